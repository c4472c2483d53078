"""Experts: who is chosen, the way there and back, and the sums against a plain loop over tokens."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.experts import PlainExperts
from skein.model.sparse.experts import ExpertNames, Experts
from skein.model.sparse.routing import DropOrder, RoutingSpec
from skein.types import Precision
from tests.worker.model.builders import assert_near
from worker.model.pending import Tray, add_up
from worker.model.sparse.choosing import likeliest, near_ties, slots_of
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp
from worker.model.sparse.rows import ExpertRows

EXPERTS = Experts(
    num_experts=4,
    num_chosen=2,
    num_features=16,
    num_inner=24,
    is_normalised=True,
    names=ExpertNames(module="mlp", gate="gate", up="up", down="down"),
)
# Sums of the same float64 numbers in another order.
ROUNDING = 1e-12


def sparse(experts: Experts, precision: Precision = Precision.FP64) -> SparseMlp:
    """Experts and router with drawn numbers."""
    module = SparseMlp(experts, precision, Tray(), Junction())
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 4)
    return module


def tokens(num_samples: int = 2, num_tokens: int = 9) -> Tensor:
    draw = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_samples, num_tokens, EXPERTS.num_features, generator=draw, dtype=torch.float64)


def plain(module: SparseMlp, x_BTD: Tensor) -> Tensor:
    """The same sum, token by token."""
    given = []
    for x in x_BTD.flatten(0, -2):
        chances = torch.softmax(module.gate.weight @ x, -1)
        weights, chosen = chances.topk(module.sizes.num_chosen)
        if module.sizes.is_normalised:
            weights = weights / weights.sum()
        parts = []
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up, down = module.experts[str(expert)].parameters()
            parts.append(weight * (down @ (functional.silu(gate @ x) * (up @ x))))
        given.append(torch.stack(parts).sum(0))
    return torch.stack(given).view(x_BTD.shape)


def slot_by_slot(choices: list[list[int]], weights: list[list[float]], order: DropOrder) -> list[list[int]]:
    """The same by a loop over choices in turn, each of which goes behind those that its expert has."""
    every = [(token, choice) for token, row in enumerate(choices) for choice in range(len(row))]
    turns = {
        DropOrder.TOKEN_MAJOR: every,
        DropOrder.CHOICE_MAJOR: sorted(every, key=lambda pair: (pair[1], pair[0])),
        DropOrder.PROBS: sorted(every, key=lambda pair: (-weights[pair[0]][pair[1]], pair)),
    }
    slots = [[-1] * len(row) for row in choices]
    waiting: Counter[int] = Counter()
    for token, choice in turns[order]:
        expert = choices[token][choice]
        slots[token][choice] = waiting[expert]
        waiting[expert] += 1
    return slots


def gradients(module: SparseMlp) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def test_choices_made_elsewhere_are_as_good_where_scores_nearly_tie_and_nowhere_else() -> None:
    scores = torch.tensor([[0.4, 0.401, 0.1, 0.099]]).repeat(5, 1)
    own = likeliest(scores, 2)
    assert own.tolist() == [[1, 0]] * 5
    told = torch.tensor([[1, 0], [0, 1], [1, 2], [1, 1], [2, 3]])
    assert near_ties(scores, own, told).tolist() == [True, True, False, False, False]
    one = near_ties(scores[:2], own[:2, :1], torch.tensor([[0], [3]]))
    assert one.tolist() == [True, False]


def test_the_likeliest_are_chosen_and_of_equals_the_lower() -> None:
    chances = torch.tensor([[0.1, 0.4, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.0, 0.2, 0.1]])
    assert likeliest(chances, 3).tolist() == [[1, 3, 0], [0, 1, 2], [0, 2, 3]]


def test_rows_of_an_expert_are_its_tokens_in_order_and_places_lead_back() -> None:
    rows = ExpertRows.of(torch.tensor([[2, 0], [0, 3], [2, 3]]), 4)
    assert rows.num_rows == (2, 0, 2, 2)
    assert rows.tokens_R.tolist() == [0, 1, 0, 2, 1, 2]
    assert rows.places_NK.tolist() == [[2, 0], [1, 4], [3, 5]]


def test_the_three_drop_orders_fill_an_expert_otherwise() -> None:
    choices = torch.tensor([[0, 1], [1, 0], [0, 1]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.75, 0.25]])
    found = {order: slots_of(choices, weights, 2, order).tolist() for order in DropOrder}
    assert found == {
        DropOrder.CHOICE_MAJOR: [[0, 1], [0, 2], [1, 2]],
        DropOrder.TOKEN_MAJOR: [[0, 0], [1, 1], [2, 2]],
        # Of equal weights the earlier token first.
        DropOrder.PROBS: [[0, 1], [0, 2], [1, 2]],
    }
    weights = torch.tensor([[0.5, 0.5], [0.125, 0.875], [0.75, 0.25]])
    assert slots_of(choices, weights, 2, DropOrder.PROBS).tolist() == [[2, 0], [2, 0], [1, 1]]


def test_weights_that_differ_by_rounding_alone_are_equal() -> None:
    weights = torch.tensor([[0.5], [0.5 + 1e-12], [0.5 - 1e-12], [0.75]], dtype=torch.float64)
    assert slots_of(torch.zeros(4, 1).long(), weights, 1, DropOrder.PROBS).tolist() == [[1], [2], [3], [0]]


@pytest.mark.parametrize("order", DropOrder)
@pytest.mark.parametrize("seed", range(5))
def test_slots_are_those_of_a_loop_over_choices(order: DropOrder, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    # Of few different numbers, so that some are equal.
    chances = torch.randint(1, 5, (23, 6), generator=draw) / 16
    choices = likeliest(chances, 3)
    weights = chances.gather(-1, choices)
    found = slots_of(choices, weights, 6, order)
    assert found.tolist() == slot_by_slot(choices.tolist(), weights.tolist(), order)


@pytest.mark.parametrize("order", DropOrder)
@pytest.mark.parametrize("capacity", [0.4, 1.0, 4.0])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_choices_that_find_their_expert_full_add_nothing(
    order: DropOrder, capacity: float, is_split: bool
) -> None:
    experts = replace(EXPERTS, routing=RoutingSpec(capacity=capacity, drop=order, balance_coefficient=0.5))
    module, other = sparse(experts), sparse(experts)
    plain_experts = PlainExperts([other])
    x, same = (tokens().requires_grad_() for _ in range(2))
    with module.junction.visited(7) as routed:
        y = module(x)
    expected = other(same)
    assert_near(y, expected.detach(), tolerance=ROUNDING)
    grad = expected.detach().flip(0)
    if is_split:
        with module.tray.opened() as pending:
            torch.autograd.backward(y, grad)
        add_up(pending)
    else:
        torch.autograd.backward(y, grad)
    [loss] = plain_experts.taken()
    torch.autograd.backward((expected * grad).sum() + 0.5 * 7 * loss)
    assert same.grad is not None
    assert_near(x.grad, same.grad, tolerance=ROUNDING)
    for name, gradient in gradients(module).items():
        wanted = other.get_parameter(name).grad
        assert wanted is not None
        assert_near(gradient, wanted, tolerance=ROUNDING, what=name)
    assert routed.balance is not None
    assert routed.balance.drop_ratio == plain_experts.drop_ratio()
    assert (routed.balance.num_dropped > 0) == (capacity < 4)


def test_nothing_is_dropped_outside_of_training() -> None:
    module, other = sparse(replace(EXPERTS, routing=RoutingSpec(capacity=0.2))), sparse(EXPERTS)
    with module.junction.visited(None) as routed:
        assert torch.equal(module(tokens()), other(tokens()))
    assert torch.equal(module(tokens()), other(tokens()))
    assert routed.balance is None


@pytest.mark.parametrize(
    "experts",
    [
        EXPERTS,
        replace(EXPERTS, is_normalised=False, num_chosen=3),
        replace(EXPERTS, num_chosen=1),
        replace(EXPERTS, num_experts=2),
    ],
    ids=["two of four", "three, not normalised", "one", "all"],
)
def test_results_and_gradients_are_those_of_a_loop_over_tokens(experts: Experts) -> None:
    module, other = sparse(experts), sparse(experts)
    x, same = (tokens().requires_grad_() for _ in range(2))
    y, expected = module(x), plain(other, same)
    assert_near(y, expected, tolerance=ROUNDING)
    grad = expected.detach().flip(0)
    torch.autograd.backward(y, grad)
    torch.autograd.backward(expected, grad)
    assert same.grad is not None
    assert_near(x.grad, same.grad, tolerance=ROUNDING)
    for name, gradient in gradients(module).items():
        # Autograd leaves out whom no token has chosen.
        wanted = other.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if wanted is None else wanted
        assert_near(gradient, expected, tolerance=ROUNDING, what=name)


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_an_expert_without_tokens_has_a_gradient_of_zero(is_split: bool) -> None:
    module = sparse(EXPERTS)
    y = module(tokens(1, 1))
    if is_split:
        with module.tray.opened() as pending:
            torch.autograd.backward(y.sum())
        add_up(pending)
    else:
        torch.autograd.backward(y.sum())
    is_moved = {name: bool(grad.any()) for name, grad in gradients(module).items() if "experts" in name}
    assert len(is_moved) == 3 * EXPERTS.num_experts
    assert sum(is_moved.values()) == 3 * EXPERTS.num_chosen


def test_torchs_grouped_products_give_what_products_expert_by_expert_give() -> None:
    x = tokens().bfloat16()
    grouped = sparse(EXPERTS, Precision.BF16)
    # Rows of 20 inner features are not aligned, so the same numbers, padded with zeros, take the other way.
    narrow = sparse(replace(EXPERTS, num_inner=20), Precision.BF16)
    with torch.no_grad():
        for wide, own in zip(grouped.experts.values(), narrow.experts.values(), strict=True):
            for matrix, part in zip(wide.parameters(), own.parameters(), strict=True):
                matrix.zero_()
                matrix[: part.shape[0], : part.shape[1]] = part
        grouped.get_parameter("gate.weight").copy_(narrow.get_parameter("gate.weight"))
    # bfloat16 keeps 8 bits; sums of 16 and 20 numbers in float32, rounded at three products.
    assert_near(grouped(x), narrow(x).detach(), tolerance=2e-2)
