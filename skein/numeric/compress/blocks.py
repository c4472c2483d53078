"""Blocks of elements that share a scale or a small codebook: int8, int4 and int2.

A block's scale comes from its own elements, so that one huge element coarsens its block and no other. int8 and int4
are even grids up to the largest magnitude: nothing is cut off, every element is within half a grid step. Two bits are
too few for that: four even levels lose 60 % of a normal vector (of its norm). There a magnitude is either small or
large, and is decoded as the mean of its kind in its block: 34 % are lost, and a block never decodes to something
further from it than zero is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.compress.compressor import Form, check_parts, check_scales, check_vector
from skein.numeric.compress.packing import pack_codes, unpack_codes
from skein.numeric.walker import Tensors

_THRESHOLD = 0.9816
"""Max, "Quantizing for minimum distortion" (1960), Table I: where the four best levels for a normal variable part,
in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Elements as integers from -levels to levels times a scale for each block: its largest magnitude / levels."""

    levels: int
    bits_each: int
    block: int
    scale_dtype: torch.dtype

    def form(self, num_elements: int, dtype: torch.dtype) -> Form:
        num_codes = -(-num_elements * self.bits_each // 8)
        kind = torch.int8 if self.bits_each == 8 else torch.uint8
        return {
            "codes": (kind, (num_codes,)),
            "scales": (self.scale_dtype, (-(-num_elements // self.block),)),
        }

    def encode(self, x: Tensor) -> Tensors:
        blocks = _blocks(x, self.block)
        scales = (blocks.abs().amax(dim=1) * (1.0 / self.levels)).to(self.scale_dtype)
        steps = scales.to(torch.float32)[:, None]
        # No scale, no step to divide by: a block of zeros, or of less than any scale can say.
        ratios = blocks.div_(torch.where(steps > 0, steps, torch.inf))
        codes = ratios.round_().clamp_(-self.levels, self.levels).view(-1)[: x.numel()].to(torch.int8)
        return {"codes": self._pack(codes), "scales": scales}

    def decode(self, parts: Mapping[str, Tensor], num_elements: int, dtype: torch.dtype) -> Tensor:
        check_parts(parts, self.form(num_elements, dtype))
        check_scales(parts["scales"])
        codes = self._unpack(parts["codes"], num_elements)
        values = _padded(codes.to(torch.float32), self.block).mul_(parts["scales"].to(torch.float32)[:, None])
        return values.view(-1)[:num_elements].to(dtype)

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits_each == 8:
            return codes
        return pack_codes((codes + 2 ** (self.bits_each - 1)).to(torch.uint8), bits_each=self.bits_each)

    def _unpack(self, packed: Tensor, num_elements: int) -> Tensor:
        if self.bits_each == 8:
            return packed
        codes = unpack_codes(packed, num_elements, bits_each=self.bits_each)
        return codes.to(torch.int8).sub_(2 ** (self.bits_each - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TwoBits:
    """A sign and a size for each element: the mean magnitude of the small ones of its block, or of the large ones."""

    block: int

    def form(self, num_elements: int, dtype: torch.dtype) -> Form:
        num_blocks, num_codes = -(-num_elements // self.block), -(-num_elements // 4)
        return {"codes": (torch.uint8, (num_codes,)), "means": (torch.bfloat16, (2 * num_blocks,))}

    def encode(self, x: Tensor) -> Tensors:
        blocks = _blocks(x, self.block)
        is_negative = blocks < 0
        largest = blocks.abs_().amax(dim=1, keepdim=True)
        blocks.div_(torch.where(largest > 0, largest, torch.inf))  # so that no square overflows or vanishes
        lengths = _lengths(x.numel(), self.block, like=blocks)
        is_large = blocks > blocks.square().sum(dim=1, keepdim=True).div_(lengths).sqrt_().mul_(_THRESHOLD)
        sums = torch.cat(
            [(blocks * ~is_large).sum(1, keepdim=True), (blocks * is_large).sum(1, keepdim=True)], 1
        )
        num_large = is_large.sum(dim=1, keepdim=True)
        counts = torch.cat([lengths - num_large, num_large], 1).clamp_(min=1)
        # The cut to float32's largest bfloat16 keeps a mean from being rounded to infinity.
        means = sums.div_(counts).mul_(largest).clamp_(max=torch.finfo(torch.bfloat16).max)
        codes = is_negative.to(torch.uint8).mul_(2).add_(is_large)
        return {
            "codes": pack_codes(codes.view(-1)[: x.numel()], bits_each=2),
            "means": means.to(torch.bfloat16).view(-1),
        }

    def decode(self, parts: Mapping[str, Tensor], num_elements: int, dtype: torch.dtype) -> Tensor:
        check_parts(parts, self.form(num_elements, dtype))
        check_scales(parts["means"])
        codes = _padded(unpack_codes(parts["codes"], num_elements, bits_each=2), self.block)
        means = parts["means"].to(torch.float32).view(-1, 2)
        sizes = torch.where((codes & 1).to(torch.bool), means[:, 1:], means[:, :1])
        values = torch.where((codes & 2).to(torch.bool), -sizes, sizes)
        return values.view(-1)[:num_elements].to(dtype)


def _blocks(x: Tensor, block: int) -> Tensor:
    """(num_blocks, block), a new float32 tensor, zeros behind the last element."""
    check_vector(x)
    values = x.detach().to(torch.float32)
    check_vector(values)  # float64 may hold what float32 cannot
    padded = _padded(values, block)
    return padded.clone() if padded.data_ptr() == x.data_ptr() else padded


def _padded(values: Tensor, block: int) -> Tensor:
    """Rows of `block` elements, the last filled up with zeros; the same memory if the length allows it."""
    missing = -values.numel() % block
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, block)


def _lengths(num_elements: int, block: int, *, like: Tensor) -> Tensor:
    """(num_blocks, 1): how many elements each block has; the last may have fewer."""
    lengths = torch.full((like.shape[0], 1), float(block), dtype=like.dtype, device=like.device)
    if num_elements % block:
        lengths[-1] = num_elements % block
    return lengths


INT8 = _Grid(levels=127, bits_each=8, block=256, scale_dtype=torch.float32)
"""8.125 bits; a normal vector comes back within 0.7 %."""
INT4 = _Grid(levels=7, bits_each=4, block=128, scale_dtype=torch.bfloat16)
"""4.125 bits; a normal vector comes back within 12 %."""
INT2 = _TwoBits(block=256)
"""2.125 bits; a normal vector comes back within 35 %."""
