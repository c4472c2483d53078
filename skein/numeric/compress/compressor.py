"""Protocol of every compressor, and the checks that all share.

Rules of this package
- What is encoded is a vector on any device; what comes out are tensors in types that may travel.
- Equal vectors give equal bits whatever the number of threads: only sums within a block or a row are taken.
- A vector that is not finite is refused: a scale that is not a number would spoil what all hold.
- Decoding checks what it is given, for that may come from another machine.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from skein.numeric.gradients import is_finite
from skein.numeric.walker import Tensors

Form = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Types and shapes of tensors that travel together, by name."""


def form_of(tensors: Mapping[str, Tensor]) -> Form:
    """Form of tensors, whatever is in them."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


class Compressor(Protocol):
    """A way to say a vector in fewer bytes. Settings, if any, are the compressor's own frozen fields."""

    def form(self, num_elements: int, dtype: torch.dtype) -> Form:
        """Form of a vector of `dtype` once it is encoded."""
        ...

    def encode(self, x: Tensor) -> Tensors:
        """The vector `x`, shape (num_elements,), floating point, as tensors that may travel; `x` is unchanged.

        Raises:
            ValueError: `x` is no vector of floats, or it or its encoding is not finite.
        """
        ...

    def decode(self, parts: Mapping[str, Tensor], num_elements: int, dtype: torch.dtype) -> Tensor:
        """Vector that `parts` say, a new one of `dtype`.

        Raises:
            ValueError: `parts` are not those of a vector of `num_elements`, or a scale is negative or not finite.
        """
        ...


def check_vector(x: Tensor) -> None:
    """Raises ValueError unless `x` is a finite vector of floats."""
    if x.ndim != 1 or not x.is_floating_point():
        raise ValueError(f"a vector of floats is needed, not {x.dtype} of shape {tuple(x.shape)}")
    if not is_finite(x):
        raise ValueError("what is not finite cannot be compressed")


def check_parts(parts: Mapping[str, Tensor], expected: Form) -> None:
    """Raises ValueError unless `parts` are of just these names, types and shapes."""
    found = form_of(parts)
    if found != dict(expected):
        raise ValueError(f"encoded tensors do not fit: {found}, expected {dict(expected)}")


def check_scales(scales: Tensor) -> None:
    """Raises ValueError unless all `scales` are finite and at least 0."""
    if not is_finite(scales) or (scales < 0).any():
        raise ValueError("a scale is negative or not finite")
