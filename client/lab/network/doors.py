"""Doors: ports on this machine's loopback that lead into a namespace, for commands of a user outside of it."""

import asyncio
import socket
from functools import partial

from client.lab.network.namespaces import inside
from skein.wire.channel import split_address

_READ_BYTES = 1 << 16


class NamespaceDoors:
    """Carries connections from here into one namespace, unchanged and at once, from `open` to `close`."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self, door: str, host: str, port: int) -> None:
        """Listen at `door` (host:port here), and dial host:port in the namespace for whoever comes."""
        here = split_address("door", door)
        self._servers.append(await asyncio.start_server(partial(self._enter, (host, port)), *here))

    async def close(self) -> None:
        """Close everything."""
        for server in self._servers:
            server.close()
        for writer in list(self._writers):
            writer.close()

    async def _enter(
        self, to: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with inside(self._namespace):
            there = socket.socket()
        there.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(there, to)
            reader_there, writer_there = await asyncio.open_connection(sock=there)
        except OSError:  # nothing listens yet
            there.close()
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry(reader, writer_there))
            group.create_task(self._carry(reader_there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(_READ_BYTES):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone; the other is told below
        finally:
            writer.close()
            self._writers.discard(writer)
