"""Microbatches onto holders: who takes how many, and which way each one goes."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from skein.plan.place import Pool
from skein.plan.plan import Path
from skein.topology.links import F64, Mask
from skein.types import ChunkRef, Layout, StageIndex, StageSpec


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` split in proportion to `weights`, by largest remainder, with one for everybody while that lasts.

    >>> shares(8, [3.0, 1.0]), shares(3, [100.0, 1.0, 1.0]), shares(1, [1.0, 2.0])
    ((6, 2), (1, 1, 1), (0, 1))
    """
    least = 1 if total >= len(weights) else 0
    ideal = np.asarray(weights) * (total / sum(weights))
    counts = np.maximum(np.floor(ideal), least).astype(int)
    # More given than there is only if small shares were raised: the best served give back.
    while counts.sum() > total:
        surplus = np.where(counts > least, counts - ideal, -np.inf)
        counts[surplus.argmax()] -= 1
    while counts.sum() < total:
        counts[(ideal - counts).argmax()] += 1
    return tuple(int(count) for count in counts)


def find_paths(
    stages: Sequence[StageSpec],
    layout: Layout,
    holders: Sequence[Sequence[int]],
    num_microbatches: int,
    speeds: F64,
    pool: Pool,
) -> tuple[Path, ...]:
    """Paths of all microbatches: holders are used in proportion to `speeds`, over the cheapest links.

    Between two stages, pairs of holders are served from the cheapest link on, as far as both have microbatches left;
    so pipelines inside a site stay there. In `LOOP` the way back to the origin follows from its first hop; it decides
    between equals.

    Args:
        stages: all stages, the head stage of `LOOP` included.
        layout: where the head is.
        holders: of each body stage, as positions in the pool.
        num_microbatches: of one step.
        speeds: FLOP/s that each worker of the pool has for one of its chunks.
        pool: the fleet.
    """
    quotas = [
        dict(zip(x, shares(num_microbatches, [float(speeds[w]) for w in x]), strict=True)) for x in holders
    ]
    flows = [_Flows(before, after, pool) for before, after in pairwise(quotas)]
    origins = _Turns(quotas[0])
    paths: dict[tuple[int, ...], Path] = {}
    found = []
    for _ in range(num_microbatches):
        origin = origins.take()
        way = [origin]
        for boundary in flows:
            way.append(boundary.take(way[-1], origin if layout.comes_back else None))
        if layout.comes_back:
            way.append(origin)
        # One object for each distinct way: thousands of microbatches share a few.
        found.append(paths.setdefault(tuple(way), _path(stages, way, pool)))
    return tuple(found)


def find_skipping_paths(
    stages: Sequence[StageSpec],
    layout: Layout,
    holders: Sequence[Sequence[int]],
    num_microbatches: int,
    num_visited: int,
    speeds: F64,
    pool: Pool,
) -> tuple[Path, ...]:
    """Paths, one per microbatch, that leave stages out in rotation, the rest in order: plain, blind to links' costs.

    Every stage that may be left out is visited equally often, to within one. The holders of a stage take its visitors
    in turn, in proportion to `speeds`, those in the sender's site first.

    Args:
        stages, layout, holders, num_microbatches, speeds, pool: as of `find_paths`.
        num_visited: body stages on each path.
    """
    ways = [visited_stages(m, len(holders), num_visited, layout) for m in range(num_microbatches)]
    visits = Counter(stage for way in ways for stage in way)
    turns = [
        _Turns(dict(zip(x, shares(visits[s], [float(speeds[w]) for w in x]), strict=True)))
        for s, x in enumerate(holders)
    ]
    found = []
    for visited in ways:
        way = [turns[0].take()]
        for stage in visited[1:]:
            way.append(turns[stage].take(pool.links.crosses_sites[way[-1]]))
        on = [stages[stage] for stage in visited]
        if layout.comes_back:
            on.append(stages[-1])
            way.append(way[0])
        found.append(_path(on, way, pool))
    return tuple(found)


