"""Sparse feed-forward of a decoder block: a router, and the experts that it chooses among for each token.

Rules of this package
- Choices are dropped in training alone, so that losses on validation data are those of the model as it is exported.
- Sums go by a token's choices, in their order, so that equal inputs give equal bits on any device.
- An expert that no token goes through has a gradient of zero.
- Of several devices each has some experts whole, and a copy of the router. It goes on with a part of the tokens once
  all are routed: capacities and balance are those of the microbatch, and nobody has to ask how many rows will come.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, R rows, O outputs.
"""

import torch
from torch import Tensor, nn

from skein.model.sparse.experts import Experts
from skein.types import Precision
from worker.mesh.share import WHOLE, Share
from worker.mesh.tokens import TokenShare
from worker.model.base import Linear, parameter_dtype
from worker.model.ops import swiglu
from worker.model.pending import Tray
from worker.model.sparse.choosing import likeliest, slots_of
from worker.model.sparse.junction import Junction
from worker.model.sparse.rows import ExpertRows, combine, dispatch, grouped
from worker.model.sparse.spread import Pieces, SpreadRows, spread


class SparseMlp(nn.Module):
    """SwiGLU feed-forwards, and the router that chooses among them for each token.

    Source: Jiang et al., Mixtral of Experts, 2024, Section 2.1; without `is_normalised`, chances of all experts are the
    weights of the chosen.

    Takes whole activations and gives whole ones, whatever its `share` of the experts.
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
        self.gate = Linear(experts.num_features, experts.num_experts, dtype, tray)
        self._share = share
        self._tokens = TokenShare(share)
        own = share.rows(experts.num_experts)
        self.experts = nn.ModuleDict({str(expert): _Expert(experts, dtype, tray) for expert in own})
        self._gates, self._ups, self._downs = (
            [expert.get_parameter(f"{name}.weight") for expert in self.experts.values()]
            for name in (names.gate, names.up, names.down)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND, tokens = x_BTD.flatten(0, -2), self._tokens
        if self._share.size > 1:
            x_ND = tokens.enter(x_ND)
        chances_NE = self.gate(x_ND).to(self.dtype).softmax(-1)
        choices_NK = likeliest(chances_NE, self.sizes.num_chosen)
        counts_E = torch.bincount(choices_NK.flatten(), minlength=self.sizes.num_experts)
        if self._share.size > 1:
            chances_NE = tokens.keep(chances_NE)
        chances_NE = self.junction.weighed(chances_NE, counts_E, self.sizes.routing.balance_coefficient)
        weights_NK = chances_NE.gather(-1, choices_NK)
        if self.sizes.is_normalised:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        kept_NK = self._kept(choices_NK, weights_NK)
        if self._share.size > 1:
            return self._spread(x_ND, choices_NK, weights_NK, kept_NK).view(x_BTD.shape)
        rows = ExpertRows.of(choices_NK, self.sizes.num_experts, kept_NK)
        x_RD = dispatch(x_ND, rows)
        inner_RO = swiglu(
            grouped(x_RD, rows, self.tray, *self._gates), grouped(x_RD, rows, self.tray, *self._ups)
        )
        y_RD = grouped(inner_RO, rows, self.tray, *self._downs)
        return combine(y_RD, weights_NK, rows).view(x_BTD.shape)

    def _spread(self, x_ND: Tensor, choices_NK: Tensor, weights_NK: Tensor, kept_NK: Tensor | None) -> Tensor:
        """Results for all tokens, of which each device makes its own."""
        num_tokens, share = len(x_ND), self._share
        here = self._tokens.own(num_tokens)
        rows = SpreadRows.of(choices_NK, kept_NK, self.sizes.num_experts, share)
        weights = (*self._gates, *self._ups, *self._downs)
        y_SD = spread(dispatch(x_ND[here], rows.own), rows, Pieces(), share, self.tray, *weights)
        return self._tokens.leave(combine(y_SD, weights_NK[here], rows.own), num_tokens)

    def _kept(self, choices_NK: Tensor, weights_NK: Tensor) -> Tensor | None:
        """Choices that do not find their expert full, in training; None: all."""
        num_experts, routing = self.sizes.num_experts, self.sizes.routing
        most = self.sizes.most_choices(len(choices_NK)) if self.junction.is_training else None
        if most is None:
            return None
        kept_NK = slots_of(choices_NK, weights_NK, num_experts, routing.drop) < most
        self.junction.dropped(int((~kept_NK).sum()))
        return kept_NK


class _Expert(nn.Module):
    """Matrices of one expert, under its family's names."""

    def __init__(self, experts: Experts, dtype: torch.dtype, tray: Tray) -> None:
        super().__init__()
        for name, (num_outputs, num_inputs) in experts.matrices().items():
            self.add_module(name, Linear(num_inputs, num_outputs, dtype, tray))
