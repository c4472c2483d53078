"""Compressors by the names that job files use."""

from typing import Final

from skein.numeric.compress.blocks import INT2, INT4, INT8
from skein.numeric.compress.compressor import Compressor
from skein.numeric.compress.plain import BF16, FP32
from skein.numeric.compress.sign import SIGN

COMPRESSOR_BY_NAME: Final[dict[str, Compressor]] = {
    "fp32": FP32,
    "bf16": BF16,
    "int8": INT8,
    "int4": INT4,
    "int2": INT2,
    "sign": SIGN,
}


def compressor_of(name: str) -> Compressor:
    """The compressor that a job file calls `name`.

    Raises:
        ValueError: there is none.

    >>> compressor_of("sign") is SIGN
    True
    """
    if name not in COMPRESSOR_BY_NAME:
        raise ValueError(f"no compressor {name!r}: there are {', '.join(COMPRESSOR_BY_NAME)}")
    return COMPRESSOR_BY_NAME[name]
