"""The plain order of ops, from paths and slots alone: oldest microbatch first and backward before forward.

Rules of this file
- Nothing here knows times: an op takes one turn, and what it made is where it goes in the next.
- What may run is decided by `DryRun` for every schedule alike: of one chunk, what takes a slot in its order and only
  into a free slot, what accumulates in its order, and each op after those that it waits for. Whether all of that can
  be met does not depend on which worker runs what first.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from skein.plan.ops import ChunkOrder, PathOp
from skein.plan.plan import Path, Plan, PlannedOp, Schedule
from skein.types import ChunkRef, MicrobatchId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """An op of a training microbatch at the chunk of hop `hop` of its path, and how it lies there."""

    op: PlannedOp
    chunk: ChunkRef
    at: PathOp

    @property
    def hop(self) -> int:
        return self.at.hop


Ways = Sequence[Sequence[PlacedOp]]
"""All ops of each microbatch, by number."""
Urgency = Callable[[PlacedOp], tuple[int, ...]]
"""Key of an op: of what is ready a worker runs the least first. No two ops of a worker may be equal."""


def ops_of(microbatch: MicrobatchId, path: Path) -> Iterator[PlacedOp]:
    """Every op of a training microbatch, each after those whose outputs it takes, by number."""
    for at in path.ops:
        chunk = path.hops[at.hop]
        op = PlannedOp(kind=at.kind, stage=chunk.stage, microbatch=microbatch)
        yield PlacedOp(op=op, chunk=chunk, at=at)


def ways_of(paths: Sequence[Path]) -> list[list[PlacedOp]]:
    """Every op of each microbatch."""
    return [list(ops_of(MicrobatchId(m), path)) for m, path in enumerate(paths)]


def ascending_schedules(
    paths: Sequence[Path], slots: Mapping[ChunkRef, int], workers: Iterable[WorkerId]
) -> tuple[Schedule, ...]:
    """Schedules in which every chunk takes its microbatches in ascending order, forward and backward.

    All workers take turns of equal length. In each they run what has arrived: backward before loss before forward, the
    oldest microbatch first, and of one microbatch the hop nearest to its loss. The oldest unfinished microbatch is next
    wherever it goes, and no younger one holds a slot there, so this ends whatever the paths are.

    Args:
        paths: `paths[m]` is microbatch m's.
        slots: of every chunk on a path, at least 1.
        workers: whose schedules are wanted; those on no path have an empty one.
    """
    walk = DryRun(ways_of(paths), slots, ascending_ops(paths), urgency=oldest_first)
    done: dict[WorkerId, list[PlannedOp]] = {worker: [] for worker in sorted(set(workers))}
    while turn := walk.turn():
        for placed in turn:
            done[placed.chunk.worker].append(placed.op)
    assert not walk.waiting(), "an ascending order cannot get stuck"
    return tuple(Schedule(worker=worker, ops=tuple(ops)) for worker, ops in done.items())


def ascending_ops(paths: Sequence[Path]) -> dict[ChunkRef, list[PlannedOp]]:
    """The ops of each chunk, by microbatch."""
    ops: defaultdict[ChunkRef, list[PlannedOp]] = defaultdict(list)
    for placed in itertools.chain(*ways_of(paths)):
        ops[placed.chunk].append(placed.op)
    return ops


def left_undone(plan: Plan) -> tuple[PlannedOp, ...]:
    """Ops at which microbatches come to a halt if a step is made by `plan`: none, unless its orders run in a circle.

    The schedules must be complete: every op of every path once, on its worker.
    """
    ops: defaultdict[ChunkRef, list[PlannedOp]] = defaultdict(list)
    for schedule in plan.schedules:
        for op in schedule.ops:
            ops[ChunkRef(stage=op.stage, worker=schedule.worker)].append(op)
    slots = {x.chunk: x.slots for x in plan.chunks}
    walk = DryRun(ways_of(plan.paths), slots, ops, urgency=oldest_first)
    while walk.turn():
        pass
    return tuple(placed.op for placed in walk.waiting())


def oldest_first(placed: PlacedOp) -> tuple[int, ...]:
    """By kind, then microbatch, then the hop nearest to the loss."""
    return placed.op.kind.row.urgency, placed.op.microbatch, -placed.hop


class ChunkQueue:
    """The strict orders of one chunk, and how far it has come in each."""

    def __init__(
        self, ops: Iterable[PlannedOp], free_slots: int, lanes: Collection[ChunkOrder] = tuple(ChunkOrder)
    ) -> None:
        listed = list(ops)
        self._free_slots = free_slots
        self._lanes = {lane: deque(op for op in listed if op.kind.row.lane is lane) for lane in lanes}
        self._in_order: dict[PlannedOp, PlacedOp] = {}
        self._others: list[PlacedOp] = []

    def arrive(self, placed: PlacedOp) -> None:
        """All that the op waits for is done."""
        if placed.op.kind.row.lane in self._lanes:
            self._in_order[placed.op] = placed
        else:
            self._others.append(placed)

    def take_due(self) -> Iterator[PlacedOp]:
        """Ops that may run now and were not given before."""
        yield from self._others
        self._others.clear()
        for head in (queue[0] for queue in self._lanes.values() if queue):
            if head in self._in_order and (head.kind.row.slots <= 0 or self._free_slots):
                yield self._in_order.pop(head)

    def end(self, op: PlannedOp) -> None:
        """Note that an op which `take_due` gave is over."""
        queue = self._lanes.get(op.kind.row.lane) if op.kind.row.lane else None
        if queue is not None:
            queue.popleft()
        self._free_slots -= op.kind.row.slots


class DryRun:
    """All workers carry out one step in turns of equal length, as far as they come.

    Args:
        ways: `ways[m]` are all ops of microbatch m, by number.
        slots: of every chunk on a path, as many as are free.
        ops: of every chunk on a path those that are to come, in an order that is kept in each of `lanes`; others
            count as done.
        urgency: which of its ready ops a worker runs first.
        lanes: the strict orders that are kept.
    """

    def __init__(
        self,
        ways: Ways,
        slots: Mapping[ChunkRef, int],
        ops: Mapping[ChunkRef, Iterable[PlannedOp]],
        *,
        urgency: Urgency,
        lanes: Collection[ChunkOrder] = tuple(ChunkOrder),
    ) -> None:
        self._urgency = urgency
        self._ways = ways
        to_come = {chunk: set(listed) for chunk, listed in ops.items()}
        self._left = [{x.at.number for x in way if x.op in to_come[x.chunk]} for way in self._ways]
        self._awaited = [
            [sum(number in left for number in placed.at.awaited) for placed in way]
            for way, left in zip(self._ways, self._left, strict=True)
        ]
        self._queues = {chunk: ChunkQueue(listed, slots[chunk], lanes) for chunk, listed in ops.items()}
        self._ready: dict[WorkerId, list[tuple[tuple[int, ...], PlacedOp]]] = {}
        for placed in itertools.chain(*self._ways):
            microbatch, number = placed.op.microbatch, placed.at.number
            if number in self._left[microbatch] and not self._awaited[microbatch][number]:
                self._arrive(placed)

    def turn(self) -> list[PlacedOp]:
        """Ops of one turn: one of each worker that has one ready, by worker; none if all is done or none can go on."""
        ran = [heappop(self._ready[worker])[1] for worker in sorted(self._ready)]
        for worker in [worker for worker, ready in self._ready.items() if not ready]:
            del self._ready[worker]
        for placed in ran:
            self._end(placed)
        return ran

    def waiting(self) -> tuple[PlacedOp, ...]:
        """The next op of each microbatch that is not through."""
        return tuple(way[min(left)] for way, left in zip(self._ways, self._left, strict=True) if left)

    def _end(self, placed: PlacedOp) -> None:
        self._queues[placed.chunk].end(placed.op)
        self._release(placed.chunk)
        microbatch = placed.op.microbatch
        self._left[microbatch].remove(placed.at.number)
        awaited = self._awaited[microbatch]
        for follower in placed.at.followers:
            awaited[follower] -= 1
            if not awaited[follower] and follower in self._left[microbatch]:
                self._arrive(self._ways[microbatch][follower])

    def _arrive(self, placed: PlacedOp) -> None:
        self._queues[placed.chunk].arrive(placed)
        self._release(placed.chunk)

    def _release(self, chunk: ChunkRef) -> None:
        for placed in self._queues[chunk].take_due():
            heappush(self._ready.setdefault(chunk.worker, []), (self._urgency(placed), placed))
