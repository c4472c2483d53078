"""The few operations whose gradients are written by hand, to keep less between forward and backward.

Where they are `mapped`, torch differentiates them itself. Its transforms take none of these functions, and in the form
that they would take a function's signature is looked up at every call, which all other jobs would pay for.

B batch, T tokens, H heads, F features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from skein.model.shape import Llama3Rope
from worker.model.pending import Tray


class _Saved(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    tray: Tray
    needs_input_grad: tuple[bool, ...]
    grads: Sequence[Tensor]


class _RmsNorm(Function):
    """Keeps the input and one scale per row; the normalised input is computed anew."""

    @staticmethod
    def forward(ctx: _Saved, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, tray: Tray) -> Tensor:
        wide = x.to(weight.dtype)
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        ctx.tray = tray
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        unit = x.to(weight.dtype) * scale
        # Made now, for it is small, and what it is made of is not.
        grad_weight = ctx.tray.gradient(weight, as_made, (grad * unit).flatten(0, -2).sum(0))
        grad_unit = grad * weight
        along = torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1) / x.shape[-1]
        return grad_unit.sub_(unit.mul_(along)).mul_(scale).to(x.dtype), grad_weight, None, None, None


class _Swiglu(Function):
    """Keeps the two inputs; the gate's activation is computed anew."""

    @staticmethod
    def forward(ctx: _Saved, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, functional.silu(gate).mul_(grad)


class _Linear(Function):
    """Casts the weight in both passes, where autocast would keep a copy for every microbatch in flight."""

    @staticmethod
    def forward(ctx: _Saved, x: Tensor, weight: Tensor, tray: Tray) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tray = tray
        return functional.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_weight = ctx.tray.gradient(weight, matrix_gradient, grad, x)
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, None


class _Embedding(Function):
    """Keeps the tokens; rows of the matrix that no token takes have a gradient of 0."""

    @staticmethod
    def forward(ctx: _Saved, weight: Tensor, tokens: Tensor, tray: Tray) -> Tensor:
        ctx.save_for_backward(weight, tokens)
        ctx.tray = tray
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor | None, None, None]:
        weight, tokens = ctx.saved_tensors
        return ctx.tray.gradient(weight, _rows_added, grad, tokens), None, None


class _Biased(Function):
    """Adds a bias in the dtype of what it is added to."""

    @staticmethod
    def forward(ctx: _Saved, x: Tensor, bias: Tensor, tray: Tray) -> Tensor:
        ctx.save_for_backward(bias)
        ctx.tray = tray
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (bias,) = ctx.saved_tensors
        return grad, ctx.tray.gradient(bias, _rows_summed, grad), None


