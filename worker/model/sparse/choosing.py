"""Choices of tokens among experts: which ones each token takes, and which of them find room.

N tokens of a microbatch, E experts, K choices of a token, C = N K of all.
"""

import torch
from torch import Tensor

from skein.model.sparse.routing import DropOrder

WEIGHT_STEPS = 2**16
"""Weights that are equal in so many steps from 0 to 1 are equal where choices are dropped by weight."""


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
