"""Between numpy and torch, for whoever computes in float64 arrays and has aggregation rules work on them."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from skein.numeric.walker import Tensors


def tensors_of(arrays: Mapping[str, NDArray[np.float64]]) -> Tensors:
    """Copies as tensors, float64."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def arrays_of(tensors: Tensors) -> dict[str, NDArray[np.float64]]:
    """Copies as arrays, float64."""
    return {name: tensor.detach().to(torch.float64).numpy().copy() for name, tensor in tensors.items()}


def tensors_bytes(tensors: Tensors) -> int:
    """Bytes of the tensors' elements, without headers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def differing(one: Tensors, other: Tensors) -> tuple[str, ...]:
    """Names, sorted, under which two sets of tensors are not bit-equal, or only one has something."""
    names = sorted(one.keys() | other.keys())
    return tuple(n for n in names if n not in one or n not in other or not torch.equal(one[n], other[n]))
