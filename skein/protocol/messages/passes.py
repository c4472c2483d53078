"""Secrets by which workers know each other under a generation, all derived from one key.

Rules of this file
- A generation has a key, which the coordinator derives from its own and gives to the members of that generation alone.
  Each member derives from it what every other member shows, so the same message serves all of them.
- A member whose process another one replaces has no later key: an incarnation is part of each secret.
"""

import hmac
from dataclasses import dataclass, field, replace

from skein.protocol.messages.directives import Member
from skein.types import Epoch, Generation, Incarnation, WorkerId

_SECRET_BYTES = 16
KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationKey:
    """Key of one generation; `value` has `KEY_BYTES` bytes, or none where there is no generation yet."""

    value: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, coordinator_key: bytes, epoch: Epoch, generation: Generation) -> "GenerationKey":
        """The key of a generation that a coordinator with this key has opened in this epoch."""
        about = f"generation {epoch} {generation}".encode()
        return cls(value=hmac.digest(coordinator_key, about, "sha256"))

    def tensor_secret(self, worker: WorkerId, incarnation: Incarnation) -> str:
        """Secret that the tensors of a member carry; empty without a generation."""
        return self._secret("tensors", worker, incarnation)

    def state_secret(self, worker: WorkerId, incarnation: Incarnation) -> str:
        """Secret that a member wants to be shown by peers that fetch its state; empty without a generation."""
        return self._secret("state", worker, incarnation)

    def as_donor(self, member: Member) -> Member:
        """A member with the secret that it wants to be shown, for a worker that is to fetch state from it."""
        return replace(member, door=self.state_secret(member.worker, member.incarnation))

    def _secret(self, purpose: str, worker: WorkerId, incarnation: Incarnation) -> str:
        return derived_secret(self.value, purpose, worker, incarnation) if self.value else ""


def probe_secret(coordinator_key: bytes, epoch: Epoch, worker: WorkerId, incarnation: Incarnation) -> str:
    """Secret that a worker wants to be shown by peers that measure the link to it, for all of an epoch."""
    return derived_secret(coordinator_key, f"probe {epoch}", worker, incarnation)


def derived_secret(key: bytes, purpose: str, worker: WorkerId, incarnation: Incarnation) -> str:
    """HMAC-SHA256 (RFC 2104), cut to 128 bits, in hexadecimal; `repr` quotes separators that names contain."""
    about = repr((purpose, worker, incarnation)).encode()
    return hmac.digest(key, about, "sha256")[:_SECRET_BYTES].hex()
