"""Vectors that travel as numbers, rounded to a shorter type at most."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.compress.compressor import Form, check_parts, check_vector
from skein.numeric.gradients import is_finite
from skein.numeric.walker import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """Every element on its own, in `dtype`."""

    dtype: torch.dtype

    def form(self, num_elements: int, dtype: torch.dtype) -> Form:
        return {"values": (self.dtype, (num_elements,))}

    def encode(self, x: Tensor) -> Tensors:
        check_vector(x)
        values = x.detach().to(self.dtype, copy=True)
        if not is_finite(values):  # what overflows only in the shorter type
            raise ValueError(f"an element is too large for {self.dtype}")
        return {"values": values}

    def decode(self, parts: Mapping[str, Tensor], num_elements: int, dtype: torch.dtype) -> Tensor:
        check_parts(parts, self.form(num_elements, dtype))
        if not is_finite(parts["values"]):
            raise ValueError("what was encoded is not finite")
        return parts["values"].to(dtype, copy=True)


FP32 = _Plain(dtype=torch.float32)
"""float32: nothing is lost but what float64 has more."""
BF16 = _Plain(dtype=torch.bfloat16)
"""bfloat16, rounded to the nearest, ties to even: float32's range, 8 significant bits."""
