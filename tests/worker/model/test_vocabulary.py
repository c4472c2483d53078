"""Every cut of the vocabulary gives the loss and the gradients of the whole matrix.

Sums are the same but for their order: 1e-10 in float64, relative to each number and, near zero, absolute.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skein.model.layers import AnyModel
from skein.model.rows import VocabularySplit, parse_block, row_blocks
from skein.types import Precision
from tests.worker.model.builders import MODELS, NUM_TOKENS, assert_near, part, whole
from worker.model.base import IGNORED_LABEL, Crossing, Stage
from worker.model.pending import Tray, add_up
from worker.model.vocabulary import Rows, cross_entropy

NUM_FEATURES, VOCABULARY = 16, 50
CUTS = {"whole": (0, 50), "even": (0, 25, 50), "uneven": (0, 3, 4, 31, 50)}
LABELS = {"some ignored": 5, "all valid": 0, "all ignored": NUM_TOKENS}
SPLITS = (VocabularySplit.OUTPUT, VocabularySplit.BOTH)


def drawn(scale: float, num_ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, matrix and labels; logits lie between about -`scale` and `scale`."""
    draw = torch.Generator().manual_seed(3)
    x_BTH = torch.randn(1, NUM_TOKENS, NUM_FEATURES, generator=draw, dtype=torch.float64)
    weight_VH = torch.randn(VOCABULARY, NUM_FEATURES, generator=draw, dtype=torch.float64)
    x_BTH *= scale / (x_BTH @ weight_VH.T).abs().max()
    labels_BT = torch.randint(0, VOCABULARY, (1, NUM_TOKENS), generator=draw)
    labels_BT[:, :num_ignored] = IGNORED_LABEL
    return x_BTH, weight_VH, labels_BT


def rows(weight_VH: Tensor, blocks: Sequence[range]) -> Rows:
    held = Rows(blocks, NUM_FEATURES, weight_VH.dtype, Tray())
    with torch.no_grad():
        for block, weight_RH in zip(blocks, held.weights, strict=True):
            weight_RH.copy_(weight_VH[block.start : block.stop])
    return held


