"""Routers: for each token scores of all experts, and what follows from them, by the kind of router that a job names.

Scores are those of the layer's gate: a matrix without bias, or for xmoe cosines over a temperature. P is their softmax
over experts. Of equal scores the lower expert comes first, and of equal tokens the earlier.

| router | chosen | weight |
|---|---|---|
| softmax_topk | each token's K largest P | P, divided by their sum if the family says so |
| gshard | each token's K largest scores; in training with noise, and the second by chance, if asked | their softmax |
| sigmoid | each token's K largest scores | logistic function of the score |
| xmoe | each token's K largest cosines | P |
| expert_choice | each expert's ceil(K N / E) tokens of the largest P | P |
| softmoe | nobody: an expert takes means of all tokens, by the softmax over tokens | softmax over slots |

Sources: Jiang et al., Mixtral of Experts, 2024; Lepikhin et al., GShard, 2020; Lewis et al., BASE Layers, 2021; Chi et
al., On the Representation Collapse of Sparse Mixture of Experts, 2022; Zhou et al., Mixture-of-Experts with Expert
Choice Routing, 2022; Puigcerver et al., From Sparse to Soft Mixtures of Experts, 2023.

N tokens of a microbatch, D hidden features, E experts, K choices of a token, P projected features, S slots, R rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from skein.model.sparse.experts import Experts
from skein.model.sparse.routing import RouterKind
from worker.model.base import Linear, empty_parameter
from worker.model.pending import Tray
from worker.model.sparse.choosing import best_tokens, likeliest, near_seconds, near_ties, slots_of
from worker.model.sparse.junction import Junction
from worker.model.sparse.rows import ExpertRows, combine, dispatch

_LEAST_LENGTH = 1e-12
"""Length of a vector that is compared; a shorter one counts as this long."""


class ExpertWay(Protocol):
    """Way of a microbatch's tokens to the experts and back."""

    @property
    def rows(self) -> ExpertRows:
        """Rows of each expert."""

    def there(self, x_ND: Tensor) -> Tensor:
        """Rows for the experts, (R, D)."""

    def back(self, y_RD: Tensor) -> Tensor:
        """Tokens of what the experts give, (N, D), in the dtype of weights."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Experts of each token.

    Attributes:
        choices_NK: numbers of experts.
        weights_NK: of what each gives.
        kept_NK: choices that count; None: all.
    """

    choices_NK: Tensor
    weights_NK: Tensor
    kept_NK: Tensor | None = None

    def way(self, num_experts: int) -> "ChosenWay":
        """Way of the tokens to so many experts and back."""
        rows = ExpertRows.of(self.choices_NK, num_experts, self.kept_NK)
        return ChosenWay(rows, self.weights_NK)


@dataclass(frozen=True, slots=True)
class ChosenWay:
    """Copies of tokens go to some experts each, and come back as their weighted sum."""

    rows: ExpertRows
    weights_NK: Tensor

    def there(self, x_ND: Tensor) -> Tensor:
        """See `ExpertWay`."""
        return dispatch(x_ND, self.rows)

    def back(self, y_RD: Tensor) -> Tensor:
        """See `ExpertWay`."""
        return combine(y_RD, self.weights_NK, self.rows)


@dataclass(frozen=True, slots=True)
class MixedWay:
    """Each slot takes a mean over all tokens, and each token one over all slots."""

    rows: ExpertRows
    there_NS: Tensor
    """Weights, that sum to 1 over tokens."""
    back_NS: Tensor
    """Weights, that sum to 1 over slots."""

    def way(self, _num_experts: int) -> "MixedWay":
        """This, whose rows are the slots."""
        return self

    def of_experts(self, own: range) -> "MixedWay":
        """Way there and back of these experts' slots alone; back, as part of the means over all."""
        each = self.rows.num_rows[own.start]
        slots = slice(own.start * each, own.stop * each)
        rows = ExpertRows.even(len(own), each)
        return MixedWay(rows, self.there_NS[:, slots], self.back_NS[:, slots])

    def there(self, x_ND: Tensor) -> Tensor:
        """See `ExpertWay`."""
        return self.there_NS.to(x_ND).t() @ x_ND

    def back(self, y_RD: Tensor) -> Tensor:
        """See `ExpertWay`."""
        return (self.back_NS.to(y_RD) @ y_RD).to(self.back_NS)


