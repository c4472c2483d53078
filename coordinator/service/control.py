"""Control streams: Hello first, then reports up and directives down, until either side ends it."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
from grpc import aio

from coordinator.driver import Driver
from coordinator.lead.lease import Lead
from coordinator.streams import Stream
from skein.config.location import check_offers
from skein.config.resources import check_labels
from skein.errors import RemoteError, UserError
from skein.protocol.messages.directives import Assign, Commit, Prepare, Refused
from skein.protocol.messages.reports import Hello
from skein.types import WORKER_NAME_PATTERN, WorkerId
from skein.wire.codec import DIRECTIVE, REPORT
from skein.wire.context import Context
from skein.wire.extra import Downward, LogLine, LogLines
from skein.wire.identity.callers import NAMELESS
from skein.wire.identity.names import caller_of, is_worker
from skein.wire.v1 import control_pb2

HELLO_S = 10.0
"""A stream that has said nothing for so long is closed."""
CUT_S = 5.0
"""Seconds that a closed stream's call may take to end by itself; it does not when the worker reads nothing."""
NUM_ENCODED = 64
"""Directives that are kept encoded: those of a step or a generation that several workers are told."""
COMPRESSED = (Assign, Prepare, Commit)
"""Directives that are long and have no secret in them: the length of a compressed secret says something of it."""
MAX_SECRET = 64
MAX_HOST = 255
MAX_LINES = 200
MAX_LINE_CHARACTERS = 2000


class EncodedDirectives:
    """Encodes directives, each once while it is sent to many workers.

    A directive that all members of a generation or of a group are told is one object, which their streams take within a
    short time of each other: the newest `size` are kept with their bytes.
    """

    def __init__(self, size: int = NUM_ENCODED) -> None:
        self._size = size
        self._kept: OrderedDict[int, tuple[Downward, bytes]] = OrderedDict()

    def __call__(self, directive: Downward) -> bytes:
        """The message of a directive, in binary form."""
        # What is kept is alive, so no other object has its id.
        known = self._kept.get(id(directive))
        if known is not None:
            return known[1]
        data = DIRECTIVE.encode(directive).SerializeToString()
        self._kept[id(directive)] = directive, data
        if len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return data


class Control:
    """Turns streams into posts to the driver, and the driver's directives into messages."""

    def __init__(self, driver: Driver, lead: Lead) -> None:
        self._driver = driver
        self._lead = lead
        self._encoded = EncodedDirectives()

    def attach(self, server: aio.Server) -> None:
        """Have `server` answer the service's method. Directives are bytes already, so generated code cannot do it."""
        session = grpc.stream_stream_rpc_method_handler(
            self.Session,
            request_deserializer=control_pb2.Report.FromString,
        )
        handlers = grpc.method_handlers_generic_handler("skein.wire.v1.Control", {"Session": session})
        server.add_generic_rpc_handlers((handlers,))

    async def Session(
        self, request_iterator: AsyncIterator[control_pb2.Report], context: Context
    ) -> AsyncIterator[bytes]:
        # Set for the call, and put off below for each message that has a secret or is short.
        context.set_compression(grpc.Compression.Gzip)
        hello = await _hello(request_iterator)
        await _require_own_name(hello, context)
        stream = Stream(hello.worker, hello.incarnation, secret=hello.secret)
        await self._driver.opened(stream, hello)
        reading = asyncio.create_task(self._read(stream, request_iterator))
        cutting = asyncio.create_task(_cut(stream, asyncio.current_task()))
        doubting = asyncio.create_task(_close_if_lost(stream, self._lead))
        try:
            while (directive := await stream.take()) is not None:
                await self._lead.certain()
                if not isinstance(directive, COMPRESSED):
                    context.disable_next_message_compression()
                yield self._encoded(directive)
                if isinstance(directive, Refused):
                    stream.close("refused")
            if reading.done():
                await reading
        finally:
            cutting.cancel()
            doubting.cancel()
            reading.cancel()
            await self._driver.closed(stream, "the connection broke")

    async def _read(self, stream: Stream, reports: AsyncIterator[control_pb2.Report]) -> None:
        """Post what comes; the stream ends with it."""
        reason = "the connection broke"
        try:
            async for message in reports:
                await self._post(stream, message)
            reason = "the worker closed it"
        finally:
            stream.close(reason)

    async def _post(self, stream: Stream, message: control_pb2.Report) -> None:
        """Post a message, or what is wrong with it: what that costs its worker is for the machine to say."""
        try:
            report = REPORT.decode(message)
            if isinstance(report, Hello):
                raise RemoteError("a second Hello on one stream")
        except RemoteError as error:
            await self._driver.refused(stream, str(error))
            return
        if isinstance(report, LogLines):
            self._driver.said(stream.worker, [_short(line) for line in report.lines[:MAX_LINES]])
        else:
            await self._driver.reported(stream, report)


async def _hello(reports: AsyncIterator[control_pb2.Report]) -> Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            first = REPORT.decode(await anext(reports))
    except TimeoutError as error:
        raise RemoteError(f"no Hello within {HELLO_S:.0f} s") from error
    except StopAsyncIteration as error:
        raise RemoteError("the stream ended before a Hello") from error
    if not isinstance(first, Hello):
        raise RemoteError(f"{type(first).__name__} before Hello")
    _check_name("worker", first.worker)
    _check_name("incarnation", first.incarnation)
    _check_name("site", first.site)
    _check_said(first)
    if len(first.secret) > MAX_SECRET or len(first.host) > MAX_HOST or not first.host.isprintable():
        raise RemoteError(
            f"a secret of at most {MAX_SECRET} characters and a host of at most {MAX_HOST} are wanted"
        )
    return first


async def _require_own_name(hello: Hello, context: Context) -> None:
    """A worker is whom its certificate names: nobody joins, votes or beats for another."""
    caller = caller_of(context)
    if is_worker(caller, hello.worker):
        return
    shown = NAMELESS if caller is None else f"the certificate is that of {caller.role} {caller.name}"
    await context.abort(
        grpc.StatusCode.PERMISSION_DENIED,
        f"Hello of worker {hello.worker}, but {shown}: join by its own name",
    )


def _check_name(field: str, name: WorkerId | str) -> None:
    if re.fullmatch(WORKER_NAME_PATTERN, name) is None:
        raise RemoteError(
            f"{field} {name[:64]!r}: use up to 64 letters, digits, dots, dashes and underscores"
        )


def _check_said(hello: Hello) -> None:
    try:
        check_labels("labels", hello.labels)
        check_offers(hello.offers, field="offers")
    except UserError as error:
        raise RemoteError(str(error)) from error


def _short(line: LogLine) -> LogLine:
    return replace(line, text=" ".join(line.text[:MAX_LINE_CHARACTERS].split()))


async def _close_if_lost(stream: Stream, lead: Lead) -> None:
    await lead.lost()
    stream.close("the run log does not answer, so another coordinator may lead")


async def _cut(stream: Stream, call: "asyncio.Task[object] | None") -> None:
    """End the call of a closed stream that does not end itself."""
    await stream.closed()
    await asyncio.sleep(CUT_S)
    if call is not None:
        call.cancel()