class _GoneBack(Function):
    """A number whose gradient is handed on as those that were given."""

    @staticmethod
    def forward(ctx: _Saved, grads: Sequence[Tensor], *made: Tensor) -> Tensor:
        ctx.grads = grads
        return made[0].new_zeros(())

    @staticmethod
    def backward(ctx: _Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        del grad
        return None, *ctx.grads


def as_made(_parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that was made at once, for it is small, and what it is made of is not."""
    return gradient


def matrix_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of a matrix that a linear function multiplies `x` by, whose result has the gradient `grad`."""
    return (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)


def _rows_added(weight: Tensor, grad: Tensor, tokens: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten.embedding_dense_backward(grad, tokens, weight.shape[0], -1, False)
    return made


def _rows_summed(bias: Tensor, grad: Tensor) -> Tensor:
    return grad.sum(tuple(range(grad.dim() - 1))).to(bias.dtype)


_is_mapped = ContextVar("is_mapped", default=False)


@contextmanager
def mapped() -> Iterator[None]:
    """Have the operations of this file be such as `torch.func` can transform, until the end of the block.

    Results are the same, and gradients but for the order of sums.
    """
    before = _is_mapped.set(True)
    try:
        yield
    finally:
        _is_mapped.reset(before)


# torch leaves `apply` without types.
_rms_norm: Callable[[Tensor, Tensor, float, torch.dtype, Tray], Tensor] = _RmsNorm.apply
_swiglu: Callable[[Tensor, Tensor], Tensor] = _Swiglu.apply
_linear: Callable[[Tensor, Tensor, Tray], Tensor] = _Linear.apply
_embedding: Callable[[Tensor, Tensor, Tray], Tensor] = _Embedding.apply
_biased: Callable[[Tensor, Tensor, Tray], Tensor] = _Biased.apply
_gone_back: Callable[..., Tensor] = _GoneBack.apply


def go_back(made: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Adds to what `made` was made of the gradients that follow from these of `made`.

    As `torch.autograd.backward(made, grads)`, which imports a computer algebra system the first time: 34 MiB, 1.7 s.
    """
    _gone_back(grads, *made).backward()  # type: ignore[no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, tray: Tray) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dim, computed in the dtype of `weight`, given in `dtype`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, Eq. 4, with Llama's eps.
    """
    if _is_mapped.get():
        wide = x.to(weight.dtype)
        return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight).to(dtype)
    return _rms_norm(x, weight, eps, dtype, tray)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`. Source: Shazeer, GLU Variants Improve Transformer, 2020, Eq. 5."""
    return functional.silu(gate) * up if _is_mapped.get() else _swiglu(gate, up)


def linear(x: Tensor, weight: Tensor, tray: Tray) -> Tensor:
    """`x @ weight.T` in the dtype of `x`; the weight's gradient comes in the weight's own dtype."""
    return functional.linear(x, weight.to(x.dtype)) if _is_mapped.get() else _linear(x, weight, tray)


def embedding(tokens: Tensor, weight: Tensor, tray: Tray) -> Tensor:
    """Row of `weight` for each token."""
    return functional.embedding(tokens, weight) if _is_mapped.get() else _embedding(weight, tokens, tray)


def biased(x: Tensor, bias: Tensor, tray: Tray) -> Tensor:
    """`x + bias` in the dtype of `x`; the bias's gradient comes in the bias's own dtype."""
    return x + bias.to(x.dtype) if _is_mapped.get() else _biased(x, bias, tray)


def rotary_tables(
    num_tokens: int,
    num_features: int,
    theta: float,
    dtype: torch.dtype,
    *,
    scaling: Llama3Rope | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position, both (num_tokens, 1, num_features), for `rotate`.

    Computed in `dtype` from the start, as Hugging Face does in float32, so that logits agree at late positions.

    Source: Su et al., RoFormer, 2021, Eq. 34, with the pairs (i, i + num_features / 2) of Hugging Face.
    """
    exponents = torch.arange(0, num_features, 2, dtype=dtype, device="cpu") / num_features
    frequencies_F = 1.0 / theta**exponents
    if scaling is not None:
        frequencies_F = _stretched(frequencies_F, scaling)
    angles_TF = torch.outer(torch.arange(num_tokens, dtype=dtype, device="cpu"), frequencies_F)
    cos, sin = angles_TF.cos(), angles_TF.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def _stretched(frequencies_F: Tensor, scaling: Llama3Rope) -> Tensor:
    """Frequencies (radians per token) of which slow ones are divided by the factor, and those between in part.

    Source: The Llama 3 Herd of Models, 2024, and its published code: the share kept rises linearly, from 0 to 1, in the
    number of waves that the original positions hold, between the low and the high factor.
    """
    waves_F = scaling.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((waves_F - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies_F * kept_F + frequencies_F / scaling.factor * (1.0 - kept_F)


def rotate(x_BTHF: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of features by its position's angle; sums in the tables' dtype, gives that of `x`."""
    turned = x_BTHF * cos + torch.roll(x_BTHF, x_BTHF.shape[-1] // 2, -1) * sin
    return turned.to(x_BTHF.dtype)


def takes_groups(x: Tensor) -> bool:
    """Whether torch has an attention kernel for grouped heads of such numbers that keeps no scores.

    CUDA's has none above two bytes: torch would fall back to plain products, with memory in the square of the tokens.
    """
    return not x.is_cuda or x.dtype.itemsize <= 2


def attend(q_BHTF: Tensor, k_BHTF: Tensor, v_BHTF: Tensor, *, takes_groups: bool) -> Tensor:
    """Causal attention; several query heads in a row may share a head of `k` and `v`.

    Source: Ainslie et al., GQA, 2023, Section 2.2.
    """
    group = q_BHTF.shape[1] // k_BHTF.shape[1]
    if group > 1 and not takes_groups:
        k_BHTF, v_BHTF = (x.repeat_interleave(group, 1) for x in (k_BHTF, v_BHTF))
    is_grouped = group > 1 and takes_groups
    return functional.scaled_dot_product_attention(
        q_BHTF, k_BHTF, v_BHTF, is_causal=True, enable_gqa=is_grouped
    )
