"""Bytes of a vector on the wire, by format: as many as `skein.numeric.compress` makes, without torch.

Names and shapes of tensors, and what gRPC, TCP and IP add, are left out: measured on Ethernet, 3.6 % for the headers of
full packets, and about 1 kB for each message with what answers it (`bench.studies.aggregation.wire_bytes`).
"""

from typing import assert_never

from skein.config.rule import Wire

_INT8_BLOCK, _INT4_BLOCK, _INT2_BLOCK = 256, 128, 256
"""Elements that share a scale."""
_INT8_SCALE_BYTES, _INT4_SCALE_BYTES, _INT2_SCALE_BYTES = 4, 2, 4
"""A float32; a bfloat16; two of them, for small elements and for large ones."""


def payload_bytes(wire: Wire, num_elements: int, *, word_bytes: int = 4) -> int:
    """Bytes of a vector in a format, scales included.

    Args:
        wire: the format; fp32 means as computed.
        num_elements: of the vector.
        word_bytes: of a number as computed: 4, or 8 in a job of precision fp64.

    >>> [payload_bytes(wire, 1024) for wire in ("fp32", "bf16", "int8", "int4", "int2")]
    [4096, 2048, 1040, 528, 272]
    """
    match wire:
        case "fp32":
            return word_bytes * num_elements
        case "bf16":
            return 2 * num_elements
        case "int8":
            return num_elements + _INT8_SCALE_BYTES * _ceil(num_elements, _INT8_BLOCK)
        case "int4":
            return _ceil(num_elements, 2) + _INT4_SCALE_BYTES * _ceil(num_elements, _INT4_BLOCK)
        case "int2":
            return _ceil(num_elements, 4) + _INT2_SCALE_BYTES * _ceil(num_elements, _INT2_BLOCK)
        case _:
            assert_never(wire)


def sign_bytes(num_elements: int, num_scales: int, *, word_bytes: int = 4) -> int:
    """Bytes of a vector of which only signs travel, and some scales.

    >>> sign_bytes(1024, 1)
    132
    """
    return _ceil(num_elements, 8) + word_bytes * num_scales


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
