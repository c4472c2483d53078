"""Weight gradients that are put aside: an input op keeps what they are made of, a weight op adds them all.

Rules of this file
- A function with parameters asks its stage's tray for their gradients, and gives back what the tray gives.
- While the tray is open nothing reaches a parameter's gradient, not even a norm's: all of a microbatch is put aside, so
  that whoever dies between the two ops leaves no sum with half a contribution.
- A gradient is made and then added, as autograd does it: the sums of both ways are equal bit for bit.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Make = Callable[..., Tensor]
"""A parameter's gradient, in its own dtype, from the parameter and what was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Gradient of one parameter that is still to be made of `operands`."""

    parameter: Tensor
    make: Make
    operands: tuple[Tensor, ...]


class Tray:
    """Place where the functions of one stage put weight gradients aside while an input op runs."""

    def __init__(self) -> None:
        self._pending: deque[Pending] | None = None

    @contextmanager
    def opened(self) -> Iterator[deque[Pending]]:
        """Gradients that are put aside from now on, until the end of the block."""
        assert self._pending is None, "an input op runs within another one"
        self._pending = pending = deque[Pending]()
        try:
            yield pending
        finally:
            self._pending = None

    def gradient(self, parameter: Tensor, make: Make, *operands: Tensor) -> Tensor | None:
        """The gradient of `parameter`; None if it is put aside."""
        if self._pending is None:
            return make(parameter, *operands)
        self._pending.append(Pending(parameter=parameter, make=make, operands=operands))
        return None


@torch.no_grad()
def add_up(pending: deque[Pending]) -> None:
    """Adds every gradient to its parameter's `grad`, and lets go of what each was made of.

    Those of a parameter that is used twice are added to each other first.
    """
    left = Counter(id(one.parameter) for one in pending)
    sums: dict[int, Tensor] = {}
    while pending:
        one = pending.popleft()
        place = id(one.parameter)
        made = one.make(one.parameter, *one.operands)
        if place in sums:
            made = sums.pop(place) + made
        left[place] -= 1
        if left[place]:
            sums[place] = made
        elif one.parameter.grad is None:
            one.parameter.grad = made
        else:
            one.parameter.grad += made


def held_bytes(pending: Iterable[Pending]) -> int:
    """Bytes that are put aside; what several matrices share counts once."""
    storages = (x.untyped_storage() for one in pending for x in one.operands)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
