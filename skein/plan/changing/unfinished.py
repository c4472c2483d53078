"""Ops that are left of a step that was stopped in the middle, in an order that can be carried out.

Rules of this file
- What is done is never done again. What is left takes its input from what is done, or from what is left before it.
- All workers take turns of equal length, as in `skein.plan.order`; what takes a slot does so strictly by microbatch,
  all else as it becomes ready. A microbatch's ops stand in line: what must be made again is, before it goes on. Hence
  only what is held from before can be in the way of the oldest microbatch: then the youngest at its chunk is given up
  and made again, so this always ends.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from skein.plan.ops import ChunkOrder, Kept
from skein.plan.order import DryRun, PlacedOp, Ways, oldest_first, ways_of
from skein.plan.plan import Path, PlannedOp, Schedule
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId

Contribution = tuple[MicrobatchId, StageIndex]
Held = tuple[MicrobatchId, StageIndex, Kept]
"""Data that an op has left at its chunk for a later one, an activation for instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """An op that is left and takes what a finished op made: `PlacedOp` of both."""

    op: PlacedOp
    made_by: PlacedOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The remainder of a step.

    `held` stays at its chunks; `needs` are where ops that are left take what finished ones made, so that somebody has
    to send it again.
    """

    schedules: tuple[Schedule, ...]
    held: frozenset[Held]
    needs: tuple[Need, ...]


def rest_of(
    paths: Sequence[Path],
    slots: Mapping[ChunkRef, int],
    workers: Sequence[WorkerId],
    *,
    ledger: frozenset[Contribution],
    held: frozenset[Held],
) -> Rest:
    """The ops that are left of a step, worker by worker.

    Args:
        paths: `paths[m]` is microbatch m's; who did something is the worker of that hop.
        slots: of every chunk on a path, at least 1.
        workers: whose schedules are wanted.
        ledger: contributions that are accumulated.
        held: what waits for later ops; nothing of what is accumulated.
    """
    ways = ways_of(paths)
    kept: defaultdict[Contribution, set[Kept]] = defaultdict(set)
    # A liar may tell of things that no op leaves where it is.
    for microbatch, stage, what in held & {
        (*_contribution(x), x.op.kind.row.leaves) for way in ways for x in way
    }:
        kept[microbatch, stage].add(what)
    while True:
        left = {placed for way in ways for placed in way if not _is_done(placed, ledger, kept)}
        walk = _walk(ways, slots, left, kept)
        ops: dict[WorkerId, list[PlannedOp]] = {worker: [] for worker in workers}
        while turn := walk.turn():
            for placed in turn:
                ops[placed.chunk.worker].append(placed.op)
        if not walk.waiting():
            break
        # A halt: what is held is in the oldest one's way. Each round gives one up, so this ends.
        del kept[_youngest_in_the_way(walk.waiting(), ways, kept)]
    return Rest(
        schedules=tuple(Schedule(worker=worker, ops=tuple(listed)) for worker, listed in ops.items()),
        held=frozenset((*place, what) for place, found in kept.items() for what in found),
        needs=tuple(_needs(ways, left)),
    )


_KeptAt = Mapping[Contribution, set[Kept]]


def _is_done(placed: PlacedOp, ledger: frozenset[Contribution], kept: _KeptAt) -> bool:
    at = _contribution(placed)
    return at in ledger or placed.op.kind.row.is_shown_by(kept.get(at, ()))


def _walk(ways: Ways, slots: Mapping[ChunkRef, int], left: set[PlacedOp], kept: _KeptAt) -> DryRun:
    """Dry run of the ops that are left, ready to be carried out turn by turn."""
    free = dict(slots)
    ops: defaultdict[ChunkRef, list[PlannedOp]] = defaultdict(list)
    for placed in (placed for way in ways for placed in way):
        listed = ops[placed.chunk]
        if placed in left:
            listed.append(placed.op)
        elif placed.op.kind.row.slots > 0 and _contribution(placed) in kept:
            free[placed.chunk] -= placed.op.kind.row.slots
    lines = [_in_line(way, left) for way in ways]
    return DryRun(lines, free, ops, urgency=oldest_first, lanes=[ChunkOrder.SLOTS])


def _in_line(way: Sequence[PlacedOp], left: set[PlacedOp]) -> list[PlacedOp]:
    """The way with each op that is left behind the one before, by number."""
    line = list(way)
    numbers = [placed.at.number for placed in way if placed in left]
    for place, number in enumerate(numbers):
        before, after = tuple(numbers[:place][-1:]), tuple(numbers[place + 1 : place + 2])
        line[number] = replace(
            way[number], at=way[number].at._replace(inputs=(), own=before, followers=after)
        )
    return line


def _youngest_in_the_way(waiting: Sequence[PlacedOp], ways: Ways, kept: _KeptAt) -> Contribution:
    """The youngest microbatch that holds a slot which the oldest waiting one needs, and its stage."""
    chunk = min(waiting, key=lambda placed: placed.op.microbatch).chunk
    at_chunk = {_contribution(placed) for way in ways for placed in way if placed.chunk == chunk}
    return max(at_chunk & kept.keys())


def _needs(ways: Ways, left: set[PlacedOp]) -> Iterator[Need]:
    """Boundary tensors that ops which are left take from ops which are done."""
    for way in ways:
        for placed in (placed for placed in way if placed in left):
            for before in (way[number] for number in placed.at.inputs):
                if before not in left:
                    yield Need(op=placed, made_by=before)


def _contribution(placed: PlacedOp) -> Contribution:
    return placed.op.microbatch, placed.chunk.stage
