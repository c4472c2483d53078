"""Softmax over a vocabulary cut into rows: each shard's scores, their sum into loss and gradient, the rows' gradients.

A shard holds some rows of the output matrix. `scores` gives what one shard knows of the softmax, `joined` sums up what
two know, `merge` makes loss and gradient of what all know, and `gradients` goes on at each shard with the normaliser.
With one barrier a shard's answer has what the input's gradient is made of, so that it is there at `merge`; with two it
is the sum of what every shard's `gradients` gives.

Everything is summed in the dtype of parameters; what enters a product is rounded to the dtype of products, exponentials
of the numerator excepted. Exponents are at most 0, so no finite logit overflows.

N tokens, H hidden features, R rows of a shard.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (2024), Algorithms 1 and 2; sums that
are merged, Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from skein.types import Precision
from worker.model.base import IGNORED_LABEL, parameter_dtype, product_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """Divisor of a softmax: a probability is exp(logit - `max_N`) / `sum_N`."""

    max_N: Tensor
    sum_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerator:
    """Input's gradient before it is divided: `expected_NH` / sum - `label_NH`."""

    expected_NH: Tensor
    """Sum of the rows, each times its exp(logit - max)."""
    label_NH: Tensor
    """Row of each token's label; 0 where that is another shard's, or ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSoftmax:
    """Softmax as far as the rows of one shard, or of several, tell; without any token, max -inf and sum 0."""

    normaliser: Normaliser
    label_N: Tensor
    """Logit of each token's label; 0 where that is another shard's, or ignored."""
    numerator: Numerator | None
    """None where the input's gradient waits for a second barrier, or nobody wants one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScores:
    """Scores that a shard keeps of a microbatch until the normaliser comes."""

    x_NH: Tensor
    exponential_NR: Tensor
    """exp(logit - `max_N`), the maximum being this shard's; 0 in padding."""
    max_N: Tensor
    columns_N: Tensor
    """Place of each token's label among the rows; -1 where that is another shard's, or ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLoss:
    """Loss of a microbatch, from what all shards told."""

    loss_sum: Tensor
    """Sum of the cross entropies, in nats."""
    num_tokens: int
    normaliser: Normaliser
    grad_x_NH: Tensor | None
    """Gradient of `loss_sum`; None where the shards told no numerator."""


@torch.no_grad()
def scores(
    x_NH: Tensor,
    weight_RH: Tensor,
    labels_N: Tensor,
    *,
    first_row: int,
    vocab_size: int,
    precision: Precision,
    has_numerator: bool,
) -> tuple[ShardScores, PartialSoftmax]:
    """Scores that a shard keeps, and its answer to the others. Nothing is changed: it may be computed again.

    Args:
        x_NH: result of the final norm.
        weight_RH: the shard's rows; those beyond the vocabulary are padding, of any finite numbers.
        labels_N: int64, below `vocab_size`; `IGNORED_LABEL` where there is nothing to predict.
        first_row: place of the shard's first row in the whole matrix.
        vocab_size: number of tokens that the whole vocabulary has.
        precision: the job's.
        has_numerator: whether the input's gradient shall follow from the answers (one barrier).
    """
    dtype = product_dtype(precision)
    x_NH, weight_RH = x_NH.to(dtype), weight_RH.to(dtype)
    logits_NR = functional.linear(x_NH, weight_RH).to(parameter_dtype(precision))
    logits_NR[:, max(0, vocab_size - first_row) :] = -torch.inf
    max_N = logits_NR.amax(-1)
    # Padding alone has no maximum to take off: exp(-inf - -inf) has to be 0.
    exponential_NR = torch.exp(logits_NR - max_N.masked_fill(max_N == -torch.inf, 0)[:, None])
    columns_N = labels_N - first_row
    # `IGNORED_LABEL` is below every row.
    columns_N = columns_N.where((columns_N >= 0) & (columns_N < len(weight_RH)), -1)
    labels_N1, is_elsewhere_N = columns_N.clamp(min=0)[:, None], columns_N < 0
    numerator = None
    if has_numerator:
        # Not rounded to the dtype of products: the two terms cancel where the label is likely.
        wide_RH = weight_RH.to(max_N.dtype)
        numerator = Numerator(
            expected_NH=exponential_NR @ wide_RH,
            label_NH=wide_RH[labels_N1.squeeze(1)].masked_fill(is_elsewhere_N[:, None], 0),
        )
    kept = ShardScores(x_NH=x_NH, exponential_NR=exponential_NR, max_N=max_N, columns_N=columns_N)
    answer = PartialSoftmax(
        normaliser=Normaliser(max_N=max_N, sum_N=exponential_NR.sum(-1)),
        label_N=logits_NR.gather(1, labels_N1).squeeze(1).masked_fill(is_elsewhere_N, 0),
        numerator=numerator,
    )
    return kept, answer


@torch.no_grad()
def joined(one: PartialSoftmax, other: PartialSoftmax) -> PartialSoftmax:
    """Partial softmax of two shards, or of two runs of them.

    Associative but for rounding: who joins along a chain, or all answers at once, in the order of the rows, gets the
    same bits.
    """
    max_N = torch.maximum(one.normaliser.max_N, other.normaliser.max_N)
    one_N, other_N = (_scale(x.normaliser.max_N, max_N) for x in (one, other))
    numerator = None
    if one.numerator is not None and other.numerator is not None:
        mine, theirs = one.numerator, other.numerator
        numerator = Numerator(
            expected_NH=mine.expected_NH * one_N[:, None] + theirs.expected_NH * other_N[:, None],
            label_NH=mine.label_NH + theirs.label_NH,
        )
    sum_N = one.normaliser.sum_N * one_N + other.normaliser.sum_N * other_N
    return PartialSoftmax(
        normaliser=Normaliser(max_N=max_N, sum_N=sum_N),
        label_N=one.label_N + other.label_N,
        numerator=numerator,
    )


@torch.no_grad()
def merge(answers: Sequence[PartialSoftmax], labels_N: Tensor) -> MergedLoss:
    """Loss, and with one barrier the input's gradient, of a microbatch.

    Args:
        answers: those of all shards in the order of their rows, or what a chain has joined of them.
        labels_N: as for `scores`.
    """
    known = reduce(joined, answers)
    is_valid_N = labels_N != IGNORED_LABEL
    normaliser = known.normaliser
    losses_N = normaliser.max_N + normaliser.sum_N.log() - known.label_N
    grad_x_NH = None
    if known.numerator is not None:
        grad_x_NH = known.numerator.expected_NH / normaliser.sum_N[:, None] - known.numerator.label_NH
        grad_x_NH = grad_x_NH.masked_fill(~is_valid_N[:, None], 0)
    return MergedLoss(
        loss_sum=losses_N.masked_fill(~is_valid_N, 0).sum(),
        num_tokens=int(is_valid_N.sum()),
        normaliser=normaliser,
        grad_x_NH=grad_x_NH,
    )


@torch.no_grad()
def gradients(
    kept: ShardScores, normaliser: Normaliser, labels_N: Tensor, *, weight_RH: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradient of the shard's rows, and with two barriers its part of the input's.

    Args:
        kept: what `scores` left of this microbatch.
        normaliser: that of all shards together, from `merge`.
        labels_N: as for `scores`.
        weight_RH: the rows that `scores` took, if the input's gradient waits for them; None with one barrier.

    Returns:
        (R, H) for the rows, 0 in padding; (N, H) to be summed over all shards in the order of their rows, or None.
    """
    dtype = kept.max_N.dtype
    scale_N = _scale(kept.max_N, normaliser.max_N) / normaliser.sum_N
    is_here_N = kept.columns_N >= 0
    error_NR = kept.exponential_NR * scale_N[:, None]
    error_NR.scatter_add_(1, kept.columns_N.clamp(min=0)[:, None], -is_here_N[:, None].to(dtype))
    # Rounded with the label taken off, as for the whole matrix: what is left of a likely token is small.
    error_NR = error_NR.masked_fill((labels_N == IGNORED_LABEL)[:, None], 0).to(kept.x_NH.dtype)
    grad_x_NH = None if weight_RH is None else (error_NR @ weight_RH.to(error_NR.dtype)).to(dtype)
    return (error_NR.T @ kept.x_NH).to(dtype), grad_x_NH


def _scale(max_N: Tensor, new_max_N: Tensor) -> Tensor:
    """Factor of exponentials over `max_N` that makes them those over `new_max_N`, which is not below it."""
    return torch.exp(max_N - new_max_N).masked_fill(max_N == -torch.inf, 0)
