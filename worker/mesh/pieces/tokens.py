"""Tokens of a microbatch in parts over the devices of a mesh: all have them, and each goes on with its own.

What each device makes of its tokens is gathered: forward at the exit, gradients at the entry. Nothing is summed, so
nothing is rounded, and each row crosses once where a sum would send it there and back.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

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
        return _enter(x_ND, self)

    def keep(self, x_NE: Tensor) -> Tensor:
        """The same numbers of all tokens, of which only those of this device get a gradient here."""
        return _keep(x_NE, self)

    def leave(self, y_ND: Tensor, num_tokens: int) -> Tensor:
        """Rows that all devices have made of their own tokens."""
        return _leave(y_ND, self, num_tokens)

    def gathered(self, own: Tensor, num_tokens: int) -> Tensor:
        """Rows of all tokens, of those of each device."""
        each = self.starts(num_tokens)[1]
        return self._share.rows_of_all(functional.pad(own, (0, 0, 0, each - len(own))))[:num_tokens]


class _Context(FunctionCtx):
    tokens: TokenShare


class _Enter(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x_ND: Tensor, tokens: TokenShare) -> Tensor:
        ctx.tokens = tokens
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx: _Context, grad_ND: Tensor) -> tuple[Tensor, None]:
        num_tokens = len(grad_ND)
        return ctx.tokens.gathered(grad_ND[ctx.tokens.own(num_tokens)], num_tokens), None


class _Keep(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x_NE: Tensor, tokens: TokenShare) -> Tensor:
        ctx.tokens = tokens
        return x_NE.view_as(x_NE)

    @staticmethod
    def backward(ctx: _Context, grad_NE: Tensor) -> tuple[Tensor, None]:
        own = ctx.tokens.own(len(grad_NE))
        kept_NE = torch.zeros_like(grad_NE)
        kept_NE[own] = grad_NE[own]
        return kept_NE, None


class _Leave(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, y_ND: Tensor, tokens: TokenShare, num_tokens: int) -> Tensor:
        ctx.tokens = tokens
        return tokens.gathered(y_ND, num_tokens)

    @staticmethod
    def backward(ctx: _Context, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        return grad_ND[ctx.tokens.own(len(grad_ND))], None, None


# torch leaves `apply` without types.
_enter: Callable[[Tensor, TokenShare], Tensor] = _Enter.apply
_keep: Callable[[Tensor, TokenShare], Tensor] = _Keep.apply
_leave: Callable[[Tensor, TokenShare, int], Tensor] = _Leave.apply
