"""Matrices over a vocabulary that is cut into rows: tokens looked up, and scored, shard by shard along a path.

Each shard of the output adds its rows' scores to those of the shards before: of each token it passes on the logarithm
of the sum of all exponentials so far, and the logit of its label if that was among them. The last one's are the loss.
Gradients come back the same way, and each shard adds its part of the input's gradient to what it passes on.

Everything is summed in the dtype of parameters; what enters a product is rounded to the dtype of products. Exponents
are at most 0, so no finite logit overflows. Rows are in blocks, added in their order, whoever holds them.

B batch, T tokens, H hidden features, R rows of a block.

Source: sums that are merged, Milakov and Gimelshein, Online normalizer calculation for softmax (2018); shards of the
output along a pipeline, Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism (2024), without
their barriers: here a microbatch's scores visit the shards one after the other.
"""

from collections.abc import Callable, Sequence

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
        return _embed(x_BTH, tokens_BT, self.blocks, self.tray, *self.weights)

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
        return _score(x_BTH, scores_BT2, labels_BT, dtype, self.blocks, self.tray, *self.weights)

    def logits(self, x_BTH: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits of these rows, rows in the last dim, in the dtype of products."""
        return torch.cat([functional.linear(x_BTH.to(dtype), x.to(dtype)) for x in self.weights], -1)


def cross_entropy(scores_BT2: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of the cross entropies (nats) of the valid labels, of scores over all rows."""
    losses_BT = scores_BT2[..., 0] - scores_BT2[..., 1]
    return losses_BT.masked_fill(labels_BT == IGNORED_LABEL, 0).sum()


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    tray: Tray
    blocks: tuple[range, ...]


class _Embed(Function):
    """Keeps the tokens."""

    @staticmethod
    def forward(
        ctx: _Context,
        x_BTH: Tensor,
        tokens_BT: Tensor,
        blocks: tuple[range, ...],
        tray: Tray,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens_BT, *weights)
        ctx.blocks, ctx.tray = blocks, tray
        for rows, weight_RH in zip(blocks, weights, strict=True):
            columns_BT = _columns(tokens_BT, rows)
            found_BTH = functional.embedding(columns_BT.clamp(min=0), weight_RH)
            x_BTH = x_BTH + found_BTH.masked_fill((columns_BT < 0)[..., None], 0)
        return x_BTH

    @staticmethod
    def backward(ctx: _Context, grad_BTH: Tensor) -> tuple[Tensor | None, ...]:
        tokens_BT, *weights = ctx.saved_tensors
        made = []
        for rows, weight_RH in zip(ctx.blocks, weights, strict=True):
            columns_BT = _columns(tokens_BT, rows)
            made.append(ctx.tray.gradient(weight_RH, _rows_here, grad_BTH, columns_BT))
        return grad_BTH, None, None, None, *made


class _Score(Function):
    """Keeps the input and the logits, in the dtype of products."""

    @staticmethod
    def forward(
        ctx: _Context,
        x_BTH: Tensor,
        scores_BT2: Tensor,
        labels_BT: Tensor,
        dtype: torch.dtype,
        blocks: tuple[range, ...],
        tray: Tray,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        narrow_BTH = x_BTH.to(dtype)
        (normaliser_BT, label_BT), kept = scores_BT2.unbind(-1), []
        for rows, weight_RH in zip(blocks, weights, strict=True):
            logits_BTR = functional.linear(narrow_BTH, weight_RH.to(dtype))
            kept.append(logits_BTR)
            wide_BTR = logits_BTR.to(scores_BT2.dtype)
            normaliser_BT = torch.logaddexp(normaliser_BT, wide_BTR.logsumexp(-1))
            columns_BT = _columns(labels_BT, rows)
            own_BT = wide_BTR.gather(-1, columns_BT.clamp(min=0)[..., None]).squeeze(-1)
            label_BT = label_BT + own_BT.masked_fill(columns_BT < 0, 0)
        before_BT = scores_BT2[..., 0]
        ctx.save_for_backward(narrow_BTH, before_BT, normaliser_BT, labels_BT, *weights, *kept)
        ctx.blocks, ctx.tray = blocks, tray
        return x_BTH.view_as(x_BTH), torch.stack((normaliser_BT, label_BT), -1)

    @staticmethod
    def backward(ctx: _Context, grad_BTH: Tensor, grad_BT2: Tensor) -> tuple[Tensor | None, ...]:
        x_BTH, before_BT, after_BT, labels_BT, *others = ctx.saved_tensors
        weights, kept = others[: len(ctx.blocks)], others[len(ctx.blocks) :]
        grad_normaliser_BT, grad_label_BT = grad_BT2.unbind(-1)
        made = []
        for rows, weight_RH, logits_BTR in zip(ctx.blocks, weights, kept, strict=True):
            error_BTR = torch.exp(logits_BTR.to(after_BT.dtype) - after_BT[..., None])
            error_BTR *= grad_normaliser_BT[..., None]
            columns_BT = _columns(labels_BT, rows)
            own_BT = grad_label_BT.masked_fill(columns_BT < 0, 0)
            error_BTR.scatter_add_(-1, columns_BT.clamp(min=0)[..., None], own_BT[..., None])
            # Rounded with the label taken off, as for the whole matrix: what is left of a likely token is small.
            error_BTR = error_BTR.to(x_BTH.dtype)
            grad_BTH = grad_BTH + error_BTR @ weight_RH.to(x_BTH.dtype)
            made.append(ctx.tray.gradient(weight_RH, matrix_gradient, error_BTR, x_BTH))
        # Of what was summed before the exponentials' share, and all of the label's logit.
        grad_before_BT2 = torch.stack(
            (grad_normaliser_BT * torch.exp(before_BT - after_BT), grad_label_BT), -1
        )
        return grad_BTH, grad_before_BT2, None, None, None, None, *made


def _columns(tokens_BT: Tensor, rows: range) -> Tensor:
    """Place of each token among the rows; -1 where it is not, as no ignored label is."""
    columns_BT = tokens_BT - rows.start
    return columns_BT.where((columns_BT >= 0) & (columns_BT < len(rows)), -1)


def _rows_here(weight_RH: Tensor, grad_BTH: Tensor, columns_BT: Tensor) -> Tensor:
    # A row more takes what is of other tokens.
    num_rows = len(weight_RH)
    columns_BT = columns_BT.where(columns_BT >= 0, num_rows)
    made: Tensor = torch.ops.aten.embedding_dense_backward(grad_BTH, columns_BT, num_rows + 1, -1, False)
    return made[:-1]


# torch leaves `apply` without types.
_embed: Callable[..., Tensor] = _Embed.apply
_score: Callable[..., tuple[Tensor, Tensor]] = _Score.apply
