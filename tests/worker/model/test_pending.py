"""A backward in two ops: the same numbers as the whole one, nothing added before the second, bytes as predicted."""

import pytest
import torch
from torch import Tensor

from skein.model.layers import pending_bytes, splits_backward
from skein.types import Precision
from tests.support import extent
from tests.worker.model.builders import DECODERS, MODELS, NUM_TOKENS, part, samples
from worker.model.pending import add_up, held_bytes
from worker.model.stage import Stage

NUM_SAMPLES = 3
CASES = [
    (name, first, stop, precision)
    for precision in Precision
    for name in DECODERS
    for first, stop in ((1, 2), (1, 3), (2, 3))
]


def blocks(name: str, first: int, stop: int, precision: Precision) -> Stage:
    """Blocks whose sums of gradients are not zero."""
    stage = part(MODELS[name], first, stop, precision=precision)
    for number, parameter in enumerate(stage.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    return stage


def arrived(stage: Stage, number: int) -> tuple[Tensor, Tensor]:
    """Input of a stage, and the gradient that comes back to it."""
    model = stage.spec
    tokens, _ = samples(model, NUM_SAMPLES + number)
    embedded = part(model, 0, 1, precision=stage.precision)(tokens[:NUM_SAMPLES]).detach()
    return embedded.requires_grad_(), embedded.detach().flip(0) * (number + 1)


def sums(stage: Stage) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in stage.named_parameters() if x.grad is not None}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, x in actual.items() if not torch.equal(x, expected[name])] == []


@pytest.mark.parametrize(("name", "first", "stop", "precision"), extent.part(CASES, every=2))
def test_both_ops_give_what_the_whole_backward_gives_bit_for_bit(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    whole, split = (blocks(name, first, stop, precision) for _ in range(2))
    before = sums(split)
    x, grad = arrived(whole, 0)
    torch.autograd.backward(whole(x), grad)
    x_of_split, _ = arrived(split, 0)
    grad_x, pending = split.input_gradient(x_of_split, split(x_of_split), grad)
    assert x.grad is not None
    assert torch.equal(grad_x, x.grad)
    assert_equal(sums(split), before)
    add_up(pending)
    assert_equal(sums(split), sums(whole))
    # All of them took part.
    assert [n for n, y in sums(split).items() if torch.equal(y, before[n])] == []


@pytest.mark.parametrize(("name", "first", "stop", "precision"), extent.part(CASES, every=2))
def test_as_many_bytes_are_put_aside_as_predicted(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    stage = blocks(name, first, stop, precision)
    x, grad = arrived(stage, 0)
    _, pending = stage.input_gradient(x, stage(x), grad)
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
    whole, split = (blocks("qwen2", 1, 3, precision) for _ in range(2))
    came = [arrived(whole, number) for number in range(3)]
    for x, grad in came:
        torch.autograd.backward(whole(x), grad)
    graphs = [(x.detach().requires_grad_(), grad) for x, grad in came]
    left = [(x, split(x), grad) for x, grad in graphs]
    put_aside = [split.input_gradient(*one)[1] for one in left]
    for pending in put_aside:
        add_up(pending)
    assert_equal(sums(split), sums(whole))


def test_a_whole_backward_after_an_input_op_is_whole() -> None:
    stage, other = (blocks("tied", 1, 3, Precision.FP32) for _ in range(2))
    x, grad = arrived(stage, 0)
    stage.input_gradient(x, stage(x), grad)
    torch.autograd.backward(stage(x), grad)
    torch.autograd.backward(other(x), grad)
    assert_equal(sums(stage), sums(other))


@pytest.mark.parametrize("name", MODELS)
def test_ends_and_families_whose_functions_put_nothing_aside_stay_whole(name: str) -> None:
    model = MODELS[name]
    num_layers = len(model.layer_parameters())
    for first, stop in ((0, 1), (0, num_layers), (1, num_layers), (1, 2)):
        stage = part(model, first, stop)
        splits = splits_backward(model, stage.stage)
        assert splits == (name in DECODERS and (first, stop) == (1, 2))
        held = pending_bytes(
            model, stage.stage, num_samples=2, sequence_tokens=NUM_TOKENS, precision=Precision.FP32
        )
        assert (held > 0) == splits


def test_parameters_without_a_sum_begin_one() -> None:
    stage = part(MODELS["tied"], 1, 2)
    x, grad = arrived(stage, 0)
    _, pending = stage.input_gradient(x, stage(x), grad)
    assert sums(stage) == {}
    add_up(pending)
    begun, other = sums(stage), part(MODELS["tied"], 1, 2)
    torch.autograd.backward(other(x), grad)
    assert_equal(begun, sums(other))
