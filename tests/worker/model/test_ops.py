"""Gradients written by hand against numeric ones, and casts against autocast."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional

from tests.worker.model.builders import assert_near
from worker.model.ops import (
    attend,
    biased,
    go_back,
    linear,
    rms_norm,
    rotary_tables,
    rotate,
    swiglu,
    takes_groups,
)
from worker.model.pending import Tray


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()


def test_rms_norm_has_its_gradients_and_torchs_values() -> None:
    x, weight = numbers(2, 3, 5), numbers(5)
    assert gradcheck(lambda x, weight: rms_norm(x, weight, 1e-5, torch.float64, Tray()), (x, weight))
    # Two roundings of float64 apart.
    expected = functional.rms_norm(x, (5,), weight, 1e-5)
    assert_near(rms_norm(x, weight, 1e-5, torch.float64, Tray()), expected, tolerance=1e-14)


def test_swiglu_has_its_gradients() -> None:
    gate, up = numbers(2, 3, 5), numbers(2, 3, 5).detach().flip(0).requires_grad_()
    assert gradcheck(swiglu, (gate, up))


def test_hand_written_gradients_leave_what_they_get_unchanged() -> None:
    x, weight, gate = numbers(2, 3, 5), numbers(5), numbers(2, 3, 5).detach().requires_grad_()
    grad = torch.ones(2, 3, 5, dtype=torch.float64)
    before = [y.detach().clone() for y in (x, weight, gate)]
    torch.autograd.backward(swiglu(gate, rms_norm(x, weight, 1e-5, torch.float64, Tray())), grad)
    assert torch.equal(grad, torch.ones_like(grad))
    assert all(torch.equal(y, old) for y, old in zip((x, weight, gate), before, strict=True))


def test_linear_with_a_wider_weight_is_what_autocast_computes() -> None:
    results = []
    for is_autocast in (False, True):
        x, weight = numbers(2, 3, 8, dtype=torch.bfloat16), numbers(4, 8, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            y = functional.linear(x, weight) if is_autocast else linear(x, weight, Tray())
        torch.autograd.backward(y, torch.ones_like(y))
        results.append((y.detach(), x.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_and_biases_of_one_dtype_are_torchs_own_bit_for_bit(dtype: torch.dtype) -> None:
    results = []
    for is_ours in (False, True):
        x, weight, bias = (
            numbers(2, 37, 8, dtype=dtype),
            numbers(24, 8, dtype=dtype),
            numbers(24, dtype=dtype),
        )
        if is_ours:
            y = biased(linear(x, weight, Tray()), bias, Tray())
        else:
            y = functional.linear(x, weight) + bias
        torch.autograd.backward(y, y.detach().flip(0))
        results.append((y.detach(), x.grad, weight.grad, bias.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_keeps_lengths_and_depends_on_distance_only(dtype: torch.dtype) -> None:
    cos, sin = rotary_tables(9, 6, 100.0, dtype)
    query, key = numbers(6, dtype=dtype).detach(), numbers(1, 6, dtype=dtype).detach().squeeze(0)
    queries, keys = (rotate(x.expand(1, 9, 1, 6), cos, sin)[0, :, 0] for x in (query, key))
    # A sum of six products of rounded sines and cosines.
    rounding = 1e-5 if dtype == torch.float32 else 1e-13
    assert_near(queries.norm(dim=-1), query.norm().expand(9), tolerance=rounding)
    scores = queries @ keys.T
    for distance in range(-8, 9):
        along = scores.diagonal(distance)
        assert_near(along, along[0].expand_as(along), tolerance=rounding)


def test_heads_repeated_for_a_kernel_without_groups_attend_alike() -> None:
    query, key, value = numbers(2, 6, 5, 4), numbers(2, 3, 5, 4), numbers(2, 3, 5, 4).detach().flip(0)
    results = [attend(query, key, value, takes_groups=takes) for takes in (True, False)]
    # Sums of five products, perhaps in another order.
    assert_near(results[0], results[1], tolerance=1e-13)
    assert takes_groups(query)


def test_going_back_is_a_backward_of_several_results() -> None:
    found: list[list[Tensor]] = []
    for way in (go_back, torch.autograd.backward):
        draw = torch.Generator().manual_seed(5)
        x, w = (torch.randn(4, 4, generator=draw).requires_grad_() for _ in range(2))
        made = [x @ w, (x * w).sum(0)]
        way(made, [torch.randn(y.shape, generator=draw) for y in made])
        found.append([y.grad for y in (x, w) if y.grad is not None])
    ours, theirs = found
    assert len(ours) == 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_worker_goes_back_without_a_computer_algebra_system() -> None:
    program = (
        "import sys, torch, worker.model.stage; from worker.model.ops import go_back;"
        "x = torch.ones(2, requires_grad=True); go_back([x * x], [torch.ones(2)]);"
        "assert x.grad.tolist() == [2, 2]; assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
