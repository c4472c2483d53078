"""Rows side by side: each is updated as it would be alone, bit for bit, and what one is never shows in another."""

import math

import pytest
import torch

from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.numeric.optim import side_by_side
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.optim.side_by_side import RowTerms, update_rows
from skein.numeric.rows import RowBuffer
from skein.numeric.walker import Tensors, Walker

SHAPES = {"head.bias": (5,), "head.weight": (5, 7), "kernel": (3, 2, 3, 3), "norm": (11,)}
NUM_ROWS = 4
SPECS: dict[str, OptimizerSpec] = {
    "adamw": AdamWSpec(),
    "adam": AdamSpec(name="adam"),
    "adadelta": AdadeltaSpec(name="adadelta"),
    "sgd": SgdSpec(name="sgd"),
    "nesterov": SgdSpec(name="sgd", nesterov=True),
    "plain sgd": SgdSpec(name="sgd", momentum=0.0),
    "lamb": LambSpec(name="lamb"),
}


def drawn(seed: int, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def own(spec: OptimizerSpec, row: int) -> OptimizerSpec:
    """Numbers of one row, in every field that an update reads."""
    changes: dict[str, object] = {"weight_decay": 0.1 * row}
    if isinstance(spec, AdadeltaSpec):
        return spec.model_copy(update=changes | {"rho": 0.9 - 0.1 * row})
    if isinstance(spec, SgdSpec):
        return spec.model_copy(update=changes | {"momentum": spec.momentum / (row + 1)})
    return spec.model_copy(
        update=changes | {"betas": (0.9 - 0.1 * row, 0.99 - 0.1 * row), "eps": 10.0 ** (-4 - row)}
    )


def walkers(spec: OptimizerSpec, dtype: torch.dtype) -> list[Walker]:
    made = []
    for row in range(NUM_ROWS):
        params = drawn(row, dtype)
        made.append(Walker(params=params, state=optimizer_of(own(spec, row)).init(params)))
    return made


def assert_equal(row: Walker, alone: Walker) -> None:
    assert row.num_updates == alone.num_updates
    for name, param in alone.params.items():
        assert torch.equal(row.params[name], param), name
    for slot, tensors in alone.state.items():
        for name, tensor in tensors.items():
            assert torch.equal(row.state[slot][name], tensor), f"{slot}.{name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPECS)
def test_each_row_is_updated_as_it_would_be_alone(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several spans of columns, the last of each kind a short one.
    monkeypatch.setattr(side_by_side, "_PIECE", 10 * NUM_ROWS)
    spec = SPECS[name]
    alone = walkers(spec, dtype)
    rows, optimizers = RowBuffer.of(alone), [optimizer_of(own(spec, row)) for row in range(NUM_ROWS)]
    for step in range(3):
        terms = [
            RowTerms(learning_rate=0.01 / (row + 1 + step), gradient_scale=0.3 * (row + 1))
            for row in range(NUM_ROWS)
        ]
        grads = [drawn(100 * step + row + 50, dtype) for row in range(NUM_ROWS)]
        for walker, optimizer, grad, term in zip(alone, optimizers, grads, terms, strict=True):
            optimizer.update(
                walker, grad, learning_rate=term.learning_rate, gradient_scale=term.gradient_scale
            )
        flat = RowBuffer.of([Walker(params=grad, state={}) for grad in grads]).params
        update_rows(rows, flat, optimizers, terms)
    for row, walker in enumerate(alone):
        assert_equal(rows.walker(row), walker)


@pytest.mark.parametrize("name", SPECS)
def test_a_row_without_terms_stays_as_it_is_whatever_its_gradient(name: str) -> None:
    spec = SPECS[name]
    alone = walkers(spec, torch.float64)
    rows, optimizers = RowBuffer.of(alone), [optimizer_of(own(spec, row)) for row in range(NUM_ROWS)]
    grads = torch.ones_like(rows.params)
    grads[1] = math.nan
    term = RowTerms(learning_rate=0.1, gradient_scale=1.0)
    update_rows(rows, grads, optimizers, [term, None, term, term])
    assert_equal(rows.walker(1), alone[1])
    assert rows.num_updates == [1, 0, 1, 1]
    assert rows.params.isfinite().all()


def test_what_is_taken_shares_no_memory_and_can_be_put_back() -> None:
    rows = RowBuffer.of(walkers(SPECS["adamw"], torch.float32))
    before = rows.params.clone()
    part = rows.taken([3, 1])
    assert torch.equal(part.params, before[[3, 1]])
    part.params.zero_()
    assert torch.equal(rows.params, before)
    rows.put([3, 1], part)
    assert not rows.params[[3, 1]].any()
    assert torch.equal(rows.params[[0, 2]], before[[0, 2]])


def test_a_row_is_whole_and_what_decays_comes_first() -> None:
    rows = RowBuffer.of(walkers(SPECS["adamw"], torch.float32))
    assert list(rows.layout.shapes) == ["head.weight", "kernel", "head.bias", "norm"]
    assert rows.layout.num_decayed == 5 * 7 + 3 * 2 * 9
    assert rows.params[2].is_contiguous()
    assert rows.walker(2).params["norm"].data_ptr() == rows.params[2, -11:].data_ptr()