@pytest.mark.parametrize("scale", [5.0, 1e3])
@pytest.mark.parametrize("num_ignored", LABELS.values(), ids=LABELS.keys())
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_shards_give_what_the_whole_matrix_gives(cut: Sequence[int], num_ignored: int, scale: float) -> None:
    x_BTH, weight_VH, labels_BT = drawn(scale, num_ignored)
    wanted_x, wanted_weight = x_BTH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    logits = (wanted_x @ wanted_weight.T).flatten(0, 1)
    wanted = functional.cross_entropy(
        logits, labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    torch.autograd.backward(wanted)

    x_BTH.requires_grad_()
    # Two blocks a shard where it has so many rows, as shards of a large vocabulary have several.
    shards = [rows(weight_VH, _halves(first, stop)) for first, stop in pairwise(cut)]
    hidden, scores = x_BTH, None
    for shard in shards:
        hidden, scores = shard.score(hidden, scores, labels_BT, torch.float64)
    assert scores is not None
    total = cross_entropy(scores, labels_BT)
    torch.autograd.backward(total)

    assert total.isfinite()
    assert_near(total.detach(), wanted.detach(), tolerance=1e-10, what="loss")
    assert wanted_x.grad is not None
    assert wanted_weight.grad is not None
    assert_near(x_BTH.grad, wanted_x.grad, tolerance=1e-10, what="dx")
    grads = [weight.grad for shard in shards for weight in shard.weights if weight.grad is not None]
    assert_near(torch.cat(grads), wanted_weight.grad, tolerance=1e-10, what="dw")


def _halves(first: int, stop: int) -> list[range]:
    middle = (first + stop) // 2
    return [x for x in (range(first, middle), range(middle, stop)) if x]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("is_put_aside", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize("has_whole_ends", [False, True], ids=["shards", "whole ends"])
@pytest.mark.parametrize("name", ["tied", "untied", "qwen2"])
def test_a_model_cut_through_its_vocabulary_is_the_model(
    name: str, split: VocabularySplit, *, has_whole_ends: bool, is_put_aside: bool
) -> None:
    model, generator = MODELS[name], torch.Generator().manual_seed(1)
    assert model.vocab_size is not None
    tokens, labels = torch.randint(0, model.vocab_size, (2, 3, NUM_TOKENS), generator=generator)
    labels[0, :2] = IGNORED_LABEL
    reference = whole(model)
    wanted, num_wanted = reference.loss(tokens, labels)
    torch.autograd.backward(wanted)

    cut = model.with_rows(split)
    every, inner = range(len(cut.layer_parameters()) + 1), cut.inner_layers
    # Each layer by itself; or ends that are in blocks and whole, as where a planner cut none.
    stops = [0, inner.start + 1, every[-1]] if has_whole_ends else every
    stages = [part(cut, first, stop) for first, stop in pairwise(stops)]
    total, num_valid = _trained(stages, tokens, labels, is_put_aside=is_put_aside)

    assert_near(total, wanted.detach(), tolerance=1e-10, what="loss")
    assert num_valid == num_wanted
    found = _whole_gradients(stages)
    for parameter_name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert_near(found[parameter_name], parameter.grad, tolerance=1e-10, what=parameter_name)


def _trained(
    stages: Sequence[Stage], tokens: Tensor, labels: Tensor, *, is_put_aside: bool
) -> tuple[Tensor, int]:
    """Loss of a microbatch whose boundaries are cut off from each other, as between workers."""
    given = Crossing(tokens)
    kept: list[tuple[Crossing, Sequence[Tensor], Stage]] = []
    for stage in stages[:-1]:
        made = stage.onward(given, labels)
        kept.append((given, made.differentiable, stage))
        given = made.detached()
        for tensor in given.differentiable:
            tensor.requires_grad_()
    total, num_valid = stages[-1].score(given, labels)
    kept.append((given, [total], stages[-1]))
    grads: Sequence[Tensor] | None = None
    for taken, made_of, stage in reversed(kept):
        if is_put_aside:
            pending = stage.put_aside(made_of, grads)
            assert all(parameter.grad is None for parameter in stage.parameters())
            add_up(pending)
        else:
            torch.autograd.backward(made_of, grads)
        grads = [tensor.grad for tensor in taken.differentiable if tensor.grad is not None]
    return total.detach(), num_valid


def _whole_gradients(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Gradients of whole tensors, those of both ends of a tied model added."""
    by_row: dict[str, dict[int, Tensor]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            block = parse_block(name)
            whole_name, first = (name, 0) if block is None else (block.whole, block.rows.start)
            parts = by_row.setdefault(whole_name, {})
            assert parameter.grad is not None
            parts[first] = parts[first] + parameter.grad if first in parts else parameter.grad
    return {name: torch.cat([parts[x] for x in sorted(parts)]) for name, parts in by_row.items()}


@pytest.mark.parametrize("split", SPLITS)
def test_shards_begin_with_the_rows_of_the_whole_matrix(split: VocabularySplit) -> None:
    model: AnyModel = MODELS["untied"]
    cut = model.with_rows(split)
    wanted = dict(whole(model).named_parameters())
    for at in range(len(cut.layer_parameters())):
        for name, parameter in part(cut, at, at + 1).named_parameters():
            block = parse_block(name)
            rows_of = slice(None) if block is None else slice(block.rows.start, block.rows.stop)
            whole_name = name if block is None else block.whole
            assert torch.equal(parameter, wanted[whole_name][rows_of]), name


def test_scores_and_gradients_do_not_depend_on_how_many_hold_the_rows() -> None:
    x_BTH, weight_VH, labels_BT = drawn(5.0, 3)
    blocks = row_blocks(VOCABULARY)
    found: list[list[Tensor]] = []
    for shards in ([blocks], [[block] for block in blocks]):
        held = [rows(weight_VH, shard) for shard in shards]
        x = x_BTH.clone().requires_grad_()
        hidden, scores = x, None
        for one in held:
            hidden, scores = one.score(hidden, scores, labels_BT, torch.float64)
        assert scores is not None
        torch.autograd.backward(cross_entropy(scores, labels_BT))
        grads = [weight.grad for one in held for weight in one.weights]
        found.append([scores.detach(), *(grad for grad in (x.grad, *grads) if grad is not None)])
    alone, apart = found
    assert len(alone) == len(apart) == 2 + len(blocks)
    assert all(torch.equal(a, b) for a, b in zip(alone, apart, strict=True))


def test_in_bf16_gradients_are_as_near_as_those_of_the_whole_matrix() -> None:
    model = MODELS["untied"]
    tokens, labels = torch.randint(0, 50, (2, 2, NUM_TOKENS), generator=torch.Generator().manual_seed(2))
    exact, rounded = whole(model), whole(model, precision=Precision.BF16)
    cut = model.with_rows(VocabularySplit.OUTPUT)
    shards = [part(cut, at, at + 1, precision=Precision.BF16) for at in range(len(cut.layer_parameters()))]
    for stage in (exact, rounded):
        torch.autograd.backward(stage.loss(tokens, labels)[0])
    _trained(shards, tokens, labels, is_put_aside=False)
    found = _whole_gradients(shards)
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        other = rounded.get_parameter(name).grad
        assert other is not None
        size = parameter.grad.norm()
        error, usual = (float((x.double() - parameter.grad).norm() / size) for x in (found[name], other))
        assert error <= 1.5 * usual + 1e-3, name
