"""Stages onto workers: who holds what, under memory, fast, near each other, and moving as little as possible.

Everything here is about body stages: the head stage of `loop` sits where stage 0 sits, so it counts as part of it.
Workers and stages are positions in the fleet and in the demand. A worker's *pace* is the seconds that it computes per
microbatch of the batch, if the holders of each stage share its microbatches in proportion to their speeds.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from skein.topology.links import F64, LinkMatrices, Mask
from skein.types import WorkerId

I64 = npt.NDArray[np.int64]

_ABOUT_AS_FAST = 0.8
"""Share of the fastest candidate's speed from which on a worker may be chosen for being near."""
_WORTH_LEAVING_OUT = 1.5
"""Fewer workers than stages are used only if that is so many times faster: the user asked for a cut."""
_MARGIN = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """Demand of the body stages: FLOPs per microbatch and bytes with one slot, (num_stages,) each.

    `spared_bytes`: what two stages take less on one worker than on two, where that is anything.
    """

    flops: F64
    memory_bytes: I64
    replicas: int
    num_microbatches: int
    spared_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def bytes_of(self, stages: Collection[int]) -> int:
        """Bytes of these stages on one worker."""
        spared = sum(num for pair, num in self.spared_bytes.items() if set(pair) <= {*stages})
        return int(self.memory_bytes[[*stages]].sum()) - spared

    def spared_between(self, together: Sequence[Collection[int]]) -> dict[tuple[int, int], int]:
        """Bytes that two of these groups of stages take less on one worker than on two, as of `spared_bytes`."""
        spared: Counter[tuple[int, int]] = Counter()
        group_of = {stage: group for group, stages in enumerate(together) for stage in stages}
        for one, other in self.spared_bytes:
            pair = (group_of[one], group_of[other])
            if pair[0] != pair[1]:
                spared[min(pair), max(pair)] += self.spared_bytes[one, other]
        return dict(spared)

    def bytes_from(self, start: int) -> I64:
        """(num_stages + 1,) bytes of the stages from `start` up to each place, on one worker."""
        sizes: I64 = np.concatenate([[0], np.cumsum(self.memory_bytes)])
        for (one, other), num_bytes in self.spared_bytes.items():
            if one >= start:
                sizes[other + 1 :] -= num_bytes
        sizes -= sizes[start]
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """The fleet's workers, (num_workers,) each; `round_trip_s` of a boundary tensor is (num_workers, num_workers)."""

    workers: tuple[WorkerId, ...]
    speeds: F64
    memory_bytes: I64
    links: LinkMatrices
    round_trip_s: F64


class Seating:
    """Placement: holders by stage, and stages by worker. Keeps its two views and the free memory in step."""

    def __init__(self, demand: Demand, pool: Pool) -> None:
        self.demand = demand
        self.pool = pool
        self.holders: list[list[int]] = [[] for _ in demand.flops]
        self.held: list[list[int]] = [[] for _ in pool.workers]
        self.free_bytes = pool.memory_bytes.copy()

    def take(self, stage: int, worker: int) -> None:
        self.free_bytes[worker] -= self._bytes_more(stage)[worker]
        self.holders[stage].append(worker)
        self.held[worker].append(stage)

    def drop(self, stage: int, worker: int) -> None:
        self.holders[stage].remove(worker)
        self.held[worker].remove(stage)
        self.free_bytes[worker] += self._bytes_more(stage)[worker]

    def _bytes_more(self, stage: int) -> I64:
        """(num_workers,) bytes that the stage takes beside what each worker holds."""
        more = np.full(len(self.held), self.demand.memory_bytes[stage])
        for pair, num_bytes in self.demand.spared_bytes.items():
            if stage in pair:
                more[self.holders[sum(pair) - stage]] -= num_bytes
        return more

    def is_idle(self) -> Mask:
        """Workers that hold nothing."""
        return np.array([not stages for stages in self.held], dtype=np.bool_)

    def has_room(self, stage: int) -> Mask:
        """Workers that could hold `stage` too."""
        mask: Mask = self.free_bytes >= self._bytes_more(stage)
        mask[self.holders[stage]] = False
        return mask

    def stage_speed(self, stage: int) -> float:
        """FLOP/s of all holders together."""
        return float(sum(self.pool.speeds[worker] for worker in self.holders[stage]))

    def pace_s(self, worker: int) -> float:
        """See the top of the file."""
        return float(sum(self.demand.flops[stage] / self.stage_speed(stage) for stage in self.held[worker]))

    def slowest_pace_s(self) -> float:
        return max(self.pace_s(worker) for worker, stages in enumerate(self.held) if stages)

    def orphans(self) -> list[int]:
        """Stages that nobody holds, the heaviest first."""
        return sorted(
            (i for i, x in enumerate(self.holders) if not x), key=lambda i: (-self.demand.flops[i], i)
        )

    def beside(self, stage: int) -> list[int]:
        """Holders of the stages before and after."""
        return [x for i in (stage - 1, stage + 1) if 0 <= i < len(self.holders) for x in self.holders[i]]


