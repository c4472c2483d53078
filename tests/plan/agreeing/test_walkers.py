"""Walkers of plans: complete lines of holders, near ones together, and kept together as long as they are whole."""

import pytest

from skein.config.aggregation import Gossip
from skein.config.job import JobSpec
from skein.config.optimizer import SgdSpec
from skein.plan.agreeing.walkers import lines_of, walkers_of
from skein.plan.balanced import pool_of
from skein.plan.check import violations
from skein.topology.fleet import Fleet
from skein.types import Layout, WorkerId
from tests.plan.builders import fleet, job, link, planned, without

SGD = SgdSpec(name="sgd")
RING = Gossip(rule="gossip", method="dmsgd", graph="ring")


def many(*, stages: int = 2, replicas: int = 3, layout: Layout = Layout.LINE) -> JobSpec:
    spec = job(stages=stages, replicas=replicas, layout=layout, is_tied=False)
    return spec.model_copy(update={"aggregation": RING, "optimizer": SGD})


def lines(
    holders: list[list[int]], on: Fleet, before: list[list[str]] | None = None
) -> list[tuple[int, ...]]:
    spec = many()
    pool = pool_of(spec, on)
    return list(lines_of(holders, pool, [[WorkerId(x) for x in line] for line in before or []]))


def test_near_holders_make_a_walker() -> None:
    # w0 and w3 are at one place, w1 and w2 at another.
    slow = [
        link(f"w{a}", f"w{b}", 0.1)
        for a in range(4)
        for b in range(4)
        if a != b and {a, b} not in ({0, 3}, {1, 2})
    ]
    fast = [link(f"w{a}", f"w{b}", 0.001) for a, b in ((0, 3), (3, 0), (1, 2), (2, 1))]
    assert lines([[0, 1], [2, 3]], fleet([1.0] * 4, links=[*slow, *fast])) == [(0, 3), (1, 2)]


def test_there_are_as_many_walkers_as_the_stage_with_the_fewest_holders_allows() -> None:
    assert len(lines([[0, 1, 2], [3, 4]], fleet([1.0] * 5))) == 2


def test_whoever_is_whole_stays_together() -> None:
    on = fleet([1.0] * 5)
    before = [["w1", "w4"], ["w0", "w9"]]
    assert lines([[0, 1], [3, 4]], on, before) == [(1, 4), (0, 3)]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("num_workers", [3, 4, 5, 6, 7, 9])
def test_plans_of_many_walkers_keep_microbatches_inside_them(layout: Layout, num_workers: int) -> None:
    spec = many(stages=3, layout=layout)
    on = fleet([1e10 * (1 + i % 3) for i in range(num_workers)])
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    by_walker = [set(walker) for walker in walkers_of(plan)]
    for path in plan.paths:
        assert sum(set(path.hops) <= chunks for chunks in by_walker) == 1


def test_a_walker_that_lost_nobody_is_a_walker_of_the_next_plan() -> None:
    spec, on = many(), fleet([1e10] * 6)
    before = planned(spec, on)
    first, second, third = walkers_of(before)
    gone = second[1].worker
    after = planned(spec, without(on, gone), before)
    assert first in walkers_of(after)
    assert third in walkers_of(after)
    assert second not in walkers_of(after)
