"""The search for a good routing: anneal, start again, keep the best. Each call is deterministic; time is the caller's.

What one annealing reaches differs by a few percent from the next, so several shorter ones beat a long one until each
is long enough; `Search.improve` runs one.
"""

from dataclasses import dataclass

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import draws_of, ordered, timeline
from skein.plan.route.kernels.anneal import Cooling, anneal, anneal_surrogate
from skein.plan.route.kernels.arrays import routing, state
from skein.plan.route.kernels.cost import NEVER, fit, fitted, scratch_for
from skein.plan.route.kernels.moves import dice, undo_space
from skein.plan.route.problem import I64, Problem, Routing
from skein.plan.route.rounds import MoveSlice
from skein.plan.route.start import first_paths
from skein.rng import key, stream

_CLOSE = 1.005
"""Mean steps under jitter nearer to each other than this are no reason to prefer one."""
_SMALL = 8
_SEAT_SHARE = 0.1
NUM_JITTERS = 24
"""Draws that routings are compared by, the same for all seeds, so that searches can be compared too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A routing, seconds of its step as predicted, their mean under 3 % jitter, and what moving costs a step."""

    routing: Routing
    step_s: float
    jittered_s: float
    move_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds that the search makes small."""
        return self.jittered_s + self.move_s


class Search:
    """Keeps the best routing of `problem`. Equal problem, seed and calls give equal results.

    Args:
        problem: what to plan.
        seed: of all draws.
        start: a routing to be considered, and from which placement is taken when `improve` is told to stay near it.
    """

    def __init__(self, problem: Problem, *, seed: int, start: Routing | None = None) -> None:
        self.problem = problem
        self.best: Found | None = None
        self.num_moves = 0
        self._least_s = NEVER
        self._seed = seed
        self._num_rounds = 0
        self._draws = draws_of(problem, num_draws=NUM_JITTERS)
        self._fixed = self._draws.measured
        if start is not None:
            self._offer(start)

    def consider(self, routing_: Routing) -> Found | None:
        """Measure a given routing, and keep it if it is the best; None if its order does not keep to the slots."""
        try:
            return self._measured(routing_)
        except ValueError:
            return None

    def begin(self) -> Found | Infeasible:
        """A first legal routing, at once."""
        paths = first_paths(self.problem)
        if isinstance(paths, Infeasible):
            return paths
        for worker_of in self._placements():
            found = ordered(self.problem, worker_of, paths)
            if found is not None:
                return self._offer(found)
        return Infeasible(reason="no placement has a slot for every chunk")

    def improve(self, num_moves: int) -> Found | Infeasible:
        """Run one annealing of `num_moves` proposals from a start of its own; gives the best routing so far."""
        self._num_rounds += 1
        random = dice(key(self._seed, "anneal", self._num_rounds))
        paths = first_paths(self.problem)
        if isinstance(paths, Infeasible):
            return paths
        if self.best is None:
            begun = self.begin()
            if isinstance(begun, Infeasible):
                return begun
        assert self.best is not None
        here = state(self.problem, self._scattered(self.best.routing.worker_of), paths)
        fit(self._fixed, here)
        undo = undo_space(here)
        scale_s = self.best.step_s
        # Far from good, an order is not worth its cost: the surrogate needs none.
        rough = Cooling(max(1, num_moves // 8), scale_s / 15, scale_s / 1200, _SEAT_SHARE)
        # On small problems anything may be best, so every other start is drawn and left as it is.
        if self._num_rounds % 2 or self.problem.num_workers > _SMALL:
            anneal_surrogate(self._fixed, here, undo, rough, random)
        routed = ordered(self.problem, here.holder[: self.problem.num_chunks], here.path)
        if routed is None:
            return self.best
        begun_s = timeline(self.problem, routed, self._fixed).step_s
        fine = Cooling(num_moves, begun_s / 35, scale_s / 1500, _SEAT_SHARE)
        return self._annealed(routed, fine, random)

    def run(self, slice_: MoveSlice) -> Found | Infeasible:
        """Run one slice; gives the best routing so far."""
        if slice_.warmth is None:
            return self.improve(slice_.num_moves)
        return self.polish(slice_.num_moves, warmth=slice_.warmth)

    def polish(self, num_moves: int, *, warmth: float = 0.004) -> Found | Infeasible:
        """Anneal the best routing once more, from a temperature of `warmth` times its step."""
        if self.best is None:
            return self.begin()
        self._num_rounds += 1
        random = dice(key(self._seed, "polish", self._num_rounds))
        step_s = self.best.step_s
        cooling = Cooling(num_moves, warmth * step_s, step_s / 3000, _SEAT_SHARE)
        return self._annealed(self.best.routing, cooling, random)

    def _annealed(self, routing_: Routing, cooling: Cooling, random: np.ndarray) -> Found:
        here, best = (fitted(self.problem, self._fixed, routing_) for _ in range(2))
        work, undo = scratch_for(self._fixed, here), undo_space(here)
        anneal(self._fixed, self._fixed.graph, here, best, work, undo, cooling, random)
        self.num_moves += cooling.num_moves
        return self._offer(routing(self.problem, best))

    def _offer(self, routing_: Routing) -> Found:
        self._measured(routing_)
        assert self.best is not None
        return self.best

    def _measured(self, routing_: Routing) -> Found:
        step_s = timeline(self.problem, routing_, self._fixed).step_s
        move_s = self.problem.move_s
        found = Found(
            routing=routing_,
            step_s=step_s,
            jittered_s=self._draws.mean_s(routing_),
            move_s=0.0 if move_s is None else float(move_s[routing_.worker_of, self.problem.stage_of].sum()),
        )
        self._least_s = min(self._least_s, found.cost_s)
        if self.best is None or self._is_better(found, self.best):
            self.best = found
        return found

    def _is_better(self, found: Found, best: Found) -> bool:
        """Whether `found` is better: of those close to the least mean under jitter, the shortest as measured wins."""
        most_s = _CLOSE * self._least_s
        if found.cost_s > most_s or best.cost_s > most_s:
            return found.cost_s < best.cost_s
        return found.step_s + found.move_s < best.step_s + best.move_s

    def _placements(self) -> list[I64]:
        """Placements to try first: workers in order, then drawn ones."""
        workers = np.arange(self.problem.num_workers)
        return [self._seat(workers), *(self._seat(self._drawn(n)) for n in range(20))]

    def _drawn(self, number: int) -> I64:
        return stream(self._seed, "placement", number).permutation(self.problem.num_workers)

    def _seat(self, workers: I64) -> I64:
        return np.resize(workers, self.problem.num_chunks).astype(np.int64)

    def _scattered(self, worker_of: I64) -> I64:
        # Where moving costs something, the annealing begins at what is held.
        is_free = self.problem.move_s is None
        if (
            not is_free
            or self.problem.num_chunks > self.problem.num_workers
            or (self.problem.slots < 1).any()
        ):
            return worker_of
        return self._seat(self._drawn(100 + self._num_rounds))
