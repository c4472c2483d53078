"""Tokens of a microbatch in parts over the devices of a mesh: all are scored everywhere, and each has its own.

- Between halves of blocks all devices have all tokens: each goes on with some of them, in a row, and what each makes of
  its own is gathered: forward at the exit, gradients at the entry.
- Or each has a part of every sequence anyway: it goes on with that, and scores alone are gathered. What pads a
  sequence at its end is no token: nothing counts it, and it leaves as zeros.

Nothing is summed, so nothing is rounded, and each row crosses once where a sum would send it there and back.

B batch, T tokens, N = B T of all, O of this device, P of a part with what pads it, D features, E numbers of a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from worker.mesh.passing import as_it_is, passed
from worker.mesh.share import Share


class TokenShare(ABC):
    """Part of a microbatch's tokens that a device goes on with; all are counted sample by sample."""

    def __init__(self, share: Share, num_samples: int, num_tokens: int) -> None:
        self.share = share
        self._sizes = num_samples, num_tokens

    @property
    def num_all(self) -> int:
        """Tokens of all devices."""
        num_samples, num_tokens = self._sizes
        return num_samples * num_tokens

    @abstractmethod
    def devices(self) -> Tensor:
        """Device of each token, (N,)."""

    @abstractmethod
    def own(self, x: Tensor) -> Tensor:
        """Rows of this device's tokens, of those of all (N, ...)."""

    @abstractmethod
    def entered(self, x: Tensor, score: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """This device's tokens (O, D), and the scores of all tokens (N, E), of which its own get a gradient here.

        Args:
            x: activation as it is between blocks' halves.
            score: scores of tokens (rows, D), each of its own row.
        """

    @abstractmethod
    def left(self, y_OD: Tensor) -> Tensor:
        """An activation as it is between blocks' halves, of what each device has made of its own tokens."""


class TokensInRow(TokenShare):
    """Share of tokens that all devices have: equally many in a row each, but for the last devices."""

    @property
    def _each(self) -> int:
        return -(-self.num_all // self.share.size)

    def devices(self) -> Tensor:
        return torch.arange(self.num_all) // self._each

    def own(self, x: Tensor) -> Tensor:
        return x[self.share.index * self._each :][: self._each]

    def entered(self, x: Tensor, score: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        x_ND = passed(x.flatten(0, 1), as_it_is, lambda grad_ND: self._gathered(self.own(grad_ND)))
        return self.own(x_ND), passed(score(x_ND), as_it_is, self._kept)

    def left(self, y_OD: Tensor) -> Tensor:
        y_ND = passed(y_OD, self._gathered, self.own)
        return y_ND.view(*self._sizes, y_ND.shape[-1])

    def _gathered(self, own: Tensor) -> Tensor:
        padded = functional.pad(own, (0, 0, 0, self._each - len(own)))
        return self.share.rows_of_all(padded)[: self.num_all]

    def _kept(self, grad_NE: Tensor) -> Tensor:
        """The gradient of this device's tokens, and zeros."""
        kept_NE = torch.zeros_like(grad_NE)
        self.own(kept_NE).copy_(self.own(grad_NE))
        return kept_NE


class TokensOfSequence(TokenShare):
    """Part of each sequence that this device has between blocks' halves."""

    @property
    def _each(self) -> int:
        return -(-self._sizes[1] // self.share.size)

    @property
    def _num_own(self) -> int:
        """Tokens of this device's part of a sequence, without what pads it."""
        return max(0, min(self._each, self._sizes[1] - self.share.index * self._each))

    def devices(self) -> Tensor:
        return (torch.arange(self._sizes[1]) // self._each).repeat(self._sizes[0])

    def own(self, x: Tensor) -> Tensor:
        first = self.share.index * self._each
        by_sample = x.reshape(*self._sizes, *x.shape[1:])
        return by_sample[:, first : first + self._num_own].flatten(0, 1)

    def entered(self, x: Tensor, score: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        own_OD = x[:, : self._num_own].flatten(0, 1)
        return own_OD, passed(score(own_OD), self._gathered, self.own)

    def left(self, y_OD: Tensor) -> Tensor:
        return self._padded(y_OD)

    def _padded(self, own: Tensor) -> Tensor:
        by_sample = own.view(self._sizes[0], self._num_own, own.shape[-1])
        return functional.pad(by_sample, (0, 0, 0, self._each - self._num_own))

    def _gathered(self, own: Tensor) -> Tensor:
        num_samples, num_tokens = self._sizes
        parts = self.share.rows_of_all(self._padded(own))
        by_device = parts.view(self.share.size, num_samples, self._each, parts.shape[-1])
        return by_device.transpose(0, 1).flatten(1, 2)[:, :num_tokens].flatten(0, 1)


def tokens_of(share: Share, x: Tensor) -> TokenShare:
    """Parts of the tokens of an activation, as it is between blocks' halves.

    >>> from worker.mesh.share import WHOLE
    >>> tokens_of(WHOLE, torch.zeros(2, 3, 8)).devices()
    tensor([0, 0, 0, 0, 0, 0])
    """
    if share.num_parts == 1:
        return TokensInRow(share, *x.shape[:2])
    return TokensOfSequence(share, len(x), share.num_tokens)
