"""Compressor to one bit for each element, its sign, and one scale for all."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.compress.compressor import Form, check_parts, check_scales, check_vector
from skein.numeric.compress.packing import pack_bits, unpack_bits
from skein.numeric.gradients import squared_norm
from skein.numeric.walker import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sign:
    """Signs times the root mean square. What is lost can exceed the vector itself if few elements make up its norm:
    only error feedback makes it a compressor.

    Source: Seide et al., "1-bit stochastic gradient descent" (2014); the scale is that of DeepSpeed's 1-bit LAMB.
    """

    def form(self, num_elements: int, dtype: torch.dtype) -> Form:
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        return {"bits": (torch.uint8, (-(-num_elements // 8),)), "scale": (kind, (1,))}

    def encode(self, x: Tensor) -> Tensors:
        """Bits (1: at least 0) as numpy.packbits packs them, and a scale in float32, or in float64 like `x`."""
        check_vector(x)
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        scale = math.sqrt(squared_norm(x) / max(x.numel(), 1))
        scales = torch.tensor([scale], dtype=dtype, device=x.device)
        check_scales(scales)
        return {"bits": pack_bits(x.detach() >= 0), "scale": scales}

    def decode(self, parts: Mapping[str, Tensor], num_elements: int, dtype: torch.dtype) -> Tensor:
        check_parts(parts, self.form(num_elements, dtype))
        check_scales(parts["scale"])
        scale = parts["scale"].to(dtype)
        return torch.where(unpack_bits(parts["bits"], num_elements), scale, -scale)


SIGN = _Sign()
