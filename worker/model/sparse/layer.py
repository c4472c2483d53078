"""Sparse feed-forward of a decoder block: a router, and the experts that it chooses among for each token.

Rules of this package
- Choices are dropped in training alone, so that losses on validation data are those of the model as it is exported.
- Sums go by a token's choices, in their order, so that equal inputs give equal bits on any device.
- An expert that no token goes through has a gradient of zero.
- Of several devices each has some experts whole, and a copy of the router. It goes on with a part of the tokens once
  all are routed: capacities and balance are those of the microbatch, and nobody has to ask how many rows will come.
  Experts that take means of all tokens are given all, and what devices make is summed, as of any feed-forward.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, R rows, O outputs.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.sparse.experts import Experts
from skein.plan.pieces.choice import TimedRows
from skein.types import Precision
from worker.mesh.pieces.tokens import tokens_of
from worker.mesh.share import WHOLE, Share
from worker.model.base import Linear, parameter_dtype, product_dtype
from worker.model.ops import swiglu
from worker.model.pending import Tray
from worker.model.sparse.junction import Junction
from worker.model.sparse.routers import ROUTES, ExpertWay, MixedWay, Routed, gate_of
from worker.model.sparse.rows import combine, dispatch, grouped
from worker.model.sparse.spread import SpreadRows, spread, timed_rows
from worker.probe import synchronize


class SparseMlp(nn.Module):
    """SwiGLU feed-forwards, and the gate that scores them for each token; its router says what goes where.

    Takes activations as they are between blocks' halves, and gives them so, whatever its `share` of the experts.
    """

    def __init__(
        self,
        experts: Experts,
        precision: Precision,
        tray: Tray,
        junction: Junction,
        share: Share = WHOLE,
    ) -> None:
        super().__init__()
        dtype, names = parameter_dtype(precision), experts.names
        self.sizes = experts
        self.dtype = dtype
        self.tray = tray
        self.junction = junction
        self.gate = gate_of(experts, dtype, tray)
        self._travels = product_dtype(precision)
        self._share = share
        own = share.rows(experts.num_experts)
        self.experts = nn.ModuleDict({str(expert): _Expert(experts, dtype, tray) for expert in own})
        self._gates, self._ups, self._downs = (
            [expert.get_parameter(f"{name}.weight") for expert in self.experts.values()]
            for name in (names.gate, names.up, names.down)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self._share.size == 1:
            return self._alone(x_BTD.flatten(0, -2)).view(x_BTD.shape)
        if self.sizes.mixes_tokens:
            return self._mixed(x_BTD)
        return self._spread(x_BTD)

    def timed(self, num_rows: Sequence[int], device: torch.device) -> tuple[TimedRows, ...]:
        """Seconds of exchanges and of this device's experts, on so many rows."""

        def clock() -> float:
            synchronize(device)
            return time.perf_counter()

        weights = (*self._gates, *self._ups, *self._downs)
        x_RD = torch.zeros(max(num_rows), self.sizes.num_features, dtype=self._travels, device=device)
        return tuple(timed_rows(x_RD[:num], weights, self._share, clock) for num in num_rows)

    def _scores(self, x_ND: Tensor) -> Tensor:
        scores: Tensor = self.gate(x_ND)
        return scores.to(self.dtype)

    def _routed(self, scores: Tensor) -> Routed | MixedWay:
        return ROUTES[self.sizes.routing.router](scores, self.sizes, self.junction)

    def _alone(self, x_ND: Tensor) -> Tensor:
        """Results for all tokens, by this device's experts."""
        return self._by_experts(x_ND, self._routed(self._scores(x_ND)).way(self.sizes.num_experts))

    def _by_experts(self, x_ND: Tensor, way: ExpertWay) -> Tensor:
        x_RD = way.there(x_ND)
        inner_RO = swiglu(
            grouped(x_RD, way.rows, self.tray, *self._gates), grouped(x_RD, way.rows, self.tray, *self._ups)
        )
        return way.back(grouped(inner_RO, way.rows, self.tray, *self._downs))

    def _mixed(self, x: Tensor) -> Tensor:
        """Results for tokens as devices have them: the sum of what each one's experts make of means of all tokens."""
        share = self._share
        whole_BTD = share.enter(x)
        num_samples, num_padded = whole_BTD.shape[:2]
        x_ND = whole_BTD[:, : share.num_tokens].flatten(0, 1)
        routed = self._routed(self._scores(x_ND))
        assert isinstance(routed, MixedWay), "tokens that choose are spread"
        y_ND = self._by_experts(x_ND, routed.of_experts(share.rows(self.sizes.num_experts)))
        y_BTD = y_ND.view(num_samples, share.num_tokens, -1)
        return share.leave(functional.pad(y_BTD, (0, 0, 0, num_padded - share.num_tokens)))

    def _spread(self, x: Tensor) -> Tensor:
        """Results for tokens as devices have them, of which each makes its own."""
        tokens = tokens_of(self._share, x)
        x_OD, scores_NE = tokens.entered(x, self._scores)
        routed = self._routed(scores_NE)
        assert isinstance(routed, Routed), "mixtures of tokens are not spread"
        rows = SpreadRows.of(routed.choices_NK, routed.kept_NK, self.sizes.num_experts, tokens)
        weights = (*self._gates, *self._ups, *self._downs)
        y_SD = spread(dispatch(x_OD, rows.own), rows, self._share, self.tray, *weights)
        return tokens.left(combine(y_SD, tokens.own(routed.weights_NK), rows.own))


class _Expert(nn.Module):
    """Matrices of one expert, under its family's names."""

    def __init__(self, experts: Experts, dtype: torch.dtype, tray: Tray) -> None:
        super().__init__()
        for name, (num_outputs, num_inputs) in experts.matrices().items():
            self.add_module(name, Linear(num_inputs, num_outputs, dtype, tray))
