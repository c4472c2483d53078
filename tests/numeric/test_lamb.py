"""LAMB alone: the ratio of each tensor, and the norms that it is made of."""

import math

import pytest
import torch
from torch import Tensor

from skein.numeric.optim.elementwise import norm_of, row_sums_of_squares
from skein.numeric.optim.lamb import Lamb
from skein.numeric.walker import Tensors, Walker


def moved(
    params: Tensors, grads: Tensors, *, min_ratio: float = 0.0, max_ratio: float = 100.0, decay: float = 0.0
) -> Tensors:
    """How far one update with learning rate 1 moves each parameter."""
    rule = Lamb(
        betas=(0.5, 0.75),
        eps=1e-6,
        weight_decay=decay,
        min_ratio=min_ratio,
        max_ratio=max_ratio,
        bias_correction=False,
    )
    walker = Walker(params={name: x.clone() for name, x in params.items()}, state=rule.init(params))
    rule.update(walker, grads, learning_rate=1.0, gradient_scale=1.0)
    return {name: param - walker.params[name] for name, param in params.items()}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_tensor_moves_by_its_own_norm_whatever_its_gradients_size() -> None:
    small, large = drawn(5, 3), 4.0 * drawn(5, 3, seed=1)
    params = {"small": small, "large": large}
    steps = moved(params, {"small": 1e3 * drawn(5, 3, seed=2), "large": 1e-2 * drawn(5, 3, seed=3)})
    for name, param in params.items():
        # Ratio and step each round a few times.
        assert steps[name].norm().item() == pytest.approx(param.norm().item(), rel=1e-13)


def test_a_ratio_out_of_bounds_is_brought_to_the_bound() -> None:
    param, grad = {"w": drawn(6, 2)}, {"w": drawn(6, 2, seed=1)}
    plain = moved({"w": torch.zeros(6, 2, dtype=torch.float64)}, grad)["w"]  # ratio 1
    for bounds, ratio in (((50.0, 60.0), 50.0), ((0.0, 0.125), 0.125)):
        found = moved(param, grad, min_ratio=bounds[0], max_ratio=bounds[1])["w"]
        # One subtraction from numbers of order 1 each way.
        torch.testing.assert_close(found, ratio * plain, rtol=1e-12, atol=1e-14)


def test_where_a_norm_is_zero_the_ratio_is_one_in_spite_of_bounds() -> None:
    grad = drawn(4, seed=1)
    zero = torch.zeros(4, dtype=torch.float64)
    bound = moved({"w": zero}, {"w": grad}, min_ratio=5.0)["w"]
    direction = 0.5 * grad / ((0.25 * grad * grad).sqrt() + 1e-6)
    torch.testing.assert_close(bound, direction, rtol=1e-14, atol=0.0)
    assert not moved({"w": drawn(4)}, {"w": zero}, min_ratio=5.0)["w"].any()


@pytest.mark.parametrize("num_elements", [0, 1, 3, 4095, 4096, 4097, 3 * 4096 + 1234])
def test_row_sums_are_the_sum_of_squares(num_elements: int) -> None:
    piece = drawn(num_elements).float()
    sums = row_sums_of_squares(piece, torch.empty(num_elements, dtype=torch.float64))
    assert len(sums) == -(-num_elements // 4096)
    exact = math.fsum(x * x for x in piece.tolist())
    # Twelve halvings of positive numbers, each rounded once in float64.
    assert norm_of(sums) == pytest.approx(math.sqrt(exact), rel=12 * 2**-53, abs=0.0)


def test_a_norm_of_what_is_not_finite_is_not_finite() -> None:
    assert norm_of([1.0, math.inf]) == math.inf
    assert math.isnan(norm_of([1.0, math.nan]))
