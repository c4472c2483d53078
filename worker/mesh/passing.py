"""A function of autograd by which tensors pass between the devices of a mesh, and their gradients back."""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

_OneWay = Callable[[Tensor], Tensor]


class _Context(FunctionCtx):
    back: _OneWay


class _Passed(Function):
    """Keeps nothing."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, there: _OneWay, back: _OneWay) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


# torch leaves `apply` without types.
passed: Callable[[Tensor, _OneWay, _OneWay], Tensor] = _Passed.apply
"""Result of a function of a tensor; another makes the tensor's gradient of the result's. Neither may keep either."""


def as_it_is(x: Tensor) -> Tensor:
    """The same numbers, as a result of their own."""
    return x.view_as(x)
