"""A backward in two ops: the same numbers as the whole one, nothing added before the second, bytes as predicted."""

import pytest
import torch
from torch import Tensor

from skein.model.layers import pending_bytes
from skein.types import Precision
from tests.support import extent
from tests.worker.model.builders import MODELS, NUM_TOKENS, part, samples
from worker.model.pending import add_up, held_bytes
from worker.model.stage import Stage

NUM_SAMPLES = 3
LAST = 4
"""Layers: what takes raw samples, two more, and the head behind them."""
SPLIT = [name for name, model in MODELS.items() if model.has_split_backward]
CASES = [
    (name, first, stop, precision)
    for precision in Precision
    for name in SPLIT
    for first, stop in ((0, 1), (0, 2), (1, 3), (2, 3), (3, LAST), (2, LAST), (0, LAST))
]


def layers(name: str, first: int, stop: int, precision: Precision) -> Stage:
    """Stage whose sums of gradients are not zero."""
    stage = part(MODELS[name], first, stop, precision=precision)
    assert stage.num_layers == LAST
    for number, parameter in enumerate(stage.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    return stage


def passed(stage: Stage, number: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor] | None]:
    """Input of a stage, what it makes of that, and the gradients that come back to it; none to a loss."""
    raw, labels = (x[:NUM_SAMPLES] for x in samples(stage.spec, NUM_SAMPLES + number))
    x = raw
    if stage.stage.first > 0:
        before = part(stage.spec, 0, stage.stage.first, precision=stage.precision)
        handed_on: Tensor = before(raw)
        x = handed_on.detach().requires_grad_()
    if stage.has_head:
        return x, [stage.loss(x, labels)[0]], None
    y = stage(x)
    return x, [y], [y.detach().flip(0) * (number + 1)]


def sums(stage: Stage) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in stage.named_parameters() if x.grad is not None}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, x in actual.items() if not torch.equal(x, expected[name])] == []


@pytest.mark.parametrize(("name", "first", "stop", "precision"), extent.part(CASES, every=3))
def test_both_ops_give_what_the_whole_backward_gives_bit_for_bit(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    whole, split = (layers(name, first, stop, precision) for _ in range(2))
    before = sums(split)
    x, y, grad = passed(whole)
    torch.autograd.backward(y, grad)
    x_of_split, y_of_split, _ = passed(split)
    pending = split.put_aside(y_of_split, grad)
    assert (x.grad is None) == (first == 0)
    if x.grad is not None:
        assert x_of_split.grad is not None
        assert torch.equal(x_of_split.grad, x.grad)
    assert_equal(sums(split), before)
    add_up(pending)
    assert_equal(sums(split), sums(whole))
    # All of them took part.
    assert [n for n, y in sums(split).items() if torch.equal(y, before[n])] == []


@pytest.mark.parametrize(("name", "first", "stop", "precision"), extent.part(CASES, every=3))
def test_as_many_bytes_are_put_aside_as_predicted(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    stage = layers(name, first, stop, precision)
    _, y, grad = passed(stage)
    pending = stage.put_aside(y, grad)
    predicted = pending_bytes(
        stage.spec,
        stage.stage,
        num_samples=NUM_SAMPLES,
        sequence_tokens=NUM_TOKENS,
        precision=precision,
    )
    assert held_bytes(pending) == predicted
    add_up(pending)
    assert held_bytes(pending) == 0


@pytest.mark.parametrize("precision", Precision)
def test_weight_ops_that_come_after_other_input_ops_change_no_sum(precision: Precision) -> None:
    whole, split = (layers("qwen2", 1, 3, precision) for _ in range(2))
    for number in range(3):
        _, y, grad = passed(whole, number)
        torch.autograd.backward(y, grad)
    left = [passed(split, number) for number in range(3)]
    put_aside = [split.put_aside(y, grad) for _, y, grad in left]
    for pending in put_aside:
        add_up(pending)
    assert_equal(sums(split), sums(whole))


def test_a_whole_backward_after_an_input_op_is_whole() -> None:
    stage, other = (layers("tied", 1, 3, Precision.FP32) for _ in range(2))
    _, y, grad = passed(stage)
    stage.put_aside(y, grad)
    for each in (stage, other):
        _, y, grad = passed(each)
        torch.autograd.backward(y, grad)
    assert_equal(sums(stage), sums(other))


@pytest.mark.parametrize("name", MODELS)
def test_families_whose_functions_put_nothing_aside_stay_whole(name: str) -> None:
    model = MODELS[name]
    stage = part(model, 1, 2)
    held = pending_bytes(
        model, stage.stage, num_samples=2, sequence_tokens=NUM_TOKENS, precision=Precision.FP32
    )
    assert model.has_split_backward == (held > 0) == (model.family != "digits_cnn")


def test_parameters_without_a_sum_begin_one() -> None:
    stage, other = (part(MODELS["tied"], 1, 2) for _ in range(2))
    _, y, grad = passed(stage)
    pending = stage.put_aside(y, grad)
    assert sums(stage) == {}
    add_up(pending)
    _, y, grad = passed(other)
    torch.autograd.backward(y, grad)
    assert_equal(sums(stage), sums(other))
