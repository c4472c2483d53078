"""AdamW as a pair of functions over explicit state.

Rules of this file: every operation on tensors is one correctly rounded IEEE operation per element (product, sum,
quotient or root), so nothing can be contracted into a fused multiply-add and equal inputs give equal bits whatever
the number of threads and the instruction set. Nothing is divided by a number: CUDA would multiply by its reciprocal.
Work goes piece by piece through two scratch buffers: on a CPU a piece stays in cache from first operation to last.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CPU_PIECE = 2**18
_DEVICE_PIECE = 2**24  # elements per piece bound the scratch memory and do not change results


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWState:
    """What AdamW remembers: how many updates were made, and two running means per parameter, by its name."""

    step: int
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


def decayed_names(named_params: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: matrices, embeddings and kernels, not vectors.

    >>> sorted(decayed_names({"embed": torch.ones(4, 2), "norm": torch.ones(2)}))
    ['embed']
    """
    return frozenset(name for name, param in named_params.items() if param.ndim >= 2)


def init(params: Mapping[str, Tensor]) -> AdamWState:
    """The state before the first update: zeros in the shape, dtype and device of each parameter."""
    return AdamWState(
        step=0,
        exp_avg={name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()},
        exp_avg_sq={name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()},
    )


@torch.no_grad()
def update(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: AdamWState,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decayed: AbstractSet[str],
    gradient_scale: float,
) -> AdamWState:
    """Moves `params` by one step, in place, and gives back the state that follows.

    With gradient g = gradient_scale * grad, update count t = state.step + 1, and all in the dtype of the parameter:

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = (1 - learning_rate * weight_decay) * p              only if decayed
        p = p - learning_rate / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

    `state` is spent: its tensors become those of the new state. Names, shapes and dtypes are checked and
    all memory is taken before the first write, so a call that raises has changed nothing.

    Args:
        params: by name, contiguous.
        grads: the same names, shapes and dtypes; sums that `gradient_scale` turns into clipped means.
        decayed: names that weight decay applies to, for instance `decayed_names(params)`.
        gradient_scale: factor on every gradient: one over the valid tokens, times the clip.

    Raises:
        ValueError: names, shapes or dtypes disagree, or a tensor is not contiguous.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), Algorithm 2, with the learning rate
    in the place of its schedule multiplier, as in torch.optim.AdamW.

    >>> params = {"w": torch.tensor([1.0])}
    >>> state = update(params, {"w": torch.tensor([2.0])}, init(params), learning_rate=0.5, betas=(0.9, 0.99),
    ...                eps=1e-8, weight_decay=0.0, decayed=frozenset(), gradient_scale=1.0)
    >>> state.step, params["w"].tolist()
    (1, [0.5])
    """
    _check(params, grads, state)
    step = state.step + 1
    rule = _Rule(
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        gradient_scale=gradient_scale,
        step_size=learning_rate / (1.0 - betas[0] ** step),
        inverse_root=(1.0 - betas[1] ** step) ** -0.5,
    )
    scratch = _scratch(params)
    for name in sorted(params):
        if name in decayed:
            params[name].mul_(1.0 - learning_rate * weight_decay)
        tensors = (params[name], grads[name], state.exp_avg[name], state.exp_avg_sq[name])
        for pieces in zip(*(_pieces(tensor) for tensor in tensors), strict=True):
            _update_piece(*pieces, scratch=scratch, rule=rule)
    return AdamWState(step=step, exp_avg=state.exp_avg, exp_avg_sq=state.exp_avg_sq)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """The numbers of one update, bias corrections worked in."""

    beta1: float
    beta2: float
    eps: float
    gradient_scale: float
    step_size: float
    inverse_root: float


def _update_piece(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, scratch: Tensor, rule: _Rule) -> None:
    """One piece of one tensor, as vectors of equal length. Division is by tensors only: see the rules above."""
    g, x = scratch[0, : p.numel()], scratch[1, : p.numel()]
    torch.mul(grad, rule.gradient_scale, out=g)
    m.mul_(rule.beta1).add_(torch.mul(g, 1.0 - rule.beta1, out=x))
    v.mul_(rule.beta2).add_(torch.mul(g, g, out=x).mul_(1.0 - rule.beta2))
    denominator = _root(v, out=g).mul_(rule.inverse_root).add_(rule.eps)
    p.sub_(torch.mul(m, rule.step_size, out=x).div_(denominator))


def _root(v: Tensor, *, out: Tensor) -> Tensor:
    """Square roots, each rounded correctly."""
    if v.device.type != "cpu":
        return torch.sqrt(v, out=out)
    # torch asks MKL, which is one unit off in every sixth float32 and chooses its code by the make of the CPU.
    np.sqrt(v.numpy(), out=out.numpy())
    return out


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.view(-1), _piece_size(tensor.device))


def _piece_size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE


def _scratch(params: Mapping[str, Tensor]) -> Tensor:
    """(2, elements of the largest piece), uninitialised."""
    largest = max(params.values(), key=torch.Tensor.numel, default=torch.empty(0))
    return largest.new_empty((2, min(largest.numel(), _piece_size(largest.device))))


def _check(params: Mapping[str, Tensor], grads: Mapping[str, Tensor], state: AdamWState) -> None:
    for what, tensors in (("grads", grads), ("exp_avg", state.exp_avg), ("exp_avg_sq", state.exp_avg_sq)):
        if tensors.keys() != params.keys():
            raise ValueError(f"{what}: names differ: {sorted(tensors.keys() ^ params.keys())}")
    kinds = {(param.dtype, param.device) for param in params.values()}
    if len(kinds) > 1:
        raise ValueError(f"parameters of one dtype on one device are needed: {sorted(map(str, kinds))}")
    for name, param in params.items():
        for tensor in (param, grads[name], state.exp_avg[name], state.exp_avg_sq[name]):
            if (tensor.shape, tensor.dtype, tensor.device) != (param.shape, param.dtype, param.device):
                raise ValueError(
                    f"{name}: {tuple(tensor.shape)} {tensor.dtype} {tensor.device} differs from the rest"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: a contiguous tensor is needed")