def visited_stages(microbatch: int, num_stages: int, num_visited: int, layout: Layout) -> tuple[int, ...]:
    """The body stages that `microbatch` visits when stages are left out in rotation, spread as evenly as can be.

    >>> [visited_stages(m, 4, 3, Layout.LOOP) for m in range(3)]
    [(0, 2, 3), (0, 1, 3), (0, 1, 2)]
    >>> [visited_stages(m, 6, 4, Layout.LINE) for m in range(4)]
    [(0, 2, 4, 5), (0, 1, 3, 5), (0, 2, 4, 5), (0, 1, 3, 5)]
    """
    inner, num_skipped = layout.inner(num_stages), num_stages - num_visited
    skipped = {inner[(microbatch + i * len(inner) // num_skipped) % len(inner)] for i in range(num_skipped)}
    return tuple(stage for stage in range(num_stages) if stage not in skipped)


def widest_jump(num_stages: int, num_visited: int, layout: Layout) -> int:
    """Widest jump: how many stages any microbatch goes up at once if stages are left out in rotation.

    >>> widest_jump(6, 4, Layout.LOOP), widest_jump(6, 3, Layout.LINE), widest_jump(4, 4, Layout.LINE)
    (2, 4, 1)
    """
    ways = [visited_stages(m, num_stages, num_visited, layout) for m in range(num_stages)]
    return max((after - before for way in ways for before, after in pairwise(way)), default=0)


def split_at(paths: Iterable[Path], stages: Collection[StageIndex]) -> tuple[Path, ...]:
    """The same paths, with split backwards at these stages."""
    return tuple(
        replace(path, split=tuple(i for i, hop in enumerate(path.hops) if hop.stage in stages))
        for path in paths
    )


def _path(stages: Sequence[StageSpec], way: Sequence[int], pool: Pool) -> Path:
    return Path(
        hops=tuple(
            ChunkRef(stage=StageIndex(stage.index), worker=pool.workers[worker])
            for stage, worker in zip(stages, way, strict=True)
        )
    )


class _Turns:
    """Takes from several quotas in turn, each as often as its size says, evenly spread."""

    def __init__(self, quota_by_worker: Mapping[int, int]) -> None:
        self._quota = {worker: quota for worker, quota in quota_by_worker.items() if quota}
        self._taken = dict.fromkeys(self._quota, 0)

    def take(self, is_far: Mask | None = None) -> int:
        """The worker whose turn it is; one marked in `is_far` (num_workers,) only when no other has any left."""
        left = [worker for worker, quota in self._quota.items() if self._taken[worker] < quota]
        worker = min(left, key=lambda x: (is_far is not None and bool(is_far[x]), self._due(x), x))
        self._taken[worker] += 1
        return worker

    def _due(self, worker: int) -> float:
        return (self._taken[worker] + 0.5) / self._quota[worker]


class _Flows:
    """Numbers of microbatches that go from each holder of one stage to each of the next."""

    def __init__(self, before: Mapping[int, int], after: Mapping[int, int], pool: Pool) -> None:
        senders, receivers = np.array(sorted(before)), np.array(sorted(after))
        pairs = np.ix_(senders, receivers)
        order = np.lexsort((pool.links.crosses_sites[pairs].ravel(), pool.round_trip_s[pairs].ravel()))
        to_send, to_receive = dict(before), dict(after)
        flow_by_sender: dict[int, dict[int, int]] = {sender: {} for sender in before}
        for pair in order:
            sender, receiver = int(senders[pair // len(receivers)]), int(receivers[pair % len(receivers)])
            flow = min(to_send[sender], to_receive[receiver])
            if flow:
                flow_by_sender[sender][receiver] = flow
                to_send[sender] -= flow
                to_receive[receiver] -= flow
        self._turns = {sender: _Turns(flow) for sender, flow in flow_by_sender.items()}
        self._crosses_sites = pool.links.crosses_sites

    def take(self, sender: int, origin: int | None) -> int:
        """The next holder after `sender`; one in the origin's site if the path must return there."""
        return self._turns[sender].take(None if origin is None else self._crosses_sites[:, origin])
