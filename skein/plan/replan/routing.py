"""Replanning: what a change of fleet makes of a routing, with as little moved as pays.

Rules of this file
- A chunk moves only if that is predicted to spare more than it costs: its bytes over links, spread over the steps to
  come, and `GAIN` of a step, for no prediction is better than that. So what comes and goes moves nothing.
- Placements are tried by one move more each round, from the best of the round before. Nothing else moves: two stages
  never exchange workers.
- A routing that can go on as it is does, unless another spares `GAIN` of its step.
- The effort is counted in moves of the annealer, so equal inputs give equal routings.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.replan.before import LOST, Before, Seats, moved_chunks, num_held, worker_of
from skein.plan.replan.needs import Needs, needs_of, needs_of_devices
from skein.plan.replan.repair import posed, repaired
from skein.plan.replan.seats import filled, one_move
from skein.plan.replan.trial import Trial, annealed, as_before, moves_s, priced, roughly
from skein.plan.route.evaluate import jittered_mean_s
from skein.plan.route.kernels.arrays import num_seats
from skein.plan.route.problem import F64, Problem, Routing
from skein.plan.route.search import NUM_JITTERS

GAIN = 0.02
"""Share of a step that moving one chunk, or changing what could go on, has to spare."""
_MOST_ROUNDS = 5
_TRIED, _LONGER, _LONGEST = 40, 8, 4
"""Placements that are tried in a round, tried longer, and, of all rounds, tried longest."""
_OPS_PER_ROUND = 12_000
"""On large problems fewer placements are tried: so many ops together, but never fewer than are tried longer."""
_SHARES = {"short": 1 / 70, "long": 1 / 20, "last": 1 / 9}
"""Shares of all moves in one annealing of each kind: with every round there is, they sum to 1."""
_WARMTHS = {"short": 1 / 100, "long": 1 / 150, "last": 1 / 250}
"""Cool, for paths that were good before are good starts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moving:
    """Cost of moving, and how much may be held.

    Args:
        state_bytes: (num_stages,) of one chunk.
        fetch_s: (num_workers, num_stages) to bring a stage to a worker.
        steps_left: over which that is spread; None: only bytes count, not how long they take.
        most_chunks: held by all workers together.
    """

    state_bytes: F64
    fetch_s: F64
    steps_left: int | None
    most_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replanned:
    """The routing after a change.

    Args:
        problem: with the numbers of holders and of microbatches per origin that were chosen.
        routing: its answer.
        moved: (stage, worker) of each chunk that its worker does not hold yet.
        moved_bytes: their state.
        move_s: until all of it is there, if each worker fetches one after the other.
        step_s: predicted mean under 3 % jitter.
        is_as_before: nobody has another path, chunk or order.
    """

    problem: Problem
    routing: Routing
    moved: tuple[tuple[int, int], ...]
    moved_bytes: float
    move_s: float
    step_s: float
    is_as_before: bool


def always() -> bool:
    """For those who do not end early."""
    return True


def replan(
    problem: Problem,
    before: Before,
    moving: Moving,
    *,
    num_moves: int,
    seed: int,
    may_go_on: Callable[[], bool] = always,
) -> Replanned | Infeasible:
    """The routing that follows `before` on the workers of `problem`.

    Args:
        problem: the fleet as it is now. Its stage sizes and microbatches per origin count for nothing.
        before: what was, in this fleet's numbers.
        moving: what changes cost.
        num_moves: of the annealer, at most; 400,000 take about a second at 20 workers and 30 microbatches.
        seed: of all draws.
        may_go_on: asked between annealings; False ends with the best so far.
    """
    placed = _placed(problem, before, moving)
    if isinstance(placed, Infeasible):
        return placed
    seats, needs = placed
    kept = as_before(problem, before, seats, needs)
    start = kept or roughly(problem, before, seats, needs, seed=seed)
    if start is None:
        return Infeasible(reason="no order of what is held has slots enough")
    # Moves are priced only now: a part of that price is a share of the step itself.
    move_s = _move_s(before, moving, gain_s=GAIN * start.cost_s)
    start = priced(start, move_s)
    trying = _Trying(
        problem=replace(problem, move_s=move_s),
        before=before,
        needs=needs,
        most_chunks=moving.most_chunks,
        num_moves=num_moves,
        seed=seed,
        may_go_on=may_go_on,
    )
    best = trying.best(start)
    can_stay = kept is not None and seats == before.seats
    if can_stay and best.cost_s > (1 - GAIN) * start.cost_s:
        best = start
    return _replanned(best, before, moving, is_as_before=can_stay and best is start)


