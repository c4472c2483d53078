"""Experts in parts over the devices of a mesh: rows go to the devices of their experts, and come back.

Rules of this file
- Routers run alike on all devices, so each knows from the start how many rows go where.
- Rows travel in pieces, all on their way at once, so that experts compute while others' rows travel. A piece is a part
  of each device's own tokens, in their order; it may be empty.
- An expert has its rows in the order of the tokens, whatever the pieces, so that sums over them come to the same bits.

N tokens of a microbatch, K choices of a token, D hidden features, O inner features, S rows that a device sends, R rows
that its experts are given, P rows of a piece of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from skein.plan.pieces.choice import TimedRows
from skein.plan.pieces.lanes import Pieces
from worker.mesh.forms.cuts import portion_of
from worker.mesh.pieces.tokens import TokenShare
from worker.mesh.share import Arriving, Share
from worker.model.ops import matrix_gradient
from worker.model.pending import Tray
from worker.model.sparse.rows import ExpertRows, products, slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows that travel together.

    Attributes:
        sent_rows: which of the rows of this device's tokens; None: all.
        num_sent: of these, for each device.
        given_P: which of the rows of this device's experts; None: all.
        order_P: place among these of each row as it arrives.
        num_received: rows from each device.
        num_rows: rows of each expert of this device.
    """

    sent_rows: Tensor | None
    num_sent: tuple[int, ...]
    given_P: Tensor | None
    order_P: Tensor
    num_received: tuple[int, ...]
    num_rows: tuple[int, ...]

    def by_expert(self, arrived_PD: Tensor) -> Tensor:
        """Rows in the order of the experts, as they came from one device after the other."""
        sorted_PD = torch.empty_like(arrived_PD)
        sorted_PD[self.order_P] = arrived_PD
        return sorted_PD

    def by_device(self, sorted_PD: Tensor) -> Tensor:
        """The reverse."""
        return sorted_PD[self.order_P]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRows:
    """Rows of a microbatch as one device sees them.

    Attributes:
        own: of its own tokens, to all experts.
        sent_to_S: device of each of these.
        sent_tokens_S: token of each, as all devices count tokens.
        given_tokens_R: token of each row of its experts, by expert and token.
        experts_R: expert of each, the device's first being 0.
        num_own_experts: its experts.
        devices_N: device of each token.
        size: devices.
    """

    own: ExpertRows
    sent_to_S: Tensor
    sent_tokens_S: Tensor
    given_tokens_R: Tensor
    experts_R: Tensor
    num_own_experts: int
    devices_N: Tensor
    size: int

    @classmethod
    def of(cls, choices_NK: Tensor, kept_NK: Tensor | None, num_experts: int, tokens: TokenShare) -> Self:
        """Rows of choices, of those that are kept."""
        num_tokens, num_chosen = choices_NK.shape
        size, mine = tokens.share.size, tokens.share.rows(num_experts)
        own_choices = tokens.own(choices_NK)
        own = ExpertRows.of(own_choices, num_experts, None if kept_NK is None else tokens.own(kept_NK))
        own_tokens = tokens.own(torch.arange(num_tokens, device=choices_NK.device))
        experts_C = choices_NK.flatten()
        is_given_C = (experts_C >= mine.start) & (experts_C < mine.stop)
        if kept_NK is not None:
            is_given_C &= kept_NK.flatten()
        order_C = experts_C.sort(stable=True).indices
        given_R = order_C[is_given_C[order_C]]
        stops = torch.tensor([portion_of(num_experts, i, size).stop for i in range(size)])
        return cls(
            own=own,
            sent_to_S=torch.bucketize(
                own_choices.flatten()[own.choices_R], stops.to(choices_NK.device), right=True
            ),
            sent_tokens_S=own_tokens[own.tokens_R],
            given_tokens_R=given_R // num_chosen,
            experts_R=experts_C[given_R] - mine.start,
            num_own_experts=len(mine),
            devices_N=tokens.devices().to(choices_NK.device),
            size=size,
        )

    def pieces(self, num_pieces: int) -> list[Piece]:
        """Rows of so many equal parts of each device's tokens."""
        pieces_N = self._pieces(num_pieces)
        pieces_S, pieces_R = pieces_N[self.sent_tokens_S], pieces_N[self.given_tokens_R]
        sources_R = self.devices_N[self.given_tokens_R]
        made = []
        for piece in range(num_pieces):
            sent, given = (pieces_S == piece).nonzero().flatten(), (pieces_R == piece).nonzero().flatten()
            sources_P = sources_R[given]
            made.append(
                Piece(
                    sent_rows=sent if num_pieces > 1 else None,
                    num_sent=_counts(self.sent_to_S[sent], self.size),
                    given_P=given if num_pieces > 1 else None,
                    order_P=sources_P.sort(stable=True).indices,
                    num_received=_counts(sources_P, self.size),
                    num_rows=_counts(self.experts_R[given], self.num_own_experts),
                )
            )
        return made

    def _pieces(self, num_pieces: int) -> Tensor:
        """Piece of each token."""
        order_N, counts = self.devices_N.sort(stable=True).indices, self.devices_N.bincount()
        places_N = torch.empty_like(order_N)
        places_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        places_N -= (counts.cumsum(0) - counts)[self.devices_N]
        # The piece whose end, (piece + 1) * count // pieces, is the first after the token's place at its device.
        return ((places_N + 1) * num_pieces - 1) // counts[self.devices_N]


