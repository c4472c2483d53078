"""The mean of vectors that travel as one bit per element: who encodes what, and what comes of it.

Rules of this file
- A vector consists of segments, which have scales of their own: one for the whole vector, or one for each tensor.
- Every segment is cut into shards where a byte of its bits ends, so any number of shards fits any length; a short one
  may have nothing in some shard. What fills up its last byte is bits only: it has no scale, no error and no say.
- Each member sends its segments with its own scales, whoever sums a shard sends each segment's piece with another:

      member i:   c = b_i + e_i ;  a_i = |c| / sqrt(len) ;  q = sign(c), sign(0) = 1 ;  e_i = c - a_i q
      shard j:    s = sum_i w_i a_i q_i + E ;  A = |s| / sqrt(len) ;  Q = sign(s) ;     E = s - A Q
      all:        the mean is A Q, each shard with its own A

  So sum_i w_i (b_i + e_i) + E before is the mean + sum_i w_i e_i + E after: nothing is lost, it is late.

Source: DeepSpeed 0.18.9, `runtime/comm/compressed.py`. It fills vectors up with zeros that get signs, scales and
errors of their own; here a vector of any length goes the way it would go without them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.compress.compressor import Form, check_parts, check_scales
from skein.numeric.compress.sign import SIGN
from skein.numeric.gradients import shard_bounds
from skein.numeric.walker import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """Cut of a vector: the lengths of its segments, one after another, and the number of shards."""

    lengths: tuple[int, ...]
    num_shards: int

    def ranges(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Begin and end, in the vector, of each segment's piece in `shard`.

        >>> SegmentLayout(lengths=(20, 5), num_shards=2).ranges(1)
        ((16, 20), (25, 25))
        """
        ranges, start = [], 0
        for length in self.lengths:
            first, stop = shard_bounds(-(-length // 8), self.num_shards)[shard]
            ranges.append((start + min(8 * first, length), start + min(8 * stop, length)))
            start += length
        return tuple(ranges)

    def num_elements(self, shard: int) -> int:
        """Elements in `shard`."""
        return sum(stop - start for start, stop in self.ranges(shard))

    def key(self, shard: int) -> str:
        """A name for `shard` that no other way of cutting the vector gives."""
        return f"{shard}of{self.num_shards}x{sum(self.lengths)}"


def encode_all(total: Tensor, layout: SegmentLayout) -> tuple[dict[int, Tensors], Tensor]:
    """Tensors that a member sends of `total`, by shard, and what it says with them, as a vector like `total`.

    Raises:
        ValueError: `total` is not finite.
    """
    segments = [SIGN.encode(part) for part in torch.split(total, list(layout.lengths))]
    said = [
        SIGN.decode(segment, length, total.dtype)
        for segment, length in zip(segments, layout.lengths, strict=True)
    ]
    bounds = [shard_bounds(segment["bits"].numel(), layout.num_shards) for segment in segments]
    parts = {}
    for shard in range(layout.num_shards):
        pieces = [
            segment["bits"][slice(*cuts[shard])] for segment, cuts in zip(segments, bounds, strict=True)
        ]
        parts[shard] = {"bits": torch.cat(pieces), "scales": torch.cat([s["scale"] for s in segments])}
    return parts, torch.cat(said)


def encode_shard(total: Tensor, layout: SegmentLayout, shard: int) -> tuple[Tensors, Tensor]:
    """Tensors that the owner of `shard` sends to all, and what it says with them; `total` is that shard alone.

    Raises:
        ValueError: `total` is not finite.
    """
    lengths = [stop - start for start, stop in layout.ranges(shard)]
    pieces = [SIGN.encode(part) for part in torch.split(total, lengths)]
    sent = {
        "bits": torch.cat([piece["bits"] for piece in pieces]),
        "scales": torch.cat([piece["scale"] for piece in pieces]),
    }
    return sent, decode_shard(sent, layout, shard, dtype=total.dtype)


def decode_shard(parts: Tensors, layout: SegmentLayout, shard: int, *, dtype: torch.dtype) -> Tensor:
    """Elements of `shard` that `parts` say, as a vector.

    Raises:
        ValueError: they are not of that shard, or a scale is negative or not finite.
    """
    lengths = _check(parts, layout, shard, dtype=dtype)
    num_bytes = [-(-length // 8) for length in lengths]
    bits, scales = torch.split(parts["bits"], num_bytes), torch.split(parts["scales"], 1)
    return torch.cat(
        [
            SIGN.decode({"bits": b, "scale": a}, length, dtype)
            for b, a, length in zip(bits, scales, lengths, strict=True)
        ]
    )


def said_norm(parts: Tensors, layout: SegmentLayout, shard: int, *, dtype: torch.dtype) -> float:
    """The length of what `parts` say about the elements of `shard`: its scales alone tell.

    Raises:
        ValueError: as for `decode_shard`.
    """
    lengths = _check(parts, layout, shard, dtype=dtype)
    check_scales(parts["scales"])
    scales: list[float] = parts["scales"].tolist()
    return math.sqrt(math.fsum(length * a * a for a, length in zip(scales, lengths, strict=True)))


def shard_form(layout: SegmentLayout, shard: int, dtype: torch.dtype) -> Form:
    """Form of what a member or the owner sends of `shard`, where vectors are of `dtype`."""
    lengths = [stop - start for start, stop in layout.ranges(shard)]
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    num_bytes = sum(-(-length // 8) for length in lengths)
    return {"bits": (torch.uint8, (num_bytes,)), "scales": (kind, (len(lengths),))}


def _check(parts: Tensors, layout: SegmentLayout, shard: int, *, dtype: torch.dtype) -> list[int]:
    """Lengths of the pieces in `shard`; raises ValueError unless `parts` could be theirs."""
    check_parts(parts, shard_form(layout, shard, dtype))
    return [stop - start for start, stop in layout.ranges(shard)]


def join_shards(shards: Sequence[Tensor], layout: SegmentLayout) -> Tensor:
    """The vector whose shards these are, in order."""
    whole = shards[0].new_empty(sum(layout.lengths))
    for shard, values in enumerate(shards):
        ranges = layout.ranges(shard)
        pieces = torch.split(values, [stop - start for start, stop in ranges])
        for (start, stop), piece in zip(ranges, pieces, strict=True):
            whole[start:stop] = piece
    return whole
