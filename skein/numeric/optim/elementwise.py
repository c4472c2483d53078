"""Parts that all optimizers are made of: pieces, scratch memory, checks, and the few operations they share.

Rules of the optimizers
- Every operation on tensors is one correctly rounded IEEE operation per element (product, sum, quotient or root), so
  nothing can be contracted into a fused multiply-add and equal inputs give equal bits whatever the number of threads
  and the instruction set. Nothing is divided by a number: CUDA would multiply by its reciprocal.
- Sums over a tensor are made of such operations too, in an order that its length alone fixes.
- Work goes piece by piece through a few scratch buffers: on a CPU a piece stays in cache from first operation to last.
- All is checked, and all memory taken, before the first write.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from skein.numeric.walker import Slot, Tensors, Walker

_ROW = 2**12
_CPU_PIECE = 2**18
_DEVICE_PIECE = 2**24  # elements per piece bound the scratch memory and do not change results


def zeros_like(params: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> dict[str, Tensors]:
    """Zeros in shape, dtype and device of each parameter, for each slot."""
    return {
        slot: {name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()}
        for slot in slots
    }


def check_update(walker: Walker, grads: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
    """Returns if gradients and the state in `slots` are in names, shapes, dtype and device as the parameters.

    Raises:
        ValueError: they are not, or a tensor is not contiguous.
    """
    params = walker.params
    beside = {"grads": grads} | {slot: walker.state.get(slot, {}) for slot in slots}
    for what, tensors in beside.items():
        if tensors.keys() != params.keys():
            raise ValueError(f"{what}: names differ: {sorted(tensors.keys() ^ params.keys())}")
    kinds = {(param.dtype, param.device) for param in params.values()}
    if len(kinds) > 1:
        raise ValueError(f"parameters of one dtype on one device are needed: {sorted(map(str, kinds))}")
    for name, param in params.items():
        for tensor in (param, *(tensors[name] for tensors in beside.values())):
            if (tensor.shape, tensor.dtype, tensor.device) != (param.shape, param.dtype, param.device):
                raise ValueError(
                    f"{name}: {tuple(tensor.shape)} {tensor.dtype} {tensor.device} differs from the rest"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: a contiguous tensor is needed")


# --- pieces ---


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape as vectors, side by side, a piece at a time."""
    size = _piece_size(tensors[0].device)
    return zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)


def scratch_rows(params: Mapping[str, Tensor], *, num_rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """(num_rows, elements of the largest piece), uninitialised, by default in the dtype of the parameters."""
    largest = max(params.values(), key=torch.Tensor.numel, default=torch.empty(0))
    size = min(largest.numel(), _piece_size(largest.device))
    return largest.new_empty((num_rows, size), dtype=dtype or largest.dtype)


def _piece_size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE


# --- operations on pieces ---


def decayed_gradient(
    grad: Tensor, p: Tensor, *, scale: float, decay: float, rows: tuple[Tensor, Tensor]
) -> Tensor:
    """g = scale * grad + decay * p, in the first of `rows`."""
    g, x = rows
    return torch.mul(grad, scale, out=g).add_(torch.mul(p, decay, out=x))


def average_moments(
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    betas: tuple[float, float],
    gradient_scale: float,
    rows: tuple[Tensor, Tensor],
) -> None:
    """m = beta1 * m + (1 - beta1) * g and v = beta2 * v + (1 - beta2) * g * g, in place, g = gradient_scale * grad."""
    g, x = rows
    torch.mul(grad, gradient_scale, out=g)
    m.mul_(betas[0]).add_(torch.mul(g, 1.0 - betas[0], out=x))
    v.mul_(betas[1]).add_(torch.mul(g, g, out=x).mul_(1.0 - betas[1]))


def root(v: Tensor, *, out: Tensor) -> Tensor:
    """Square roots, each rounded correctly."""
    if v.device.type != "cpu":
        return torch.sqrt(v, out=out)
    # torch asks MKL, which is one unit off in every sixth float32 and chooses its code by the make of the CPU.
    np.sqrt(v.numpy(), out=out.numpy())
    return out


def row_sums_of_squares(piece: Tensor, row: Tensor) -> list[float]:
    """Sums of squares of 4096 elements each, in float64; a piece's last one may have fewer.

    Halves are added to each other, again and again: no order of threads or lanes can show, on any device.

    Args:
        row: float64 scratch, at least as long as `piece`.
    """
    squares = row[: piece.numel()].copy_(piece)
    torch.mul(squares, squares, out=squares)
    num_whole = squares.numel() // _ROW * _ROW
    sums = _folded(squares[:num_whole].view(-1, _ROW)).tolist()
    return (
        [*sums, *_folded(squares[num_whole:].view(1, -1)).tolist()] if num_whole < squares.numel() else sums
    )


def _folded(rows: Tensor) -> Tensor:
    """The sum of each row, destroying `rows`."""
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half].add_(rows[:, half:width])
        width = half
    return rows[:, 0]


def norm_of(row_sums: list[float]) -> float:
    """The root of a sum of squares, rounded once however the rows came in pieces; not finite if an element is not."""
    total = sum(row_sums)
    return math.sqrt(math.fsum(row_sums) if math.isfinite(total) else total)
