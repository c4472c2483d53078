"""Tokens of a microbatch in parts over the devices of a mesh: all have them, and each goes on with its own.

What each device makes of its tokens is gathered: forward at the exit, gradients at the entry. Nothing is summed, so
nothing is rounded, and each row crosses once where a sum would send it there and back.
"""

import torch
from torch import Tensor
from torch.nn import functional

from worker.mesh.passing import as_it_is, passed
from worker.mesh.share import Share


class TokenShare:
    """Part of a microbatch's tokens that a device goes on with."""

    def __init__(self, share: Share) -> None:
        self._share = share

    def starts(self, num_tokens: int) -> tuple[int, ...]:
        """First token of each device, and the end: all have equally many, but for the last ones.

        >>> from worker.mesh.share import WHOLE
        >>> TokenShare(WHOLE).starts(5)
        (0, 5)
        """
        size = self._share.size
        each = -(-num_tokens // size)
        return tuple(min(num_tokens, index * each) for index in range(size + 1))

    def own(self, num_tokens: int) -> slice:
        """Tokens of this device."""
        starts = self.starts(num_tokens)
        return slice(starts[self._share.index], starts[self._share.index + 1])

    def enter(self, x_ND: Tensor) -> Tensor:
        """All tokens; each gets the gradient that its own device has for it."""
        return passed(x_ND, as_it_is, lambda grad_ND: self.gathered(self._part(grad_ND), len(grad_ND)))

    def keep(self, x_NE: Tensor) -> Tensor:
        """The same numbers of all tokens, of which only those of this device get a gradient here."""
        return passed(x_NE, as_it_is, self._kept)

    def leave(self, y_ND: Tensor, num_tokens: int) -> Tensor:
        """Rows that all devices have made of their own tokens."""
        return passed(y_ND, lambda own_ND: self.gathered(own_ND, num_tokens), self._part)

    def gathered(self, own: Tensor, num_tokens: int) -> Tensor:
        """Rows of all tokens, of those of each device."""
        each = self.starts(num_tokens)[1]
        return self._share.rows_of_all(functional.pad(own, (0, 0, 0, each - len(own))))[:num_tokens]

    def _part(self, x_ND: Tensor) -> Tensor:
        """Rows of this device's tokens."""
        return x_ND[self.own(len(x_ND))]

    def _kept(self, grad_NE: Tensor) -> Tensor:
        """The gradient of this device's tokens, and zeros."""
        own, kept_NE = self.own(len(grad_NE)), torch.zeros_like(grad_NE)
        kept_NE[own] = grad_NE[own]
        return kept_NE
