"""Seconds of a plan: of its ops and tensors, of a step in closed forms (warm-up depths, an estimate, a lower bound)."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from skein.config.aggregation import AggregationSpec
from skein.plan.agreeing.exchange import Pattern, exchange_s, pattern_called
from skein.plan.load import StageLoad
from skein.plan.ops import WEIGHT_SHARE
from skein.plan.place import Pool
from skein.plan.plan import ChunkTime, Group, Path, Plan, TransferTime
from skein.topology.fleet import Fleet, StageTime
from skein.topology.links import F64
from skein.types import ChunkRef, WorkerId

# A quotient this little above a whole number is that number and rounding.
_ROUNDING = 1e-9
_LEAST_S = 1e-12


def warm_up_depths(
    op_s: Sequence[float], hop_s: Sequence[float], period_s: Sequence[float]
) -> tuple[int, ...]:
    """Forwards that each worker of one pipeline runs before its first backward, to keep the slowest one busy.

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
        """Seconds from the forward's start at `hop` to its backward's end, if nothing waits."""
        return sum(self.op_s[hop:]) + sum(self.hop_s[hop:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Work of all paths of a step together: each distinct path, visits per chunk, computing seconds per worker."""

    trips: tuple[Trip, ...]
    visits: Mapping[ChunkRef, int]
    busy_s: Mapping[WorkerId, float]

    @property
    def slowest(self) -> WorkerId:
        """The worker that computes longest, the first by name among equals."""
        return min(self.busy_s, key=lambda worker: (-self.busy_s[worker], worker))


def traffic(
    paths: Sequence[Path], loads: Sequence[StageLoad], pool: Pool, speeds: F64 | None = None
) -> Traffic:
    """Times of all `paths` through stages of `loads`; `speeds` as of `stage_speeds`, None: those of profiles."""
    speeds = np.repeat(pool.speeds[:, None], len(loads), axis=1) if speeds is None else speeds
    position = {worker: i for i, worker in enumerate(pool.workers)}
    count_by_path = Counter(paths)
    trips = []
    visits: Counter[ChunkRef] = Counter()
    busy_s: defaultdict[WorkerId, float] = defaultdict(float)
    for path, count in count_by_path.items():
        trip = _trip(path, loads, pool, position, speeds)
        trips.append(trip)
        for hop, op_s in zip(path.hops, trip.op_s, strict=True):
            visits[hop] += count
            busy_s[hop.worker] += count * op_s
    return Traffic(trips=tuple(trips), visits=visits, busy_s=busy_s)


def _trip(
    path: Path, loads: Sequence[StageLoad], pool: Pool, position: Mapping[WorkerId, int], speeds: F64
) -> Trip:
    way = [position[hop.worker] for hop in path.hops]
    stages = [loads[hop.stage] for hop in path.hops]
    hop_s = []
    for sender, receiver, load in zip(way[:-1], way[1:], stages[:-1], strict=True):
        latency_s = pool.links.latency_s[sender, receiver] + pool.links.latency_s[receiver, sender]
        there, back = pool.links.bytes_per_s[sender, receiver], pool.links.bytes_per_s[receiver, sender]
        hop_s.append(float(latency_s + load.output_bytes / there + load.output_bytes / back))
    op_s = tuple(
        loads[hop.stage].flops / float(speeds[worker, hop.stage])
        for hop, worker in zip(path.hops, way, strict=True)
    )
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


def estimate_s(of: Traffic, slots: Mapping[ChunkRef, int], reductions_s: Sequence[float]) -> float:
    """Seconds of one step, in closed form: the longest path, behind the busiest worker's other work or scarce slots.

    Exact for a uniform pipeline, (m + p - 1) (f + b) + 2 (p - 1) c; the groups then reduce side by side. Elsewhere an
    estimate: shared lines and idle gaps make steps longer, waits that overlap shorter, but never below `lower_bound_s`.
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


def lower_bound_s(of: Traffic, loads: Sequence[StageLoad], pool: Pool, speeds: F64) -> float:
    """Seconds that no schedule of this placement and these paths can beat, even over free links.

    All arithmetic at all speeds, each stage's at its holders', and the longest path's alone. `of` is at `speeds`.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    flops_by_stage: Counter[int] = Counter()
    speeds_by_stage: defaultdict[int, dict[WorkerId, float]] = defaultdict(dict)
    for chunk, visits in of.visits.items():
        flops_by_stage[chunk.stage] += visits * loads[chunk.stage].flops
        speeds_by_stage[chunk.stage][chunk.worker] = float(speeds[position[chunk.worker], chunk.stage])
    # Who holds several stages is no faster than at the best of them.
    fastest = (max(own[worker] for own in speeds_by_stage.values() if worker in own) for worker in of.busy_s)
    stage_s = (
        flops_by_stage[stage] / sum(own[worker] for worker in sorted(own))
        for stage, own in speeds_by_stage.items()
    )
    return max(flops_by_stage.total() / sum(fastest), *stage_s, *(sum(trip.op_s) for trip in of.trips))


def reduction_s(group: Group, num_bytes: int, pool: Pool) -> float:
    """Seconds for the members' parts to reach the shards' owners and for the sums to come back, by the group's way."""
    if len(group.workers) < 2:
        return 0.0
    return exchange_s(group.pattern, group.num_shards, num_bytes, *_links_among(group.workers, pool))


def pattern_of(
    aggregation: AggregationSpec, workers: Sequence[WorkerId], num_shards: int, num_bytes: int, pool: Pool
) -> Pattern:
    """Pattern in which the shards of these workers' gradients go: as the job file says, or the cheapest.

    Where what travels is not what is added (a rounded wire format, a combination that is no sum, a rule of another
    kind), owners see all parts: Direct.
    """
    name = aggregation.sum_pattern or "direct"
    return pattern_called(name, num_shards, num_bytes, *_links_among(workers, pool))


def _links_among(workers: Sequence[WorkerId], pool: Pool) -> tuple[F64, F64]:
    """Latency and bandwidth from each to each, (num_workers, num_workers)."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    places = [position[worker] for worker in workers]
    pairs = np.ix_(places, places)
    return pool.links.latency_s[pairs], pool.links.bytes_per_s[pairs]


def op_times(fleet: Fleet, loads: Sequence[StageLoad], pool: Pool) -> tuple[F64, F64, F64]:
    """Seconds of every stage at every worker, each (num_workers, all stages): forward, backward, and of that weights.

    What was measured counts; a stage that a worker has not run yet takes as long as its arithmetic at the speed the
    worker showed on others, or else in its profile, and weights the share that they had there.
    """
    speeds = _shown_speeds(fleet, loads, pool)
    forward_s = np.array([load.forward_flops for load in loads])[None, :] / speeds[:, None]
    backward_s = np.array([load.backward_flops for load in loads])[None, :] / speeds[:, None]
    shares: defaultdict[int, list[float]] = defaultdict(list)
    for at, _, x in _measured(fleet, loads, pool):
        forward_s[at], backward_s[at] = x.forward_s, x.backward_s
        if x.weight_s is not None and x.backward_s > 0:
            shares[at[0]].append(x.weight_s / x.backward_s)
    share = np.array([median(shares[w]) if shares[w] else WEIGHT_SHARE for w in range(len(speeds))])
    weight_s = backward_s * share[:, None]
    for at, _, x in _measured(fleet, loads, pool):
        weight_s[at] = weight_s[at] if x.weight_s is None else x.weight_s
    return forward_s, backward_s, weight_s


def stage_speeds(fleet: Fleet, loads: Sequence[StageLoad], pool: Pool) -> F64:
    """FLOP/s of every stage at every worker, as `op_times` has them, (num_workers, all stages)."""
    speeds = np.repeat(_shown_speeds(fleet, loads, pool)[:, None], len(loads), axis=1)
    for at, load, x in _measured(fleet, loads, pool):
        if load.flops > 0:
            speeds[at] = load.flops / max(x.forward_s + x.backward_s, _LEAST_S)
    return speeds


def _shown_speeds(fleet: Fleet, loads: Sequence[StageLoad], pool: Pool) -> F64:
    """(num_workers,) FLOP/s over all stages that a worker was measured at, or else its profile's."""
    speeds = pool.speeds.copy()
    own: defaultdict[int, list[tuple[StageLoad, StageTime]]] = defaultdict(list)
    for (worker, _), load, x in _measured(fleet, loads, pool):
        own[worker].append((load, x))
    for worker, pairs in own.items():
        flops = sum(load.flops for load, _ in pairs)
        if flops > 0:  # looking up embeddings is no arithmetic, and tells nothing about other stages
            speeds[worker] = flops / sum(x.forward_s + x.backward_s for _, x in pairs)
    return speeds


def _measured(
    fleet: Fleet, loads: Sequence[StageLoad], pool: Pool
) -> Iterator[tuple[tuple[int, int], StageLoad, StageTime]]:
    """Measured times of these very stages, each with its (worker, stage) and its load."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    load_of = {load.stage: load for load in loads}
    for x in fleet.stage_times:
        if x.stage in load_of and x.worker in position:
            yield (position[x.worker], x.stage.index), load_of[x.stage], x


def with_times(
    plan: Plan, loads: Sequence[StageLoad], pool: Pool, forward_s: F64, backward_s: F64, weight_s: F64
) -> Plan:
    """`plan` with the times that it was made by.

    Args:
        plan: of stages with these loads, on workers of `pool`.
        loads: (num_stages,), the head of `LOOP` included.
        pool: the fleet's links.
        forward_s: (num_workers, num_stages), one microbatch.
        backward_s: same shape.
        weight_s: same shape, the part of it that weights take.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    last = len(plan.stages) - 1
    split = {path.hops[hop].stage for path in plan.paths for hop in path.split}
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
                weight_s=float(weight_s[at]) if placed.chunk.stage in split else 0.0,
            )
        )
    return replace(plan, chunk_times=tuple(times), transfer_times=_transfers(plan, loads, pool, position))


def _transfers(
    plan: Plan, loads: Sequence[StageLoad], pool: Pool, position: dict[WorkerId, int]
) -> tuple[TransferTime, ...]:
    """Transfer times of all directed links in use; where tensors of several sizes take a link, of the largest."""
    bytes_by_link: dict[tuple[WorkerId, WorkerId], int] = {}
    for path in plan.paths:
        for here, there in path.links:
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
