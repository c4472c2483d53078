"""Laws that every optimizer obeys. A new one adds a row to `ROWS` and inherits them all."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from skein.numeric.optim import adamw

State = adamw.AdamWState
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An optimizer under test, with its settings bound, beside the same rule by torch."""

    name: str
    init: Callable[[Mapping[str, Tensor]], State]
    update: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], State, float], State]
    """Parameters (moved in place), gradients, state and the factor on the gradients."""
    reference: Callable[[Tensors], torch.optim.Optimizer]
    decays: bool


def adamw_row(name: str, *, betas: tuple[float, float], eps: float, weight_decay: float) -> Row:
    def update(
        params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: State, scale: float
    ) -> State:
        return adamw.update(
            params,
            grads,
            state,
            learning_rate=3e-3,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decayed=adamw.decayed_names(params),
            gradient_scale=scale,
        )

    def reference(params: Tensors) -> torch.optim.Optimizer:
        decayed = adamw.decayed_names(params)
        groups = [
            {
                "params": [params[name] for name in sorted(params) if name in decayed],
                "weight_decay": weight_decay,
            },
            {"params": [params[name] for name in sorted(params) if name not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-3, betas=betas, eps=eps)

    return Row(name=name, init=adamw.init, update=update, reference=reference, decays=weight_decay > 0)


ROWS = (
    adamw_row("adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    adamw_row("adamw without decay", betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0),
    adamw_row("adamw without means", betas=(0.0, 0.0), eps=1e-3, weight_decay=0.01),
)


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    chosen: Row = request.param
    return chosen


def make_params(dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed": (33, 8), "kernel": (4, 2, 3, 3), "norm": (8,), "scale": ()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def make_grads(params: Tensors, num_updates: int) -> Iterator[Tensors]:
    """Gradients of very different sizes: every update its own power of ten."""
    generator = torch.Generator().manual_seed(2)
    for index in range(num_updates):
        size = 10.0 ** (index % 7 - 4)
        yield {
            name: torch.randn(param.shape, generator=generator, dtype=param.dtype) * size
            for name, param in params.items()
        }


def same_bits(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_fifty_updates_equal_torch(row: Row) -> None:
    params = make_params()
    mirrored = {name: param.clone().requires_grad_() for name, param in params.items()}
    reference, state = row.reference(mirrored), row.init(params)
    for grads in make_grads(params, 50):
        state = row.update(params, grads, state, 0.25)
        for name, param in mirrored.items():
            param.grad = grads[name] * 0.25
        reference.step()
    for name, param in params.items():
        # float64 rounds at 1e-16; fifty updates of order 1e-3, ordered differently, leave far less than 1e-12.
        torch.testing.assert_close(param, mirrored[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_inputs_give_equal_bits(row: Row, dtype: torch.dtype) -> None:
    runs = []
    for _ in range(2):
        params = make_params(dtype)
        state = row.init(params)
        for grads in make_grads(params, 5):
            state = row.update(params, grads, state, 0.3)
        runs.append((params, state))
    (first, first_state), (second, second_state) = runs
    assert same_bits(first, second)
    assert same_bits(first_state.exp_avg_sq, second_state.exp_avg_sq)


def test_state_is_explicit_so_a_copy_continues_equally(row: Row) -> None:
    params = make_params()
    state = row.init(params)
    saved: tuple[Tensors, State] | None = None
    for index, grads in enumerate(make_grads(params, 6)):
        if index == 3:
            saved = copy.deepcopy((params, state))
        state = row.update(params, grads, state, 1.0)
        if saved is not None:
            saved = (saved[0], row.update(saved[0], grads, saved[1], 1.0))
    assert saved is not None
    assert same_bits(saved[0], params)
    assert saved[1].step == state.step == 6


def test_any_cut_of_the_parameters_gives_the_same_result(row: Row) -> None:
    whole = make_params()
    parts = [{name: param.clone()} for name, param in whole.items()]
    state, part_states = row.init(whole), [row.init(part) for part in parts]
    for grads in make_grads(whole, 4):
        state = row.update(whole, grads, state, 0.7)
        part_states = [
            row.update(part, {name: grads[name] for name in part}, part_state, 0.7)
            for part, part_state in zip(parts, part_states, strict=True)
        ]
    assert same_bits({name: param for part in parts for name, param in part.items()}, whole)


def test_zero_gradients_move_nothing_that_does_not_decay(row: Row) -> None:
    params = make_params()
    before, decayed = copy.deepcopy(params), adamw.decayed_names(params) if row.decays else frozenset()
    row.update(
        params, {name: torch.zeros_like(param) for name, param in params.items()}, row.init(params), 1.0
    )
    assert {name for name in params if not torch.equal(params[name], before[name])} == decayed


def test_scaling_by_the_rule_is_scaling_the_gradients(row: Row) -> None:
    scaled, unscaled = make_params(torch.float32), make_params(torch.float32)
    (grads,) = make_grads(scaled, 1)
    row.update(scaled, grads, row.init(scaled), 1 / 3)
    row.update(unscaled, {name: grad * (1 / 3) for name, grad in grads.items()}, row.init(unscaled), 1.0)
    assert same_bits(scaled, unscaled)


def test_the_number_of_threads_changes_no_bit(row: Row) -> None:
    results = []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(3)
            params = {"big": torch.randn(300_001, generator=generator)}
            grads = {"big": torch.randn(300_001, generator=generator)}
            row.update(params, grads, row.init(params), 0.1)
            results.append(params)
    finally:
        torch.set_num_threads(num_threads)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_a_stage_without_parameters_just_counts(row: Row) -> None:
    assert row.update({}, {}, row.init({}), 1.0).step == 1


@pytest.mark.parametrize("fault", ["name", "shape", "dtype", "strides"])
def test_a_refused_update_has_changed_nothing(row: Row, fault: str) -> None:
    params = make_params()
    (grads,) = make_grads(params, 1)
    state, before = row.init(params), copy.deepcopy(params)
    embed = grads.pop("embed")
    wrong = {
        "name": {"other": embed},
        "shape": {"embed": embed[1:]},
        "dtype": {"embed": embed.float()},
        "strides": {"embed": embed.t().contiguous().t()},
    }
    with pytest.raises(ValueError, match="embed"):
        row.update(params, grads | wrong[fault], state, 1.0)
    assert same_bits(params, before)
    assert not any(moment.any() for moment in state.exp_avg.values())
