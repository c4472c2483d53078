"""Which groups end a step, by rule: what is reduced, who exchanges what with whom, and with which weights."""

import numpy as np
import pytest

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitLamb
from skein.config.robust import CentredClip
from skein.config.rule import GossipMethod, GraphName, Reach
from skein.plan.agreeing.exchange import Broadcast, Direct, Neighbours
from skein.plan.agreeing.rounds import (
    Leaders,
    StepGroups,
    exchanged_stage,
    step_groups,
    weighed,
)
from skein.plan.plan import Group, Plan
from skein.types import Local, Own, StageIndex, Tied
from tests.support.plans import chunk, grid_plan, path, plan_of

LSGD = Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=4)
DILOCO = DiLoCo(rule="diloco", local_steps=4, fragments=2)


def walkers(num: int, *, stages: int = 2) -> Plan:
    """As many walkers, each with a holder of every stage and a microbatch of its own."""
    lines = [[chunk(s, f"w{s}{'abcdefgh'[r]}") for s in range(stages)] for r in range(num)]
    return plan_of([x for line in lines for x in line], [path(*line) for line in lines], num_shards=num)


def groups_at(
    step: int,
    rule: AggregationSpec,
    plan: Plan | None = None,
    *,
    leaders: Leaders | None = None,
    num_tokens: tuple[int, ...] = (),
) -> StepGroups:
    return step_groups(
        plan or walkers(4),
        rule,
        step,
        num_steps=100,
        seed=3,
        num_tokens=num_tokens,
        leaders=leaders,
        tree=lambda workers, leader: (leader,) * len(workers),
    )


def mixing(groups: list[Group]) -> np.ndarray:
    """The rows of a gossip exchange as a matrix."""
    [first] = {group.weights for group in groups}
    n = len(first)
    found = np.zeros((n, n))
    for i, row in enumerate(first):
        for j, weight in row.pairs:
            found[i, j] = weight
    return found


def test_plain_all_reduce_sums_over_all_holders_and_exchanges_nothing() -> None:
    plan = grid_plan()
    groups = groups_at(7, AllReduce(), plan)
    assert groups.reduced == plan.groups
    assert groups.units == ((Own(StageIndex(0)), Own(StageIndex(1))),)
    assert groups.exchanged == ()
    assert groups.has_one_norm


def test_a_step_without_an_exchange_leaves_every_walker_alone() -> None:
    groups = groups_at(0, DILOCO, num_tokens=(1, 2, 3, 4))
    assert groups.exchanged == ()
    assert [group.members for group in groups.reduced] == [
        (chunk(s, f"w{s}{r}"),) for s in (0, 1) for r in "abcd"
    ]
    assert groups.units[2] == (Local(chunk(0, "w0c")), Local(chunk(1, "w1c")))
    assert groups.may_lose_some
    assert not groups.has_one_norm


def test_fragments_take_turns() -> None:
    due = {step: groups_at(step, DILOCO).exchanged for step in range(8)}
    assert {step: [(str(x.group), x.fragment) for x in found] for step, found in due.items() if found} == {
        1: [("x0.f0", 0), ("x1.f0", 0)],
        3: [("x0.f1", 1), ("x1.f1", 1)],
        5: [("x0.f0", 0), ("x1.f0", 0)],
        7: [("x0.f1", 1), ("x1.f1", 1)],
    }


def test_a_warm_up_is_plain_and_what_follows_is_an_exchange() -> None:
    rule = OneBitLamb(rule="one_bit_lamb", warmup_steps=3)
    assert groups_at(2, rule).exchanged == ()
    after = groups_at(3, rule)
    assert [str(x.group) for x in after.exchanged] == ["x0", "x1"]
    assert all(isinstance(x.pattern, Direct) for x in after.exchanged)
    assert not after.may_lose_some
    assert not after.clips_result


