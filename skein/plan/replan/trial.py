"""Placements tried out: the paths before, repaired; then annealed as long as the placement stays promising."""

from dataclasses import dataclass, replace

import numpy as np

from skein.plan.replan.before import Before, Seats, seats_of, worker_of
from skein.plan.replan.needs import Needs
from skein.plan.replan.repair import posed, repaired
from skein.plan.route.evaluate import ordered, timeline
from skein.plan.route.kernels.anneal import Cooling, anneal, anneal_surrogate
from skein.plan.route.kernels.arrays import fixed, routing, state
from skein.plan.route.kernels.cost import fit, fitted, scratch_for
from skein.plan.route.kernels.moves import dice, undo_space
from skein.plan.route.plan_routing import in_time
from skein.plan.route.problem import F64, I64, Problem, Routing
from skein.rng import key

_SEAT_SHARE = 0.0
"""A placement is tried as it is."""
_ROUGH_MOVES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A placement as far as it was tried: its best routing, and seconds of its step with what moving costs one."""

    problem: Problem
    routing: Routing
    cost_s: float

    @property
    def seats(self) -> Seats:
        """Holders of each stage."""
        return seats_of(self.problem.stage_sizes, self.routing.worker_of)


def as_before(problem: Problem, before: Before, seats: Seats, needs: Needs) -> Trial | None:
    """Trial of these seats with the paths before, repaired, in the order before; None if slots do not suffice in it."""
    problem = posed(problem, before, seats, needs)
    path = repaired(problem, before, seats, needs)
    kept = Routing(worker_of=worker_of(seats), path=path, sequence=before.sequence)
    sorted_ = in_time(problem, kept)
    return None if sorted_ is None else _trial(problem, sorted_)


def roughly(problem: Problem, before: Before, seats: Seats, needs: Needs, *, seed: int) -> Trial | None:
    """Trial of these seats with the paths before, repaired, or with much better ones; None if no order was found."""
    problem = posed(problem, before, seats, needs)
    path = repaired(problem, before, seats, needs)
    holders = worker_of(seats)
    first_come = (ordered(problem, holders, paths) for paths in (path, _eased(problem, holders, path, seed)))
    trials = [_trial(problem, found) for found in first_come if found is not None]
    return min(trials, key=lambda trial: trial.cost_s, default=None)


def annealed(trial: Trial, num_moves: int, *, warmth: float, seed: int) -> Trial:
    """The best met on an annealing from `trial`, of `warmth` times its step; itself if nothing better is."""
    problem, scale_s = trial.problem, trial.cost_s
    arrays = fixed(problem)
    here, best = (fitted(problem, arrays, trial.routing) for _ in range(2))
    cooling = Cooling(max(1, num_moves), warmth * scale_s, min(warmth / 4, 1 / 2500) * scale_s, _SEAT_SHARE)
    work, random = (
        scratch_for(arrays, here),
        dice(key(seed, "replan", num_moves, *trial.routing.worker_of.tolist())),
    )
    anneal(arrays, arrays.graph, here, best, work, undo_space(here), cooling, random)
    found = _trial(problem, routing(problem, best))
    return found if found.cost_s < trial.cost_s else trial


def moves_s(problem: Problem, seats: Seats) -> float:
    """Seconds that moving the chunks of `seats` costs a step."""
    if problem.move_s is None:
        return 0.0
    stages = np.repeat(np.arange(len(seats)), [len(held) for held in seats])
    return float(problem.move_s[worker_of(seats), stages].sum())


def priced(trial: Trial, move_s: F64) -> Trial:
    """`trial` where moving costs something, `move_s` as in `Problem`."""
    return _trial(replace(trial.problem, move_s=move_s), trial.routing)


def _trial(problem: Problem, routing_: Routing) -> Trial:
    cost_s = timeline(problem, routing_).step_s + moves_s(
        problem, seats_of(problem.stage_sizes, routing_.worker_of)
    )
    return Trial(problem=problem, routing=routing_, cost_s=cost_s)


def _eased(problem: Problem, holders: I64, path: I64, seed: int) -> I64:
    """Paths that suit the closed form better, from cold: no order is needed to find them."""
    arrays = fixed(problem)
    here = state(problem, holders, path)
    fit(arrays, here)
    scale_s = float(here.trip_s.max())
    random = dice(key(seed, "ease", *holders.tolist()))
    cooling = Cooling(_ROUGH_MOVES, scale_s / 50, scale_s / 1200, _SEAT_SHARE)
    anneal_surrogate(arrays, here, undo_space(here), cooling, random)
    return here.path
