import itertools

import numpy as np
import pytest

from skein.plan.clock.timing import depths, estimate_s, lower_bound_s, traffic, warm_up_depths
from skein.plan.load import StageLoad
from skein.plan.place import Pool
from skein.plan.plan import Path
from skein.topology.links import link_cost_s
from skein.types import ChunkRef, StageIndex, StageSpec
from tests.plan.builders import fleet, link

# Unit times of the published figures: forward 1, backward 2.
FORWARD, BACKWARD = 1.0, 2.0


def makespan(depth_by_hop: tuple[int, ...], num_microbatches: int, hop_s: float) -> float:
    """When a pipeline ends that runs so many forwards first and then backward and forward in turn."""
    p, m = len(depth_by_hop), num_microbatches
    orders = []
    for depth in depth_by_hop:
        forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
        pairs = itertools.zip_longest(backwards, forwards[depth:])
        orders.append(forwards[:depth] + [op for pair in pairs for op in pair if op])
    end: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * p, [0] * p
    while any(position[hop] < 2 * m for hop in range(p)):
        for hop, order in enumerate(orders):
            while position[hop] < 2 * m:
                kind, i = order[position[hop]]
                ready = _ready(end, kind, hop, i, p, hop_s)
                if ready is None:
                    break
                free[hop] = max(free[hop], ready) + (FORWARD if kind == "F" else BACKWARD)
                end[kind, hop, i] = free[hop]
                position[hop] += 1
    return max(free)


def _ready(
    end: dict[tuple[str, int, int], float], kind: str, hop: int, i: int, p: int, hop_s: float
) -> float | None:
    if kind == "F":
        before = 0.0 if hop == 0 else end.get(("F", hop - 1, i))
        return before if before is None or hop == 0 else before + hop_s
    if hop == p - 1:
        return end.get(("F", hop, i))
    after = end.get(("B", hop + 1, i))
    return None if after is None else after + hop_s


def uniform_depths(p: int, hop_s: float) -> tuple[int, ...]:
    op_s = FORWARD + BACKWARD
    return warm_up_depths([op_s] * p, [2 * hop_s] * (p - 1), [op_s] * p)


@pytest.mark.parametrize(
    ("p", "m", "hop_s", "deep", "textbook"),
    [(4, 16, 2.0, 69.0, 113.0), (8, 32, 4.0, 173.0, 389.0), (4, 32, 2.0, 117.0, 209.0)],
)
def test_warm_up_depth_reaches_the_published_makespans(
    p: int, m: int, hop_s: float, deep: float, textbook: float
) -> None:
    assert makespan(tuple(min(m, depth) for depth in uniform_depths(p, hop_s)), m, hop_s) == deep
    assert makespan(tuple(range(p, 0, -1)), m, hop_s) == textbook


def test_warm_up_depths_of_the_published_example() -> None:
    assert uniform_depths(4, 2.0) == (10, 7, 4, 1)


def test_without_latency_the_textbook_depths_come_out() -> None:
    assert uniform_depths(4, 0.0) == (4, 3, 2, 1)


def uniform(p: int, m: int, hop_s: float) -> tuple[tuple[StageLoad, ...], Pool, tuple[Path, ...]]:
    """One pipeline whose every op takes 3 s and every hop `hop_s`, whatever the bytes."""
    loads = tuple(
        StageLoad(
            stage=StageSpec(index=StageIndex(i), first=i, stop=i + 1),
            forward_flops=1,
            backward_flops=2,
            fixed_bytes=0,
            slot_bytes=1,
            output_bytes=0,
            parameter_bytes=4,
        )
        for i in range(p)
    )
    names = [f"w{i}" for i in range(p)]
    whole = fleet([1.0] * p, links=[link(a, b, hop_s) for a in names for b in names if a != b])
    links = link_cost_s(whole)
    pool = Pool(
        workers=tuple(x.worker for x in whole.workers),
        speeds=np.ones(p),
        memory_bytes=np.ones(p, dtype=np.int64),
        links=links,
        round_trip_s=links.round_trip_s(0),
    )
    hops = tuple(ChunkRef(stage=StageIndex(i), worker=worker) for i, worker in enumerate(pool.workers))
    return loads, pool, (Path(hops=hops),) * m


@pytest.mark.parametrize(
    ("p", "m", "hop_s"), [(4, 16, 2.0), (8, 32, 4.0), (4, 32, 2.0), (1, 5, 1.0), (3, 3, 0.0)]
)
def test_estimate_is_exact_for_a_uniform_pipeline(p: int, m: int, hop_s: float) -> None:
    loads, pool, paths = uniform(p, m, hop_s)
    step = traffic(paths, loads, pool)
    slots = depths(step)
    # All terms are small whole numbers, so nothing is rounded.
    assert estimate_s(step, slots, []) == makespan(tuple(slots[hop] for hop in paths[0].hops), m, hop_s)
    assert lower_bound_s(step, loads, pool, np.ones((p, p))) == 3 * max(m, p)


def test_estimate_grows_when_memory_allows_too_few_in_flight() -> None:
    loads, pool, paths = uniform(4, 16, 2.0)
    step = traffic(paths, loads, pool)
    few = dict.fromkeys(depths(step), 1)
    # One slot at the first hop: each microbatch makes its whole round trip alone.
    assert estimate_s(step, few, []) == 16 * (4 * 3 + 3 * 4)


def test_a_holder_that_sees_every_second_microbatch_needs_half_the_depth() -> None:
    every, second = [3.0, 3.0], [6.0, 3.0]
    assert warm_up_depths([3.0, 3.0], [9.0], every)[0] == 5
    assert warm_up_depths([3.0, 3.0], [9.0], second)[0] == 3
