"""Placements after a change: those that one move reaches, and those that leave no stage without a holder."""

from collections.abc import Iterator

import numpy as np

from skein.plan.plan import Infeasible
from skein.plan.replan.before import Seats, num_held
from skein.plan.replan.needs import Needs
from skein.plan.route.kernels.arrays import num_seats
from skein.plan.route.problem import F64, Problem

_PER_PAIR = 4
"""Workers tried for each pair of stages, those that would be nearest to the others: in a large fleet many are alike."""


def one_move(problem: Problem, seats: Seats, needs: Needs, *, most_chunks: int) -> Iterator[Seats]:
    """Placements with one chunk more, or in which one worker holds another stage than one that others hold too.

    Args:
        problem: whose workers may hold what they have slots for.
        seats: from which the move starts.
        needs: which workers are near.
        most_chunks: of all workers together.
    """
    away_s = needs.away_s(seats)
    shared = num_held(seats)
    most_held = num_seats(problem) // problem.num_workers
    spare = [worker for worker in range(problem.num_workers) if shared[worker] < most_held]
    can_grow = sum(shared.values()) < most_chunks
    for to, held in enumerate(seats):
        # One origin more would have no microbatch to begin.
        if to == 0 and len(held) >= problem.num_microbatches:
            continue
        idle = [worker for worker in spare if not shared[worker]] or spare
        if can_grow or not held:
            yield from (_moved(seats, None, to, x) for x in _nearest(problem, idle, held, away_s, to))
        for source, others in enumerate(seats):
            if source != to and len(others) > 1:
                yield from (_moved(seats, source, to, x) for x in _nearest(problem, others, held, away_s, to))


def _nearest(
    problem: Problem, workers: tuple[int, ...] | list[int], held: tuple[int, ...], away_s: F64, to: int
) -> list[int]:
    able = [worker for worker in workers if worker not in held and problem.slots[worker, to] >= 1]
    return sorted(able, key=lambda worker: (away_s[worker, to], worker))[:_PER_PAIR]


def _moved(seats: Seats, source: int | None, to: int, worker: int) -> Seats:
    return tuple(
        tuple(x for x in held if x != worker) if stage == source else (*held, worker) if stage == to else held
        for stage, held in enumerate(seats)
    )


def filled(
    problem: Problem, seats: Seats, needs: Needs, fetch_s: F64, *, most_chunks: int
) -> Seats | Infeasible:
    """`seats` with a holder for every stage, by as few moves as can be: idle workers first, then those that are spared.

    Of equal ones what leaves the busiest stage least to do is taken, then what is fetched fastest.
    """
    while [] in [list(held) for held in seats]:
        empty = seats.index(())
        options = [x for x in one_move(problem, seats, needs, most_chunks=most_chunks) if x[empty]]
        if not options:
            return Infeasible(reason=f"nobody can take stage {empty} over")
        seats = min(options, key=lambda x: (_spared_s(needs, x), fetch_s[x[empty][0], empty], x))
    return seats


def _spared_s(needs: Needs, seats: Seats) -> float:
    """Seconds of the busiest stage among those that are held."""
    busy_s = needs.busy_s(seats)
    return float(np.max(busy_s, initial=0.0, where=np.isfinite(busy_s)))
