"""Addresses of the coordinators that share a state directory: of the leader and of each standby.

Rules of this file
- Each coordinator writes one small file, again and again while it runs, and removes the file when it stops.
- A file that a crash left behind counts for a day: that coordinator may come back, and asking it costs nothing.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from skein.errors import SkeinError, UserError
from skein.wire.identity.passport import write_private
from skein.wire.leader import MAX_ADDRESSES, split_addresses

FOLDER = "coordinators"
"""Below the state directory."""
KEPT_S = 86400.0
"""Seconds for which a coordinator that writes no more is named to workers and clients all the same."""
ANNOUNCE_S = 60.0
"""Seconds between two writes of one coordinator."""
_MAX_BYTES = 4096
_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """host:port of one coordinator, and host:port where newcomers enrol there ("" without certificates)."""

    address: str
    enrol_address: str = ""


class SharedAddresses:
    """Addresses that coordinators with one state directory write for each other.

    Args:
        folder: of the files; it is made where there is none.
        clock: gives Unix time.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self.own: CoordinatorAddress | None = None
        self._announced_s = 0.0

    def announce(self, own: CoordinatorAddress) -> None:
        """Write this coordinator's address, unless that was done within `ANNOUNCE_S`; a full disk is logged."""
        if own == self.own and 0 <= self._clock() - self._announced_s < ANNOUNCE_S:
            return
        self.own, self._announced_s = own, self._clock()
        try:
            write_private(self._file(own), json.dumps({**asdict(own), "seen_s": self._clock()}))
        except UserError as error:
            _log.warning("other coordinators are not told of this one: %s", error)

    def withdraw(self) -> None:
        """Remove this coordinator's address."""
        if self.own is not None:
            with suppress(OSError):
                self._file(self.own).unlink(missing_ok=True)

    def known(self) -> tuple[CoordinatorAddress, ...]:
        """This coordinator first, then the others that were seen within `KEPT_S`, by address."""
        others = {
            found for found in self._read_all() if self.own is None or found.address != self.own.address
        }
        ordered = sorted(others, key=lambda found: found.address)
        return (*(() if self.own is None else (self.own,)), *ordered)[:MAX_ADDRESSES]

    def _file(self, own: CoordinatorAddress) -> Path:
        return self._folder / f"{hashlib.sha256(own.address.encode()).hexdigest()[:16]}.json"

    def _read_all(self) -> Iterator[CoordinatorAddress]:
        try:
            files = sorted(self._folder.glob("*.json"))
        except OSError:
            return
        for file in files:
            # A file that another release or a crash has spoilt names no coordinator.
            with suppress(OSError, ValueError, KeyError, TypeError, SkeinError):
                yield from self._read(file)

    def _read(self, file: Path) -> Iterator[CoordinatorAddress]:
        with open(os.fspath(file), encoding="ascii") as opened:
            content = json.loads(opened.read(_MAX_BYTES))
        if self._clock() - float(content["seen_s"]) > KEPT_S:
            return
        [address] = split_addresses("address", content["address"])
        enrol = content["enrol_address"] and split_addresses("enrol_address", content["enrol_address"])[0]
        yield CoordinatorAddress(address=address, enrol_address=enrol)
