"""Parts that no honest member sends: whoever combines them goes on with the others, and is not to blame."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from skein.config.aggregation import AggregationSpec, AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam
from skein.config.optimizer import AdamWSpec, OptimizerSpec, SgdSpec
from skein.config.rule import Due, Reach
from skein.numeric.aggregate.all_reduce import RESIDUAL
from skein.numeric.aggregate.rule import Rule, Talk, Terms
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.walker import Tensors, Walker
from tests.support.exchanges import led_by, talks_by_row, talks_by_shard

NUM_ELEMENTS = 64
TERMS = Terms(step=5, learning_rate=0.1, gradient_scale=1.0)
RULES: Mapping[str, tuple[AggregationSpec, OptimizerSpec]] = {
    "bf16": (AllReduce(wire="bf16"), AdamWSpec()),
    "int8": (AllReduce(wire="int8"), AdamWSpec()),
    "one_bit": (OneBitAdam(rule="one_bit_adam", warmup_steps=2), AdamWSpec()),
    "diloco": (DiLoCo(rule="diloco", local_steps=1, wire="int8"), AdamWSpec()),
    "gossip": (Gossip(rule="gossip", graph="ring"), SgdSpec(name="sgd", momentum=0.9)),
}
STRANGE: Mapping[str, Tensors] = {
    "nothing": {},
    "another name": {"secret": torch.ones(NUM_ELEMENTS)},
    "one element": {name: torch.ones(1) for name in ("values", "codes", "scales", "bits", "y")},
    "too many": {name: torch.ones(10 * NUM_ELEMENTS) for name in ("values", "codes", "scales", "bits", "y")},
    "another type": {
        name: torch.ones(NUM_ELEMENTS, dtype=torch.int64) for name in ("values", "codes", "bits", "y")
    },
}


def talks(spec: AggregationSpec) -> list[Talk]:
    """Three members, who all hear each other."""
    if isinstance(spec, Gossip):
        return talks_by_row(Due(round=0, reach=Reach.NEIGHBOURS), [[1 / 3] * 3] * 3)
    return talks_by_shard(Due(round=0), num_members=3, num_shards=1)


def offer(rule: Rule, gradient: Tensor, talk: Talk) -> tuple[Walker, dict[int, Tensors]]:
    """A member that has made its local step, and what it sends."""
    params = {"w": torch.ones(NUM_ELEMENTS)}
    walker = Walker(params=params, state=rule.init(params))
    rule.local_step(walker, {"w": gradient}, TERMS, talks=True)
    return walker, rule.contribution(walker, talk)


def combined(name: str, strange: Tensors | None) -> Tensor:
    """What member 0 makes of shard 0, the last member sending `strange`; None: what an honest one sends."""
    spec, optimizer = RULES[name]
    rule, views = rule_of(spec, optimizer), talks(spec)
    gradient = torch.linspace(-1.0, 2.0, NUM_ELEMENTS)
    made = [offer(rule, gradient, talk) for talk in views]
    parts = [sent[0] for _, sent in made]
    if strange is not None:
        parts[-1] = strange
    walker = made[0][0]
    result = rule.combine(walker, views[0], 0, parts)
    return rule.join(walker, views[0], {0: result})


@pytest.mark.parametrize("strange", sorted(STRANGE))
@pytest.mark.parametrize("name", sorted(RULES))
def test_a_part_that_does_not_fit_does_not_count(name: str, strange: str) -> None:
    # All members are alike, so without one of them the result is what it is with all, to rounding.
    torch.testing.assert_close(combined(name, STRANGE[strange]), combined(name, None), rtol=1e-5, atol=1e-6)


def test_one_bit_parts_of_unusual_length_do_not_count() -> None:
    spec, optimizer = RULES["one_bit"]
    rule = rule_of(spec, optimizer)
    _, sent = offer(rule, torch.linspace(-1.0, 2.0, NUM_ELEMENTS), talks(spec)[2])
    long = {**sent[0], "scales": sent[0]["scales"] * 1e20}
    torch.testing.assert_close(combined("one_bit", long), combined("one_bit", None), rtol=1e-5, atol=1e-6)


def test_who_has_no_weight_in_an_all_reduce_keeps_what_it_has_to_say() -> None:
    spec, optimizer = RULES["int8"]
    rule = rule_of(spec, optimizer)
    heard, unheard = talks_by_shard(Due(round=0), num_members=2, num_shards=1, weights=((0, 1.0),))
    gradient = torch.linspace(-1.0, 2.0, NUM_ELEMENTS)
    assert offer(rule, gradient, heard)[0].state[RESIDUAL]["w"].any()
    assert not offer(rule, gradient, unheard)[0].state[RESIDUAL]["w"].any()


@pytest.mark.parametrize("strange", sorted(STRANGE))
@pytest.mark.parametrize("name", sorted(RULES.keys() - {"gossip"} | {"lsgd"}))
def test_a_result_that_does_not_fit_is_voted_as_not_finite(name: str, strange: str) -> None:
    spec, optimizer = (Lsgd(rule="lsgd"), SgdSpec(name="sgd")) if name == "lsgd" else RULES[name]
    rule, view = rule_of(spec, optimizer), talks(spec)[1]
    if name == "lsgd":
        view = led_by(view, 0)
    walker, _ = offer(rule, torch.linspace(-1.0, 2.0, NUM_ELEMENTS), view)
    joined = rule.join(walker, view, {0: STRANGE[strange]})
    assert joined.shape == (NUM_ELEMENTS,)
    assert joined.isnan().all()