@pytest.mark.parametrize(("rule", "num_shards"), [
    (AllReduce(wire="int8"), 4),
    (AllReduce(robust=CentredClip(kind="centred_clip")), 1),
])  # fmt: skip
def test_whoever_compares_members_sees_the_whole_of_each(rule: AllReduce, num_shards: int) -> None:
    exchanged = groups_at(0, rule).exchanged
    assert {x.num_shards for x in exchanged} == {num_shards}
    assert {len(x.weights) for x in exchanged} == {num_shards}
    assert all(row.weights == (0.25,) * 4 for x in exchanged for row in x.weights)


def test_who_has_learned_nothing_has_no_say() -> None:
    group = weighed(groups_at(1, DILOCO).exchanged[0], (30, 0, 10, 0))
    assert {row.pairs for row in group.weights} == {((0, 0.75), (2, 0.25))}
    assert group.contributors(1) == (group.members[0], group.members[2])


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("method", "graph"), [
    ("decentlam", "ring"),
    ("decentlam", "symmetric_exponential"),
    ("qg_dmsgd", "one_peer_exponential"),
    ("qg_dmsgd", "random_matching"),
    ("dsgd", "static_exponential"),
])  # fmt: skip
def test_gossip_keeps_the_mean_in_every_round(num: int, method: GossipMethod, graph: GraphName) -> None:
    rule = Gossip(rule="gossip", method=method, graph=graph)
    for step in range(6):
        groups = groups_at(step, rule, walkers(num))
        assert set(groups.reach) == {Reach.NEIGHBOURS}
        assert all(isinstance(x.pattern, Neighbours) and x.num_shards == num for x in groups.exchanged)
        rows = mixing(list(groups.exchanged))
        # Weights are quotients of small integers: sums of a handful are exact to a few roundings.
        np.testing.assert_allclose(rows.sum(axis=0), 1.0, rtol=1e-12)
        np.testing.assert_allclose(rows.sum(axis=1), 1.0, rtol=1e-12)


def test_without_a_leader_there_is_no_pull() -> None:
    assert groups_at(3, LSGD).exchanged == ()


def test_pulls_go_to_the_leaders_of_groups_first_and_then_to_that_of_all() -> None:
    groups = groups_at(3, LSGD, leaders=Leaders(of_all=2, of_group=(1, 1, 2, 2)))
    assert [str(x.group) for x in groups.exchanged] == ["x0.1", "x0.2", "x1.1", "x1.2", "x0.all", "x1.all"]
    assert groups.reach == (Reach.GROUP,) * 4 + (Reach.ALL,) * 2
    near, whole = groups.exchanged[1], groups.exchanged[4]
    assert near.workers == ("w0c", "w0d")
    assert isinstance(near.pattern, Broadcast)
    assert near.pattern.leader == 0
    assert isinstance(whole.pattern, Broadcast)
    assert (whole.workers[whole.pattern.leader], len(whole.workers)) == ("w0c", 4)


def test_a_leader_that_nobody_follows_exchanges_nothing() -> None:
    groups = groups_at(1, LSGD, leaders=Leaders(of_all=0, of_group=(0, 0, 0, 3)))
    assert [str(x.group) for x in groups.exchanged] == ["x0.0", "x1.0"]


def test_equal_inputs_give_equal_groups() -> None:
    rule = Gossip(rule="gossip", method="qg_dmsgd", graph="random_matching")
    assert [groups_at(step, rule) for step in range(5)] == [groups_at(step, rule) for step in range(5)]


def test_the_stage_of_an_exchange_is_in_its_name() -> None:
    groups = groups_at(3, LSGD, leaders=Leaders(of_all=2, of_group=(1, 1, 2, 2)))
    assert {exchanged_stage(x.group) == x.members[0].stage for x in groups.exchanged} == {True}
    assert all(exchanged_stage(x.group) is None for x in groups.reduced)
    assert exchanged_stage(Tied()) is None
