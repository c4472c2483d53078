"""Parts of a routing that a change of fleet leaves in place, in the numbers of the workers that are here now."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from skein.plan.route.problem import I64, Problem

LOST = -1
"""Holder of a chunk whose worker has gone."""

Seats = tuple[tuple[int, ...], ...]
"""Holders of each stage, in the order of its chunks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """The routing so far.

    Args:
        stage_sizes: chunks of each stage.
        worker_of: (num_chunks,) who filled each; `LOST` for who has gone.
        path: as in `Routing`.
        sequence: as in `Routing`.
    """

    stage_sizes: tuple[int, ...]
    worker_of: I64
    path: I64
    sequence: I64
    seats: Seats = field(init=False)
    """Holders of each stage before the change, `LOST` included."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seats", seats_of(self.stage_sizes, self.worker_of))

    def kept(self, problem: Problem) -> Seats:
        """Holders that each stage still has and that have room for it."""
        return tuple(
            tuple(worker for worker in held if worker != LOST and problem.slots[worker, stage] >= 1)
            for stage, held in enumerate(self.seats)
        )


def seats_of(stage_sizes: Sequence[int], worker_of: I64) -> Seats:
    """Holders of each stage.

    >>> seats_of((2, 1), np.array([5, LOST, 3]))
    ((5, -1), (3,))
    """
    stops = np.cumsum(stage_sizes)
    return tuple(
        tuple(int(worker) for worker in worker_of[stop - size : stop])
        for stop, size in zip(stops, stage_sizes, strict=True)
    )


def worker_of(seats: Seats) -> I64:
    """(num_chunks,) as in `Routing`."""
    return np.array([worker for held in seats for worker in held], np.int64)


def num_held(seats: Seats) -> Counter[int]:
    """Number of chunks that each worker has."""
    return Counter(worker for held in seats for worker in held)


def moved_chunks(before: Before, seats: Seats) -> tuple[tuple[int, int], ...]:
    """(stage, worker) of every chunk that its worker did not hold before."""
    return tuple(
        (stage, worker)
        for stage, workers in enumerate(seats)
        for worker in sorted(workers)
        if worker not in before.seats[stage]
    )
