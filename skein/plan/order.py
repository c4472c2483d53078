"""Who does what when, from paths and slots alone: the plain order, oldest microbatch first and backward before forward.

Rules of this file
- Nothing here knows times: an op takes one turn, and what it made is where it goes in the next.
- What may run is decided by `DryRun` for every schedule alike: of one chunk, forwards in their order, what accumulates
  in its order, a forward only into a free slot, and each op after those whose outputs it takes. Whether all of that
  can be met does not depend on which worker runs what first.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from skein.plan.ops import PathOp, path_ops
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


Urgency = Callable[[PlacedOp], tuple[int, ...]]
"""What a worker runs first among what is ready: the least. No two ops of a worker may be equal."""


def ops_of(microbatch: MicrobatchId, path: Path) -> Iterator[PlacedOp]:
    """Every op of a training microbatch, each after those whose outputs it takes, by number."""
    for at in path_ops(len(path.hops)):
        chunk = path.hops[at.hop]
        op = PlannedOp(kind=at.kind, stage=chunk.stage, microbatch=microbatch)
        yield PlacedOp(op=op, chunk=chunk, at=at)


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
    walk = DryRun(paths, slots, ascending_ops(paths), urgency=_oldest_first)
    done: dict[WorkerId, list[PlannedOp]] = {worker: [] for worker in sorted(set(workers))}
    while turn := walk.turn():
        for placed in turn:
            done[placed.chunk.worker].append(placed.op)
    assert not walk.waiting(), "an ascending order cannot get stuck"
    return tuple(Schedule(worker=worker, ops=tuple(ops)) for worker, ops in done.items())


def ascending_ops(paths: Sequence[Path]) -> dict[ChunkRef, list[PlannedOp]]:
    """The ops of each chunk, by microbatch."""
    ops: defaultdict[ChunkRef, list[PlannedOp]] = defaultdict(list)
    for index, path in enumerate(paths):
        for placed in ops_of(MicrobatchId(index), path):
            ops[placed.chunk].append(placed.op)
    return ops


def left_undone(plan: Plan) -> tuple[PlannedOp, ...]:
    """Where microbatches come to a halt if a step is made by `plan`: nowhere, unless its orders run in a circle.

    The schedules must be complete: every op of every path once, on its worker.
    """
    ops: defaultdict[ChunkRef, list[PlannedOp]] = defaultdict(list)
    for schedule in plan.schedules:
        for op in schedule.ops:
            ops[ChunkRef(stage=op.stage, worker=schedule.worker)].append(op)
    walk = DryRun(plan.paths, {x.chunk: x.slots for x in plan.chunks}, ops, urgency=_oldest_first)
    while walk.turn():
        pass
    return walk.waiting()


def _oldest_first(placed: PlacedOp) -> tuple[int, ...]:
    return placed.op.kind.row.urgency, placed.op.microbatch, -placed.hop


class _ChunkQueue:
    """The two orders of one chunk, and how far it has come in each."""

    def __init__(self, ops: Iterable[PlannedOp], slots: int) -> None:
        listed = list(ops)
        self.arrived: dict[PlannedOp, PlacedOp] = {}
        self._free_slots = slots
        self._forwards = deque(op for op in listed if not op.kind.row.is_accumulating)
        self._accumulations = deque(op for op in listed if op.kind.row.is_accumulating)

    def take_due(self) -> Iterator[PlacedOp]:
        """What may run now and was not given before."""
        if self._accumulations and self._accumulations[0] in self.arrived:
            yield self.arrived.pop(self._accumulations[0])
        if self._forwards and self._forwards[0] in self.arrived and self._free_slots:
            yield self.arrived.pop(self._forwards[0])

    def end(self, op: PlannedOp) -> None:
        """What `take_due` gave is over."""
        if op.kind.row.is_accumulating:
            self._accumulations.popleft()
        else:
            self._forwards.popleft()
        self._free_slots -= op.kind.row.slots


class DryRun:
    """All workers carry out one step in turns of equal length, as far as they come.

    Args:
        paths: `paths[m]` is microbatch m's.
        slots: of every chunk on a path.
        ops: of every chunk on a path, in an order that is kept among forwards and among what accumulates.
        urgency: which of its ready ops a worker runs first.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        slots: Mapping[ChunkRef, int],
        ops: Mapping[ChunkRef, Iterable[PlannedOp]],
        *,
        urgency: Urgency,
    ) -> None:
        self._urgency = urgency
        self._ways = [list(ops_of(MicrobatchId(m), path)) for m, path in enumerate(paths)]
        self._awaited = [[placed.at.num_awaited for placed in way] for way in self._ways]
        self._left = [set(range(len(way))) for way in self._ways]
        self._queues = {chunk: _ChunkQueue(listed, slots[chunk]) for chunk, listed in ops.items()}
        self._ready: dict[WorkerId, list[tuple[tuple[int, ...], PlacedOp]]] = {}
        for placed in itertools.chain(*self._ways):
            if not placed.at.num_awaited:
                self._arrive(placed)

    def turn(self) -> list[PlacedOp]:
        """One op of each worker that has one ready, by worker; nothing if all is done or nothing can go on."""
        ran = [heappop(self._ready[worker])[1] for worker in sorted(self._ready)]
        for worker in [worker for worker, ready in self._ready.items() if not ready]:
            del self._ready[worker]
        for placed in ran:
            self._end(placed)
        return ran

    def waiting(self) -> tuple[PlannedOp, ...]:
        """The next op of each microbatch that is not through."""
        return tuple(way[min(left)].op for way, left in zip(self._ways, self._left, strict=True) if left)

    def _end(self, placed: PlacedOp) -> None:
        self._queues[placed.chunk].end(placed.op)
        self._release(placed.chunk)
        microbatch = placed.op.microbatch
        self._left[microbatch].remove(placed.at.number)
        awaited = self._awaited[microbatch]
        for follower in placed.at.followers:
            awaited[follower] -= 1
            if not awaited[follower]:
                self._arrive(self._ways[microbatch][follower])

    def _arrive(self, placed: PlacedOp) -> None:
        self._queues[placed.chunk].arrived[placed.op] = placed
        self._release(placed.chunk)

    def _release(self, chunk: ChunkRef) -> None:
        for placed in self._queues[chunk].take_due():
            heappush(self._ready.setdefault(chunk.worker, []), (self._urgency(placed), placed))
