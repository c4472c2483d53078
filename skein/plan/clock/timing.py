"""Seconds of a plan: of its ops and tensors, of a step in closed forms (warm-up depths, an estimate, a lower bound)."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import assert_never

import numpy as np

from skein.config.aggregation import AggregationSpec
from skein.plan.agreeing.exchange import DIRECT, Pattern, Ring, Tree, cheapest, seconds
from skein.plan.load import StageLoad
from skein.plan.place import Pool
from skein.plan.plan import ChunkTime, Group, Path, Plan, TransferTime
from skein.topology.fleet import Fleet
from skein.topology.links import F64
from skein.types import ChunkRef, WorkerId

# A quotient this little above a whole number is that number and rounding.
_ROUNDING = 1e-9


def warm_up_depths(
    op_s: Sequence[float], hop_s: Sequence[float], period_s: Sequence[float]
) -> tuple[int, ...]:
    """How many forwards each worker of one pipeline runs before its first backward, to keep the slowest one busy.

    Args:
        op_s: forward and backward of one microbatch at each of num_hops hops, seconds.
        hop_s: activation from hop h to h + 1 and gradient back, seconds; num_hops - 1 of them.
        period_s: seconds from one microbatch to the next at each hop; in one pipeline that is max(op_s).

    Hop r starts what will be under way until its first gradient returns:
    K_r = K_{r+1} + ceil((f_{r+1} + b_{r+1} + c_fwd + c_bwd) / P), K = 1 at the last hop. P is each hop's own, for a
    holder that sees only a part of the microbatches waits longer between two.

    >>> warm_up_depths([3.0] * 4, [4.0] * 3, [3.0] * 4)
    (10, 7, 4, 1)
    """
    away_s = [op + hop for op, hop in zip(op_s[1:], hop_s, strict=True)]
    return tuple(
        1 + sum(math.ceil(away / period - _ROUNDING) for away in away_s[hop:])
        for hop, period in enumerate(period_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A path in seconds: `op_s[h]` forward and backward at hop h, `hop_s[h]` from h to h + 1 and back."""

    path: Path
    op_s: tuple[float, ...]
    hop_s: tuple[float, ...]

    def from_hop_s(self, hop: int) -> float:
        """From the forward's start at `hop` to its backward's end, if nothing waits."""
        return sum(self.op_s[hop:]) + sum(self.hop_s[hop:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What all paths of a step ask together: each distinct one, visits per chunk, computing seconds per worker."""

    trips: tuple[Trip, ...]
    visits: Mapping[ChunkRef, int]
    busy_s: Mapping[WorkerId, float]

    @property
    def slowest(self) -> WorkerId:
        """The worker that computes longest, the first by name among equals."""
        return min(self.busy_s, key=lambda worker: (-self.busy_s[worker], worker))


def traffic(paths: Sequence[Path], loads: Sequence[StageLoad], pool: Pool) -> Traffic:
    """Times of all `paths` through stages of `loads`."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    count_by_path = Counter(paths)
    trips = []
    visits: Counter[ChunkRef] = Counter()
    busy_s: defaultdict[WorkerId, float] = defaultdict(float)
    for path, count in count_by_path.items():
        trip = _trip(path, loads, pool, position)
        trips.append(trip)
        for hop, op_s in zip(path.hops, trip.op_s, strict=True):
            visits[hop] += count
            busy_s[hop.worker] += count * op_s
    return Traffic(trips=tuple(trips), visits=visits, busy_s=busy_s)


def _trip(path: Path, loads: Sequence[StageLoad], pool: Pool, position: Mapping[WorkerId, int]) -> Trip:
    way = [position[hop.worker] for hop in path.hops]
    stages = [loads[hop.stage] for hop in path.hops]
    hop_s = []
    for sender, receiver, load in zip(way[:-1], way[1:], stages[:-1], strict=True):
        latency_s = pool.links.latency_s[sender, receiver] + pool.links.latency_s[receiver, sender]
        there, back = pool.links.bytes_per_s[sender, receiver], pool.links.bytes_per_s[receiver, sender]
        hop_s.append(float(latency_s + load.output_bytes / there + load.output_bytes / back))
    op_s = tuple(load.flops / float(pool.speeds[worker]) for load, worker in zip(stages, way, strict=True))
    return Trip(path=path, op_s=op_s, hop_s=tuple(hop_s))


def depths(of: Traffic) -> dict[ChunkRef, int]:
    """Slots that each chunk can use: the deepest warm-up of the paths through it, at most its microbatches."""
    slowest_s = of.busy_s[of.slowest]
    deepest: Counter[ChunkRef] = Counter()
    for trip in of.trips:
        period_s = [slowest_s / of.visits[hop] for hop in trip.path.hops]
        for hop, depth in zip(trip.path.hops, warm_up_depths(trip.op_s, trip.hop_s, period_s), strict=True):
            deepest[hop] = max(deepest[hop], min(depth, of.visits[hop]))
    return dict(deepest)


def predict_s(of: Traffic, slots: Mapping[ChunkRef, int], reductions_s: Sequence[float]) -> float:
    """Seconds of one step: the longest path, behind the other work of the busiest worker or of the scarcest slots.

    Exact for a uniform pipeline, (m + p - 1) (f + b) + 2 (p - 1) c; the groups then reduce side by side.
    """
    longest = 0.0
    for trip in of.trips:
        waits_s = 0.0
        own_s: defaultdict[WorkerId, float] = defaultdict(float)
        for hop, op_s in zip(trip.path.hops, trip.op_s, strict=True):
            own_s[hop.worker] += op_s
        for i, hop in enumerate(trip.path.hops):
            for_worker_s = of.busy_s[hop.worker] - own_s[hop.worker]
            for_slot_s = (of.visits[hop] / slots[hop] - 1) * trip.from_hop_s(i)
            waits_s = max(waits_s, for_worker_s, for_slot_s)
        longest = max(longest, trip.from_hop_s(0) + waits_s)
    return longest + max(reductions_s, default=0.0)


def lower_bound_s(of: Traffic, loads: Sequence[StageLoad], pool: Pool) -> float:
    """Seconds that no schedule of this placement and these paths can beat, even over free links.

    All arithmetic at all speeds, each stage's at its holders', and the longest path's alone.
    """
    speed_by_worker = dict(zip(pool.workers, (float(x) for x in pool.speeds), strict=True))
    flops_by_stage: Counter[int] = Counter()
    workers_by_stage: defaultdict[int, set[WorkerId]] = defaultdict(set)
    for chunk, visits in of.visits.items():
        flops_by_stage[chunk.stage] += visits * loads[chunk.stage].flops
        workers_by_stage[chunk.stage].add(chunk.worker)
    total_s = flops_by_stage.total() / sum(speed_by_worker[worker] for worker in of.busy_s)
    stage_s = (
        flops_by_stage[stage] / sum(speed_by_worker[worker] for worker in sorted(workers))
        for stage, workers in workers_by_stage.items()
    )
    return max(total_s, *stage_s, *(sum(trip.op_s) for trip in of.trips))


def reduction_s(group: Group, num_bytes: int, pool: Pool) -> float:
    """Seconds for the members' parts to reach the shards' owners and for the sums to come back, by the group's way."""
    if len(group.workers) < 2:
        return 0.0
    return seconds(group.pattern, group.num_shards, num_bytes, *_links_among(group.workers, pool))


def pattern_of(
    aggregation: AggregationSpec, workers: Sequence[WorkerId], num_shards: int, num_bytes: int, pool: Pool
) -> Pattern:
    """Which way the shards of these workers' gradients go: as the job file says, or the cheapest.

    Where what travels is not what is added (a rounded wire format, a combination that is no sum, a rule of another
    kind), owners see all parts: Direct.
    """
    match aggregation.sum_pattern:
        case None | "direct":
            return DIRECT
        case "ring":
            return Ring()
        case "tree":
            return Tree()
        case "auto":
            return cheapest(num_shards, num_bytes, *_links_among(workers, pool))
        case _:
            assert_never(aggregation.sum_pattern)


def _links_among(workers: Sequence[WorkerId], pool: Pool) -> tuple[F64, F64]:
    """Latency and bandwidth from each to each, (num_workers, num_workers)."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    places = [position[worker] for worker in workers]
    pairs = np.ix_(places, places)
    return pool.links.latency_s[pairs], pool.links.bytes_per_s[pairs]


def op_times(fleet: Fleet, loads: Sequence[StageLoad], pool: Pool) -> tuple[F64, F64]:
    """Seconds of forward and backward of every stage at every worker, both (num_workers, all stages).

    What was measured counts; a stage that a worker has not run yet takes as long as its arithmetic at the speed the
    worker showed on others, or else in its profile.
    """
    speeds = pool.speeds.copy()
    flops_by_stage = {load.stage: load for load in loads}
    measured = [x for x in fleet.stage_times if x.stage in flops_by_stage and x.worker in pool.workers]
    position = {worker: i for i, worker in enumerate(pool.workers)}
    for worker in {x.worker for x in measured}:
        own = [x for x in measured if x.worker == worker]
        flops = sum(flops_by_stage[x.stage].flops for x in own)
        if flops > 0:  # looking up embeddings is no arithmetic, and tells nothing about other stages
            speeds[position[worker]] = flops / sum(x.forward_s + x.backward_s for x in own)
    forward_s = np.array([load.forward_flops for load in loads])[None, :] / speeds[:, None]
    backward_s = np.array([load.backward_flops for load in loads])[None, :] / speeds[:, None]
    for x in measured:
        at = position[x.worker], x.stage.index
        forward_s[at], backward_s[at] = x.forward_s, x.backward_s
    return forward_s, backward_s


def with_times(plan: Plan, loads: Sequence[StageLoad], pool: Pool, forward_s: F64, backward_s: F64) -> Plan:
    """`plan` with the times that it was made by.

    Args:
        plan: of stages with these loads, on workers of `pool`.
        loads: (num_stages,), the head of `LOOP` included.
        pool: the fleet's links.
        forward_s: (num_workers, num_stages), one microbatch.
        backward_s: same shape.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    last = len(plan.stages) - 1
    times = []
    for placed in sorted(plan.chunks, key=lambda x: x.chunk):
        at = position[placed.chunk.worker], placed.chunk.stage
        ahead_s, back_s = float(forward_s[at]), float(backward_s[at])
        is_last = placed.chunk.stage == last
        times.append(
            ChunkTime(
                chunk=placed.chunk,
                forward_s=0.0 if is_last else ahead_s,
                backward_s=0.0 if is_last else back_s,
                loss_s=ahead_s + back_s if is_last else 0.0,
            )
        )
    return replace(plan, chunk_times=tuple(times), transfer_times=_transfers(plan, loads, pool, position))


def _transfers(
    plan: Plan, loads: Sequence[StageLoad], pool: Pool, position: dict[WorkerId, int]
) -> tuple[TransferTime, ...]:
    """One for each directed link in use; where tensors of several sizes take it, of the largest."""
    bytes_by_link: dict[tuple[WorkerId, WorkerId], int] = {}
    for path in plan.paths:
        for here, there in pairwise(path.hops):
            if here.worker != there.worker:
                num_bytes = loads[here.stage].output_bytes
                for link in ((here.worker, there.worker), (there.worker, here.worker)):
                    bytes_by_link[link] = max(bytes_by_link.get(link, 0), num_bytes)
    return tuple(
        TransferTime(
            sender=sender,
            receiver=receiver,
            num_bytes=num_bytes,
            seconds=pool.links.seconds_of(position[sender], position[receiver], num_bytes),
        )
        for (sender, receiver), num_bytes in sorted(bytes_by_link.items())
    )
