"""Junctions: routers of a stage, or its dropout, and the op that runs them meet there, past everything between them.

N tokens of a microbatch, E experts, K choices of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from numpy.random import Generator
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from skein.model.sparse.choices import Choices
from skein.protocol.messages.reports import Balance
from skein.rng import stream


@dataclass(slots=True)
class RoutedMicrobatch:
    """A microbatch on its way through a stage: how many of its tokens have a label, and what routers tell of it."""

    num_valid: int | None
    """None: outside of training, where nothing is told."""
    losses: list[float]
    """Balance loss of each layer."""
    num_choices: int = 0
    num_dropped: int = 0
    """Choices of all layers that found their expert full."""
    counts: list[tuple[int, ...]] = field(default_factory=list)
    """Choices of each expert, layer by layer, those that are dropped too."""
    luck: int | Tensor | None = None
    """Seed of what routers draw, of the microbatch whoever routes it, or of what is dropped of its first sample;
    None: nothing is drawn."""
    told: Tensor | None = None
    """Choices of all layers as they were made elsewhere, which hold; None: each layer makes its own."""
    made: list[Tensor] = field(default_factory=list)
    """Choices of each layer, as they travel."""

    @property
    def choices(self) -> Tensor | None:
        """Choices of all layers, in a tensor; None: no layer has made any."""
        return torch.stack(self.made) if self.made else None

    @property
    def balance(self) -> Balance | None:
        """Balance of all layers together; None: no layer has told anything."""
        if self.num_valid is None or not self.losses:
            return None
        return Balance(
            loss_sum=self.num_valid * sum(self.losses),
            num_tokens=self.num_valid * len(self.losses),
            num_choices=self.num_choices,
            num_dropped=self.num_dropped,
        )


class Junction:
    """Place where the routers of one stage find the microbatch that goes through them.

    Args:
        first_layer: number of the stage's first layer of experts among those of the model.
    """

    def __init__(self, first_layer: int = 0) -> None:
        self._first_layer = first_layer
        self._visit: RoutedMicrobatch | None = None

    @property
    def microbatch(self) -> RoutedMicrobatch | None:
        """The one that is on its way now."""
        return self._visit

    @contextmanager
    def visited(
        self, num_valid: int | None, told: Tensor | None = None, luck: int | Tensor | None = None
    ) -> Iterator[RoutedMicrobatch]:
        """Visit of a microbatch with so many valid tokens until the end of the block; None: outside of training.

        `told` are the choices of a visit before, elsewhere, which this one repeats; `luck` is what is drawn by.
        """
        assert self._visit is None, "a forward runs within another one"
        self._visit = RoutedMicrobatch(num_valid=num_valid, losses=[], told=told, luck=luck)
        try:
            yield self._visit
        finally:
            self._visit = None

    @property
    def is_training(self) -> bool:
        """Whether what goes through the stage now trains it."""
        return self._visit is not None and self._visit.num_valid is not None

    @property
    def luck(self) -> int | Tensor | None:
        """Seed of what is drawn for the microbatch that is on its way; None: nothing is."""
        return None if self._visit is None else self._visit.luck

    def drawn(self, like_NE: Tensor) -> Tensor:
        """Standard normal numbers for a layer's scores: of a microbatch and layer the same, wherever they are drawn."""
        return torch.from_numpy(self._stream().standard_normal(like_NE.shape)).to(like_NE)

    def evenly_drawn(self, num_tokens: int) -> Tensor:
        """Numbers above 0 and at most 1 in float64, one of each token of a layer: likewise the same everywhere."""
        return 1 - torch.from_numpy(self._stream("second").random(num_tokens))

    def _stream(self, *names: str) -> Generator:
        """Stream of numbers for a layer of the microbatch, which has not settled its choices yet."""
        visit = self._visit
        assert visit is not None, "chance belongs to training"
        assert isinstance(visit.luck, int), "chance without a seed"
        return stream(visit.luck, self._first_layer + len(visit.made), *names)

    def settled(self, choices: Tensor, are_near: Callable[[Tensor], Tensor], form: Choices) -> Tensor:
        """Choices of a layer that hold: those that it makes, unless it was told others that are as good.

        Whoever tells may lie: choices that no make of worker comes to by these scores are not taken.

        Args:
            choices: a row for each token, or for each expert that chooses.
            are_near: which rows of others are as good, as a mask.
        """
        visit = self._visit
        if visit is None or visit.num_valid is None:
            return choices
        if visit.told is not None:
            told = visit.told[len(visit.made)].to(choices)
            choices = torch.where(are_near(told).unsqueeze(-1), told, choices)
        visit.made.append(choices.to(torch.uint8 if form.is_narrow else torch.int32))
        return choices

    def dropped(self, num_dropped: int) -> None:
        """So many of a layer's choices found their expert full."""
        assert self._visit is not None, "choices are dropped in training alone"
        self._visit.num_dropped += num_dropped

    def weighed(self, chances_NE: Tensor, counts_E: Tensor, coefficient: float) -> Tensor:
        """The same chances, whose gradient has that of the balance loss in it from now on.

        The loss of a layer is E times the sum, over experts, of the share of all choices that went to one and its mean
        chance; 1 where all have equally many. Only chances have a gradient: that of the loss, times `coefficient` and
        the valid tokens.

        Args:
            chances_NE: of each token's experts, in the dtype of parameters.
            counts_E: choices of each expert, those that are dropped too.
            coefficient: what the loss counts per valid token.

        Source: Fedus et al., Switch Transformers, 2021, Eq. 4 to 6, for several choices of a token divided by K.
        """
        visit = self._visit
        if visit is None or visit.num_valid is None:
            return chances_NE
        num_tokens, num_experts = chances_NE.shape
        num_choices = int(counts_E.sum())
        shares_E = counts_E.to(chances_NE) * (num_experts / num_choices)
        visit.num_choices += num_choices
        visit.counts.append(tuple(counts_E.tolist()))
        visit.losses.append(float(shares_E @ chances_NE.detach().mean(0)))
        factor = coefficient * visit.num_valid / num_tokens
        return _pulled(chances_NE, shares_E * factor) if factor else chances_NE


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]


class _Pulled(Function):
    """Keeps what it adds to the gradient of every token: a number for each expert."""

    @staticmethod
    def forward(ctx: _Context, chances_NE: Tensor, pull_E: Tensor) -> Tensor:
        ctx.save_for_backward(pull_E)
        return chances_NE.view_as(chances_NE)

    @staticmethod
    def backward(ctx: _Context, grad_NE: Tensor) -> tuple[Tensor, None]:
        (pull_E,) = ctx.saved_tensors
        return grad_NE + pull_E, None


# torch leaves `apply` without types.
_pulled: Callable[[Tensor, Tensor], Tensor] = _Pulled.apply
