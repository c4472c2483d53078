"""The relay itself: joins the stream of a caller with the one by which it is answered.

Rules of this file
- What is carried is not looked at. A part is taken from one end when the other has room for the one before it, so a
  connection keeps one part in each direction, and a slow reader stops nobody but its own caller.
- Who listens is known by name and process, and where there are certificates, by these.
- A connection ends with either of its ends; what was taken until then is still handed on.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from grpc import aio

from skein.errors import RemoteError
from skein.types import Incarnation, WorkerId
from skein.wire.codec import CARRY_PART, INCOMING, LISTEN_REQUEST
from skein.wire.context import Context
from skein.wire.extra import AnswerCall, CallPeer, Incoming
from skein.wire.identity.names import LOCAL, Caller, caller_of, is_worker
from skein.wire.serving.hosts import host_of, is_from_here
from skein.wire.serving.reading import refuse_unreadable
from skein.wire.v1 import relay_pb2

MAX_CONNECTIONS = 512
MAX_OF_ONE = 256
"""Connections at once, in all and of one caller: a worker has six to each of its peers."""
MAX_LISTENERS = 1024
MAX_PROCESSES = 4
"""Processes of one worker that listen at once: it has one, and at a restart another."""
ANSWER_S = 5.0
"""In which whoever is called opens its end; it may be about to listen only."""
_FIRST_PART_S = 10.0
SERVICE = "skein.wire.v1.Relay"

Process = tuple[WorkerId, Incarnation]
Parts = AsyncIterator[bytes]


@dataclass(slots=True, eq=False)
class _End:
    """End of a connection: its parts, and where those of the other go."""

    parts: Parts
    context: Context
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Switchboard:
    """Connections of one relay.

    Args:
        is_offered: carry for everybody; else only for whoever serves here: that calls back those who listen.
        owner: whose server this is, where callers have certificates.
    """

    def __init__(self, *, is_offered: bool, owner: Caller = LOCAL) -> None:
        self._is_offered = is_offered
        self._owner = owner
        self.num_bytes = 0
        """Carried so far, in both directions."""
        self.num_refused = 0
        self._listeners: dict[Process, asyncio.Queue[str]] = {}
        self._came = asyncio.Event()
        self._ringing: dict[str, asyncio.Future[_End]] = {}
        self._open: Counter[str] = Counter()

    @property
    def num_connections(self) -> int:
        """Connections that are open, or about to be."""
        return self._open.total()

    @property
    def num_listening(self) -> int:
        """Processes that listen here."""
        return len(self._listeners)

    def attach(self, server: aio.Server) -> None:
        """Have `server`, not started yet, answer for this relay."""
        # Not by the generated function: what is carried passes as the bytes that it is.
        handlers = {
            "Listen": grpc.unary_stream_rpc_method_handler(
                self.Listen,
                request_deserializer=relay_pb2.ListenRequest.FromString,
                response_serializer=relay_pb2.Incoming.SerializeToString,
            ),
            "Carry": grpc.stream_stream_rpc_method_handler(self.Carry),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def Listen(
        self, request: relay_pb2.ListenRequest, context: Context
    ) -> AsyncIterator[relay_pb2.Incoming]:
        """Tells of callers; see the proto. A newer stream of a process takes the place of one before it."""
        wanted = LISTEN_REQUEST.decode(request)
        if not is_worker(caller_of(context), wanted.worker):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"listens for worker {wanted.worker}, which it is not"
            )
        process = wanted.worker, wanted.incarnation
        if process not in self._listeners:
            if len(self._listeners) >= MAX_LISTENERS:
                await self._crowded(context, f"{MAX_LISTENERS} workers listen here already")
            if sum(worker == wanted.worker for worker, _ in self._listeners) >= MAX_PROCESSES:
                await self._crowded(context, f"{MAX_PROCESSES} processes of this worker listen here already")
        calls = self._listeners[process] = asyncio.Queue(MAX_OF_ONE)
        self._came.set()
        self._came.clear()
        try:
            while True:
                yield INCOMING.encode(Incoming(connection=await calls.get()))
        finally:
            if self._listeners.get(process) is calls:
                del self._listeners[process]

    async def Carry(self, requests: Parts, context: Context) -> None:
        """Takes one end of a connection; see the proto."""
        parts = aiter(requests)
        try:
            async with asyncio.timeout(_FIRST_PART_S):
                first = CARRY_PART.from_bytes(await anext(parts))
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a connection begins with whose it is")
        except RemoteError:
            await refuse_unreadable(context, "Carry")
        match first:
            case CallPeer():
                await self._call(first, _End(parts, context))
            case AnswerCall():
                await self._answer(first, _End(parts, context))
            case _:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bytes of no connection")

    async def _call(self, wanted: CallPeer, end: _End) -> None:
        context = end.context
        if not (self._is_offered or self._is_owner(context)):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "this worker relays for itself only: see --relay"
            )
        host = _caller_key(context)
        if self.num_connections >= MAX_CONNECTIONS or self._open[host] >= MAX_OF_ONE:
            await self._crowded(context, f"{self.num_connections} connections are open already")
        with self._counted(host):
            try:
                async with asyncio.timeout(ANSWER_S):
                    other = await self._answered((wanted.worker, wanted.incarnation))
            except TimeoutError:
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"worker {wanted.worker} does not listen here"
                )
            try:
                await self._join(end, other)
            finally:
                other.is_over.set()

    def _is_owner(self, context: Context) -> bool:
        caller = caller_of(context)
        if caller == LOCAL:
            return is_from_here(context.peer())
        # Connections that are carried come from this machine, too: the name decides.
        return caller is not None and caller.host == self._owner.host

    async def _answered(self, process: Process) -> _End:
        """The other end, once whoever is called has opened it."""
        while (calls := self._listeners.get(process)) is None:
            await self._came.wait()
        connection = secrets.token_hex(16)
        answer: asyncio.Future[_End] = asyncio.get_running_loop().create_future()
        self._ringing[connection] = answer
        try:
            await calls.put(connection)
            return await answer
        finally:
            del self._ringing[connection]

    async def _answer(self, answer: AnswerCall, end: _End) -> None:
        ringing = self._ringing.get(answer.connection)
        if ringing is None or ringing.done():
            await end.context.abort(grpc.StatusCode.NOT_FOUND, "nobody waits for this connection any more")
        ringing.set_result(end)
        try:
            await end.is_over.wait()
        finally:
            end.is_over.set()

    async def _join(self, caller: _End, called: _End) -> None:
        """Carry both ways until either ends."""
        ways = {
            asyncio.create_task(self._carry(caller.parts, called.context)),
            asyncio.create_task(self._carry(called.parts, caller.context)),
            asyncio.create_task(called.is_over.wait()),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
                way.add_done_callback(_take_error)

    async def _carry(self, parts: Parts, to: Context) -> None:
        async for part in parts:
            await to.write(part)
            self.num_bytes += len(part)

    @contextmanager
    def _counted(self, host: str) -> Iterator[None]:
        self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]

    async def _crowded(self, context: Context, why: str) -> None:
        self.num_refused += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


def _caller_key(context: Context) -> str:
    """Caller that a connection counts for: by certificate, or by host."""
    caller = caller_of(context)
    return host_of(context.peer()) if caller in (None, LOCAL) else caller.host


def _take_error(way: "asyncio.Task[object]") -> None:
    """Look at how a direction ended that nobody waits for: its connection is over, and knows why."""
    if not way.cancelled():
        way.exception()
