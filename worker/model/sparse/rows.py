"""Rows of experts: copies of tokens on their way to the experts that they chose, and back into weighted sums.

Rules of this file
- Rows of one expert are side by side, in the order of the tokens; the place of each choice of a token among the rows
  leads back. A choice that is dropped has no row, and leads to zeros.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, C = N K of all, R rows, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from worker.model.ops import matrix_gradient
from worker.model.pending import Tray

_ALIGNED = 8
"""Grouped products want rows whose length is a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Way of tokens to experts and back.

    Attributes:
        choices_R: choice that each row is of, all choices counted token by token.
        places_NK: row of each choice of a token; of one that is dropped, the row after the last.
        num_rows: rows of each expert, in their order; on the host, which cuts rows by them.
    """

    choices_R: Tensor
    places_NK: Tensor
    num_rows: tuple[int, ...]

    @classmethod
    def of(cls, choices_NK: Tensor, num_experts: int, kept_NK: Tensor | None = None) -> Self:
        """The way of tokens to the experts that each has chosen; of choices that are not `kept_NK`, none."""
        choices_C = choices_NK.flatten()
        order_R = choices_C.sort(stable=True).indices
        if kept_NK is not None:
            order_R = order_R[kept_NK.flatten()[order_R]]
        places_C = torch.full_like(choices_C, len(order_R))
        places_C[order_R] = torch.arange(len(order_R), device=order_R.device)
        num_rows = torch.bincount(choices_C[order_R], minlength=num_experts).tolist()
        return cls(order_R, places_C.view_as(choices_NK), tuple(num_rows))

    @classmethod
    def even(cls, num_experts: int, each: int) -> Self:
        """Rows of experts that take so many each, of no token's choice."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(none, none.view(0, 0), (each,) * num_experts)

    @property
    def tokens_R(self) -> Tensor:
        """Token of each row."""
        return self.choices_R // self.places_NK.shape[1]

    def padded(self, x_RD: Tensor) -> Tensor:
        """Rows with one of zeros after the last if any choice is dropped."""
        return x_RD if len(x_RD) == self.places_NK.numel() else functional.pad(x_RD, (0, 0, 0, 1))


def slices_of(num_rows: Sequence[int]) -> list[slice]:
    """Rows of each expert, where those of one follow those of another.

    >>> slices_of((2, 0, 1))
    [slice(0, 2, None), slice(2, 2, None), slice(2, 3, None)]
    """
    return [slice(start, stop) for start, stop in pairwise((0, *accumulate(num_rows)))]


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    tray: Tray
    rows: ExpertRows


class _Dispatch(Function):
    """Keeps the places."""

    @staticmethod
    def forward(ctx: _Context, x_ND: Tensor, rows: ExpertRows) -> Tensor:
        ctx.save_for_backward(rows.places_NK)
        ctx.rows = rows
        return x_ND[rows.tokens_R]

    @staticmethod
    def backward(ctx: _Context, grad_RD: Tensor) -> tuple[Tensor, None]:
        (places_NK,) = ctx.saved_tensors
        grad_RD = ctx.rows.padded(grad_RD)
        first_N, *others = places_NK.unbind(-1)
        grad_ND = grad_RD[first_N]
        for places_N in others:
            grad_ND += grad_RD[places_N]
        return grad_ND, None


class _Combine(Function):
    """Keeps the rows, the weights and the places; sums in the dtype of the weights."""

    @staticmethod
    def forward(ctx: _Context, y_RD: Tensor, weights_NK: Tensor, rows: ExpertRows) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, rows.choices_R, rows.places_NK)
        ctx.rows = rows
        y_ND, padded_RD = weights_NK.new_zeros(len(weights_NK), y_RD.shape[-1]), rows.padded(y_RD)
        for choice, places_N in enumerate(rows.places_NK.unbind(-1)):
            y_ND += padded_RD[places_N] * weights_NK[:, choice, None]
        return y_ND

    @staticmethod
    def backward(ctx: _Context, grad_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, weights_NK, choices_R, places_NK = ctx.saved_tensors
        padded_RD = ctx.rows.padded(y_RD)
        grad_weights_NK = [
            torch.linalg.vecdot(grad_ND, padded_RD[places_N].to(grad_ND)) for places_N in places_NK.unbind(-1)
        ]
        grad_RD = grad_ND[choices_R // weights_NK.shape[1]] * weights_NK.flatten()[choices_R, None]
        return grad_RD.to(y_RD), torch.stack(grad_weights_NK, -1), None


class _Grouped(Function):
    """Keeps the rows; each expert's matrix multiplies its own."""

    @staticmethod
    def forward(ctx: _Context, x_RD: Tensor, rows: ExpertRows, tray: Tray, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, *weights)
        ctx.rows, ctx.tray = rows, tray
        return products(x_RD, [weight.t() for weight in weights], rows.num_rows)

    @staticmethod
    def backward(ctx: _Context, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, *weights = ctx.saved_tensors
        made = [
            ctx.tray.gradient(weight, matrix_gradient, grad_RO[own], x_RD[own])
            for weight, own in zip(weights, slices_of(ctx.rows.num_rows), strict=True)
        ]
        return products(grad_RO, weights, ctx.rows.num_rows), None, None, *made


def products(x_RD: Tensor, matrices: Sequence[Tensor], num_rows: Sequence[int]) -> Tensor:
    """Rows of each expert, so many, times its matrix (inputs, outputs), in the dtype of the rows."""
    num_outputs = matrices[0].shape[1]
    # What is cast is copied anyway: into one tensor, for torch's own grouped product.
    if x_RD.dtype is torch.bfloat16 and x_RD.shape[1] % _ALIGNED == num_outputs % _ALIGNED == 0:
        stops_E = torch.tensor(tuple(accumulate(num_rows)), dtype=torch.int32, device=x_RD.device)
        return functional.grouped_mm(x_RD, torch.stack([y.to(x_RD) for y in matrices]), offs=stops_E)
    y_RO = x_RD.new_empty(len(x_RD), num_outputs)
    for matrix, own in zip(matrices, slices_of(num_rows), strict=True):
        torch.mm(x_RD[own], matrix.to(x_RD), out=y_RO[own])
    return y_RO


# torch leaves `apply` without types.
dispatch: Callable[[Tensor, ExpertRows], Tensor] = _Dispatch.apply
combine: Callable[[Tensor, Tensor, ExpertRows], Tensor] = _Combine.apply
grouped: Callable[..., Tensor] = _Grouped.apply
