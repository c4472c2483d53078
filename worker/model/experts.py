"""Experts of a sparse decoder: each token goes through a few of them, and has the weighted sum of what they give.

Rules of this file
- Rows are copies of tokens, those of one expert side by side, in the order of the tokens; the place of each choice of a
  token among the rows leads back. Nothing is padded, and no choice is dropped.
- Sums go by a token's choices, in their order, so that equal inputs give equal bits on any device.
- An expert that no token goes through has a gradient of zero.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, R = N K rows, O outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from skein.model.experts import Experts
from skein.types import Precision
from worker.model.base import Linear, parameter_dtype
from worker.model.junction import Junction
from worker.model.ops import matrix_gradient, swiglu
from worker.model.pending import Tray

_ALIGNED = 8
"""Grouped products want rows whose length is a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Way of tokens to experts and back.

    Attributes:
        tokens_R: token of each row.
        places_NK: row of each choice of a token.
        num_rows: rows of each expert, in their order; on the host, which cuts rows by them.
    """

    tokens_R: Tensor
    places_NK: Tensor
    num_rows: tuple[int, ...]

    @classmethod
    def of(cls, choices_NK: Tensor, num_experts: int) -> Self:
        """The way of tokens to the experts that each has chosen."""
        num_tokens, num_chosen = choices_NK.shape
        order_R = choices_NK.flatten().sort(stable=True).indices
        places_R = torch.empty_like(order_R)
        places_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        num_rows = torch.bincount(choices_NK.flatten(), minlength=num_experts).tolist()
        return cls(order_R // num_chosen, places_R.view(num_tokens, num_chosen), tuple(num_rows))

    @property
    def stops(self) -> tuple[int, ...]:
        """End of each expert's rows."""
        return tuple(accumulate(self.num_rows))

    @property
    def slices(self) -> list[slice]:
        """Rows of each expert."""
        return [slice(start, stop) for start, stop in pairwise((0, *self.stops))]


def likeliest(chances_NE: Tensor, num_chosen: int) -> Tensor:
    """The most likely experts of each token, (N, K), the likeliest first; of equal ones the lower first."""
    order_NE = chances_NE.detach().sort(dim=-1, descending=True, stable=True).indices
    return order_NE[:, :num_chosen].contiguous()


class SparseMlp(nn.Module):
    """SwiGLU feed-forwards, and the router that chooses among them for each token.

    Source: Jiang et al., Mixtral of Experts, 2024, Section 2.1; without `is_normalised`, chances of all experts are the
    weights of the chosen.
    """

    def __init__(self, experts: Experts, precision: Precision, tray: Tray, junction: Junction) -> None:
        super().__init__()
        dtype, names = parameter_dtype(precision), experts.names
        self.sizes = experts
        self.dtype = dtype
        self.tray = tray
        self.junction = junction
        self.gate = Linear(experts.num_features, experts.num_experts, dtype, tray)
        self.experts = nn.ModuleList(_Expert(experts, dtype, tray) for _ in range(experts.num_experts))
        self._gates, self._ups, self._downs = (
            [expert.get_parameter(f"{name}.weight") for expert in self.experts]
            for name in (names.gate, names.up, names.down)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, -2)
        chances_NE = self.gate(x_ND).to(self.dtype).softmax(-1)
        choices_NK = likeliest(chances_NE, self.sizes.num_chosen)
        rows = ExpertRows.of(choices_NK, self.sizes.num_experts)
        chances_NE = self.junction.weighed(chances_NE, rows.num_rows, self.sizes.routing.balance_coefficient)
        weights_NK = chances_NE.gather(-1, choices_NK)
        if self.sizes.is_normalised:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        x_RD = _dispatch(x_ND, rows)
        inner_RO = swiglu(
            _grouped(x_RD, rows, self.tray, *self._gates), _grouped(x_RD, rows, self.tray, *self._ups)
        )
        y_RD = _grouped(inner_RO, rows, self.tray, *self._downs)
        return _combine(y_RD, weights_NK, rows).view(x_BTD.shape)


