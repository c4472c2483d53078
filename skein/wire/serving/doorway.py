"""Connections on which nobody has called yet: few of one address, so that one machine cannot take all that there are.

gRPC takes connections itself and says nothing of them, so this asks the system which of this process's connections
belong to a port, whose they are, and how much has come on them. The oldest of an address go first: a caller that means
it says what it wants within a round trip.

Asking takes the system some milliseconds, for it goes through the connections of all processes. So this counts its own
files, and asks once so many were opened that there may be too many connections; and now and then, for files that were
closed make room for others.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from skein.wire.serving.hosts import counted_as

PER_ADDRESS = 64
PERIOD_S = 0.25
_NUM_PERIODS = 20
"""Periods after which a look is due, though hardly a file was opened."""
_FILES = "/proc/self/fd"
GREETED_BYTES = 33
"""Bytes of the HTTP/2 preface and the shortest settings."""
CALLED_BYTES = 128
"""A whole greeting is shorter, with a first call it is longer."""
_ESTABLISHED = "01"
_BYTES_RECEIVED = struct.Struct("=128xQ")
"""Field of Linux's `tcp_info`, since 4.1."""


class Doorway:
    """The connections that come in at a port of this process.

    Args:
        least_bytes: what has to have come on a connection that is nobody's to end: more than a greeting where nobody
            who means it connects without a call.
    """

    def __init__(self, port: int, *, least_bytes: int) -> None:
        self._port = port
        self._least_bytes = least_bytes
        self._since: dict[int, int] = {}
        """Look at which each connection was first there, by inode; inodes of several processors tell no order."""
        self._most_files = PER_ADDRESS
        """Files of this process with which no address can have too many connections, as of the last look."""

    async def keep(self) -> NoReturn:
        """Look where there may be too many, for ever."""
        period = 0
        while True:
            await asyncio.sleep(PERIOD_S)
            period = (period + 1) % _NUM_PERIODS
            with suppress(OSError):
                num_files = len(os.listdir(_FILES))
                if self.may_have_too_many(num_files) or (num_files > PER_ADDRESS and not period):
                    await asyncio.to_thread(self.look)

    def may_have_too_many(self, num_files: int) -> bool:
        """Whether an address may have too many connections without a call, of so many files; if none was closed."""
        return num_files > self._most_files

    def look(self) -> int:
        """Ends connections beyond what one address may have without a call; how many."""
        silent: dict[str, list[tuple[int, int, int]]] = {}
        num_files = len(os.listdir(_FILES))
        host_by_inode = dict(_connections(self._port))
        now = max(self._since.values(), default=0) + 1
        self._since = {inode: self._since.get(inode, now) for inode in host_by_inode}
        for descriptor, inode in _sockets(host_by_inode):
            received = _num_received(descriptor, inode)
            if received is not None and received < self._least_bytes:
                silent.setdefault(host_by_inode[inode], []).append((self._since[inode], inode, descriptor))
        beyond = [x for found in silent.values() for x in sorted(found)[: max(0, len(found) - PER_ADDRESS)]]
        for _, inode, descriptor in beyond:
            _end(descriptor, inode)
        most_silent = max(map(len, silent.values()), default=0)
        self._most_files = num_files - len(beyond) + max(0, PER_ADDRESS - most_silent)
        return len(beyond)


def _connections(port: int) -> Iterator[tuple[int, str]]:
    """Inode and remote host of each connection that came in at `port` of this network."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                inode = int(rest[5])
                # What nobody has accepted yet has none: it is not this process's, and 0 would be any other file.
                if inode and state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                    yield inode, _host(remote.rpartition(":")[0])


def _host(text: str) -> str:
    """Host that an address counts as, which the kernel prints in words of 32 bits, each in this machine's order.

    >>> _host("0100007F"), _host("0000000000000000FFFF00000100007F")
    ('127.0.0.1', '127.0.0.1')
    """
    words = bytes.fromhex(text)
    packed = b"".join(struct.pack("=I", x) for x in struct.unpack(f">{len(words) // 4}I", words))
    return counted_as(str(ip_address(packed)))


def _sockets(wanted: Mapping[int, str]) -> Iterator[tuple[int, int]]:
    """Descriptor and inode of this process's sockets among those."""
    for name in os.listdir(_FILES):
        with suppress(OSError, ValueError):
            kind, _, number = os.readlink(f"{_FILES}/{name}").partition(":")
            inode = int(number.strip("[]")) if kind == "socket" else 0
            if inode in wanted:
                yield int(name), inode


def _num_received(descriptor: int, inode: int) -> int | None:
    """Bytes that came on a connection; None if it is gone, or another file has its number now."""
    with suppress(OSError), _borrowed(descriptor) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
            (received,) = _BYTES_RECEIVED.unpack(info)
            return int(received)
    return None


def _end(descriptor: int, inode: int) -> None:
    """Break a connection; whoever owns the descriptor finds it at its end, and closes it."""
    with suppress(OSError), _borrowed(descriptor) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket of another owner, whose number may be another file's by now: that is closed again, too.

    Raises:
        OSError: it is no socket any more.
    """
    own = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        yield connection