def _counts(places: Tensor, num: int) -> tuple[int, ...]:
    return tuple(torch.bincount(places, minlength=num).tolist())


def _part(rows: Tensor, places: Tensor | None) -> Tensor:
    return rows if places is None else rows[places]


class _Collected:
    """Rows of all experts of a device, whatever the pieces in which they are made."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._whole: Tensor | None = None

    def add(self, piece: Piece, part: Tensor) -> Tensor:
        """Note these rows of a piece; they are given back."""
        if piece.given_P is None:
            self._whole = part
            return part
        if self._whole is None:
            self._whole = part.new_empty((self._num_rows, *part.shape[1:]))
        self._whole[piece.given_P] = part
        return part

    @property
    def whole(self) -> Tensor:
        """All rows, by expert and token."""
        assert self._whole is not None
        return self._whole


def there_and_back(
    rows_SD: Tensor,
    pieces: Sequence[Piece],
    share: Share,
    compute: Callable[[Piece, Tensor], Tensor],
    meanwhile: Callable[[], None] = lambda: None,
    sum_idly: Callable[[], None] = lambda: None,
) -> Tensor:
    """Rows that experts make of others, as `compute` does on their device.

    `sum_idly` is called once all are on their way there, and may begin what fits in before the way back; `meanwhile` as
    the last travel back.
    """
    with share.meter.layer():
        return _travelled(rows_SD, pieces, share, compute, meanwhile, sum_idly)


def _travelled(
    rows_SD: Tensor,
    pieces: Sequence[Piece],
    share: Share,
    compute: Callable[[Piece, Tensor], Tensor],
    meanwhile: Callable[[], None],
    sum_idly: Callable[[], None],
) -> Tensor:
    coming = [
        share.exchange(_part(rows_SD, piece.sent_rows).contiguous(), piece.num_sent, piece.num_received)
        for piece in pieces
    ]
    sum_idly()
    going: list[Arriving] = []
    for piece, arriving in zip(pieces, coming, strict=True):
        arrived_PD = arriving.wait()
        with share.meter.experts():
            made_PD = compute(piece, piece.by_expert(arrived_PD))
        going.append(share.exchange(piece.by_device(made_PD), piece.num_received, piece.num_sent))
    with share.meter.experts():
        meanwhile()
    if pieces[0].sent_rows is None:
        return going[0].wait()
    given_SD = torch.empty_like(rows_SD)
    for piece, arriving in zip(pieces, going, strict=True):
        given_SD[piece.sent_rows] = arriving.wait()
    return given_SD


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    rows: SpreadRows
    pieces: Pieces
    share: Share
    tray: Tray


class _Spread(Function):
    """Keeps what a device's experts are given, and the products with their gates and ups.

    Weights are gates, ups and downs of the device's experts.
    """

    @staticmethod
    def forward(
        ctx: _Context, x_SD: Tensor, rows: SpreadRows, share: Share, tray: Tray, *weights: Tensor
    ) -> Tensor:
        x_RD, gate_RO, up_RO = (_Collected(len(rows.experts_R)) for _ in range(3))

        def compute(piece: Piece, x_PD: Tensor) -> Tensor:
            gate_PO, up_PO, y_PD = _forward(x_PD, weights, piece.num_rows)
            for whole, part in ((x_RD, x_PD), (gate_RO, gate_PO), (up_RO, up_PO)):
                whole.add(piece, part)
            return y_PD

        y_SD = there_and_back(x_SD, rows.pieces(share.pieces.forward), share, compute)
        ctx.save_for_backward(x_RD.whole, gate_RO.whole, up_RO.whole, *weights)
        ctx.rows, ctx.pieces, ctx.share, ctx.tray = rows, share.pieces, share, tray
        return y_SD

    @staticmethod
    def backward(ctx: _Context, grad_SD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, gate_RO, up_RO, *weights = ctx.saved_tensors
        grad_RD, grad_gate_RO, grad_up_RO = (_Collected(len(x_RD)) for _ in range(3))
        made: list[Tensor | None] = []

        def compute(piece: Piece, grad_PD: Tensor) -> Tensor:
            gate_PO, up_PO = _part(gate_RO, piece.given_P), _part(up_RO, piece.given_P)
            grad_gate_PO, grad_up_PO, grad_x_PD = _backward(grad_PD, gate_PO, up_PO, weights, piece.num_rows)
            for whole, part in ((grad_RD, grad_PD), (grad_gate_RO, grad_gate_PO), (grad_up_RO, grad_up_PO)):
                whole.add(piece, part)
            return grad_x_PD

        def add_weights() -> None:
            kept = x_RD, gate_RO, up_RO
            grads = grad_gate_RO.whole, grad_up_RO.whole, grad_RD.whole
            num_rows = _counts(ctx.rows.experts_R, ctx.rows.num_own_experts)
            made.extend(_weight_gradients(kept, grads, weights, num_rows, ctx.tray))

        def sum_idly() -> None:
            if ctx.share.idle_sums is not None:
                ctx.share.idle_sums.begin(ctx.pieces.num_summed)

        pieces = ctx.rows.pieces(ctx.pieces.backward)
        grad_x_SD = there_and_back(grad_SD.contiguous(), pieces, ctx.share, compute, add_weights, sum_idly)
        return grad_x_SD, None, None, None, *made


_Three = tuple[Tensor, Tensor, Tensor]


def _kinds(weights: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Gates, ups and downs."""
    num = len(weights) // 3
    return weights[:num], weights[num : 2 * num], weights[2 * num :]


