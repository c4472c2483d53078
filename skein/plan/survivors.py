"""After a loss: what survivors hold stays where it is, and paths and order are searched around it.

A stage that nobody holds any more gets a holder from the stage that can spare one best. Beyond that a few moves of one
chunk each are tried, from the stage with least work per holder to the one with most; each must gain `GAIN` of a step.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from skein.plan.paths import shares
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.evaluate import ordered
from skein.plan.route.of_job import Posed, work_s
from skein.plan.route.problem import I64
from skein.plan.route.search import Found, Search
from skein.plan.route.start import first_paths

GAIN = 0.01
"""Of a step, that a moved chunk must gain: no prediction is better than that, and moving is a risk of its own."""
_MOST_MOVES = 2
"""Tried beyond those that are needed."""
_WARMTHS = (0.03, 0.016, 0.008, 0.004)

_Seats = list[list[int]]
"""Workers that hold each stage."""


def stay(
    posed: Posed, before: Plan, *, num_moves: int, seed: int, may_go_on: Callable[[], bool]
) -> tuple[Posed, Found] | None:
    """The best routing found that leaves survivors where they are, or nearly; None if this is no plain loss.

    Plain is: each worker held one stage before and holds one now, and nobody is new.

    Args:
        posed: the fleet as it is now, with any placement.
        before: the plan until now.
        num_moves: of the annealer, for all placements together.
        seed: of all draws.
        may_go_on: False ends the search with what it has.
    """
    seats = _held(posed, before)
    if seats is None:
        return None
    options = list(_placements(posed, seats))
    best: tuple[Posed, Found] | None = None
    for number, placed in enumerate(options):
        found = _routed(placed, num_moves // len(options), seed, may_go_on)
        if found is None:
            continue
        penalty_s = number * GAIN * found.jittered_s
        found = replace(found, move_s=found.move_s + penalty_s)
        if best is None or found.cost_s < best[1].cost_s:
            best = placed, found
    return best


def _held(posed: Posed, before: Plan) -> _Seats | None:
    """Who of the fleet holds each body stage."""
    problem, workers = posed.problem, posed.pool.workers
    if problem.num_chunks > problem.num_workers:
        return None
    seats = [
        [workers.index(worker) for worker in before.holders(before.stages[stage].index) if worker in workers]
        for stage in range(problem.num_stages)
    ]
    holding = [worker for held in seats for worker in held]
    is_plain = sorted(holding) == list(range(len(workers)))
    return seats if is_plain else None


def _placements(posed: Posed, seats: _Seats) -> Iterator[Posed]:
    """With as few moves as can be, then with one more, and so on."""
    work = work_s(posed.problem)
    seats = [list(held) for held in seats]
    while [] in seats:
        spare = [s for s, held in enumerate(seats) if len(held) > 1]
        if not spare:
            return
        donor = min(spare, key=lambda s: (work[s] / (len(seats[s]) - 1), s))
        seats[seats.index([])].append(seats[donor].pop())
    for number in range(_MOST_MOVES + 1):
        if (placed := _placed(posed, seats)) is not None:
            yield placed
        loads = [work[s] / len(held) for s, held in enumerate(seats)]
        spare = [s for s, held in enumerate(seats) if len(held) > 1]
        if number == _MOST_MOVES or not spare:
            return
        donor = min(spare, key=lambda s: (work[s] / (len(seats[s]) - 1), s))
        needy = int(np.argmax(loads))
        if work[donor] / (len(seats[donor]) - 1) >= loads[needy]:
            return
        seats[needy].append(seats[donor].pop())


def _placed(posed: Posed, seats: _Seats) -> Posed | None:
    """The problem with these holders; nobody else may hold anything."""
    problem = posed.problem
    sizes = tuple(len(held) for held in seats)
    worker_of: I64 = np.array([worker for held in seats for worker in held], np.int64)
    stage_of = np.repeat(np.arange(len(sizes)), sizes)
    if sizes[0] > problem.num_microbatches or (problem.slots[worker_of, stage_of] < 1).any():
        return None
    origins = shares(problem.num_microbatches, [1.0] * sizes[0])
    moved = replace(problem, stage_sizes=sizes, num_by_origin=origins, move_s=None)
    paths = first_paths(moved)
    if isinstance(paths, Infeasible):
        return None
    return replace(posed, problem=moved, worker_of=worker_of, path=paths)


def _routed(placed: Posed, num_moves: int, seed: int, may_go_on: Callable[[], bool]) -> Found | None:
    """Paths and order for a placement that stays."""
    start = ordered(placed.problem, placed.worker_of, placed.path)
    if start is None:
        return None
    search = Search(placed.problem, seed=seed, start=start, is_placed=True)
    for warmth in _WARMTHS:
        if not may_go_on():
            break
        search.polish(max(1, num_moves // len(_WARMTHS)), warmth=warmth)
    return search.best
