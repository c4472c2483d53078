"""Error feedback: what a compressor could not say this time is added to what is said next time.

Nothing gets lost: what was to be said and the residual before are what was said and the residual after.
"""

from enum import StrEnum

import torch
from torch import Tensor

from skein.numeric.compress.compressor import Compressor
from skein.numeric.walker import Slot, StateClass, Tensors


class FeedbackOwner(StrEnum):
    """Owner of a residual: the peer that sends, or the chunk that sums a shard for all."""

    PEER = "peer"
    CHUNK = "chunk"

    @property
    def slot(self) -> Slot:
        """Newcomers begin without one, checkpoints have it."""
        kind = StateClass.PRIVATE if self is FeedbackOwner.PEER else StateClass.SHARD
        return Slot(kind=kind, is_copied=False)


def no_residual(num_elements: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The residual before anything was said."""
    return torch.zeros(num_elements, dtype=dtype, device=device)


def encode_with(compressor: Compressor, x: Tensor, residual: Tensor) -> tuple[Tensors, Tensor]:
    """`x` and `residual` together as tensors that may travel, and the residual that follows; both stay as they are.

        parts = encode(x + residual) ;   residual' = (x + residual) - decode(parts)

    in the dtype of `x`.

    Raises:
        ValueError: shapes or dtypes differ, or the compressor refuses.
    """
    if (x.shape, x.dtype) != (residual.shape, residual.dtype):
        raise ValueError(
            f"{tuple(x.shape)} {x.dtype} has a residual {tuple(residual.shape)} {residual.dtype}"
        )
    total = x.detach() + residual
    parts = compressor.encode(total)
    return parts, total.sub_(compressor.decode(parts, total.numel(), total.dtype))
