"""Real workers over gRPC on loopback, directed by the real Coordinator machine; its log and files are in memory."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

import grpc
from grpc import aio

from skein.config.job import JobSpec
from skein.plan.balanced import make_balanced_plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import (
    Append,
    CheckpointVerified,
    ChooseRows,
    CoordinatorCommand,
    CoordinatorEvent,
    DrainAsked,
    Halt,
    Log,
    MakePlan,
    ManifestWritten,
    PlanMade,
    PruneCheckpoints,
    ReportArrived,
    Send,
    StreamBroken,
    SubmitAsked,
    VerifyCheckpoint,
    WriteManifest,
)
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import CheckpointCommitted, EpochOpened, JobEnded, Record, StepCommitted
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import Hello
from skein.types import Condition, Epoch, Incarnation, JobId, JobState, Step, WorkerId
from skein.wire import codec
from skein.wire.channel import PART_BYTES
from skein.wire.extra import FileData, FileEnd, GetStart, LogLines, ManifestReply, PutReply, PutStart
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, control_pb2, control_pb2_grpc
from tests.worker.puppet import Context, Running, listening, running, setting
from worker.process import WorkerSetting

WAIT_S = 200.0
"""Nothing here takes long; this only turns a hang into a failure."""
R = TypeVar("R", bound=Record)


@dataclass
class Disk:
    """What survives a coordinator."""

    records: list[Record] = field(default_factory=list)
    files: dict[tuple[JobId, Step, str], bytes] = field(default_factory=dict)


Moment = Callable[[CoordinatorEvent | CoordinatorCommand], bool]
"""Whether a coordinator dies before it takes an event in, or carries a command out."""


class Cluster(control_pb2_grpc.ControlServicer, checkpoint_pb2_grpc.CheckpointServicer):
    """A coordinator that goes on from what lies on `disk`; from the moment on at which it dies it does nothing."""

    def __init__(self, disk: Disk, dies: Moment = lambda _: False) -> None:
        self.port = 0
        self.died = asyncio.Event()
        self._dies = dies
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sessions: dict[tuple[WorkerId, Incarnation], asyncio.Queue[control_pb2.Directive]] = {}
        epoch = sum(isinstance(record, EpochOpened) for record in disk.records) + 1
        disk.records.append(EpochOpened(epoch=Epoch(epoch), wall_s=self._loop.time()))
        self._num_before = len(disk.records)
        self._machine = Coordinator(key=b"only for tests")
        self._machine.replay(disk.records)

    # --- for tests ---

    def submit(self, job: JobSpec, key: str = "only") -> None:
        self._handle(SubmitAsked(key=key, spec=job))

    def drain(self, name: str) -> None:
        """An operator wants the worker to go."""
        self._handle(DrainAsked(worker=WorkerId(name)))

    def all(self, kind: type[R]) -> list[R]:
        """Records of this coordinator's epoch."""
        return [record for record in self._disk.records[self._num_before :] if isinstance(record, kind)]

    async def first(self, kind: type[R], number: int = 1) -> R:
        """The `number`th record of a kind, once it is there."""
        async with asyncio.timeout(WAIT_S):
            while len(found := self.all(kind)) < number:
                await self._news.wait()
                self._news.clear()
        return found[number - 1]

    async def finished(self) -> JobState:
        """The job's last state."""
        return (await self.first(JobEnded)).state

    @property
    def steps(self) -> list[StepRecord]:
        """What was committed; a step that was done twice, as it was the last time."""
        return list({record.record.step: record.record for record in self.all(StepCommitted)}.values())

    @asynccontextmanager
    async def workers(
        self, *names: str, adapt: Callable[[WorkerSetting], WorkerSetting] = lambda usual: usual
    ) -> AsyncIterator[list[Running]]:
        """Workers, as `adapt` makes them, that die at the end if they have not left."""
        incarnation = len(self._disk.records)
        settings = [setting(self.port, name=name, incarnation=f"{name}-{incarnation}") for name in names]
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(running(adapt(x))) for x in settings]

    # --- the driver, in short ---

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, event: CoordinatorEvent) -> None:
        events: list[CoordinatorEvent] = [event]
        while events and not self._has_died(events[0]):
            for command in self._machine.handle(events.pop(0), now=self._loop.time()):
                if self._has_died(command):
                    break
                events += self._carry_out(command)
        self.close()
        if self.died.is_set():
            return
        deadline = self._machine.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._handle, TimePassed())

    def _has_died(self, at: CoordinatorEvent | CoordinatorCommand) -> bool:
        if self._dies(at):
            self.died.set()
        return self.died.is_set()

    def _carry_out(self, command: CoordinatorCommand) -> Iterable[CoordinatorEvent]:
        match command:
            case Append():
                self._disk.records.append(command.record)
                self._news.set()
            case Send():
                session = self._sessions.get((command.worker, command.incarnation))
                if session is not None:
                    session.put_nowait(codec.DIRECTIVE.encode(command.directive))
            case MakePlan():
                plan = make_balanced_plan(command.job, command.fleet, command.previous, seed=0)
                yield PlanMade(request=command.request, result=plan)
            case ChooseRows():
                yield command.answer()
            case WriteManifest():
                yield ManifestWritten(checkpoint=command.checkpoint, error=None)
            case VerifyCheckpoint():
                yield self._look_at(command.checkpoint)
            case Halt():
                raise AssertionError(command.reason)
            case PruneCheckpoints() | Log():
                pass
            case _:
                assert_never(command)

    def _look_at(self, checkpoint: CheckpointCommitted) -> CheckpointVerified:
        """Of files with a URL only those know who can read them."""
        files = [file for stage in checkpoint.stages for file in stage.files]
        for file in files if checkpoint.url is None else ():
            data = self._disk.files.get((checkpoint.job, checkpoint.version, file.name))
            if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
                damaged = Condition.DAMAGED
                return CheckpointVerified(checkpoint=checkpoint, condition=damaged, reason=file.name)
        return CheckpointVerified(checkpoint=checkpoint, condition=Condition.WHOLE)

    # --- services ---

    async def Session(
        self, request_iterator: AsyncIterator[control_pb2.Report], context: Context
    ) -> AsyncIterator[control_pb2.Directive]:
        hello = codec.REPORT.decode(await anext(request_iterator))
        assert isinstance(hello, Hello)
        key = (hello.worker, hello.incarnation)
        session = self._sessions[key] = asyncio.Queue()
        self._handle(ReportArrived(worker=key[0], incarnation=key[1], report=hello))

        async def read() -> None:
            async for message in request_iterator:
                report = codec.REPORT.decode(message)
                if not isinstance(report, LogLines):
                    self._handle(ReportArrived(worker=key[0], incarnation=key[1], report=report))

        reading = asyncio.create_task(read())
        try:
            while True:
                yield await session.get()
        finally:
            reading.cancel()
            if self._sessions.get(key) is session:
                del self._sessions[key]
                self._handle(StreamBroken(worker=key[0], incarnation=key[1], reason="the connection broke"))

    async def Put(
        self, request_iterator: AsyncIterator[checkpoint_pb2.PutPart], context: Context
    ) -> checkpoint_pb2.PutReply:
        start = codec.PUT_PART.decode(await anext(request_iterator))
        assert isinstance(start, PutStart)
        data, digest = bytearray(), ""
        async for message in request_iterator:
            match codec.PUT_PART.decode(message):
                case FileData(data=part):
                    data += part
                case FileEnd(sha256=sha256):
                    digest = sha256
        assert (len(data), hashlib.sha256(data).hexdigest()) == (start.num_bytes, digest)
        self._disk.files[start.job, start.version, start.name] = bytes(data)
        return codec.PUT_REPLY.encode(PutReply(num_bytes=len(data), sha256=digest))

    async def Get(
        self, request: checkpoint_pb2.GetRequest, context: Context
    ) -> AsyncIterator[checkpoint_pb2.GetPart]:
        asked = codec.GET_REQUEST.decode(request)
        data = self._disk.files[asked.job, asked.version, asked.name]
        yield codec.GET_PART.encode(GetStart(num_bytes=len(data)))
        for offset in range(0, len(data), PART_BYTES):
            yield codec.GET_PART.encode(FileData(data=data[offset : offset + PART_BYTES]))
        yield codec.GET_PART.encode(FileEnd(sha256=hashlib.sha256(data).hexdigest()))

    async def Manifest(
        self, request: checkpoint_pb2.ManifestRequest, context: Context
    ) -> checkpoint_pb2.ManifestReply:
        asked = codec.MANIFEST_REQUEST.decode(request)
        kept = [r for r in self._disk.records if isinstance(r, CheckpointCommitted)]
        found = next((c for c in kept if (c.job, c.version) == (asked.job, asked.version)), None)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such checkpoint")
        return codec.MANIFEST_REPLY.encode(
            ManifestReply(
                job=found.job,
                version=found.version,
                spec="{}",
                url=found.url,
                stages=found.stages,
                wall_s=0.0,
            )
        )

    async def List(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        raise AssertionError("workers do not ask")

    async def Verify(
        self, request: checkpoint_pb2.VerifyRequest, context: Context
    ) -> checkpoint_pb2.CheckpointView:
        raise AssertionError("workers do not ask")

    async def Delete(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        raise AssertionError("workers do not ask")


@asynccontextmanager
async def cluster(disk: Disk, *, dies: Moment = lambda _: False, port: int = 0) -> AsyncIterator[Cluster]:
    """A coordinator that listens; at `port`, where workers find it that knew another one."""
    here = Cluster(disk, dies)

    def attach(server: aio.Server) -> None:
        control_pb2_grpc.add_ControlServicer_to_server(here, server)
        checkpoint_pb2_grpc.add_CheckpointServicer_to_server(here, server)

    async with listening(attach, port=port) as here.port:
        yield here
    here.close()