def _forward(x_PD: Tensor, weights: Sequence[Tensor], num_rows: Sequence[int]) -> _Three:
    """Products with gates and ups, and the experts' results."""
    gates, ups, downs = ([x.t() for x in kind] for kind in _kinds(weights))
    gate_PO, up_PO = products(x_PD, gates, num_rows), products(x_PD, ups, num_rows)
    return gate_PO, up_PO, products(functional.silu(gate_PO).mul_(up_PO), downs, num_rows)


def _backward(
    grad_PD: Tensor, gate_PO: Tensor, up_PO: Tensor, weights: Sequence[Tensor], num_rows: Sequence[int]
) -> _Three:
    """Gradients of both products, and of the rows."""
    gates, ups, downs = _kinds(weights)
    grad_PO = products(grad_PD, downs, num_rows)
    grad_gate_PO: Tensor = torch.ops.aten.silu_backward(grad_PO * up_PO, gate_PO)
    grad_up_PO = functional.silu(gate_PO).mul_(grad_PO)
    grad_x_PD = products(grad_gate_PO, gates, num_rows).add_(products(grad_up_PO, ups, num_rows))
    return grad_gate_PO, grad_up_PO, grad_x_PD


def _weight_gradients(
    kept: _Three, grads: _Three, weights: Sequence[Tensor], num_rows: Sequence[int], tray: Tray
) -> list[Tensor | None]:
    """Gradients of gates, ups and downs, by those of their results."""
    x_RD, gate_RO, up_RO = kept
    inner_RO = functional.silu(gate_RO).mul_(up_RO)
    factors = zip(_kinds(weights), grads, (x_RD, x_RD, inner_RO), strict=True)
    return [
        tray.gradient(weight, matrix_gradient, grad[own], x[own])
        for kind, grad, x in factors
        for weight, own in zip(kind, slices_of(num_rows), strict=True)
    ]


_NUM_TIMES = 3


def timed_rows(
    x_RD: Tensor, weights: Sequence[Tensor], share: Share, clock: Callable[[], float]
) -> TimedRows:
    """Seconds of the first rows on this device, evenly for all devices and experts: the least of a few times.

    Args:
        x_RD: rows as they travel; as many for each device.
        weights: gates, ups and downs of the device's experts.
        share: what exchanges them.
        clock: seconds, once all that was begun is over.
    """
    num_rows, num_experts = len(x_RD), len(weights) // 3
    even = [num_rows // share.size] * share.size
    each = [len(portion_of(num_rows, i, num_experts)) for i in range(num_experts)]
    found = []
    for _ in range(_NUM_TIMES):
        at_s = [clock()]
        share.exchange(x_RD, even, even).wait()
        at_s.append(clock())
        gate_RO, up_RO, y_RD = _forward(x_RD, weights, each)
        at_s.append(clock())
        grad_gate_RO, grad_up_RO, _ = _backward(y_RD, gate_RO, up_RO, weights, each)
        at_s.append(clock())
        _weight_gradients((x_RD, gate_RO, up_RO), (grad_gate_RO, grad_up_RO, y_RD), weights, each, Tray())
        at_s.append(clock())
        found.append([after_s - before_s for before_s, after_s in pairwise(at_s)])
    exchange_s, forward_s, backward_s, weights_s = (min(times) for times in zip(*found, strict=True))
    return TimedRows(
        num_rows=num_rows,
        exchange_s=exchange_s,
        forward_s=forward_s,
        backward_s=backward_s,
        weights_s=weights_s,
    )


# torch leaves `apply` without types.
spread: Callable[..., Tensor] = _Spread.apply
"""Results of experts, wherever they are, for rows of the tokens of this device."""
