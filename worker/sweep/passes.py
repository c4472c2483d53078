"""Three ways through the models of an array and back: fused, by vmap, or row after row, all on one buffer.

R rows, P numbers of a row, B batch.

Rules of this file
- A pass adds to the gradient buffer (R, P) what each row alone would add, and gives each row's summed loss.
- Nothing is reduced over rows but the sum of losses that the backward begins from, whose derivative is 1 for each.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from skein.numeric.rows import RowBuffer
from skein.protocol.messages.array_rounds import PassKind
from worker.model.base import IGNORED_LABEL, Stage, parameter_dtype
from worker.model.ops import mapped
from worker.sweep.fused import Fused, fused_forward


class RowBatch(NamedTuple):
    """Samples of all rows: inputs and labels, (R, B, ...) both, (R, B) factors on their losses, and each row's luck.

    `weights`: None: 1. `luck`: (R,) of each row's first sample, where a model drops numbers in training.
    """

    inputs: Tensor
    labels: Tensor
    weights: Tensor | None = None
    luck: Tensor | None = None

    def of(self, rows: Sequence[int]) -> "RowBatch":
        """Samples of these rows, in this order."""
        weights, luck = (None if x is None else x[[*rows]] for x in (self.weights, self.luck))
        return RowBatch(self.inputs[[*rows]], self.labels[[*rows]], weights, luck)


class Pass(ABC):
    """Forward and backward of all rows. Its gradients are `grads` (R, P), which whoever uses them empties."""

    def __init__(self, rows: RowBuffer) -> None:
        self.rows = rows
        self.grads = torch.zeros_like(rows.params)

    def clear(self) -> None:
        """Empty gradients."""
        self.grads.zero_()

    @abstractmethod
    def run(
        self, inputs: Tensor, labels: Tensor, weights: Tensor | None = None, luck: Tensor | None = None
    ) -> Tensor:
        """Add the gradients of each row's summed loss to `grads`; gives these losses (R,), nats.

        Args:
            inputs: (R, B, ...), each row's own samples.
            labels: (R, B, ...), `IGNORED_LABEL` where there is nothing to predict.
            weights: (R, B), a factor on each sample's cross entropies; None: 1.
            luck: (R,), of each row's first sample, as of `worker.model.dropout`; None: nothing is dropped.
        """


class _Together(Pass):
    """All rows in one graph; parameters are split off the buffer, so their gradients come back as one tensor."""

    def __init__(
        self, rows: RowBuffer, logits: Fused, dtype: torch.dtype, smoothing: Sequence[float]
    ) -> None:
        super().__init__(rows)
        self._smoothing = rows.params.new_tensor(smoothing) if any(smoothing) else None
        self._logits = logits
        self._dtype = dtype
        self._leaf = rows.params.detach().requires_grad_()
        self._is_empty = True

    def clear(self) -> None:
        # What comes first takes the place of the buffer, rather than being added to zeros.
        self._is_empty = True

    def run(
        self, inputs: Tensor, labels: Tensor, weights: Tensor | None = None, luck: Tensor | None = None
    ) -> Tensor:
        logits = self._logits(self.rows.layout.views(self._leaf), inputs, luck).to(self._dtype)
        losses = summed_losses(logits, labels, weights, self._smoothing)
        (grads,) = torch.autograd.grad(losses.sum(), self._leaf)
        self.grads = grads if self._is_empty else self.grads.add_(grads)
        self._is_empty = False
        return losses.detach()


class _InTurn(Pass):
    """Row after row through a module of its own, whose parameters are views of the buffer."""

    def __init__(self, rows: RowBuffer, stage: Stage, smoothing: Sequence[float]) -> None:
        super().__init__(rows)
        self._stages = [_on_row(stage, rows, row, self.grads[row]) for row in range(len(rows))]
        for own, share in zip(self._stages, smoothing, strict=True):
            own.smoothing = share

    def run(
        self, inputs: Tensor, labels: Tensor, weights: Tensor | None = None, luck: Tensor | None = None
    ) -> Tensor:
        losses = []
        weights_R, luck_R = ([None] * len(labels) if x is None else x for x in (weights, luck))
        for stage, x, y, w, own in zip(self._stages, inputs, labels, weights_R, luck_R, strict=True):
            with stage.junction.visited(None, luck=own):
                loss, _ = stage.loss(x, y, w)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses)


def _on_row(stage: Stage, rows: RowBuffer, row: int, grads: Tensor) -> Stage:
    """A module like `stage` on one row of the buffers."""
    own = copy.deepcopy(stage)
    params, gradients = rows.layout.views(rows.params[row]), rows.layout.views(grads)
    for name, parameter in own.named_parameters():
        parameter.data = params[name]
        parameter.grad = gradients[name]
    return own


def summed_losses(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, smoothing: Tensor | None = None
) -> Tensor:
    """Sums of each row's cross entropies (R,), from logits (R, B, ..., classes); samples weigh (R, B), or 1.

    `smoothing` (R,): share of its labels that each row spreads over all classes; None: none does.
    """
    flat, scores = labels.flatten(), functional.log_softmax(logits.flatten(0, -2), -1)
    each = functional.nll_loss(scores, flat, ignore_index=IGNORED_LABEL, reduction="none")
    if smoothing is not None:
        share = smoothing.repeat_interleave(len(each) // len(labels))
        each = (1.0 - share) * each - share * scores.mean(-1) * (flat != IGNORED_LABEL)
    if weights is not None:
        each = each.view(*weights.shape, -1) * weights.to(each).unsqueeze(-1)
    return each.view(len(labels), -1).sum(1)


class _LogitsOf(nn.Module):
    """A stage whose forward goes through the head."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor, luck: Tensor | None) -> Tensor:
        with self.stage.junction.visited(None, luck=luck):
            return self.stage.logits(x)


def _vmapped_logits(stage: Stage) -> Fused:
    module = _LogitsOf(stage)

    def one(params: Mapping[str, Tensor], x: Tensor, luck: Tensor | None) -> Tensor:
        named = {f"stage.{name}": param for name, param in params.items()}
        logits: Tensor = functional_call(module, named, (x, luck))
        return logits

    def logits(params: Mapping[str, Tensor], x: Tensor, luck: Tensor | None) -> Tensor:
        several = vmap(one, in_dims=(0, 0, None if luck is None else 0))
        with mapped():
            return several(params, x, luck)

    return logits


def make_pass(
    kind: PassKind, stage: Stage, rows: RowBuffer, smoothing: Sequence[float] | None = None
) -> Pass | None:
    """A pass of that kind over models like `stage`, a whole one; None if there is none.

    `smoothing` of each row's labels; None: as much as the stage's. Whether a model can be mapped torch tells when it is
    run, by a `RuntimeError`.
    """
    dtype = parameter_dtype(stage.precision)
    shares = [stage.smoothing] * len(rows) if smoothing is None else smoothing
    if kind is PassKind.LOOPED:
        return _InTurn(rows, stage, shares)
    if kind is PassKind.VMAPPED:
        return _Together(rows, _vmapped_logits(stage), dtype, shares)
    logits = fused_forward(stage)
    return None if logits is None else _Together(rows, logits, dtype, shares)
