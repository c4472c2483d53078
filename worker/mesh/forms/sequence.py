"""Sequence parallelism: norms and residuals of a part of the tokens on each device, of all heads' tokens nowhere.

Each half of a block is entered by gathering all tokens, and left by scattering the sum: each device has the sum of its
part of the tokens. Backward it is the reverse. So a block costs two gathers and two scatters each way, which carry as
many elements as the two sums that they stand for.

All parts are equally long, and whoever gives a sequence has padded it: what comes after all tokens is seen by none.

B batch, T tokens, D features, N devices, P tokens of a part.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, Section 4.2.2.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from worker.mesh.share import Share, SumGroup


class SequenceShare(Share):
    """Share of one of several devices, each with a part of the tokens between blocks' halves."""

    def __init__(self, group: SumGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(group, dtype)
        self._members = group

    @property
    def num_parts(self) -> int:
        return self.size

    def enter(self, x: Tensor) -> Tensor:
        """All tokens, of which each device has `x`; its gradient is its part of the sum of theirs."""
        return _enter(x, self)

    def leave(self, y: Tensor) -> Tensor:
        """Part of the sum of what all devices give, each for all tokens."""
        return _leave(y, self)

    def parts(self, x: Tensor) -> Tensor:
        """Part of `x`, which all devices have equal, and whose gradient they all want."""
        return _parts(x, self)

    def joined(self, x: Tensor) -> Tensor:
        """All tokens, whose gradient all devices have equal."""
        return _joined(x, self)

    def gather(self, part_BPD: Tensor) -> Tensor:
        """Tokens of all devices, in a new tensor."""
        whole_NBPD = self._members.gather(part_BPD.contiguous()[None])
        return whole_NBPD.transpose(0, 1).flatten(1, 2)

    def scatter(self, whole_BTD: Tensor) -> Tensor:
        """This device's part of the sum of all devices' tensors, in the dtype of sums."""
        by_part_NBPD = self._by_part(whole_BTD).transpose(0, 1)
        ordered_NBPD = by_part_NBPD.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return self._members.scatter_sum(ordered_NBPD)[0]

    def _by_part(self, whole_BTD: Tensor) -> Tensor:
        num_samples, num_tokens, num_features = whole_BTD.shape
        return whole_BTD.reshape(num_samples, self.size, num_tokens // self.size, num_features)

    def own(self, whole_BTD: Tensor) -> Tensor:
        """This device's part of a tensor, in a new one."""
        return self._by_part(whole_BTD)[:, self._members.index].clone()


class _Context(FunctionCtx):
    share: SequenceShare
    dtype: torch.dtype


class _Enter(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, share: SequenceShare) -> Tensor:
        ctx.share = share
        return share.gather(x)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.scatter(grad).to(grad.dtype), None


class _Leave(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, y: Tensor, share: SequenceShare) -> Tensor:
        ctx.share, ctx.dtype = share, y.dtype
        return share.scatter(y)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gather(grad.to(ctx.dtype)), None


class _Parts(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, share: SequenceShare) -> Tensor:
        ctx.share = share
        return share.own(x)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gather(grad), None


class _Joined(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, share: SequenceShare) -> Tensor:
        ctx.share = share
        return share.gather(x)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.own(grad), None


# torch leaves `apply` without types.
_enter: Callable[[Tensor, SequenceShare], Tensor] = _Enter.apply
_leave: Callable[[Tensor, SequenceShare], Tensor] = _Leave.apply
_parts: Callable[[Tensor, SequenceShare], Tensor] = _Parts.apply
_joined: Callable[[Tensor, SequenceShare], Tensor] = _Joined.apply
