"""Positions of a run log, signed: so that whoever tells of one has heard it from a coordinator of that log.

Rules of this file
- What is signed is all of a position; the key lies beside the log and is as old as that.
- A signature proves that the log once was so long. A position that the log covers needs none.
"""

import hmac
from dataclasses import dataclass, replace

from skein.types import Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """Part of a run log that somebody knows: up to `entry`, which `epoch` wrote.

    `opened_s` is when that epoch was opened, `origin_s` when the log was begun, or its loss accepted last (Unix time):
    two logs with one origin and other openings are one that has lost its end.
    """

    origin_s: float
    epoch: Epoch
    opened_s: float
    entry: int
    signature: str = ""
    """Signature of the coordinator that told it, in hexadecimal; "" of releases before."""


def signed(position: LogPosition, key: bytes) -> LogPosition:
    """The position with the signature of whoever has `key`."""
    return replace(position, signature=_signature(position, key))


def is_signed(position: LogPosition, key: bytes) -> bool:
    """Whether somebody who has `key` has told of this position."""
    return hmac.compare_digest(position.signature.encode(), _signature(position, key).encode())


def _signature(position: LogPosition, key: bytes) -> str:
    """HMAC-SHA256 (RFC 2104) of the numbers, each written so that it can be read back exactly."""
    about = f"{position.origin_s!r}/{position.epoch}/{position.opened_s!r}/{position.entry}"
    return hmac.digest(key, about.encode(), "sha256").hex()
