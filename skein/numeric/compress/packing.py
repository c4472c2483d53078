"""Small codes side by side in bytes, the first in the most significant bits."""

import numpy as np
import torch
from torch import Tensor


def pack_bits(bits: Tensor) -> Tensor:
    """A vector of booleans as ceil(n / 8) bytes, zeros behind the last: numpy.packbits, on any device.

    >>> pack_bits(torch.tensor([True, False, True])).tolist()
    [160]
    """
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    return pack_codes(bits.to(torch.uint8), bits_each=1)


def unpack_bits(packed: Tensor, num_elements: int) -> Tensor:
    """The first `num_elements` booleans of what `pack_bits` made.

    >>> unpack_bits(torch.tensor([160], dtype=torch.uint8), 3).tolist()
    [True, False, True]
    """
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=num_elements).view(np.bool_))
    return unpack_codes(packed, num_elements, bits_each=1).to(torch.bool)


def pack_codes(codes: Tensor, *, bits_each: int) -> Tensor:
    """A vector of uint8 codes below 2**bits_each as bytes; `bits_each` is 1, 2 or 4.

    >>> pack_codes(torch.tensor([1, 2, 3], dtype=torch.uint8), bits_each=4).tolist()
    [18, 48]
    """
    per_byte = 8 // bits_each
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    packed = padded[:, 0] << (8 - bits_each)
    for place in range(1, per_byte):
        packed |= padded[:, place] << (8 - bits_each * (place + 1))
    return packed


def unpack_codes(packed: Tensor, num_elements: int, *, bits_each: int) -> Tensor:
    """The first `num_elements` codes of what `pack_codes` made, as uint8.

    >>> unpack_codes(torch.tensor([18, 48], dtype=torch.uint8), 3, bits_each=4).tolist()
    [1, 2, 3]
    """
    per_byte = 8 // bits_each
    codes = packed.new_empty((packed.numel(), per_byte))
    for place in range(per_byte):
        codes[:, place] = (packed >> (8 - bits_each * (place + 1))) & (2**bits_each - 1)
    return codes.view(-1)[:num_elements]