def seat(demand: Demand, pool: Pool) -> Seating | None:
    """A placement from nothing; None if memory allows none."""
    spread, packed = _one_each(demand, pool), _packed(demand, pool)
    if spread is None or (packed and packed.slowest_pace_s() * _WORTH_LEAVING_OUT < spread.slowest_pace_s()):
        spread = packed
    if spread is not None:
        _settle(spread)
    return spread


def reseat(demand: Demand, pool: Pool, kept: Iterable[tuple[int, int]]) -> Seating | None:
    """The placement nearest to `kept`, (stage, worker) pairs; None if only a new one could work."""
    seating = Seating(demand, pool)
    for stage, worker in kept:
        if seating.has_room(stage)[worker]:
            seating.take(stage, worker)
    for stage in seating.orphans():
        if not _adopt(seating, stage):
            return None
    _settle(seating)
    return seating


def _choose(pool: Pool, candidates: Mask, companions: Sequence[int]) -> int | None:
    """The fastest candidate, or the one nearest to `companions` among those about as fast."""
    (found,) = np.nonzero(candidates)
    if not found.size:
        return None
    speeds = pool.speeds[found]
    near = found[speeds >= _ABOUT_AS_FAST * speeds.max()]
    return _nearest(pool, near, companions, -pool.speeds[near])


def _nearest(pool: Pool, found: npt.NDArray[np.intp], companions: Sequence[int], otherwise: F64) -> int:
    far = np.zeros(len(found))
    crossings = np.zeros(len(found))
    if companions:
        pairs = np.ix_(found, np.array(companions))
        far = pool.round_trip_s[pairs].mean(axis=1)
        crossings = pool.links.crosses_sites[pairs].mean(axis=1)
    return int(found[np.lexsort((found, otherwise, crossings, far))[0]])


def _one_each(demand: Demand, pool: Pool) -> Seating | None:
    """Placement with one worker per stage, heavy stages first; None if memory or numbers do not allow it."""
    seating = Seating(demand, pool)
    companions: list[int] = []
    open_stages = seating.orphans()
    if not _match(demand.memory_bytes[open_stages], pool.memory_bytes):
        return None
    while open_stages:
        stage, *open_stages = open_stages
        candidates = seating.is_idle() & seating.has_room(stage)
        while True:
            # The best worker here may have the only memory for a stage to come; then the next best.
            worker = _choose(pool, candidates, companions)
            assert worker is not None, "a matching existed, so one that seats this stage does"
            rest = seating.is_idle()
            rest[worker] = False
            if _match(demand.memory_bytes[open_stages], pool.memory_bytes[rest]):
                break
            candidates[worker] = False
        seating.take(stage, worker)
        companions.append(worker)
    return seating


def _match(needed_bytes: I64, memory_bytes: I64) -> bool:
    """Whether each need can have a worker of its own: largest to largest is then one way."""
    if len(needed_bytes) > len(memory_bytes):
        return False
    largest = np.sort(memory_bytes)[::-1][: len(needed_bytes)]
    return bool((np.sort(needed_bytes)[::-1] <= largest).all())


