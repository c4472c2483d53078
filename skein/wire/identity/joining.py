"""The line that is pasted on another machine: where the coordinator is, what it is known by, and what lets one in."""

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cryptography import x509

from skein.errors import UserError
from skein.wire.leader import split_addresses

PREFIX = "skein1:"
_MAX_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLine:
    """Line by which somebody gets an identity: it pins the authority, so nobody can stand in between."""

    addresses: str
    enrol_addresses: str
    authority: str
    token: str
    secret: str = field(repr=False)
    role: str

    def text(self) -> str:
        """The line."""
        raw = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        return PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def parse(cls, field_name: str, text: str) -> "JoinLine":
        """The line that `text` gives, or the file that it names as @FILE: command lines are seen by others.

        Raises:
            UserError: it is none, or not all of one, or cannot be read; the error names `field_name`.
        """
        hint = "paste the whole line that skein token create has printed"
        body = _written(field_name, text).strip().removeprefix(PREFIX)
        try:
            raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            unpacked = zlib.decompressobj().decompress(raw, _MAX_CHARACTERS)
            line = cls(**json.loads(unpacked))
            _ = x509.load_pem_x509_certificate(line.authority.encode())
        except (ValueError, TypeError, AttributeError, zlib.error) as error:
            raise UserError(field_name, f"{text[:24]}...", hint) from error
        for addresses in (line.addresses, line.enrol_addresses):
            _ = split_addresses(field_name, addresses)
        return line


def is_join_line(text: str) -> bool:
    """Whether it is a line from `skein token create` or @FILE with one, and not an address.

    >>> [is_join_line(x) for x in ("skein1:abc", "@/etc/skein/line", "127.0.0.1:7411")]
    [True, True, False]
    """
    return text.strip().startswith((PREFIX, "@"))


def _written(field_name: str, text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        with Path(text[1:]).open(encoding="ascii") as file:
            return file.read(_MAX_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(field_name, text, f"cannot be read: {reason}") from error
