"""Small pages for whoever asks by HTTP: metrics, discovery, the state of things. One GET for each connection.

Rules of this file
- Who asks has proved nothing. Connections are few, fewer from one address, and short; a half request costs a place that
  the next caller gets.
- What takes long is made on a thread, one at a time (`on_thread`): the page of a thousand workers takes longer than the
  loop may stand still.
- Where a port has TLS it has both: a connection whose first byte begins a handshake is encrypted, any other is not, and
  a request tells which. Scrapes know no authority, browsers are shown a certificate.
- Live pages have few places of their own. Each piece is made when the one before has left, so a slow reader gets fewer,
  and one that takes none for `SECONDS` is dropped.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from skein.errors import UserError
from skein.wire.channel import join_address
from skein.wire.serving.hosts import counted_as
from skein.wire.serving.room import Room

TEXT = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS = 64, 16
MAX_LIVE, MAX_LIVE_PER_ADDRESS = 32, 8
"""Live pages at once; whoever has had one for longest makes room, and its browser asks again."""
SECONDS = 10.0
"""For a request and its answer, or for a piece of a live page."""
_MAX_HEAD_BYTES = 8192
_BACKLOG = 100
_HANDSHAKE = b"\x16"
"""First byte of TLS; no method of HTTP begins so."""
_SHUTDOWN_S = 1.0
"""For a reader to say that it has read the end of what was encrypted."""
_AGAIN_S = 1.0
_MAX_QUERY_FIELDS = 8

Fields = tuple[tuple[str, str], ...]
"""Header fields of an answer, beside those that all have."""


class Page(NamedTuple):
    """An answer that is whole."""

    status: HTTPStatus
    kind: str
    body: bytes
    fields: Fields = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePage:
    """An answer that goes on, piece by piece, until `pieces` end or nobody reads them."""

    kind: str
    pieces: AsyncGenerator[bytes, None]
    fields: Fields = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A GET as its reader gave it; `fields` are the header's, by lower-case names.

    `is_head`: of that the header. `is_encrypted`: nobody on the way can read it.
    """

    path: str
    query: Mapping[str, str]
    fields: Mapping[str, str]
    is_head: bool = False
    is_encrypted: bool = False

    @property
    def host(self) -> str:
        """Host by which the reader reached this port."""
        return self.fields.get("host", "")


Answer = Callable[[PageRequest], Awaitable[Page | LivePage]]
MakeContext = Callable[[], ssl.SSLContext]
"""Gives what the next connection is to be encrypted by."""


def on_thread(make: Callable[[PageRequest], Page]) -> Answer:
    """Answers that `make` gives on a thread, one at a time."""
    making = asyncio.Lock()

    async def answer(request: PageRequest) -> Page:
        async with making:
            return await asyncio.to_thread(make, request)

    return answer


class Pages:
    """Answers GET at host:port until `close`. Made by `open`.

    `address`: host:port where it listens.
    """

    def __init__(self, answer: Answer, tls: MakeContext | None) -> None:
        self._answer = answer
        self._tls = tls
        self._room = Room(most=MAX_CONNECTIONS, per_address=MAX_CONNECTIONS_PER_ADDRESS)
        self._live = Room(most=MAX_LIVE, per_address=MAX_LIVE_PER_ADDRESS)
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    @classmethod
    async def open(
        cls, field: str, host: str, port: int, answer: Answer, *, tls: MakeContext | None = None
    ) -> "Pages":
        """Listen.

        Args:
            field: the option that names the port, for errors.
            port: 0 takes a free one.
            answer: the page for a request; called on the loop.
            tls: for connections that begin with a handshake; None: there is none.

        Raises:
            UserError: the address cannot be listened on.
        """
        pages = cls(answer, tls)
        try:
            await pages._listen(host, port)
        except (OSError, OverflowError) as error:
            reason = _reason(error)
            hint = f"{reason}; give another port, or end what listens there"
            raise UserError(field, join_address(host, port), hint) from error
        pages.address = join_address(host, pages._listening[0].getsockname()[1])
        return pages

    async def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._listening:
            self._listening.pop().close()

    async def _listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with ExitStack() as opened:
            for family, *_, address in found:
                one = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
                self._listening.append(opened.enter_context(one))
            opened.pop_all()
        for listening in self._listening:
            listening.setblocking(False)
            self._begin(self._accept(listening))

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except OSError:
                # No more files, for instance: there are, once a connection of those that are open has ended.
                await asyncio.sleep(_AGAIN_S)
            else:
                self._begin(self._serve(connection, counted_as(str(peer[0]))))

    async def _serve(self, connection: socket.socket, where: str) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with self._room.enter(where, SECONDS):
                reader, writer = await self._streams(connection)
                made, has_body = await self._respond(reader, writer)
                head = _head(made)
                writer.write(head + made.body if has_body and isinstance(made, Page) else head)
                await writer.drain()
            if isinstance(made, LivePage) and has_body:
                async with self._live.enter(where, None), aclosing(made.pieces) as pieces:
                    await _tell(writer, pieces)
            writer.close()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            # Of one that was written whole nothing is left to lose.
            if writer is None:
                connection.close()
            elif not writer.is_closing():
                writer.transport.abort()

    async def _streams(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Streams of a connection, once it has said whether it is encrypted.

        Raises:
            OSError: it has ended, or the handshake failed.
        """
        begins = await _first_byte(connection)
        tls = self._tls() if self._tls is not None and begins == _HANDSHAKE else None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=tls, ssl_shutdown_timeout=None if tls is None else _SHUTDOWN_S
        )
        # So that a page counts as written when the system has all of it.
        transport.set_write_buffer_limits(0)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _respond(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Page | LivePage, bool]:
        """The answer, and whether its body is wanted."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        fields = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
        if method not in ("GET", "HEAD"):
            return Page(HTTPStatus.METHOD_NOT_ALLOWED, TEXT, b"GET only\n"), True
        path, query = "", dict[str, str]()
        with suppress(ValueError):
            split = urlsplit(target.partition(" ")[0])
            path, query = split.path, dict(parse_qsl(split.query, max_num_fields=_MAX_QUERY_FIELDS))
        asked = PageRequest(
            path=path,
            query=query,
            fields=fields,
            is_head=method == "HEAD",
            is_encrypted=writer.get_extra_info("ssl_object") is not None,
        )
        return await self._answer(asked), not asked.is_head


async def _first_byte(connection: socket.socket) -> bytes:
    """First byte of a connection, which stays there to be read; b"" at its end."""
    loop, has_come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, has_come.set)
    try:
        await has_come.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _tell(writer: asyncio.StreamWriter, pieces: AsyncGenerator[bytes, None]) -> None:
    async for piece in pieces:
        async with asyncio.timeout(SECONDS):
            writer.write(piece)
            await writer.drain()


def _head(page: Page | LivePage) -> bytes:
    status = page.status if isinstance(page, Page) else HTTPStatus.OK
    lines = [
        f"HTTP/1.0 {status.value} {status.phrase}",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Type: {page.kind}",
        *([f"Content-Length: {len(page.body)}"] if isinstance(page, Page) else []),
        *(f"{name}: {value}" for name, value in page.fields),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "\r\n"]).encode("latin-1")


def _reason(error: OSError | OverflowError) -> str:
    """The system's own words; asyncio puts the address, which is told anyway, in front of them."""
    number = getattr(error, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(error)
