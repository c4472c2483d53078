"""Credentials of processes: an identity for TLS on both sides, or nothing."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skein.wire.identity.passport import Passport


class Wallet:
    """Passport of a process, renewed while that runs; `path`: the file that keeps it."""

    def __init__(self, passport: "Passport", path: Path | None = None) -> None:
        self.passport = passport
        self._path = path

    def renew(self, certificate: str) -> None:
        """Open connections with this certificate of the same key from now on."""
        self.take(replace(self.passport, certificate=certificate))

    def take(self, passport: "Passport") -> None:
        """Open connections by this passport, with the next certificate of the same key, from now on."""
        self.passport = passport
        if self._path is not None:
            self.passport.save(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Proof that a process shows to whom it calls, and wants to see of its callers.

    With a `wallet` every connection is encrypted, and both ends prove who they are; without one nobody is asked.
    """

    wallet: Wallet | None = None


NO_CREDENTIALS = Credentials()
"""Credentials of processes that show nothing and ask for nothing."""
