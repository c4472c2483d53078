"""Dropout whose choices are each sample's own: they follow from the sample's luck, the layer and the feature alone.

Whoever computes a microbatch, in parts or beside other rows, drops the same; so what is computed again after a death is
what it was.

B batch, F features.
"""

import torch
from torch import Tensor

from skein.rng import key

_BITS = 64
_PRECISION = 53
"""Bits of a draw that is compared with a probability: as many as a float has."""


def luck_of(seed: int, step: int, first: int) -> int:
    """Luck of the sample in place `first` of a step's batch; that of each one after it is higher by 1."""
    # Two bits less, so that no place leads beyond what a signed integer holds.
    return (key(seed, "dropout", step) >> 2) + first


def dropped(x: Tensor, luck: int | Tensor, *, layer: int, probability: float) -> Tensor:
    """`x` with each number set to 0 by that probability, and the others larger, so that the mean is as it was.

    Args:
        x: (..., B, F).
        luck: (...) of the first samples, as of `luck_of`.
        layer: place of the layer in the model, which has draws of its own.
        probability: below 1.

    Source: Srivastava et al., Dropout, 2014, Section 10, with the scale in training.
    """
    first = luck if isinstance(luck, Tensor) else torch.tensor(luck, device=x.device)
    places, features = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    samples = _mixed(_mixed(first.unsqueeze(-1) + places) + layer)
    draws = _right(_mixed(samples.unsqueeze(-1) + features), _BITS - _PRECISION)
    is_kept = draws >= round(probability * 2**_PRECISION)
    # Selected, not multiplied: of what is kept to go back it is a byte each.
    return torch.where(is_kept, x * (1.0 / (1.0 - probability)), 0.0)


def _mixed(x: Tensor) -> Tensor:
    """Integers of 64 bits, each of which depends on all bits of the one that it is made of; no two become one.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014, with the constants of
    SplitMix64. Products wrap around.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: Tensor, shift: int) -> Tensor:
    """Bits moved to the right, with zeros from the left, whatever the sign."""
    return (x >> shift) & ((1 << (_BITS - shift)) - 1)
