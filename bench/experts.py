"""Experts of a sparse model by plain torch and loops, written from the definitions of routers, for comparisons."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.sparse.experts import Experts
from skein.model.sparse.routing import DropOrder, RouterKind
from worker.model.sparse.layer import SparseMlp


class PlainExperts:
    """Experts of a model by plain torch and loops, in place of its own; knows balance losses and drops of a forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._losses: list[Tensor] = []
        self._num_choices, self._num_dropped = 0, 0
        self.coefficient = 0.0
        for module in modules:
            for layer in module.modules():
                if isinstance(layer, SparseMlp):
                    self.coefficient = layer.sizes.routing.balance_coefficient
                    layer.register_forward_hook(self._instead)

    def taken(self) -> list[Tensor]:
        """Balance losses since they were taken last, layer by layer."""
        losses, self._losses = self._losses, []
        return losses

    def drop_ratio(self) -> float | None:
        """Share of the choices that found their expert full since this was asked last."""
        num_choices, num_dropped = self._num_choices, self._num_dropped
        self._num_choices, self._num_dropped = 0, 0
        return num_dropped / num_choices if num_choices else None

    def _instead(self, layer: nn.Module, given: tuple[Tensor], _result: Tensor) -> Tensor:
        assert isinstance(layer, SparseMlp)
        x_ND = given[0].flatten(0, -2)
        match layer.sizes.routing.router:
            case RouterKind.SOFTMOE:
                y_ND = _mixed(layer, x_ND)
            case RouterKind.EXPERT_CHOICE:
                y_ND = self._taken_by_experts(layer, x_ND)
            case _:
                y_ND = self._chosen_by_tokens(layer, x_ND)
        return y_ND.view(given[0].shape)

    def _chosen_by_tokens(self, layer: SparseMlp, x_ND: Tensor) -> Tensor:
        sizes = layer.sizes
        chances_NE, choices_NK, weights_NK = chosen(layer, x_ND)
        counts_E = functional.one_hot(choices_NK, sizes.num_experts).sum((0, 1)).to(chances_NE)
        shares_E = counts_E / counts_E.sum()
        self._losses.append(sizes.num_experts * (shares_E * chances_NE.mean(0)).sum())
        y_ND = torch.zeros_like(x_ND)
        for expert, taken in enumerate(_taken(sizes, choices_NK.tolist(), weights_NK.tolist())):
            self._num_choices += int(counts_E[expert])
            self._num_dropped += int(counts_E[expert]) - len(taken)
            tokens, choices = torch.tensor(taken, dtype=torch.long).view(-1, 2).unbind(-1)
            made_RD = fed(layer, expert, x_ND[tokens])
            y_ND = y_ND.index_add(0, tokens, made_RD * weights_NK[tokens, choices, None])
        return y_ND

    def _taken_by_experts(self, layer: SparseMlp, x_ND: Tensor) -> Tensor:
        """Expert choice: every expert takes as many, so the balance loss is 1 and pulls at nothing."""
        sizes, y_ND = layer.sizes, torch.zeros_like(x_ND)
        chances_NE = (x_ND @ layer.get_parameter("gate.weight").t()).softmax(-1)
        num_taken = math.ceil(sizes.num_chosen * len(x_ND) / sizes.num_experts)
        for expert in range(sizes.num_experts):
            steps = (chances_NE[:, expert] * 2**16).round().tolist()
            best = sorted(range(len(x_ND)), key=lambda token: (-steps[token], token))
            tokens_C = torch.tensor(best[:num_taken])
            weights_C = chances_NE[tokens_C, expert]
            self._num_choices += len(tokens_C)
            y_ND = y_ND.index_add(0, tokens_C, fed(layer, expert, x_ND[tokens_C]) * weights_C[:, None])
        self._losses.append(chances_NE.new_ones(()))
        return y_ND


def chosen(layer: SparseMlp, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Chances of all experts, and each token's choices and weights, where tokens choose."""
    num_chosen, router = layer.sizes.num_chosen, layer.sizes.routing.router
    if router is RouterKind.XMOE:
        projected_NP = x_ND @ layer.get_parameter("gate.projection.weight").t()
        vectors_EP = layer.get_parameter("gate.experts.weight")
        cosines_NE = functional.cosine_similarity(projected_NP[:, None], vectors_EP[None], dim=-1)
        chances_NE = (cosines_NE / layer.sizes.routing.divisor).softmax(-1)
        weights_NK, choices_NK = chances_NE.topk(num_chosen, -1)
        return chances_NE, choices_NK, weights_NK
    scores_NE = x_ND @ layer.get_parameter("gate.weight").t()
    chances_NE = scores_NE.softmax(-1)
    best_NK, choices_NK = scores_NE.topk(num_chosen, -1)
    if router is RouterKind.GSHARD:
        return chances_NE, choices_NK, best_NK.softmax(-1)
    if router is RouterKind.SIGMOID:
        return chances_NE, choices_NK, 1 / (1 + torch.exp(-best_NK))
    weights_NK = chances_NE.gather(-1, choices_NK)
    if layer.sizes.is_normalised:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return chances_NE, choices_NK, weights_NK


def _mixed(layer: SparseMlp, x_ND: Tensor) -> Tensor:
    """Soft mixture of experts: slot by slot."""
    scores_NS = x_ND @ layer.get_parameter("gate.weight").t()
    shares_NS = scores_NS.exp() / scores_NS.exp().sum(1, keepdim=True)
    y_ND = torch.zeros_like(x_ND)
    for slot in range(scores_NS.shape[1]):
        weights_N = scores_NS[:, slot].exp() / scores_NS[:, slot].exp().sum()
        mean_D = (weights_N[:, None] * x_ND).sum(0)
        made_D = fed(layer, slot // layer.sizes.routing.num_slots, mean_D[None])[0]
        y_ND = y_ND + shares_NS[:, slot, None] * made_D
    return y_ND


def fed(layer: SparseMlp, expert: int, x_RD: Tensor) -> Tensor:
    """Rows after one expert's feed-forward."""
    gate, up, down = layer.experts[str(expert)].parameters()
    return (functional.silu(x_RD @ gate.t()) * (x_RD @ up.t())) @ down.t()


def _taken(
    sizes: Experts, choices: list[list[int]], weights: list[list[float]]
) -> list[list[tuple[int, int]]]:
    """Tokens and choices that each expert takes, in turn."""
    every = [(token, choice) for token, row in enumerate(choices) for choice in range(len(row))]
    if sizes.routing.drop is DropOrder.CHOICE_MAJOR:
        every.sort(key=lambda pair: (pair[1], pair[0]))
    elif sizes.routing.drop is DropOrder.PROBS:
        every.sort(key=lambda pair: (-round(weights[pair[0]][pair[1]] * 2**16), pair))
    most = sizes.num_chosen * len(choices) / sizes.num_experts * (sizes.routing.capacity or math.inf)
    taken: list[list[tuple[int, int]]] = [[] for _ in range(sizes.num_experts)]
    for token, choice in every:
        if len(taken[choices[token][choice]]) < most:
            taken[choices[token][choice]].append((token, choice))
    return taken