def _placed(problem: Problem, before: Before, moving: Moving) -> tuple[Seats, Needs] | Infeasible:
    """Seats with as few moves as can be, and the needs of their stages."""
    seats = before.kept(problem)
    most_held = num_seats(problem) // problem.num_workers
    if any(count > most_held for count in num_held(seats).values()):
        return Infeasible(reason=f"a worker holds more than {most_held} stages, which is all that fits now")
    if any(not held for held in seats):
        # Where nobody is left there are no links to reckon with: what is held decides.
        rough = needs_of_devices(problem)
        found = filled(problem, seats, rough, moving.fetch_s, most_chunks=moving.most_chunks)
        if isinstance(found, Infeasible):
            return found
        seats = found
    now = posed(problem, before, seats, None)
    return seats, needs_of(now, worker_of(seats), repaired(now, before, seats, None))


def _move_s(before: Before, moving: Moving, *, gain_s: float) -> F64:
    """Seconds that moving a chunk costs a step, as in `Problem`: at least `gain_s`; 0 where it is held."""
    seconds = np.zeros_like(moving.fetch_s)
    if moving.steps_left is not None:
        seconds = moving.fetch_s / max(1, moving.steps_left)
    seconds = np.maximum(seconds, gain_s)
    for stage, held in enumerate(before.seats):
        seconds[[worker for worker in held if worker != LOST], stage] = 0.0
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trying:
    """Rounds of trials, with what they have in common."""

    problem: Problem
    before: Before
    needs: Needs
    most_chunks: int
    num_moves: int
    seed: int
    may_go_on: Callable[[], bool]

    def best(self, start: Trial) -> Trial:
        """The best of all rounds, annealed longest."""
        base = self._annealed(start, "short")
        trials = [base]
        for _ in range(_MOST_ROUNDS):
            found = self._round(base, {trial.seats for trial in trials})
            trials += found[:_LONGEST]
            if not found or found[0].cost_s >= base.cost_s:
                break
            base = found[0]
        longest = sorted(trials, key=lambda trial: trial.cost_s)[:_LONGEST]
        best = min((self._annealed(trial, "long") for trial in longest), key=lambda trial: trial.cost_s)
        return self._annealed(self._annealed(best, "last"), "last")

    def _round(self, base: Trial, seen: set[Seats]) -> list[Trial]:
        """Placements one move from `base`, the best first."""
        options = set(one_move(self.problem, base.seats, self.needs, most_chunks=self.most_chunks)) - seen
        num_ops = len(base.routing.sequence)
        likely = sorted(options, key=lambda seats: (self._about_s(seats), seats))
        tried = self._roughly(likely[: max(_LONGER, min(_TRIED, _OPS_PER_ROUND // num_ops))])
        longer = sorted(tried, key=lambda trial: trial.cost_s)[:_LONGER]
        return sorted((self._annealed(x, "short") for x in longer), key=lambda trial: trial.cost_s)

    def _about_s(self, seats: Seats) -> float:
        return self.needs.about_s(seats) + moves_s(self.problem, seats)

    def _roughly(self, options: Sequence[Seats]) -> Iterator[Trial]:
        for seats in options:
            if not self.may_go_on():
                return
            trial = roughly(self.problem, self.before, seats, self.needs, seed=self.seed)
            if trial is not None:
                yield trial

    def _annealed(self, trial: Trial, what: str) -> Trial:
        if not self.may_go_on():
            return trial
        num_moves = int(_SHARES[what] * self.num_moves)
        return annealed(trial, num_moves, warmth=_WARMTHS[what], seed=self.seed)


def _replanned(best: Trial, before: Before, moving: Moving, *, is_as_before: bool) -> Replanned:
    seats, problem = best.seats, replace(best.problem, move_s=None)
    chunks = moved_chunks(before, seats)
    wait_s = np.zeros(problem.num_workers)
    for stage, worker in chunks:
        wait_s[worker] += moving.fetch_s[worker, stage]
    return Replanned(
        problem=problem,
        routing=best.routing,
        moved=chunks,
        moved_bytes=float(sum(moving.state_bytes[stage] for stage, _ in chunks)),
        move_s=float(wait_s.max(initial=0.0)),
        step_s=jittered_mean_s(problem, best.routing, num_draws=NUM_JITTERS),
        is_as_before=is_as_before,
    )
