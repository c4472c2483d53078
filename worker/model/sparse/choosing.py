"""Choices of tokens among experts: which ones each token takes, and which of them find room.

N tokens of a microbatch, E experts, K choices of a token, C = N K of all. Who chooses has a row: R rows of S scores.
"""

import torch
from torch import Tensor

from skein.model.sparse.routing import DropOrder

WEIGHT_STEPS = 2**16
"""Weights that are equal in so many steps from 0 to 1 are equal where choices are dropped by weight."""

NEAR_TIE = 2.0**-5
"""Scores apart by no more than this share of the row's largest are equal to somebody: a few roundings of bfloat16."""


def likeliest(chances_NE: Tensor, num_chosen: int) -> Tensor:
    """The most likely experts of each token, (N, K), the likeliest first; of equal ones the lower first."""
    order_NE = chances_NE.detach().sort(dim=-1, descending=True, stable=True).indices
    return order_NE[:, :num_chosen].contiguous()


def best_tokens(chances_NE: Tensor, num_tokens: int) -> Tensor:
    """Tokens that each expert takes, (E, so many): those of the largest chances, of equal ones the earlier token.

    Chances are equal as for `slots_of`.
    """
    order_NE = _rounded(chances_NE).sort(dim=0, descending=True, stable=True).indices
    return order_NE[:num_tokens].t().contiguous()


def near_ties(scores_RS: Tensor, own_RK: Tensor, told_RK: Tensor) -> Tensor:
    """Rows, a mask (R,), whose choices made elsewhere are their own but for near ties: as high one by one.

    Args:
        scores_RS: by which the row's own choices are the best, each row's in order.
        own_RK: these.
        told_RK: the others.
    """
    scores_RS = scores_RS.detach()
    margin_R1 = _margin(scores_RS)
    apart_RK = (scores_RS.gather(-1, told_RK) - scores_RS.gather(-1, own_RK)).abs()
    in_order_RK = told_RK.sort(dim=-1).values
    is_double_R = (in_order_RK[:, 1:] == in_order_RK[:, :-1]).any(-1)
    return (apart_RK <= margin_R1).all(-1) & ~is_double_R


def near_seconds(scores_NE: Tensor, best_N2: Tensor, least_N1: Tensor, told_N2: Tensor) -> Tensor:
    """Rows, a mask (N,), as of `near_ties`, whose second choice is taken or left out as chance says but for near ties.

    Args:
        scores_NE: of each token.
        best_N2: its two best experts.
        least_N1: score above which the second is taken.
        told_N2: choices made elsewhere; a second that is left out is counted E higher.
    """
    scores_NE, num_experts = scores_NE.detach(), scores_NE.shape[-1]
    experts_N2, is_left_N2 = told_N2 % num_experts, told_N2 >= num_experts
    above_N1 = scores_NE.gather(-1, experts_N2[:, 1:]) - least_N1
    may_be_N1 = torch.where(is_left_N2[:, 1:], above_N1, -above_N1) <= _margin(scores_NE)
    return near_ties(scores_NE, best_N2, experts_N2) & may_be_N1[:, 0] & ~is_left_N2[:, 0]


def _margin(scores_RS: Tensor) -> Tensor:
    """By how much scores of each row, (R, 1), may differ and be equal to somebody."""
    return NEAR_TIE * scores_RS.abs().amax(-1, keepdim=True)


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
        turn_C = _rounded(weights_NK.flatten()).sort(descending=True, stable=True).indices
    by_expert_C = turn_C[choices_NK.flatten()[turn_C].sort(stable=True).indices]
    counts_E = torch.bincount(choices_NK.flatten(), minlength=num_experts)
    starts_E = counts_E.cumsum(0) - counts_E
    slots_C = torch.empty_like(turn_C)
    slots_C[by_expert_C] = torch.arange(len(turn_C), device=turn_C.device)
    return slots_C.view_as(choices_NK) - starts_E[choices_NK]


def _rounded(weights: Tensor) -> Tensor:
    """Weights in whole `WEIGHT_STEPS`."""
    return (weights.detach() * WEIGHT_STEPS).round()
