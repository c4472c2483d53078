"""Small pages for whoever asks by HTTP: metrics, discovery. One GET for each connection, on the event loop.

Rules of this file
- Who asks has proved nothing. Connections are few, fewer from one address, and short; a half request costs a place that
  the next caller gets.
- Pages are made on a thread, one at a time: that of a thousand workers takes longer than the loop may stand still.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import urlsplit

from skein.errors import UserError
from skein.wire.channel import join_address
from skein.wire.serving.hosts import counted_as
from skein.wire.serving.room import Room

Page = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS = 64, 16
SECONDS = 10.0
"""For a request and its answer."""
_MAX_HEAD_BYTES = 8192


class Pages:
    """Answers GET at host:port until `close`. Made by `open`.

    `address`: host:port where it listens.
    """

    def __init__(self, answer: Callable[[str, str], Page]) -> None:
        self._answer = answer
        self._room = Room(most=MAX_CONNECTIONS, per_address=MAX_CONNECTIONS_PER_ADDRESS)
        self._making = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @classmethod
    async def open(cls, field: str, host: str, port: int, answer: Callable[[str, str], Page]) -> "Pages":
        """Listen.

        Args:
            field: the option that names the port, for errors.
            port: 0 takes a free one.
            answer: the page for a path and a `Host`, as the reader gave it; called on a thread.

        Raises:
            UserError: the address cannot be listened on.
        """
        pages = cls(answer)
        try:
            server = await asyncio.start_server(pages._accept, host, port, limit=_MAX_HEAD_BYTES)
        except (OSError, OverflowError) as error:
            reason = _reason(error)
            hint = f"{reason}; give another port, or end what listens there"
            raise UserError(field, join_address(host, port), hint) from error
        pages._server = server
        pages.address = join_address(host, server.sockets[0].getsockname()[1])
        return pages

    async def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername") or ("",)
        # So that a page counts as written when the system has all of it.
        writer.transport.set_write_buffer_limits(0)
        try:
            async with self._room.enter(counted_as(str(peer[0])), SECONDS):
                writer.write(await self._respond(reader))
                await writer.drain()
            writer.close()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            # Of one that was written whole nothing is left to lose.
            if not writer.is_closing():
                writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        if method not in ("GET", "HEAD"):
            return _response((HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"GET only\n"), has_body=True)
        path = ""
        with suppress(ValueError):
            path = urlsplit(target.partition(" ")[0]).path
        async with self._making:
            page = await asyncio.to_thread(self._answer, path, fields.get("host", ""))
        return _response(page, has_body=method == "GET")


def _response(page: Page, *, has_body: bool) -> bytes:
    status, kind, body = page
    head = (
        f"HTTP/1.0 {status.value} {status.phrase}\r\n"
        f"Date: {formatdate(usegmt=True)}\r\n"
        f"Content-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if has_body else b"")


def _reason(error: OSError | OverflowError) -> str:
    """The system's own words; asyncio puts the address, which is told anyway, in front of them."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(error)
