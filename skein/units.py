"""Sizes and durations as people write them, turned into SI base units at the edge; and back."""

import re

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def _split(text: str, units: dict[str, float] | dict[str, int], example: str) -> tuple[float, float]:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not a quantity such as {example}")
    return float(match[1]), units[match[2].lower()]


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`.

    >>> parse_bytes("64 MiB"), parse_bytes("2GB"), parse_bytes(7)
    (67108864, 2000000000, 7)
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, _BYTES, "'64 MiB'")
    return round(number * unit)


def parse_seconds(text: str | float) -> float:
    """Seconds in `text`.

    >>> parse_seconds("30 s"), parse_seconds("5min"), parse_seconds(0.5)
    (30.0, 300.0, 0.5)
    """
    if isinstance(text, (int, float)):
        return float(text)
    number, unit = _split(text, _SECONDS, "'30 s'")
    return number * unit


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` for people.

    >>> format_bytes(67108864)
    '64.0 MiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what it counts.

    >>> counted(1, "hop"), counted(0, "hop"), counted(2, "microbatch", "microbatches")
    ('1 hop', '0 hops', '2 microbatches')
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"
