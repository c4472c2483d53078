"""A coordinator that does nothing by itself: tests read what workers report and say what it directs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

from grpc import aio

from skein.protocol.messages.directives import Directive, Welcome
from skein.protocol.messages.reports import Beat, Hello, Report
from skein.protocol.worker.worker_io import Exit
from skein.topology.fleet import Profile
from skein.types import Epoch, Incarnation, SiteId, WorkerId
from skein.wire.channel import bind, open_server
from skein.wire.codec import DIRECTIVE, REPORT
from skein.wire.credentials import NO_CREDENTIALS, Credentials
from skein.wire.extra import LogLine, LogLines
from skein.wire.identity.callers import NamedCallers
from skein.wire.v1 import control_pb2, control_pb2_grpc
from tests.support.device import DEVICE
from worker.inbox import WorkerInbox
from worker.process import WorkerSetting, work

Context: TypeAlias = "aio.ServicerContext[object, object]"
R = TypeVar("R", bound=Report | LogLines)

WAIT_S = 120.0
"""Nothing here takes long; this only turns a hang into a failure."""
WELCOME = Welcome(epoch=Epoch(1), lease_s=3.0, beat_s=0.05)


class Session:
    """One control stream, as a test sees it."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello
        self._reports: asyncio.Queue[Report | LogLines] = asyncio.Queue()
        self._directives: asyncio.Queue[Directive | None] = asyncio.Queue()

    def say(self, *directives: Directive) -> None:
        for directive in directives:
            self._directives.put_nowait(directive)

    def end(self) -> None:
        """Close the stream."""
        self._directives.put_nowait(None)

    async def heard(self, kind: type[R]) -> R:
        """The next report of `kind`; those before it are skipped."""
        async with asyncio.timeout(WAIT_S):
            while not isinstance(report := await self._reports.get(), kind):
                pass
        return report

    async def next(self) -> Report:
        """The next report that is not a matter of course."""
        async with asyncio.timeout(WAIT_S):
            while isinstance(report := await self._reports.get(), Beat | LogLines):
                pass
        return report


class PuppetCoordinator(control_pb2_grpc.ControlServicer):
    """Takes sessions; `sessions` has them in the order in which they said Hello."""

    def __init__(self) -> None:
        self._sessions: asyncio.Queue[Session] = asyncio.Queue()

    async def session(self) -> Session:
        """The next session."""
        async with asyncio.timeout(WAIT_S):
            return await self._sessions.get()

    async def Session(
        self, request_iterator: AsyncIterator[control_pb2.Report], _context: Context
    ) -> AsyncIterator[control_pb2.Directive]:
        hello = REPORT.decode(await anext(request_iterator))
        assert isinstance(hello, Hello)
        session = Session(hello)
        self._sessions.put_nowait(session)

        async def read() -> None:
            async for message in request_iterator:
                session._reports.put_nowait(REPORT.decode(message))

        reading = asyncio.create_task(read())
        try:
            while (directive := await session._directives.get()) is not None:
                yield DIRECTIVE.encode(directive)
        finally:
            reading.cancel()


@asynccontextmanager
async def listening(
    *servicers: Callable[[aio.Server], None],
    credentials: Credentials = NO_CREDENTIALS,
    named: NamedCallers | None = None,
    port: int = 0,
) -> AsyncIterator[int]:
    """A server on loopback; its port."""
    server = open_server(credentials=credentials, named=named)
    for attach in servicers:
        attach(server)
    bound = bind(server, "127.0.0.1", port, credentials=credentials)
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@asynccontextmanager
async def puppet(
    *, credentials: Credentials = NO_CREDENTIALS, named: NamedCallers | None = None, port: int = 0
) -> AsyncIterator[tuple[PuppetCoordinator, int]]:
    """A coordinator under the test's control, and its port."""
    coordinator = PuppetCoordinator()

    def attach(server: aio.Server) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(coordinator, server)

    async with listening(attach, credentials=credentials, named=named, port=port) as bound:
        yield coordinator, bound


@dataclass(frozen=True, slots=True)
class Running:
    """A worker of this process."""

    inbox: WorkerInbox
    ended: asyncio.Task[Exit]

    async def end(self) -> Exit:
        async with asyncio.timeout(WAIT_S):
            return await self.ended


def setting(
    port: int,
    *,
    name: str = "w0",
    incarnation: str = "i0",
    credentials: Credentials = NO_CREDENTIALS,
    memory_bytes: int | None = None,
    take_log_lines: Callable[[], tuple[LogLine, ...]] = tuple,
) -> WorkerSetting:
    """A worker on loopback that joins what listens at `port`."""
    return WorkerSetting(
        worker=WorkerId(name),
        incarnation=Incarnation(incarnation),
        site=SiteId("lab"),
        join=f"127.0.0.1:{port}",
        listen="127.0.0.1",
        port=0,
        address_of=lambda bound: f"127.0.0.1:{bound}",
        credentials=credentials,
        device=DEVICE,
        memory_bytes=memory_bytes,
        metrics_host="127.0.0.1",
        metrics_port=None,
        take_log_lines=take_log_lines,
        measure=lambda device: Profile(
            device=str(device), device_name="test", flops_per_s=1e9, memory_bytes=1 << 30
        ),
    )


@asynccontextmanager
async def running(wanted: WorkerSetting) -> AsyncIterator[Running]:
    """A worker in this process; cancelled at the end, as if it were killed."""
    ready: asyncio.Future[WorkerInbox] = asyncio.get_running_loop().create_future()
    ended = asyncio.create_task(cast("Coroutine[None, None, Exit]", work(wanted, ready.set_result)))
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ended.result()
        yield Running(ready.result(), ended)
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