Router = Callable[[Tensor, Experts, Junction], Routed | MixedWay]
"""Experts of tokens, by the scores of all experts (N, E), or of slots (N, S), in the dtype of parameters."""


def gate_of(experts: Experts, dtype: torch.dtype, tray: Tray) -> nn.Module:
    """The module that scores tokens, with the parameters of `Experts.router_matrices`."""
    (first, _), *others = experts.router_matrices().values()
    if others:
        return _Comparison(experts, dtype, tray)
    return Linear(experts.num_features, first, dtype, tray)


class _Comparison(nn.Module):
    """Cosines between a projection of tokens and a vector of each expert, over the temperature."""

    def __init__(self, experts: Experts, dtype: torch.dtype, tray: Tray) -> None:
        super().__init__()
        num_projected = experts.routing.num_projected(experts.num_experts)
        self.projection = Linear(experts.num_features, num_projected, dtype, tray)
        self.experts = _Vectors(experts.num_experts, num_projected, dtype)
        self._divisor = experts.routing.divisor
        self._tray = tray

    def forward(self, x_ND: Tensor) -> Tensor:
        vectors_EP = self.experts.weight
        return _cosines(self.projection(x_ND).to(vectors_EP.dtype), vectors_EP, self._divisor, self._tray)


class _Vectors(nn.Module):
    """A vector of each expert."""

    def __init__(self, num_experts: int, num_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(num_experts, num_features, dtype=dtype)


# --- routers ---


def _softmax_topk(scores_NE: Tensor, experts: Experts, junction: Junction) -> Routed:
    chances_NE = scores_NE.softmax(-1)
    choices_NK = _likeliest(chances_NE, experts, junction)
    weights_NK = _balanced(chances_NE, choices_NK, experts, junction).gather(-1, choices_NK)
    if experts.divides_weights:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return _chosen(choices_NK, weights_NK, experts, junction)


def _gshard(scores: Tensor, experts: Experts, junction: Junction) -> Routed:
    scores_NE = _noised(scores, experts, junction)
    if experts.routing.random_second and junction.is_training:
        return _with_random_second(scores_NE, experts, junction)
    choices_NK = _likeliest(scores_NE, experts, junction)
    weights_NK = scores_NE.gather(-1, choices_NK).softmax(-1)
    weights_NK = _balanced_beside(weights_NK, scores_NE, choices_NK, experts, junction)
    return _chosen(choices_NK, weights_NK, experts, junction)


def _with_random_second(scores_NE: Tensor, experts: Experts, junction: Junction) -> Routed:
    """Choices of two experts, with the weights of both; a second one that chance leaves out is counted E higher.

    Its score is in the first one's weight all the same, so which one it was travels with what was decided.

    Source: Lepikhin et al., GShard, 2020, Section 2.2 (random routing) and Algorithm 1. What chance leaves out takes no
    place, which is what it is for; what it leaves is not divided anew.
    """
    best_N2, num_experts = likeliest(scores_NE, 2), experts.num_experts
    least_N1 = _least_taken(scores_NE.detach(), junction)
    is_left_N1 = scores_NE.detach().gather(-1, best_N2[:, 1:]) <= least_N1
    choices_N2 = torch.cat([best_N2[:, :1], best_N2[:, 1:] + num_experts * is_left_N1], -1)
    form = experts.choices_of(len(scores_NE))
    assert form is not None
    are_near = partial(near_seconds, scores_NE, best_N2, least_N1)
    choices_N2 = junction.settled(choices_N2, are_near, form)
    experts_N2, is_taken_N2 = choices_N2 % num_experts, choices_N2 < num_experts
    weights_N2 = scores_NE.gather(-1, experts_N2).softmax(-1)
    weights_N2 = _balanced_beside(weights_N2, scores_NE, choices_N2[is_taken_N2], experts, junction)
    kept_N2 = _with_room(choices_N2.clamp(max=num_experts), weights_N2, experts, junction)
    return Routed(experts_N2, weights_N2, is_taken_N2 if kept_N2 is None else kept_N2 & is_taken_N2)


def _least_taken(scores_NE: Tensor, junction: Junction) -> Tensor:
    """Score of each token, (N, 1), above which its second expert is taken.

    Twice the weight of the second, the logistic function of how far it scores above the first, is above u, which is
    drawn from 0 to 1, where its score is above that of the first and log(u / (2 - u)).
    """
    u_N1 = junction.evenly_drawn(len(scores_NE)).unsqueeze(-1)
    return scores_NE.amax(-1, keepdim=True) + (u_N1 / (2 - u_N1)).log().to(scores_NE)


def _sigmoid(scores_NE: Tensor, experts: Experts, junction: Junction) -> Routed:
    choices_NK = _likeliest(scores_NE, experts, junction)
    weights_NK = scores_NE.gather(-1, choices_NK).sigmoid()
    weights_NK = _balanced_beside(weights_NK, scores_NE, choices_NK, experts, junction)
    return _chosen(choices_NK, weights_NK, experts, junction)


def _expert_choice(scores_NE: Tensor, experts: Experts, junction: Junction) -> Routed:
    """Every expert is a choice of each token, and those that the experts take are kept."""
    chances_NE = scores_NE.softmax(-1)
    form = experts.choices_of(len(scores_NE))
    assert form is not None
    tokens_EC = best_tokens(chances_NE, experts.best_tokens(len(scores_NE)))
    tokens_EC = junction.settled(tokens_EC, partial(near_ties, chances_NE.t(), tokens_EC), form)
    kept_NE = torch.zeros_like(chances_NE, dtype=torch.bool).scatter_(0, tokens_EC.t(), True)
    _ = junction.weighed(chances_NE.detach(), kept_NE.sum(0), 0.0)
    choices_NE = torch.arange(experts.num_experts, device=kept_NE.device).expand(kept_NE.shape)
    return Routed(choices_NE, chances_NE, kept_NE)


def _softmoe(scores_NS: Tensor, experts: Experts, _junction: Junction) -> MixedWay:
    rows = ExpertRows.even(experts.num_experts, experts.routing.num_slots)
    return MixedWay(rows, scores_NS.softmax(0), scores_NS.softmax(-1))


ROUTES: Mapping[RouterKind, Router] = MappingProxyType(
    {
        RouterKind.SOFTMAX_TOPK: _softmax_topk,
        RouterKind.GSHARD: _gshard,
        RouterKind.SIGMOID: _sigmoid,
        # What differs is in the gate.
        RouterKind.XMOE: _softmax_topk,
        RouterKind.EXPERT_CHOICE: _expert_choice,
        RouterKind.SOFTMOE: _softmoe,
    }
)


def _noised(scores: Tensor, experts: Experts, junction: Junction) -> Tensor:
    """Scores of experts (N, E): with noise, each comes with a number that says how much; none outside of training.

    Source: Shazeer et al., Outrageously Large Neural Networks, 2017, Eq. 4.
    """
    noise = experts.routing.noise
    if noise is None:
        return scores
    scores_NE, scales_NE = scores.chunk(2, -1)
    if not junction.is_training:
        return scores_NE
    return scores_NE + functional.softplus(scales_NE) * junction.drawn(scores_NE).mul_(noise)


# --- parts of several ---


def _likeliest(scores_NE: Tensor, experts: Experts, junction: Junction) -> Tensor:
    """Each token's choices: of the largest scores, unless they were made before."""
    form = experts.choices_of(len(scores_NE))
    assert form is not None
    choices_NK = likeliest(scores_NE, experts.num_chosen)
    return junction.settled(choices_NK, partial(near_ties, scores_NE, choices_NK), form)


def _chosen(choices_NK: Tensor, weights_NK: Tensor, experts: Experts, junction: Junction) -> Routed:
    """Choices of tokens: in training without those that find their expert full."""
    return Routed(choices_NK, weights_NK, _with_room(choices_NK, weights_NK, experts, junction))


def _with_room(choices_NK: Tensor, weights_NK: Tensor, experts: Experts, junction: Junction) -> Tensor | None:
    """Mask of the choices whose expert is not full yet; None: all are. Number E is no expert, and says nothing."""
    most = experts.most_choices(len(choices_NK)) if junction.is_training else None
    if most is None:
        return None
    has_room_NK = slots_of(choices_NK, weights_NK, experts.num_experts + 1, experts.routing.drop) < most
    junction.dropped(int((~has_room_NK & (choices_NK < experts.num_experts)).sum()))
    return has_room_NK


def _balanced(chances_NE: Tensor, choices: Tensor, experts: Experts, junction: Junction) -> Tensor:
    """The same chances, pulled at by the balance loss of all these choices."""
    counts_E = torch.bincount(choices.flatten(), minlength=experts.num_experts)
    return junction.weighed(chances_NE, counts_E, experts.routing.balance_coefficient)


def _balanced_beside(
    weights_NK: Tensor, scores_NE: Tensor, choices: Tensor, experts: Experts, junction: Junction
) -> Tensor:
    """The same weights, whose backward lets the balance loss pull at the chances, which they are not made of."""
    if not experts.routing.balance_coefficient:
        scores_NE = scores_NE.detach()
    chances_NE = scores_NE.softmax(-1)
    pulled_NE = _balanced(chances_NE, choices, experts, junction)
    return weights_NK if pulled_NE is chances_NE else _beside(weights_NK, pulled_NE)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    shape: torch.Size
    divisor: float
    tray: Tray


class _Beside(Function):
    """Passes on its first input; the second has a gradient of zeros, to which others add."""

    @staticmethod
    def forward(ctx: _Context, first: Tensor, second: Tensor) -> Tensor:
        ctx.shape = second.shape
        return first.view_as(first)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(ctx.shape)


class _Cosines(Function):
    """Keeps the directions of tokens and their lengths; those of experts are computed anew. In whole precision."""

    @staticmethod
    def forward(ctx: _Context, x_NP: Tensor, vectors_EP: Tensor, divisor: float, tray: Tray) -> Tensor:
        lengths_N1 = _lengths(x_NP)
        along_NP = x_NP / lengths_N1
        ctx.save_for_backward(along_NP, lengths_N1, vectors_EP)
        ctx.divisor, ctx.tray = divisor, tray
        with torch.autocast(x_NP.device.type, enabled=False):
            return (along_NP @ (vectors_EP / _lengths(vectors_EP)).t()).div_(divisor)

    @staticmethod
    def backward(ctx: _Context, grad_NE: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        along_NP, lengths_N1, vectors_EP = ctx.saved_tensors
        grad_NE = grad_NE / ctx.divisor
        grad_along_NP = grad_NE @ (vectors_EP / _lengths(vectors_EP))
        grad_vectors = ctx.tray.gradient(vectors_EP, _vectors_gradient, grad_NE, along_NP)
        return _across(grad_along_NP, along_NP).div_(lengths_N1), grad_vectors, None, None


def _vectors_gradient(vectors_EP: Tensor, grad_NE: Tensor, along_NP: Tensor) -> Tensor:
    lengths_E1 = _lengths(vectors_EP)
    return _across(grad_NE.t() @ along_NP, vectors_EP / lengths_E1).div_(lengths_E1)


def _lengths(x: Tensor) -> Tensor:
    """Length of each row, in a column."""
    found: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=_LEAST_LENGTH)
    return found


def _across(grad: Tensor, along: Tensor) -> Tensor:
    """Part of each row of `grad` that turns the direction `along`, and does not stretch it."""
    stretch: Tensor = torch.linalg.vecdot(grad, along).unsqueeze(-1)
    return grad - along * stretch


# torch leaves `apply` without types.
_beside: Callable[[Tensor, Tensor], Tensor] = _Beside.apply
_cosines: Callable[[Tensor, Tensor, float, Tray], Tensor] = _Cosines.apply