class _Expert(nn.Module):
    """Matrices of one expert, under its family's names."""

    def __init__(self, experts: Experts, dtype: torch.dtype, tray: Tray) -> None:
        super().__init__()
        for name, (num_outputs, num_inputs) in experts.matrices().items():
            self.add_module(name, Linear(num_inputs, num_outputs, dtype, tray))


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
        return x_ND[rows.tokens_R]

    @staticmethod
    def backward(ctx: _Context, grad_RD: Tensor) -> tuple[Tensor, None]:
        (places_NK,) = ctx.saved_tensors
        first_N, *others = places_NK.unbind(-1)
        grad_ND = grad_RD[first_N]
        for places_N in others:
            grad_ND += grad_RD[places_N]
        return grad_ND, None


class _Combine(Function):
    """Keeps the rows, the weights and the places; sums in the dtype of the weights."""

    @staticmethod
    def forward(ctx: _Context, y_RD: Tensor, weights_NK: Tensor, rows: ExpertRows) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, rows.tokens_R, rows.places_NK)
        y_ND = weights_NK.new_zeros(len(weights_NK), y_RD.shape[-1])
        for choice, places_N in enumerate(rows.places_NK.unbind(-1)):
            y_ND += y_RD[places_N] * weights_NK[:, choice, None]
        return y_ND

    @staticmethod
    def backward(ctx: _Context, grad_ND: Tensor) -> tuple[Tensor, Tensor, None]:
        y_RD, weights_NK, tokens_R, places_NK = ctx.saved_tensors
        weights_R = torch.empty_like(weights_NK.flatten())
        weights_R[places_NK.flatten()] = weights_NK.flatten()
        grad_weights_NK = [
            torch.linalg.vecdot(grad_ND, y_RD[places_N].to(grad_ND)) for places_N in places_NK.unbind(-1)
        ]
        grad_RD = grad_ND[tokens_R] * weights_R[:, None]
        return grad_RD.to(y_RD), torch.stack(grad_weights_NK, -1), None


class _Grouped(Function):
    """Keeps the rows; each expert's matrix multiplies its own."""

    @staticmethod
    def forward(ctx: _Context, x_RD: Tensor, rows: ExpertRows, tray: Tray, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, *weights)
        ctx.rows, ctx.tray = rows, tray
        return _products(x_RD, [weight.t() for weight in weights], rows)

    @staticmethod
    def backward(ctx: _Context, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, *weights = ctx.saved_tensors
        made = [
            ctx.tray.gradient(weight, matrix_gradient, grad_RO[own], x_RD[own])
            for weight, own in zip(weights, ctx.rows.slices, strict=True)
        ]
        return _products(grad_RO, weights, ctx.rows), None, None, *made


def _products(x_RD: Tensor, matrices: Sequence[Tensor], rows: ExpertRows) -> Tensor:
    """Rows of each expert times its matrix (inputs, outputs), in the dtype of the rows."""
    num_outputs = matrices[0].shape[1]
    # What is cast is copied anyway: into one tensor, for torch's own grouped product.
    if x_RD.dtype is torch.bfloat16 and x_RD.shape[1] % _ALIGNED == num_outputs % _ALIGNED == 0:
        stops_E = torch.tensor(rows.stops, dtype=torch.int32, device=x_RD.device)
        return functional.grouped_mm(x_RD, torch.stack([y.to(x_RD) for y in matrices]), offs=stops_E)
    y_RO = x_RD.new_empty(len(x_RD), num_outputs)
    for matrix, own in zip(matrices, rows.slices, strict=True):
        torch.mm(x_RD[own], matrix.to(x_RD), out=y_RO[own])
    return y_RO


# torch leaves `apply` without types.
_dispatch: Callable[[Tensor, ExpertRows], Tensor] = _Dispatch.apply
_combine: Callable[[Tensor, Tensor, ExpertRows], Tensor] = _Combine.apply
_grouped: Callable[..., Tensor] = _Grouped.apply
