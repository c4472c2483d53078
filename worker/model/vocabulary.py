"""Matrices over a vocabulary that is cut into rows: tokens looked up, and scored, shard by shard along a path.

Each shard of the output adds its rows' scores to those of the shards before: of each token it passes on the logarithm
of the sum of all exponentials so far, and the logit of its label if that was among them. The last one's are the loss.
Gradients come back the same way, and each shard adds its part of the input's gradient to what it passes on.

Everything is summed in the dtype of parameters; what enters a product is rounded to the dtype of products. Exponents
are at most 0, so no finite logit overflows. Rows are in blocks, added in their order, whoever holds them.

Of a block's logits nothing stays: a backward makes them again, to the same bits, of the input and of the scores. So a
shard keeps a few numbers a token for each microbatch in flight, and of logits never more than a block's; but an input
op puts their gradient aside until the weight op, for to make it a third time costs a third more.

B batch, T tokens, H hidden features, R rows of a block.

Source: sums that are merged, Milakov and Gimelshein, Online normalizer calculation for softmax (2018); shards of the
output along a pipeline, Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (2024), without
their barriers: here a microbatch's scores visit the shards one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from skein.model.rows import block_name
from worker.model.base import IGNORED_LABEL, empty_parameter
from worker.model.ops import matrix_gradient
from worker.model.pending import Tray


class Rows(nn.Module):
    """Blocks of rows of one matrix, a parameter each, named after the rows."""

    def __init__(self, blocks: Sequence[range], num_features: int, dtype: torch.dtype, tray: Tray) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.tray = tray
        for rows in blocks:
            self.register_parameter(
                block_name("weight", rows), empty_parameter(len(rows), num_features, dtype=dtype)
            )

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """(R, H) of each block."""
        return tuple(self.parameters())

    def embed(self, x_BTH: Tensor, tokens_BT: Tensor) -> Tensor:
        """`x_BTH` with the rows of those tokens added that are among these."""
        for rows, weight_RH in zip(self.blocks, self.weights, strict=True):
            x_BTH = _embed(x_BTH, weight_RH, tokens_BT, rows, self.tray)
        return x_BTH

    def score(
        self, x_BTH: Tensor, scores_BT2: Tensor | None, labels_BT: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Input and scores for the next shard, with these rows among those scored.

        Args:
            x_BTH: result of the final norm, in the dtype of parameters.
            scores_BT2: of each token the logarithm of the sum of the exponentials of all logits so far, and the logit
                of its label, 0 where that was not among the rows or is ignored; None before the first row.
            labels_BT: int64; `IGNORED_LABEL` where there is nothing to predict.
            dtype: that of products.
        """
        if scores_BT2 is None:
            scores_BT2 = x_BTH.new_tensor([-torch.inf, 0.0]).expand(*labels_BT.shape, 2)
        for rows, weight_RH in zip(self.blocks, self.weights, strict=True):
            scoring = _Scoring(rows=rows, dtype=dtype)
            x_BTH, scores_BT2 = _score(x_BTH, scores_BT2, weight_RH, labels_BT, scoring, self.tray)
        return x_BTH, scores_BT2

    def logits(self, x_BTH: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits of these rows, rows in the last dim, in the dtype of products."""
        return torch.cat([functional.linear(x_BTH.to(dtype), x.to(dtype)) for x in self.weights], -1)


def looked_up(tokens_BT: Tensor, rows: range, weight_RH: Tensor, tray: Tray) -> Tensor:
    """Row of each token that is among these rows, 0 for others."""
    none_BTH = weight_RH.new_zeros((*tokens_BT.shape, weight_RH.shape[1]))
    return _embed(none_BTH, weight_RH, tokens_BT, rows, tray)


def scored(
    x_BTH: Tensor, labels_BT: Tensor, dtype: torch.dtype, rows: range, weight_RH: Tensor, tray: Tray
) -> Tensor:
    """Scores, as of `Rows.score`, of these rows alone."""
    scores_BT2 = x_BTH.new_tensor([-torch.inf, 0.0]).expand(*labels_BT.shape, 2)
    scoring = _Scoring(rows=rows, dtype=dtype)
    return _score(x_BTH, scores_BT2, weight_RH, labels_BT, scoring, tray)[1]


def block_scores(logits_BTR: Tensor, labels_BT: Tensor, rows: range) -> Tensor:
    """Scores, as of `Rows.score`, of these rows alone, from their logits in the dtype of parameters, which are kept."""
    return _block_scores(logits_BTR, labels_BT, rows)


def rows_found(tokens_BT: Tensor, rows: range, weight_RH: Tensor) -> Tensor:
    """Row of each token that is among these rows, 0 for others, in a new tensor; torch is told no gradient."""
    columns_BT = _columns(tokens_BT, rows)
    found_BTH = functional.embedding(columns_BT.clamp(min=0), weight_RH)
    return found_BTH.masked_fill_((columns_BT < 0)[..., None], 0)


def rows_added(rows: range, grad_BTH: Tensor, tokens_BT: Tensor) -> Tensor:
    """Gradient of these rows, of that of what was looked up."""
    # A row more takes what is of other tokens.
    num_rows, columns_BT = len(rows), _columns(tokens_BT, rows)
    columns_BT = columns_BT.where(columns_BT >= 0, num_rows)
    made: Tensor = torch.ops.aten.embedding_dense_backward(grad_BTH, columns_BT, num_rows + 1, -1, False)
    return made[:-1]


def merged(scores_DBT2: Tensor) -> Tensor:
    """Scores over all rows, of those of D devices over each one's own."""
    normaliser_BT, label_BT = scores_DBT2[..., 0].logsumexp(0), scores_DBT2[..., 1].sum(0)
    return torch.stack((normaliser_BT, label_BT), -1)


def cross_entropy(scores_BT2: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of the cross entropies (nats) of the valid labels, of scores over all rows."""
    losses_BT = scores_BT2[..., 0] - scores_BT2[..., 1]
    return losses_BT.masked_fill(labels_BT == IGNORED_LABEL, 0).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """Scoring of one block: its rows, and the dtype of its products."""

    rows: range
    dtype: torch.dtype

    def logits(self, weight_RH: Tensor, x_BTH: Tensor) -> Tensor:
        """Logits in the dtype of parameters, in a tensor of its own."""
        logits_BTR = functional.linear(x_BTH.to(self.dtype), weight_RH.to(self.dtype))
        return logits_BTR.to(weight_RH.dtype)

    def error(
        self, weight_RH: Tensor, x_BTH: Tensor, scores_BT2: Tensor, grad_BT2: Tensor, labels_BT: Tensor
    ) -> Tensor:
        """Gradient of the logits, in the dtype of products, of the scores as they were passed on and their gradient."""
        error_BTR = _error(self.logits(weight_RH, x_BTH), scores_BT2, grad_BT2, labels_BT, self.rows)
        # Rounded with the label taken off, as for the whole matrix: what is left of a likely token is small.
        return error_BTR.to(self.dtype)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    tray: Tray
    rows: range
    scoring: _Scoring


class _Embed(Function):
    """Keeps the tokens."""

    @staticmethod
    def forward(
        ctx: _Context, x_BTH: Tensor, weight_RH: Tensor, tokens_BT: Tensor, rows: range, tray: Tray
    ) -> Tensor:
        ctx.save_for_backward(weight_RH, tokens_BT)
        ctx.rows, ctx.tray = rows, tray
        return x_BTH + rows_found(tokens_BT, rows, weight_RH)

    @staticmethod
    def backward(ctx: _Context, grad_BTH: Tensor) -> tuple[Tensor | None, ...]:
        weight_RH, tokens_BT = ctx.saved_tensors
        made = partial(_rows_here, rows=ctx.rows)
        return grad_BTH, ctx.tray.gradient(weight_RH, made, grad_BTH, tokens_BT), None, None, None


class _BlockScores(Function):
    """Keeps the logits, and the scores that it makes of them."""

    @staticmethod
    def forward(ctx: _Context, logits_BTR: Tensor, labels_BT: Tensor, rows: range) -> Tensor:
        columns_BT = _columns(labels_BT, rows)
        own_BT = logits_BTR.gather(-1, columns_BT.clamp(min=0)[..., None]).squeeze(-1)
        made_BT2 = torch.stack((logits_BTR.logsumexp(-1), own_BT.masked_fill_(columns_BT < 0, 0)), -1)
        ctx.save_for_backward(logits_BTR, made_BT2, labels_BT)
        ctx.rows = rows
        return made_BT2

    @staticmethod
    def backward(ctx: _Context, grad_BT2: Tensor) -> tuple[Tensor, None, None]:
        logits_BTR, made_BT2, labels_BT = ctx.saved_tensors
        return _error(logits_BTR.clone(), made_BT2, grad_BT2, labels_BT, ctx.rows), None, None


class _Score(Function):
    """Keeps the input and the scores, those that came and those that go on."""

    @staticmethod
    def forward(
        ctx: _Context,
        x_BTH: Tensor,
        scores_BT2: Tensor,
        weight_RH: Tensor,
        labels_BT: Tensor,
        scoring: _Scoring,
        tray: Tray,
    ) -> tuple[Tensor, Tensor]:
        logits_BTR = scoring.logits(weight_RH, x_BTH)
        normaliser_BT, label_BT = scores_BT2.unbind(-1)
        columns_BT = _columns(labels_BT, scoring.rows)
        own_BT = logits_BTR.gather(-1, columns_BT.clamp(min=0)[..., None]).squeeze(-1)
        made_BT2 = torch.stack(
            (
                torch.logaddexp(normaliser_BT, logits_BTR.logsumexp(-1)),
                label_BT + own_BT.masked_fill_(columns_BT < 0, 0),
            ),
            -1,
        )
        ctx.save_for_backward(x_BTH, scores_BT2, made_BT2, weight_RH, labels_BT)
        ctx.scoring, ctx.tray = scoring, tray
        return x_BTH.view_as(x_BTH), made_BT2

    @staticmethod
    def backward(ctx: _Context, grad_BTH: Tensor, grad_BT2: Tensor) -> tuple[Tensor | None, ...]:
        x_BTH, before_BT2, after_BT2, weight_RH, labels_BT = ctx.saved_tensors
        error_BTR = ctx.scoring.error(weight_RH, x_BTH, after_BT2, grad_BT2, labels_BT)
        grad_BTH = grad_BTH + error_BTR @ weight_RH.to(error_BTR.dtype)
        # Of what was summed before the exponentials' share, and all of the label's logit.
        share_BT = torch.exp(before_BT2[..., 0] - after_BT2[..., 0])
        grad_before_BT2 = torch.stack((grad_BT2[..., 0] * share_BT, grad_BT2[..., 1]), -1)
        grad_RH = ctx.tray.gradient(weight_RH, _scored, error_BTR, x_BTH)
        return grad_BTH, grad_before_BT2, grad_RH, None, None, None


def _error(
    logits_BTR: Tensor, scores_BT2: Tensor, grad_BT2: Tensor, labels_BT: Tensor, rows: range
) -> Tensor:
    """Gradient of the logits, in their place."""
    error_BTR = logits_BTR.sub_(scores_BT2[..., :1]).exp_().mul_(grad_BT2[..., :1])
    columns_BT = _columns(labels_BT, rows)
    own_BT = grad_BT2[..., 1].masked_fill(columns_BT < 0, 0)
    return error_BTR.scatter_add_(-1, columns_BT.clamp(min=0)[..., None], own_BT[..., None])


def _columns(tokens_BT: Tensor, rows: range) -> Tensor:
    """Place of each token among the rows; -1 where it is not, as no ignored label is."""
    columns_BT = tokens_BT - rows.start
    return columns_BT.where((columns_BT >= 0) & (columns_BT < len(rows)), -1)


def _scored(weight_RH: Tensor, error_BTR: Tensor, x_BTH: Tensor) -> Tensor:
    # Rounded here, or each block would put aside an input of its own.
    return matrix_gradient(weight_RH, error_BTR, x_BTH.to(error_BTR.dtype))


def _rows_here(_weight: Tensor, grad_BTH: Tensor, tokens_BT: Tensor, *, rows: range) -> Tensor:
    return rows_added(rows, grad_BTH, tokens_BT)


# torch leaves `apply` without types.
_embed: Callable[..., Tensor] = _Embed.apply
_score: Callable[..., tuple[Tensor, Tensor]] = _Score.apply
_block_scores: Callable[[Tensor, Tensor, range], Tensor] = _BlockScores.apply
