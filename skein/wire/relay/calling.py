"""The caller's side: a Unix socket for each peer that is reached by a relay; who connects there is carried.

Channels are opened to such a socket as to any address, so whoever opens them need not know; with certificates they are
encrypted up to the peer, whose name is asked for as ever.
"""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from skein.protocol.messages.ways import Way
from skein.types import WorkerId
from skein.wire.extra import CallPeer
from skein.wire.relay.carrying import CHUNK_BYTES, DialRelay, carry

_log = logging.getLogger(__name__)
_BACKLOG = 64
_AGAIN_S = 0.25


class _Door:
    """The socket of one way, and the connections that came in at it."""

    def __init__(self, way: Way, path: Path, dial: DialRelay) -> None:
        self.way = way
        self.path = path
        self.trouble = ""
        """Reason why connections fail; empty again once one carries."""
        self._dial = dial
        self._connections: set[asyncio.Task[None]] = set()
        # At once, so that nobody finds it missing; connections wait until they are taken.
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                # No more files, for instance: who has connected waits until there are.
                await asyncio.sleep(_AGAIN_S)
                continue
            carrying = asyncio.create_task(self._carry(connection))
            self._connections.add(carrying)
            carrying.add_done_callback(self._connections.discard)

    async def _carry(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK_BYTES)
        wanted = CallPeer(worker=self.way.peer, incarnation=self.way.incarnation)
        reason = await carry(self._dial, self.way.relay, wanted, reader, writer, on_open=self._opened)
        if reason:
            self.trouble = f"the relay {self.way.relay.worker or 'coordinator'}: {reason}"
            _log.debug("peer=%s: %s", self.way.peer, self.trouble)

    def _opened(self) -> None:
        self.trouble = ""

    def close(self) -> None:
        """Take nobody in any more, and end the connections: their ends dial again, another way."""
        self._serving.cancel()
        self._socket.close()
        self.path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.cancel()


class RelayedPeers:
    """Peers that this process reaches by relays. Used on one event loop, and closed at the end."""

    def __init__(self, dial: DialRelay) -> None:
        self._dial = dial
        self._doors: dict[WorkerId, _Door] = {}
        self._folder: Path | None = None
        self._num_made = 0

    def take(self, ways: Iterable[Way]) -> None:
        """Use these ways, and no others."""
        wanted = {way.peer: way for way in ways}
        for peer, door in [*self._doors.items()]:
            if wanted.get(peer) != door.way:
                self.forget(peer)
        for peer, way in wanted.items():
            if peer not in self._doors:
                self._doors[peer] = _Door(way, self._path(), self._dial)

    def forget(self, peer: WorkerId) -> None:
        """Have no way to a peer any more."""
        door = self._doors.pop(peer, None)
        if door is not None:
            door.close()

    def way_to(self, peer: WorkerId) -> Way | None:
        """Way to a peer; None: it is dialled."""
        door = self._doors.get(peer)
        return None if door is None else door.way

    def target(self, peer: WorkerId) -> str | None:
        """Target of channels to a peer; None: its address is."""
        door = self._doors.get(peer)
        return None if door is None else f"unix:{door.path}"

    def trouble(self, peer: WorkerId) -> str:
        """Reason why a peer's relay does not carry; empty where it does, or where the peer is dialled.

        The peer's channel itself sees no more than that its socket was closed.
        """
        door = self._doors.get(peer)
        return "" if door is None else door.trouble

    def close(self) -> None:
        """End all connections."""
        self.take(())
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self) -> Path:
        """Path of a new socket, in a folder that only this user may enter."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"skein-{os.getpid()}-"))
        self._num_made += 1
        return self._folder / str(self._num_made)
