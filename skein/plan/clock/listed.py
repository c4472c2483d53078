"""Orders of ops by the clock: whoever is idle takes what is ready, in order of urgency.

The same model as a walk through a step (`skein.plan.clock.walked`), without lists to keep to: one op at a time at a
worker, one tensor at a time on a line. Of a chunk, what takes a slot and what accumulates goes by microbatch, so that
no plan made of these orders comes to a halt. What nobody waits for, a weight op, fills the time that is left.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from skein.plan.clock.walked import Lines, Pace
from skein.plan.order import ChunkQueue, PlacedOp, ascending_ops, oldest_first, ways_of
from skein.plan.plan import Path, PlannedOp, Schedule
from skein.types import ChunkRef, WorkerId


def timed_schedules(
    paths: Sequence[Path], slots: Mapping[ChunkRef, int], workers: Iterable[WorkerId], pace: Pace
) -> tuple[Schedule, ...]:
    """Schedules in which ops stand as they would begin if each worker took what is ready.

    Args:
        paths: `paths[m]` is microbatch m's.
        slots: of every chunk on a path, at least 1.
        workers: whose schedules are wanted; those on no path have an empty one.
        pace: of ops and links.
    """
    listing = _Listing(paths, slots, pace)
    listing.run()
    return tuple(Schedule(worker=x, ops=tuple(listing.ops[x])) for x in sorted(set(workers)))


class _Listing:
    """Step by the clock, and the ops of each worker in it."""

    def __init__(self, paths: Sequence[Path], slots: Mapping[ChunkRef, int], pace: Pace) -> None:
        self.ops: defaultdict[WorkerId, list[PlannedOp]] = defaultdict(list)
        self._pace, self._lines = pace, Lines(pace)
        self._position = {worker: i for i, worker in enumerate(pace.pool.workers)}
        self._ways = ways_of(paths)
        self._awaited = [[len(placed.at.awaited) for placed in way] for way in self._ways]
        self._ready_s = [[0.0] * len(way) for way in self._ways]
        self._queues = {
            chunk: ChunkQueue(listed, slots[chunk]) for chunk, listed in ascending_ops(paths).items()
        }
        self._ready: defaultdict[WorkerId, list[tuple[tuple[int, ...], PlacedOp]]] = defaultdict(list)
        self._busy: set[WorkerId] = set()
        self._num_events = 0
        self._events: list[tuple[float, int, bool, PlacedOp]] = []
        """Ends of ops (True), and ops that have all they wait for (False), by second and then as they were told."""
        for placed in itertools.chain(*self._ways):
            if not placed.at.awaited:
                self._tell(0.0, placed, is_end=False)

    def run(self) -> None:
        """Until everything is done."""
        while self._events:
            now_s = self._events[0][0]
            touched: set[WorkerId] = set()
            # Whoever is idle chooses among all that is there at this moment.
            while self._events and self._events[0][0] == now_s:
                _, _, is_end, placed = heappop(self._events)
                self._happen(placed, now_s, is_end=is_end)
                touched.add(placed.chunk.worker)
            for worker in sorted(touched):
                self._begin(worker, now_s)

    def _tell(self, at_s: float, placed: PlacedOp, *, is_end: bool) -> None:
        heappush(self._events, (at_s, self._num_events, is_end, placed))
        self._num_events += 1

    def _happen(self, placed: PlacedOp, now_s: float, *, is_end: bool) -> None:
        queue, worker = self._queues[placed.chunk], placed.chunk.worker
        if is_end:
            queue.end(placed.op)
            self._busy.remove(worker)
            self._hand_on(placed, now_s)
        else:
            queue.arrive(placed)
        for due in queue.take_due():
            heappush(self._ready[worker], (oldest_first(due), due))

    def _hand_on(self, placed: PlacedOp, now_s: float) -> None:
        """Followers have what the op made after its time on the line."""
        m = placed.op.microbatch
        for number in placed.at.followers:
            following = self._ways[m][number]
            arrival_s = self._lines.arrival_s(placed.chunk.worker, following.chunk.worker, now_s)
            self._ready_s[m][number] = max(self._ready_s[m][number], arrival_s)
            self._awaited[m][number] -= 1
            if not self._awaited[m][number]:
                self._tell(self._ready_s[m][number], following, is_end=False)

    def _begin(self, worker: WorkerId, now_s: float) -> None:
        if worker in self._busy or not self._ready[worker]:
            return
        _, placed = heappop(self._ready[worker])
        self._busy.add(worker)
        self.ops[worker].append(placed.op)
        self._tell(now_s + self._pace.op_s(self._position[worker], placed.op), placed, is_end=True)
