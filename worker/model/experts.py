"""Experts of a sparse decoder: each token goes through a few of them, and has the weighted sum of what they give.

Rules of this file
- Rows are copies of tokens, those of one expert side by side, in the order of the tokens; the place of each choice of a
  token among the rows leads back. A choice that is dropped has no row, and leads to zeros.
- Choices are dropped in training alone, so that losses on validation data are those of the model as it is exported.
- Sums go by a token's choices, in their order, so that equal inputs give equal bits on any device.
- An expert that no token goes through has a gradient of zero.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, C = N K of all, R rows, O outputs.
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
from skein.model.routing import DropOrder
from skein.types import Precision
from worker.model.base import Linear, parameter_dtype
from worker.model.junction import Junction
from worker.model.ops import matrix_gradient, swiglu
from worker.model.pending import Tray

_ALIGNED = 8
"""Grouped products want rows whose length is a multiple of 16 bytes."""


WEIGHT_STEPS = 2**16
"""Weights that are equal in so many steps from 0 to 1 are equal where choices are dropped by weight."""


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

    @property
    def tokens_R(self) -> Tensor:
        """Token of each row."""
        return self.choices_R // self.places_NK.shape[1]

    def padded(self, x_RD: Tensor) -> Tensor:
        """Rows with one of zeros after the last if any choice is dropped."""
        return x_RD if len(x_RD) == self.places_NK.numel() else functional.pad(x_RD, (0, 0, 0, 1))

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


def slots_of(choices_NK: Tensor, weights_NK: Tensor, num_experts: int, order: DropOrder) -> Tensor:
    """Place of each choice among those of its expert, (N, K), in the order in which the expert takes them.

    Source: Lepikhin et al., GShard, 2020, Algorithm 1 (choices in turn); Riquelme et al., Scaling Vision with Sparse
    Mixture of Experts, 2021, Section 4.1 (by weight). Equal weights go by token, then by choice; they count in whole
    `WEIGHT_STEPS`, for a run of one token begins a sample with weights that differ by nothing but rounding.
    """
    num_tokens, num_chosen = choices_NK.shape
    turn_C = torch.arange(choices_NK.numel(), device=choices_NK.device)
    if order is DropOrder.CHOICE_MAJOR:
        turn_C = turn_C.view(num_tokens, num_chosen).t().flatten()
    elif order is DropOrder.PROBS:
        rounded_C = (weights_NK.detach().flatten() * WEIGHT_STEPS).round()
        turn_C = rounded_C.sort(descending=True, stable=True).indices
    by_expert_C = turn_C[choices_NK.flatten()[turn_C].sort(stable=True).indices]
    counts_E = torch.bincount(choices_NK.flatten(), minlength=num_experts)
    starts_E = counts_E.cumsum(0) - counts_E
    slots_C = torch.empty_like(turn_C)
    slots_C[by_expert_C] = torch.arange(len(turn_C), device=turn_C.device)
    return slots_C.view_as(choices_NK) - starts_E[choices_NK]


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
        counts_E = torch.bincount(choices_NK.flatten(), minlength=self.sizes.num_experts)
        chances_NE = self.junction.weighed(chances_NE, counts_E, self.sizes.routing.balance_coefficient)
        weights_NK = chances_NE.gather(-1, choices_NK)
        if self.sizes.is_normalised:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        rows = self._rows(choices_NK, weights_NK)
        x_RD = _dispatch(x_ND, rows)
        inner_RO = swiglu(
            _grouped(x_RD, rows, self.tray, *self._gates), _grouped(x_RD, rows, self.tray, *self._ups)
        )
        y_RD = _grouped(inner_RO, rows, self.tray, *self._downs)
        return _combine(y_RD, weights_NK, rows).view(x_BTD.shape)

    def _rows(self, choices_NK: Tensor, weights_NK: Tensor) -> ExpertRows:
        """Way of tokens to experts: in training without the choices that find their expert full."""
        num_experts, routing = self.sizes.num_experts, self.sizes.routing
        most = self.sizes.most_choices(len(choices_NK)) if self.junction.is_training else None
        if most is None:
            return ExpertRows.of(choices_NK, num_experts)
        kept_NK = slots_of(choices_NK, weights_NK, num_experts, routing.drop) < most
        rows = ExpertRows.of(choices_NK, num_experts, kept_NK)
        self.junction.dropped(choices_NK.numel() - sum(rows.num_rows))
        return rows


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
