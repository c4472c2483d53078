"""What exchanges tell of themselves, against what walkers hold."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam
from skein.config.optimizer import AdamWSpec, OptimizerSpec, SgdSpec
from skein.config.rule import Due, Reach
from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.gradients import flatten
from skein.numeric.walker import Walker
from tests.support.exchanges import exchange, led_by, talks_by_row, talks_by_shard
from worker.compute.telling import EVERY, is_told, residual_norm, sent_bytes

TERMS = Terms(step=0, learning_rate=0.125, gradient_scale=1.0)
SGD = SgdSpec(name="sgd", momentum=0.0, weight_decay=0.0)
THIRD = 1 / 3


def walkers_of(rule: Rule, *values: Sequence[float]) -> list[Walker]:
    made = []
    for value in values:
        params = {"w": torch.tensor(value, dtype=torch.float64)}
        made.append(Walker(params=params, state=rule.init(params)))
    return made


def joined_by(rule: Rule, walkers: list[Walker], talks: list[Talk]) -> tuple[list[Walker], list[Tensor]]:
    """Each walker as its exchange has it, with what came back, after a step without a gradient."""
    copies = [walker.copy() for walker in walkers]
    for copy in copies:
        rule.local_step(copy, {"w": torch.zeros(2, dtype=torch.float64)}, TERMS, talks=True)
    sent = [rule.contribution(copy, talk) for copy, talk in zip(copies, talks, strict=True)]
    results = {}
    for shard in range(talks[0].num_shards):
        owner = shard % len(copies)
        parts = [sent[member][shard] for member, _ in talks[owner].weights[shard]]
        results[shard] = rule.combine(copies[owner], talks[owner], shard, parts)
    mine = [{t.me: results[t.me]} if t.is_by_row else results for t in talks]
    return copies, [rule.join(c, t, m) for c, t, m in zip(copies, talks, mine, strict=True)]


def test_gossip_is_as_far_as_the_mean_of_neighbours() -> None:
    spec, due = Gossip(rule="gossip", method="dsgd"), Due(round=0, reach=Reach.NEIGHBOURS)
    rule = rule_of(spec, SGD)
    walkers = walkers_of(rule, (0.0, 0.0), (3.0, 0.0), (0.0, 6.0))
    found, joined = joined_by(rule, walkers, talks_by_row(due, [[THIRD] * 3] * 3))
    away = [rule.distance(walker, due, flat) for walker, flat in zip(found, joined, strict=True)]
    # From the mean (1, 2).
    assert away == pytest.approx([math.hypot(1, 2), math.hypot(2, 2), math.hypot(1, 4)])


def test_diloco_is_as_far_as_the_mean_of_all() -> None:
    spec, due = DiLoCo(rule="diloco", wire="fp32"), Due(round=0)
    rule = rule_of(spec, SGD)
    walkers = walkers_of(rule, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    for walker, moved in zip(walkers, ((0.0, 0.0), (3.0, 0.0), (0.0, 6.0)), strict=True):
        walker.params["w"].copy_(torch.tensor(moved))
    found, joined = joined_by(rule, walkers, talks_by_shard(due, num_members=3, num_shards=2))
    away = [rule.distance(walker, due, flat) for walker, flat in zip(found, joined, strict=True)]
    # Changes travel as float32.
    assert away == pytest.approx([math.hypot(1, 2), math.hypot(2, 2), math.hypot(1, 4)], rel=1e-6)


def test_lsgd_is_as_far_as_the_leader() -> None:
    spec, due = Lsgd(rule="lsgd"), Due(round=0)
    rule = rule_of(spec, SGD)
    walkers = walkers_of(rule, (0.0, 0.0), (3.0, 4.0))
    talks = [led_by(talk, 1) for talk in talks_by_shard(due, num_members=2, num_shards=1)]
    for walker in walkers:
        rule.local_step(walker, {"w": torch.zeros(2, dtype=torch.float64)}, TERMS, talks=True)
    sent = rule.contribution(walkers[1], talks[1])
    flat = rule.join(walkers[0], talks[0], sent)
    assert [rule.distance(walker, due, flat) for walker in walkers] == [5.0, 0.0]


def test_rules_of_one_walker_have_no_distance() -> None:
    spec = AllReduce(wire="int8")
    rule = rule_of(spec, SGD)
    [walker] = walkers_of(rule, (1.0, 2.0))
    assert rule.distance(walker, Due(round=0), torch.zeros(2)) is None


@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        (AllReduce(wire="int8"), SGD),
        (DiLoCo(rule="diloco", wire="int4"), SGD),
        (OneBitAdam(rule="one_bit_adam", warmup_steps=2), AdamWSpec()),
    ],
)
def test_what_is_still_to_be_said_is_measured(spec: AggregationSpec, optimizer: OptimizerSpec) -> None:
    rule = rule_of(spec, optimizer)
    [walker] = walkers_of(rule, (1.0, -0.3))
    assert residual_norm(rule, walker) == 0.0
    grads = {"w": torch.tensor([1.0, 0.017], dtype=torch.float64)}
    terms = [Terms(step=step, learning_rate=0.125, gradient_scale=1.0) for step in range(3)]
    for early in terms[:2]:
        rule.local_step(walker, grads, early, talks=False)
    talks = talks_by_shard(Due(round=0), num_members=1, num_shards=1)
    [after] = exchange(rule, [walker], [grads], [terms[2]], talks)
    kept = residual_norm(rule, after)
    slot = "error" if isinstance(spec, OneBitAdam) else "residual"
    assert kept is not None
    assert kept == pytest.approx(float(flatten(after.state[slot]).norm()))
    assert kept > 0


def test_what_is_still_to_be_said_of_a_large_matrix_counts_all_of_it() -> None:
    # More than the 4096 elements that are summed at a time, and no multiple of them.
    params = {"w": torch.zeros(100, 90, dtype=torch.float64)}
    rule = rule_of(AllReduce(wire="bf16"), SGD)
    walker = Walker(params=params, state=rule.init(params))
    walker.state["residual"]["w"].fill_(2.0)
    assert residual_norm(rule, walker) == pytest.approx(2.0 * math.sqrt(9000))


def test_rules_without_error_feedback_have_nothing_to_say() -> None:
    rule = rule_of(AllReduce(), SGD)
    [walker] = walkers_of(rule, (1.0, 2.0))
    assert residual_norm(rule, walker) is None


def test_a_vector_weighs_all_its_shards_or_what_one_neighbour_gets() -> None:
    shard = {"x": torch.zeros(3, dtype=torch.float32), "s": torch.zeros(1, dtype=torch.bfloat16)}
    by_shard = talks_by_shard(Due(round=0), num_members=2, num_shards=2)[0]
    by_row = talks_by_row(Due(round=0, reach=Reach.NEIGHBOURS), [[0.5, 0.5], [0.5, 0.5]])[0]
    assert sent_bytes({0: shard, 1: shard}, by_shard) == 28
    assert sent_bytes({0: shard, 1: shard}, by_row) == 14
    assert sent_bytes({}, by_shard) == 0


def test_rules_that_talk_in_every_step_tell_now_and_then() -> None:
    gossip = rule_of(Gossip(rule="gossip"), SGD)
    assert [is_told(gossip, Due(round=round_)) for round_ in (0, 1, EVERY)] == [True, False, True]
    assert is_told(rule_of(DiLoCo(rule="diloco"), SGD), Due(round=1))
