"""A plan's step walked through, op by op and tensor by tensor: what it takes where lines are shared.

The same model as the search's (docs/planning.md, "What is predicted") for the plan as it stands: workers run their
lists in order, a worker's uplink and downlink carry one tensor at a time, in the order in which tensors are ready, and
a group sums up once the last of its members is done. Plain Python, for processes without the search's compiler.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from skein.plan.load import StageLoad, num_shards
from skein.plan.order import PlacedOp, ops_of
from skein.plan.place import Pool
from skein.plan.plan import Group, Path, PlannedOp, Schedule
from skein.topology.links import F64
from skein.types import Layout, MicrobatchId, WorkerId

MOST_OPS = 20_000
"""Some 0.1 s; beyond, a closed form has to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of ops at workers and of tensors on links.

    Args:
        pool: workers and links.
        forward_s: (num_workers, num_stages), one microbatch.
        backward_s: same shape.
        weight_s: same shape, the part of it that weights take.
        output_bytes: of the largest boundary tensor, which every tensor counts as.
    """

    pool: Pool
    forward_s: F64
    backward_s: F64
    weight_s: F64
    output_bytes: float

    def op_s(self, worker: int, op: PlannedOp) -> float:
        """Seconds of `op` at the worker at this position of the pool."""
        forward_s, backward_s, weight_s = (
            float(x[worker, op.stage]) for x in (self.forward_s, self.backward_s, self.weight_s)
        )
        return op.kind.row.cost.seconds(forward_s, backward_s, weight_s=weight_s)


def pace_of(pool: Pool, loads: Sequence[StageLoad], forward_s: F64, backward_s: F64, weight_s: F64) -> Pace:
    """The pace of a job's stages on `pool`."""
    output_bytes = float(max((load.output_bytes for load in loads[:-1]), default=0))
    return Pace(
        pool=pool,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s,
        output_bytes=output_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """A sum that is made once these stages are done, in so many seconds."""

    stages: frozenset[int]
    seconds: float


def sums_of(groups: Sequence[tuple[Group, int]], layout: Layout, pool: Pool) -> tuple[Sum, ...]:
    """The sums of a step, each group with its bytes, as the search counts them.

    In `LOOP` the groups of both ends have the same workers, and one line carries what all of them sum.
    """
    bytes_by_stages: defaultdict[frozenset[int], int] = defaultdict(int)
    workers_by_stages: dict[frozenset[int], tuple[WorkerId, ...]] = {}
    last = max((member.stage for group, _ in groups for member in group.members), default=0)
    for group, num_bytes in groups:
        stages = frozenset(int(member.stage) for member in group.members)
        if layout.comes_back and stages <= {0, last}:
            stages = frozenset({0, int(last)})
        bytes_by_stages[stages] += num_bytes
        workers_by_stages[stages] = group.workers
    return tuple(
        Sum(stages=stages, seconds=_sum_s(workers_by_stages[stages], num_bytes, pool))
        for stages, num_bytes in bytes_by_stages.items()
    )


def _sum_s(workers: Sequence[WorkerId], num_bytes: int, pool: Pool) -> float:
    """Each owner sums one part and hands the sum out, over the worst link among all."""
    if len(workers) < 2 or not num_bytes:
        return 0.0
    at = [pool.workers.index(worker) for worker in workers]
    pairs = [(a, b) for a in at for b in at if a != b]
    part_bytes = (len(at) - 1) * num_bytes / num_shards(num_bytes, len(at))
    latency_s = max(float(pool.links.latency_s[pair]) for pair in pairs)
    return 2 * (latency_s + part_bytes / min(float(pool.links.bytes_per_s[pair]) for pair in pairs))


def walked_s(
    paths: Sequence[Path], schedules: Sequence[Schedule], sums: Sequence[Sum], pace: Pace
) -> float | None:
    """Seconds of a step; None if it is too long to walk through, or if its lists wait for each other.

    Args:
        paths: `paths[m]` is microbatch m's.
        schedules: what each worker does, in order.
        sums: see `sums_of`.
        pace: of ops and links.
    """
    if sum(len(schedule.ops) for schedule in schedules) > MOST_OPS:
        return None
    walk = Walk(paths, schedules, pace)
    ends_s = walk.ends_s()
    if walk.is_stuck:
        return None
    summed_s = (max(ends_s.get(stage, 0.0) for stage in x.stages) + x.seconds for x in sums)
    return max([*ends_s.values(), *summed_s])


class Bar(NamedTuple):
    """An op of a walk: at whom, of what, and from which second of the step to which."""

    worker: WorkerId
    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


class Lines:
    """Uplinks and downlinks of workers; each carries one tensor at a time, in the order in which they are asked."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._position = {worker: i for i, worker in enumerate(pace.pool.workers)}
        self._up_s: defaultdict[int, float] = defaultdict(float)
        self._down_s: defaultdict[int, float] = defaultdict(float)

    def arrival_s(self, sender: WorkerId, receiver: WorkerId, ready_s: float) -> float:
        """Arrival of a tensor that is ready at `ready_s`, in seconds; its lines are taken until then, latency apart."""
        if sender == receiver:
            return ready_s
        here, there = self._position[sender], self._position[receiver]
        links = self._pace.pool.links
        wire_s = self._pace.output_bytes / float(links.bytes_per_s[here, there])
        begin_s = max(ready_s, self._up_s[here], self._down_s[there])
        self._up_s[here] = self._down_s[there] = begin_s + wire_s
        return begin_s + float(links.latency_s[here, there]) + wire_s


class Walk:
    """Walk through one step, in order of the ops' ends."""

    def __init__(self, paths: Sequence[Path], schedules: Sequence[Schedule], pace: Pace) -> None:
        self._pace = pace
        self._position = {worker: i for i, worker in enumerate(pace.pool.workers)}
        self._ways = [tuple(ops_of(MicrobatchId(m), path)) for m, path in enumerate(paths)]
        self._number = [{placed.op: placed.at.number for placed in way} for way in self._ways]
        self._awaited = [[len(placed.at.awaited) for placed in way] for way in self._ways]
        self._ready_s = [[0.0] * len(way) for way in self._ways]
        self._lists: Mapping[WorkerId, tuple[PlannedOp, ...]] = {x.worker: x.ops for x in schedules}
        self._at = dict.fromkeys(self._lists, 0)
        self._free_s = dict.fromkeys(self._lists, 0.0)
        self._running: list[tuple[float, int, int, PlacedOp]] = []
        self._busy: set[WorkerId] = set()
        self._lines = Lines(pace)
        self.bars: list[Bar] = []
        """Ops that were begun, in that order."""

    @property
    def is_stuck(self) -> bool:
        """Whether somebody has not come to the end of its list."""
        return any(self._at[worker] < len(ops) for worker, ops in self._lists.items())

    def ends_s(self) -> dict[int, float]:
        """Seconds at which each stage's last backward, or loss, ends."""
        ends_s: defaultdict[int, float] = defaultdict(float)
        for worker in self._lists:
            self._begin(worker)
        while self._running:
            end_s, m, _, placed = heappop(self._running)
            worker = placed.chunk.worker
            self._busy.discard(worker)
            self._at[worker] += 1
            if placed.op.kind.row.is_accumulating:
                ends_s[placed.chunk.stage] = max(ends_s[placed.chunk.stage], end_s)
            # Ends come in order of time, so lines serve tensors in the order in which they are ready.
            for number in placed.at.followers:
                target = self._ways[m][number].chunk.worker
                ready_s = self._lines.arrival_s(worker, target, end_s)
                self._ready_s[m][number] = max(self._ready_s[m][number], ready_s)
                self._awaited[m][number] -= 1
                self._begin(target)
            self._begin(worker)
        return dict(ends_s)

    def _begin(self, worker: WorkerId) -> None:
        """Start the next op of a worker's list, if it is idle and what the op needs is on its way or here."""
        ops, at = self._lists[worker], self._at[worker]
        if worker in self._busy or at == len(ops):
            return
        m = int(ops[at].microbatch)
        number = self._number[m].get(ops[at])
        if number is None or self._awaited[m][number] or self._ways[m][number].chunk.worker != worker:
            return
        begin_s = max(self._free_s[worker], self._ready_s[m][number])
        end_s = begin_s + self._pace.op_s(self._position[worker], ops[at])
        self._free_s[worker] = end_s
        self._busy.add(worker)
        self.bars.append(Bar(worker, ops[at].kind.value, ops[at].stage, m, begin_s, end_s))
        heappush(self._running, (end_s, m, number, self._ways[m][number]))
