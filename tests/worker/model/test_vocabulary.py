"""Every cut of the vocabulary gives the loss and the gradients of the whole matrix.

Sums are the same but for their order: 1e-10 in float64, relative to each number and, near zero, absolute.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skein.types import Precision
from tests.worker.model.builders import assert_near
from worker.model.base import IGNORED_LABEL
from worker.model.vocabulary import MergedLoss, PartialSoftmax, ShardScores, gradients, joined, merge, scores

NUM_TOKENS, NUM_FEATURES, VOCABULARY = 24, 16, 50
CUTS = {
    "whole": (0, 50),
    "even": (0, 25, 50),
    "uneven": (0, 3, 4, 31, 50),
    "padded": (0, 18, 36, 54),
    "all padding": (0, 25, 50, 58, 60),
    "more padding than tokens": (0, 50, 52, 110),
}
LABELS = {"some ignored": 5, "all valid": 0, "all ignored": NUM_TOKENS}


def drawn(scale: float, num_ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, matrix and labels; logits lie between about -`scale` and `scale`."""
    draw = torch.Generator().manual_seed(3)
    x_NH = torch.randn(NUM_TOKENS, NUM_FEATURES, generator=draw, dtype=torch.float64)
    weight_VH = torch.randn(VOCABULARY, NUM_FEATURES, generator=draw, dtype=torch.float64)
    x_NH *= scale / (x_NH @ weight_VH.T).abs().max()
    labels_N = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=draw)
    labels_N[:num_ignored] = IGNORED_LABEL
    return x_NH, weight_VH, labels_N


def expected(x_NH: Tensor, weight_VH: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, input's and matrix's gradient, by torch's own softmax over the whole vocabulary."""
    x_NH, weight_VH = (tensor.clone().requires_grad_() for tensor in (x_NH, weight_VH))
    loss = functional.cross_entropy(x_NH @ weight_VH.T, labels_N, ignore_index=IGNORED_LABEL, reduction="sum")
    grad_x_NH, grad_VH = torch.autograd.grad(loss, [x_NH, weight_VH])
    return loss.detach(), grad_x_NH, grad_VH


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def shards_of(weight_VH: Tensor, cut: Sequence[int]) -> list[Tensor]:
    """Rows of each shard; padding is far from 0, and the likeliest of all were it not told apart."""
    padding = weight_VH.new_full((cut[-1] - len(weight_VH), weight_VH.shape[1]), 100.0)
    return [torch.cat([weight_VH, padding])[first:stop] for first, stop in pairwise(cut)]


def told(
    x_NH: Tensor,
    shards: Sequence[Tensor],
    labels_N: Tensor,
    cut: Sequence[int],
    *,
    barriers: int,
    precision: Precision = Precision.FP64,
) -> tuple[list[ShardScores], list[PartialSoftmax]]:
    both = [
        scores(
            x_NH,
            weight_RH,
            labels_N,
            first_row=first,
            vocab_size=VOCABULARY,
            precision=precision,
            has_numerator=barriers == 1,
        )
        for weight_RH, first in zip(shards, cut, strict=False)
    ]
    return [kept for kept, _ in both], [answer for _, answer in both]


def finished(
    kept: Sequence[ShardScores],
    merged: MergedLoss,
    shards: Sequence[Tensor],
    labels_N: Tensor,
    *,
    barriers: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of all rows, padding included."""
    given = [
        gradients(one, merged.normaliser, labels_N, weight_RH=None if barriers == 1 else weight_RH)
        for one, weight_RH in zip(kept, shards, strict=True)
    ]
    grad_x_NH = merged.grad_x_NH
    if grad_x_NH is None:
        grad_x_NH = sum((part for _, part in given if part is not None), torch.zeros(()))
    return grad_x_NH, torch.cat([rows for rows, _ in given])


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("num_ignored", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("scale", [5.0, 1e3])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_cut_gives_the_loss_and_gradients_of_the_whole(
    cut: tuple[int, ...], scale: float, num_ignored: int, barriers: int
) -> None:
    x_NH, weight_VH, labels_N = drawn(scale, num_ignored)
    loss, grad_x_NH, grad_VH = expected(x_NH, weight_VH, labels_N)
    shards = shards_of(weight_VH, cut)

    kept, answers = told(x_NH, shards, labels_N, cut, barriers=barriers)
    merged = merge(answers, labels_N)
    found_x_NH, found_RH = finished(kept, merged, shards, labels_N, barriers=barriers)

    assert merged.num_tokens == NUM_TOKENS - num_ignored
    assert_near(merged.loss_sum, loss, tolerance=1e-10)
    assert_near(found_x_NH, grad_x_NH, tolerance=1e-10)
    assert_near(found_RH[:VOCABULARY], grad_VH, tolerance=1e-10)
    assert not found_RH[VOCABULARY:].any()


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_chain_gives_the_bits_of_a_star_and_backwards_the_same_loss(cut: tuple[int, ...]) -> None:
    x_NH, weight_VH, labels_N = drawn(1e3, 5)
    _, answers = told(x_NH, shards_of(weight_VH, cut), labels_N, cut, barriers=1)

    star, chain = merge(answers, labels_N), merge([reduce(joined, answers)], labels_N)
    assert star.grad_x_NH is not None
    assert chain.grad_x_NH is not None
    assert torch.equal(star.loss_sum, chain.loss_sum)
    assert torch.equal(star.grad_x_NH, chain.grad_x_NH)

    backwards = merge([reduce(joined, reversed(answers))], labels_N)
    assert_near(backwards.loss_sum, star.loss_sum, tolerance=1e-10)
    assert_near(backwards.grad_x_NH, star.grad_x_NH, tolerance=1e-10)


@pytest.mark.parametrize("barriers", [1, 2])
def test_what_cancels_at_likely_labels_is_not_rounded_to_bfloat16(barriers: int) -> None:
    """Small whole numbers, so that logits are exact and nothing but exponentials and errors has to be rounded."""
    draw = torch.Generator().manual_seed(3)
    x_NH = torch.randint(-3, 4, (NUM_TOKENS, NUM_FEATURES), generator=draw).double()
    weight_VH = 2 * torch.randint(-1, 2, (VOCABULARY, NUM_FEATURES), generator=draw).double()
    p_N, labels_N = (x_NH @ weight_VH.T).softmax(-1).max(-1)
    x_NH, labels_N = x_NH[p_N > 0.9], labels_N[p_N > 0.9]
    _, grad_x_NH, grad_VH = expected(x_NH, weight_VH, labels_N)
    shards, cut = shards_of(weight_VH.float(), CUTS["uneven"]), CUTS["uneven"]

    kept, answers = told(x_NH.float(), shards, labels_N, cut, barriers=barriers, precision=Precision.BF16)
    merged = merge(answers, labels_N)
    found_x_NH, found_RH = finished(kept, merged, shards, labels_N, barriers=barriers)

    assert found_x_NH.dtype is found_RH.dtype is merged.loss_sum.dtype is torch.float32
    # Errors are rounded to 8 bits, for two barriers and for all rows; exponentials have 24, less what cancels.
    assert relative(found_x_NH, grad_x_NH) < (1e-4 if barriers == 1 else 2**-8)
    assert relative(found_RH, grad_VH) < 2**-8
