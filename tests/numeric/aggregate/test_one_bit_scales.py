"""How far one-bit rules step: floors of second moments, ratios and factors of LAMB."""

import pytest
import torch

from skein.numeric.aggregate.one_bit.freezing import MOMENTUM_SCALE, raise_variances
from skein.numeric.aggregate.one_bit.lamb import FACTOR, RATIO, OneBitLambRule
from skein.numeric.optim.adamw import MEAN
from skein.numeric.walker import Walker
from tests.numeric.aggregate.test_one_bit import (
    WARMUP,
    advance,
    make_grads,
    new_walkers,
    one_bit_lamb,
    terms_of,
)


def test_the_floor_of_dead_tensors_is_the_mean_of_the_living() -> None:
    variances = {"dead": torch.zeros(3), "some": torch.tensor([0.0, 4.0])}
    raise_variances(variances, 0.25)
    assert variances["some"].tolist() == [0.5, 4.0]
    assert variances["dead"].tolist() == pytest.approx([0.8] * 3)  # 4 / 5 elements, in float32
    nothing = {"dead": torch.zeros(3)}
    raise_variances(nothing, 0.25)
    assert nothing["dead"].tolist() == [1.0] * 3


def test_a_constant_ratio_is_its_own_mean_after_any_warm_up() -> None:
    for warmup_steps in (2, 3, 9):
        rule = one_bit_lamb(warmup_steps=warmup_steps)
        params = {"w": torch.full((4, 4), 1e-9, dtype=torch.float64)}
        walker = Walker(params=params, state=rule.init(params))
        for step in range(warmup_steps + 1):
            rule.local_step(walker, {"w": torch.ones(4, 4, dtype=torch.float64)}, terms_of(step), talks=False)
            params["w"].fill_(1e-9)  # so small that the ratio is always at its lower bound
        assert walker.state[RATIO]["w"].item() == pytest.approx(0.01, rel=1e-12)


def test_a_tensor_that_never_had_a_ratio_goes_on_with_one() -> None:
    rule = one_bit_lamb(warmup_steps=2)
    params = {"bias": torch.zeros(4, dtype=torch.float64), "w": torch.ones(2, 2, dtype=torch.float64)}
    walker = Walker(params=params, state=rule.init(params))
    for step in range(2):
        rule.local_step(
            walker,
            {"bias": torch.zeros(4, dtype=torch.float64), "w": params["w"].clone()},
            terms_of(step),
            talks=False,
        )
    grads = {name: torch.ones_like(param) for name, param in params.items()}
    rule.local_step(walker, grads, terms_of(2), talks=False)
    assert walker.state[RATIO]["bias"].item() == 1.0
    assert walker.state[MOMENTUM_SCALE]["bias"].item() == 1.0
    assert walker.params["bias"].all()


def test_scaled_momenta_are_of_one_size() -> None:
    rule = one_bit_lamb()
    walkers = advance(rule, new_walkers(rule, 1), range(WARMUP))
    sizes = {name: m.pow(2).mean().sqrt().item() for name, m in walkers[0].state[MEAN].items()}
    grads = make_grads(walkers[0].params, step=WARMUP, member=0)
    rule.local_step(walkers[0], grads, terms_of(WARMUP), talks=True)
    scaled = {name: walkers[0].state[MOMENTUM_SCALE][name].item() * size for name, size in sizes.items()}
    united = sum(sizes.values()) / len(sizes)
    assert all(size == pytest.approx(united, rel=1e-5) for size in scaled.values())  # float32


def test_the_factor_keeps_to_its_bounds_and_moves_slowly() -> None:
    rule = one_bit_lamb()
    assert isinstance(rule, OneBitLambRule)
    walkers = new_walkers(rule, 2)
    last = dict.fromkeys(walkers[0].params, 1.0)
    seen = set()
    for step in range(60):
        walkers = advance(rule, walkers, range(step, step + 1))
        for name, factor in walkers[0].state[FACTOR].items():
            assert 0.5 - 1e-6 <= factor.item() <= 4 + 1e-6  # float32
            assert 0.9 - 1e-6 <= factor.item() / last[name] <= 1.1 + 1e-6
            last[name] = factor.item()
            seen.add(round(factor.item(), 3))
    assert len(seen) > 5