def _packed(demand: Demand, pool: Pool) -> Seating | None:
    """Runs of adjacent stages on few workers, with the slowest as fast as bisection finds."""
    high = float(demand.flops.sum() / pool.speeds.min()) * _MARGIN
    best = _cover(demand, pool, high)
    if best is None:
        return None
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = _cover(demand, pool, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _cover(demand: Demand, pool: Pool, limit_s: float) -> Seating | None:
    """Runs from the first stage on, each as long as some worker can within `limit_s` and its memory."""
    seating = Seating(demand, pool)
    flops = np.concatenate([[0.0], np.cumsum(demand.flops)])
    is_open = np.ones(len(pool.workers), dtype=np.bool_)
    companions: list[int] = []
    start = 0
    while start < len(demand.flops):
        stops = np.minimum(
            np.searchsorted(flops, flops[start] + limit_s * pool.speeds, side="right"),
            np.searchsorted(demand.bytes_from(start), pool.memory_bytes, side="right"),
        )
        stops = np.where(is_open, stops - 1, 0)
        stop = int(stops.max())
        if stop <= start:
            return None
        (found,) = np.nonzero(stops == stop)
        # The slowest that can do it: faster ones may be needed for what follows.
        worker = _nearest(pool, found, companions, pool.speeds[found])
        for stage in range(start, stop):
            seating.take(stage, worker)
        is_open[worker] = False
        companions, start = [worker], stop
    return seating


def _adopt(seating: Seating, stage: int) -> bool:
    """Seat an orphan: on an idle worker, besides what a worker holds, or by a worker that another stage can spare."""
    idle, busy, spared = _paces_with(seating, stage)
    best = min((*idle.values(), *busy.values(), *spared.values()), default=None)
    if best is None:
        return False
    for paces, tolerance in (
        (idle, _WORTH_LEAVING_OUT),
        (busy, 1 / _ABOUT_AS_FAST),
        (spared, 1 / _ABOUT_AS_FAST),
    ):
        # Idle ones first and with more patience, for they change nothing that others hold.
        near = np.array([x for x, pace in paces.items() if pace <= best * tolerance], dtype=np.intp)
        if near.size:
            worker = _nearest(
                seating.pool, near, seating.beside(stage), np.array([paces[int(x)] for x in near])
            )
            if paces is spared:
                seating.drop(seating.held[worker][0], worker)
            seating.take(stage, worker)
            return True
    raise AssertionError("the best is within every tolerance")


def _paces_with(seating: Seating, stage: int) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """The pace that each worker which could take `stage` would set: idle ones, busy ones, those that would move."""
    idle: dict[int, float] = {}
    busy: dict[int, float] = {}
    spared: dict[int, float] = {}
    has_room = seating.has_room(stage)
    for worker, held in enumerate(seating.held):
        own = float(seating.demand.flops[stage] / seating.pool.speeds[worker])
        if has_room[worker]:
            (busy if held else idle)[worker] = seating.pace_s(worker) + own
        if _may_leave(seating, worker, stage):
            left = seating.stage_speed(held[0]) - float(seating.pool.speeds[worker])
            spared[worker] = max(float(seating.demand.flops[held[0]]) / left, own)
    return idle, busy, spared


def _may_leave(seating: Seating, worker: int, stage: int) -> bool:
    """Whether the worker's only stage has another holder, and `stage` would fit in its place."""
    held = seating.held[worker]
    if len(held) != 1 or held[0] == stage or len(seating.holders[held[0]]) < 2:
        return False
    return bool(seating.pool.memory_bytes[worker] >= seating.demand.memory_bytes[stage])


def _settle(seating: Seating) -> None:
    """Give idle workers work and even out the holders, until nothing is left to do. A settled placement stays as is."""
    while _relieve(seating) or _fill(seating) or _even_out(seating):
        pass


def _relieve(seating: Seating) -> bool:
    """Hand one stage of a worker that holds several to an idle one that is not slower with it."""
    options = []
    for worker, held in enumerate(seating.held):
        if len(held) < 2:
            continue
        pace = seating.pace_s(worker)
        for stage in held:
            idle = _choose(seating.pool, seating.is_idle() & seating.has_room(stage), seating.beside(stage))
            if idle is None:
                continue
            flops, speed = seating.demand.flops[stage], seating.stage_speed(stage)
            handed = flops / (speed - seating.pool.speeds[worker] + seating.pool.speeds[idle])
            after = max(handed, pace - flops / speed)
            if after * _MARGIN < pace:
                options.append((-pace, after, -stage, worker, idle))
    if not options:
        return False
    _, _, stage, worker, idle = min(options)
    seating.drop(-stage, worker)
    seating.take(-stage, idle)
    return True


def _fill(seating: Seating) -> bool:
    """Add a holder to each of the stages that have the fewest, the neediest first; each round stays together."""
    demand, pool = seating.demand, seating.pool
    useful = _is_useful(demand, pool)
    open_stages = {i for i, holders in enumerate(seating.holders) if len(holders) < demand.replicas}
    has_changed = False
    while open_stages:
        fewest = min(len(seating.holders[i]) for i in open_stages)
        round_stages = [i for i in open_stages if len(seating.holders[i]) == fewest]
        companions: list[int] = []
        for stage in sorted(round_stages, key=lambda i: (-demand.flops[i] / seating.stage_speed(i), i)):
            worker = _choose(pool, seating.is_idle() & seating.has_room(stage) & useful, companions)
            if worker is None:
                open_stages.remove(stage)
                continue
            seating.take(stage, worker)
            companions.append(worker)
            has_changed = True
            if len(seating.holders[stage]) == demand.replicas:
                open_stages.remove(stage)
    return has_changed


def _is_useful(demand: Demand, pool: Pool) -> Mask:
    """(num_workers,) who is worth a microbatch: below, it lasts longer than what it spares the fastest."""
    useful: Mask = pool.speeds >= 0.25 * demand.replicas / demand.num_microbatches * pool.speeds.max()
    return useful


def of_use(demand: Demand, pool: Pool, kept: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs (stage, worker) of `kept` whose worker is worth a microbatch, or whose stage has no such worker."""
    listed, useful = list(kept), _is_useful(demand, pool)
    served = {stage for stage, worker in listed if useful[worker]}
    return [(stage, worker) for stage, worker in listed if useful[worker] or stage not in served]


def _even_out(seating: Seating) -> bool:
    """Move one holder from a stage with two more than another has."""
    stages = sorted(range(len(seating.holders)), key=lambda i: (len(seating.holders[i]), i))
    for poor in stages:
        for rich in reversed(stages):
            if len(seating.holders[rich]) < len(seating.holders[poor]) + 2:
                break
            movable = [x for x in seating.holders[rich] if _may_leave(seating, x, poor)]
            if movable:
                worker = min(movable, key=lambda x: (seating.pool.speeds[x], x))
                seating.drop(rich, worker)
                seating.take(poor, worker)
                return True
    return False
