"""The checks of what an exchange keeps: silent when it does, and not when anything is lost or made up."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from skein.config.aggregation import AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.optimizer import AdamWSpec, LambSpec, SgdSpec
from skein.config.rule import Due, Reach
from skein.numeric.aggregate import all_reduce, diloco
from skein.numeric.aggregate.one_bit import freezing as one_bit
from skein.numeric.aggregate.rule import Offer, Rule, Talk, Terms
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.walker import Tensors, Walker
from tests.support.exchanges import led_by, owner_of, talks_by_row, talks_by_shard

RING = ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.5))
SGD = SgdSpec(name="sgd", momentum=0.8)
RULES = {
    "int8": rule_of(AllReduce(wire="int8"), AdamWSpec()),
    "one_bit_adam": rule_of(OneBitAdam(rule="one_bit_adam", warmup_steps=2), AdamWSpec()),
    "one_bit_lamb": rule_of(OneBitLamb(rule="one_bit_lamb", warmup_steps=2), LambSpec(name="lamb")),
    "diloco": rule_of(DiLoCo(rule="diloco", local_steps=2, wire="int4", fragments=2), AdamWSpec()),
    "gossip": rule_of(Gossip(rule="gossip", method="da_dmsgd", graph="ring"), SGD),
    "lsgd": rule_of(Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=4), SGD),
}


def talks_of(name: str) -> list[Talk]:
    match name:
        case "gossip":
            return talks_by_row(Due(round=0, reach=Reach.NEIGHBOURS), RING)
        case "lsgd":
            talks = talks_by_shard(Due(round=0), num_members=3, num_shards=2)
            return [led_by(talk, 1) for talk in talks]
        case _:
            weights = ((0, 0.5), (1, 0.25), (2, 0.25))
            return talks_by_shard(Due(round=0, fragment=0), num_members=3, num_shards=2, weights=weights)


def walker_of(rule: Rule, seed: int) -> Walker:
    luck = torch.Generator().manual_seed(0)
    params = {
        "a": torch.randn(5, 7, generator=luck, dtype=torch.float64),
        "b": torch.randn(11, generator=luck, dtype=torch.float64),
    }
    walker = Walker(params=params, state=rule.init(params))
    own = torch.Generator().manual_seed(seed)
    # Something of one's own that was kept back before.
    for slot in (all_reduce.RESIDUAL, one_bit.ERROR, diloco.RESIDUAL):
        for tensor in walker.state.get(slot, {}).values():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=own, dtype=torch.float64))
    return walker


def offers(name: str) -> list[Offer]:
    """An exchange of three, as each has it when all results are there."""
    rule, talks = RULES[name], talks_of(name)
    terms = Terms(step=7, learning_rate=0.1, gradient_scale=0.5)
    walkers = [walker_of(rule, seed) for seed in (1, 2, 3)]
    grads: list[Tensors] = []
    for seed in (4, 5, 6):
        luck = torch.Generator().manual_seed(seed)
        grads.append(
            {
                "a": torch.randn(5, 7, generator=luck, dtype=torch.float64),
                "b": torch.randn(11, generator=luck, dtype=torch.float64),
            }
        )
    after = [walker.copy() for walker in walkers]
    for walker, grad in zip(after, grads, strict=True):
        rule.local_step(walker, grad, terms, talks=True)
    sent = [rule.contribution(walker, talk) for walker, talk in zip(after, talks, strict=True)]
    results: dict[int, Tensors] = {}
    for shard in range(talks[0].num_shards):
        owner = 1 if name == "lsgd" else owner_of(talks[0], shard)
        parts = [sent[member][shard] for member, _ in talks[owner].weights[shard]]
        results[shard] = rule.combine(after[owner], talks[owner], shard, parts)
    found = []
    for i, talk in enumerate(talks):
        mine = {i: results[i]} if talk.is_by_row else results
        joined = rule.join(after[i], talk, mine)
        offer = Offer(before=walkers[i], after=after[i], grads=grads[i], terms=terms, talk=talk)
        found.append(offer.joined(joined))
    return found


def moved(offers: Sequence[Offer], index: int) -> list[Offer]:
    """With one element of one member's result a little off."""
    result = offers[index].result
    assert result is not None
    changed = result.clone()
    changed[0] += 1e-3
    return [replace(x, result=changed) if i == index else x for i, x in enumerate(offers)]


@pytest.mark.parametrize("name", RULES)
def test_an_exchange_that_keeps_its_promise_is_not_accused(name: str) -> None:
    assert RULES[name].lost(offers(name)) == ""


@pytest.mark.parametrize("name", RULES)
def test_a_result_that_is_off_is_found(name: str) -> None:
    assert RULES[name].lost(moved(offers(name), 2))


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("int8", all_reduce.RESIDUAL),
        ("int8", all_reduce.SHARD_RESIDUAL),
        ("one_bit_adam", one_bit.ERROR),
        ("one_bit_adam", one_bit.SHARD_ERROR),
        ("one_bit_lamb", one_bit.ERROR),
        ("diloco", diloco.NEXT),
        ("diloco", diloco.NEXT_SHARD),
    ],
)
def test_what_was_kept_back_and_is_forgotten_is_found(name: str, slot: str) -> None:
    made = offers(name)
    for tensor in made[0].after.state[slot].values():
        tensor.zero_()
    assert RULES[name].lost(made)


def test_rows_that_are_scaled_up_after_a_loss_do_not_keep_the_mean() -> None:
    made = offers("gossip")
    first = made[0].result
    assert first is not None
    # Without member 2, member 0 has 0.5 and 0.25 left, and makes them 2/3 and 1/3: that is not its row.
    assert RULES["gossip"].lost([replace(made[0], result=first * (4 / 3)), *made[1:]])
