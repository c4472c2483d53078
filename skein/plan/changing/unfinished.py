"""What is left of a step that was stopped in the middle: which ops, in an order that can be carried out.

Rules of this file
- What is done is never done again. What is left takes its input from what is done, or from what is left before it.
- All workers take turns of equal length, as in `skein.plan.order`; backward before loss before forward, the oldest
  microbatch first, and forwards of one chunk strictly so. Hence only an activation that is held from before can be in
  the way of the oldest microbatch: then the youngest of its chunk is given up and made again, so this always ends.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from skein.plan.order import PlacedOp, ops_of
from skein.plan.plan import Path, PlannedOp, Schedule
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId

Contribution = tuple[MicrobatchId, StageIndex]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """An op that is left and takes what a finished op made: `PlacedOp` of both."""

    op: PlacedOp
    made_by: PlacedOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What is left of a step.

    `forwards` are the activations that are held and stay; `needs` are where ops that are left take what finished ones
    made, so that somebody has to send it again.
    """

    schedules: tuple[Schedule, ...]
    forwards: frozenset[Contribution]
    needs: tuple[Need, ...]


def rest_of(
    paths: Sequence[Path],
    slots: Mapping[ChunkRef, int],
    workers: Sequence[WorkerId],
    *,
    ledger: frozenset[Contribution],
    forwards: frozenset[Contribution],
) -> Rest:
    """The ops that are left of a step, worker by worker.

    Args:
        paths: `paths[m]` is microbatch m's; who did something is the worker of that hop.
        slots: of every chunk on a path, at least 1.
        workers: whose schedules are wanted.
        ledger: contributions that are accumulated.
        forwards: activations that wait for their gradient; none of them accumulated.
    """
    kept = set(forwards)
    while True:
        walk = _Walk(paths, slots, ledger, kept)
        ran = list(walk.turns())
        given_up = walk.youngest_in_the_way()
        if given_up is None:
            break
        kept.discard(given_up)
    ops: dict[WorkerId, list[PlannedOp]] = {worker: [] for worker in workers}
    for placed in ran:
        ops[placed.chunk.worker].append(placed.op)
    return Rest(
        schedules=tuple(Schedule(worker=worker, ops=tuple(listed)) for worker, listed in ops.items()),
        forwards=frozenset(kept),
        needs=tuple(walk.needs()),
    )


class _Walk:
    """One try, with these activations kept."""

    def __init__(
        self,
        paths: Sequence[Path],
        slots: Mapping[ChunkRef, int],
        ledger: frozenset[Contribution],
        kept: set[Contribution],
    ) -> None:
        self._ways = [list(ops_of(MicrobatchId(m), path)) for m, path in enumerate(paths)]
        self._ledger = ledger
        self._kept = kept
        self._left = [
            [place for place, placed in enumerate(way) if not self._is_done(placed)] for way in self._ways
        ]
        self._next = [0] * len(self._ways)
        self._free = dict(slots)
        for placed in itertools.chain(*self._ways):
            if not placed.op.kind.row.is_accumulating and _contribution(placed) in kept:
                self._free[placed.chunk] -= placed.op.kind.row.slots
        self._waiting: list[PlacedOp] = []
        self._forwards: defaultdict[ChunkRef, deque[MicrobatchId]] = defaultdict(deque)
        for way, left in zip(self._ways, self._left, strict=True):
            for placed in (way[place] for place in left):
                if not placed.op.kind.row.is_accumulating:
                    self._forwards[placed.chunk].append(placed.op.microbatch)

    def _is_done(self, placed: PlacedOp) -> bool:
        done = _contribution(placed) in self._ledger
        return done or (not placed.op.kind.row.is_accumulating and _contribution(placed) in self._kept)

    def turns(self) -> Iterator[PlacedOp]:
        """Every op that is left, as far as it can be run."""
        while True:
            best: dict[WorkerId, PlacedOp] = {}
            self._waiting = [way[left[at]] for way, left, at in self._rows() if at < len(left)]
            for placed in self._waiting:
                rival = best.get(placed.chunk.worker)
                if self._may_run(placed) and (rival is None or _urgency(placed) < _urgency(rival)):
                    best[placed.chunk.worker] = placed
            if not best:
                return
            for worker in sorted(best):
                self._run(best[worker])
                yield best[worker]

    def _may_run(self, placed: PlacedOp) -> bool:
        if placed.op.kind.row.is_accumulating:
            return True
        chunk = placed.chunk
        return self._free[chunk] > 0 and self._forwards[chunk][0] == placed.op.microbatch

    def _run(self, placed: PlacedOp) -> None:
        self._next[placed.op.microbatch] += 1
        self._free[placed.chunk] -= placed.op.kind.row.slots
        if not placed.op.kind.row.is_accumulating:
            self._forwards[placed.chunk].popleft()

    def _rows(self) -> Iterator[tuple[list[PlacedOp], list[int], int]]:
        return zip(self._ways, self._left, self._next, strict=True)

    def youngest_in_the_way(self) -> Contribution | None:
        """The youngest activation that takes a slot which the oldest waiting microbatch needs; None: nobody waits."""
        if not self._waiting:
            return None
        oldest = min(self._waiting, key=lambda placed: placed.op.microbatch)
        return max(x for x in self._kept if self._chunk_of(x) == oldest.chunk)

    def _chunk_of(self, kept: Contribution) -> ChunkRef:
        microbatch, stage = kept
        return next(x.chunk for x in self._ways[microbatch] if x.chunk.stage == stage)

    def needs(self) -> Iterator[Need]:
        """Where an op that is left takes a boundary tensor that one that is done has made."""
        for way in self._ways:
            for placed in way:
                for before in (way[number] for number in placed.at.inputs):
                    if self._is_done(before) and not self._is_done(placed):
                        yield Need(op=placed, made_by=before)


def _contribution(placed: PlacedOp) -> Contribution:
    return placed.op.microbatch, placed.chunk.stage


def _urgency(placed: PlacedOp) -> tuple[int, int]:
    return placed.op.kind.row.urgency, placed.op.microbatch
