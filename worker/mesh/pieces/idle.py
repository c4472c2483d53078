"""Gradients of which each device has a part, summed while exchanges of rows leave the lane between devices idle.

Rules of this file
- The devices' accumulators add up to the gradient, before a sum and after it: a sum is the first device's, and the
  others have zero in its place. So whoever adds them up later need not know what was summed already.
- All devices sum the same elements at the same place, whatever is in them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class ArrivingSum(Protocol):
    """A sum that is under way."""

    def wait(self) -> Tensor: ...


class GradientGroup(Protocol):
    """Devices that sum beside what they compute."""

    @property
    def index(self) -> int: ...

    def begin_sum(self, tensor: Tensor) -> ArrivingSum: ...


@dataclass(frozen=True, slots=True)
class _Elements:
    """Some elements of a parameter's accumulator."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def num(self) -> int:
        return self.stop - self.start

    @property
    def sums(self) -> Tensor:
        """A view of them."""
        assert self.parameter.grad is not None
        return self.parameter.grad.view(-1)[self.start : self.stop]


class IdleSums:
    """Sums of a stage's gradients beside its layers of experts.

    Args:
        group: the devices.
        layers: parameters of which each has a part of the gradient, by the layers of experts, the last one first:
            those whose gradients are made before the layer's way back, and after that of the layer before.
    """

    def __init__(self, group: GradientGroup, layers: Sequence[Sequence[nn.Parameter]]) -> None:
        self._group = group
        self._layers = layers
        self._num_layers = 0
        self._waiting: deque[_Elements] = deque()
        self._under_way: list[tuple[list[_Elements], ArrivingSum]] = []

    @torch.no_grad()
    def begin(self, num_elements: int) -> None:
        """Begin to sum up to so many elements, beside the next layer on the way back."""
        self._waiting.extend(_Elements(x, 0, x.numel()) for x in self._layers[self._num_layers])
        self._num_layers += 1
        taken = self._taken(num_elements)
        if not taken:
            return
        whole = torch.cat([x.sums for x in taken])
        for some in taken:
            some.sums.zero_()
        self._under_way.append((taken, self._group.begin_sum(whole)))

    @torch.no_grad()
    def finish(self) -> None:
        """End all that was begun; what had no room stays where it is, each device's own part."""
        for taken, arriving in self._under_way:
            total = arriving.wait()
            if self._group.index == 0:
                for some, part in zip(taken, torch.split(total, [x.num for x in taken]), strict=True):
                    some.sums.add_(part)
        self._under_way.clear()
        self._waiting.clear()
        self._num_layers = 0

    def _taken(self, num_elements: int) -> list[_Elements]:
        """The first of what waits, up to so many elements."""
        taken = []
        while self._waiting and num_elements > 0:
            first = self._waiting.popleft()
            stop = min(first.stop, first.start + num_elements)
            taken.append(_Elements(first.parameter, first.start, stop))
            if stop < first.stop:
                self._waiting.appendleft(_Elements(first.parameter, stop, first.stop))
            num_elements -= stop - first.start
        return taken
