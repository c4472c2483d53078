"""A coordinator that says what a test tells it to, over real gRPC, on a thread of its own."""

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import grpc
from grpc import aio

import skein
from client.jobfile import read_job_text
from skein.config.job import JobSpec
from skein.config.load import job_from_json
from skein.errors import SkeinError, UserError
from skein.plan.plan import ChunkTime, TransferTime
from skein.protocol.log.records import Incident, StageFiles
from skein.protocol.messages.directives import CheckpointFile, Decision, StepRecord
from skein.topology.fleet import Link, Profile
from skein.types import ChunkRef, Epoch, Generation, JobId, JobState, SiteId, StageIndex, Step, WorkerId
from skein.wire import codec
from skein.wire.channel import bind, open_server
from skein.wire.credentials import NO_CREDENTIALS, Credentials
from skein.wire.extra import FileData, FileEnd, GetStart, LogLevel, LogLine, ManifestReply
from skein.wire.failures import refuse
from skein.wire.greeting import VersionReply
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from skein.wire.views import (
    CheckpointView,
    ChunkTimes,
    Ended,
    EvaluationFinished,
    JobEvent,
    JobHappening,
    JobStatus,
    LineLogged,
    PageLink,
    StateChanged,
    StepFinished,
    SubmitReply,
    TransferTimes,
    WorkerState,
    WorkerStatus,
)

Context = aio.ServicerContext[object, object]
TOKENS_PER_STEP = 100
START_S = 1_700_000_000.0
T = TypeVar("T")
GOOD = """
name: first-job
model: {family: llama, preset: llama-1m}
data:
  sources: [{format: text, path: /books}]
budget: {steps: 3}
"""


def status(job: str = "first-job-1", *, state: JobState = JobState.RUNNING, step: int = 2) -> JobStatus:
    spec = read_job_text(GOOD, origin="job", base=Path())
    return JobStatus(
        job=JobId(job),
        name="first-job",
        state=state,
        reason="",
        step=Step(step),
        total_steps=3,
        loss=2.5,
        evaluation_loss=None,
        num_tokens=TOKENS_PER_STEP * step,
        tokens_per_s=1234.0,
        step_s=0.5,
        generation=Generation(1),
        num_workers=2,
        checkpoint_version=None,
        submitted_wall_s=START_S,
        spec=spec.canonical_json(),
        plan="two stages",
        predicted_step_s=0.4,
        lower_bound_s=0.3,
        measured_step_s=0.6,
        chunk_times=(
            ChunkTimes(planned=chunk_time(0, "w1", 0.1, 0.2), measured=chunk_time(0, "w1", 0.125, 0.2)),
            ChunkTimes(planned=chunk_time(1, "w2", 0.1, 0.1), measured=None),
        ),
        transfer_times=(TransferTimes(planned=way(2.5), measured=way(5.0)),),
    )


def chunk_time(stage: int, worker: str, forward_s: float, backward_s: float) -> ChunkTime:
    chunk = ChunkRef(stage=StageIndex(stage), worker=WorkerId(worker))
    return ChunkTime(chunk=chunk, forward_s=forward_s, backward_s=backward_s, loss_s=0.0)


def way(seconds: float) -> TransferTime:
    return TransferTime(sender=WorkerId("w1"), receiver=WorkerId("w2"), num_bytes=1000, seconds=seconds)


def worker(
    name: str = "w1", *, address: str = "127.0.0.1:9", state: WorkerState = WorkerState.WORKING
) -> WorkerStatus:
    profile = Profile(device="cpu", device_name="a CPU", flops_per_s=5e10, memory_bytes=2**33)
    return WorkerStatus(
        worker=WorkerId(name),
        site=SiteId("attic"),
        address=address,
        state=state,
        job=JobId("first-job-1"),
        profile=profile,
        stages=(StageIndex(0),),
        beat_age_s=0.25,
    )


def link() -> Link:
    return Link(sender=WorkerId("w1"), receiver=WorkerId("w2"), latency_s=0.0125, bytes_per_s=2.0**20)


def event(sequence: int, body: JobHappening, *, line: int = 0) -> JobEvent:
    """What is recorded, or with a `line` what passes after that."""
    return JobEvent(sequence=sequence, wall_s=START_S + sequence, body=body, line=line)


def step_body(step: int, *, loss: float = 2.0) -> StepFinished:
    record = StepRecord(
        step=Step(step),
        decision=Decision.APPLY,
        reason="",
        results=(),
        loss=loss,
        num_tokens=TOKENS_PER_STEP,
        weight=0.01,
        gradient_norm=1.5,
        clip=1.0,
        learning_rate=1e-3,
        samples_after=4 * (step + 1),
    )
    return StepFinished(record=record, tokens_per_s=200.0, step_s=0.5)


def line_body(text: str, *, level: LogLevel = LogLevel.INFO) -> LineLogged:
    return LineLogged(worker=WorkerId("w1"), line=LogLine(level=level, wall_s=START_S, text=text))


def whole_story(state: JobState = JobState.FINISHED) -> list[JobEvent]:
    """Three steps, an evaluation and the end."""
    return [
        event(1, StateChanged(state=JobState.PENDING, reason="submitted")),
        event(2, step_body(0, loss=3.0)),
        event(3, step_body(1, loss=2.0)),
        event(3, line_body("all is well"), line=1),
        event(4, step_body(2, loss=1.0)),
        event(5, EvaluationFinished(version=Step(3), loss=1.25, num_tokens=50)),
        event(6, Ended(state=state, reason="as told")),
    ]


@dataclass
class Script:
    """What the coordinator says, and what it heard."""

    jobs: dict[str, JobStatus] = field(default_factory=lambda: {"first-job-1": status()})
    workers: list[WorkerStatus] = field(default_factory=lambda: [worker()])
    num_known: int = 0
    story: list[JobEvent] = field(default_factory=whole_story)
    sequel: list[JobEvent] = field(default_factory=list)
    """What happens after somebody resumes the job."""
    incidents: list[Incident] = field(default_factory=list)
    """Of every job; told two at a time."""
    page: PageLink = field(default_factory=lambda: PageLink(address="127.0.0.1:7412", link="", link_s=300.0))
    checkpoints: list[CheckpointView] = field(default_factory=list)
    """Of every job."""
    verified: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    manifest: ManifestReply | None = None
    protocol_version: int = skein.PROTOCOL_VERSION
    error: SkeinError | None = None
    """What every call but Version is refused with."""
    page_jobs: int = 500
    """Jobs of a page of the list."""
    unavailable: int = 0
    """So many calls to Submit break after they were carried out."""
    break_after: list[int] = field(default_factory=list)
    """Each stream breaks after so many messages; streams beyond these do not."""
    keys: list[str] = field(default_factory=list)
    wishes: list[jobs_pb2.CancelRequest | jobs_pb2.PauseRequest | jobs_pb2.ResumeRequest] = field(
        default_factory=list
    )
    begun_from: list[tuple[str, int]] = field(default_factory=list)
    """What jobs were to begin with; "" and 0 for nothing."""
    specs: list[JobSpec] = field(default_factory=list)
    watched_since: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    job_by_key: dict[str, str] = field(default_factory=dict)

    def keep(self, files: dict[str, bytes], spec: JobSpec, *, tensors: dict[str, tuple[str, ...]]) -> None:
        """Have a checkpoint of these files, the first per stage."""
        self.files = files
        stages = tuple(
            StageFiles(stage=StageIndex(index), files=(_file(name, data, tensors[name]),))
            for index, (name, data) in enumerate(files.items())
        )
        self.manifest = ManifestReply(
            job=JobId("first-job-1"),
            version=Step(3),
            spec=spec.canonical_json(),
            url=None,
            stages=stages,
            wall_s=START_S,
        )


def _file(name: str, data: bytes, tensors: Sequence[str]) -> CheckpointFile:
    sha256 = hashlib.sha256(data).hexdigest()
    return CheckpointFile(name=name, num_bytes=len(data), sha256=sha256, tensors=tuple(tensors))


class _Jobs(jobs_pb2_grpc.JobsServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def _checked(self, context: Context) -> None:
        if self._script.error is not None:
            await refuse(context, self._script.error)

    async def _known(self, job: str, context: Context) -> JobStatus:
        await self._checked(context)
        if job not in self._script.jobs:
            await refuse(context, UserError("job", job, "no such job"), grpc.StatusCode.NOT_FOUND)
        return self._script.jobs[job]

    async def Version(self, request: jobs_pb2.VersionRequest, context: Context) -> jobs_pb2.VersionReply:
        reply = VersionReply(
            protocol_version=self._script.protocol_version,
            release="9.9",
            epoch=Epoch(4),
            wall_s=time.time(),
            ballast=bytes(request.reply_bytes),
        )
        return codec.VERSION_REPLY.encode(reply)

    async def Submit(self, request: jobs_pb2.SubmitRequest, context: Context) -> jobs_pb2.SubmitReply:
        await self._checked(context)
        script = self._script
        script.begun_from.append((request.from_job, request.from_version))
        script.keys.append(request.key)
        script.specs.append(job_from_json(request.spec))
        is_new = request.key not in script.job_by_key
        job = script.job_by_key.setdefault(
            request.key, f"{script.specs[-1].name}-{len(script.job_by_key) + 1}"
        )
        if script.unavailable:
            script.unavailable -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone for a moment")
        script.jobs.setdefault(job, status(job, state=JobState.PENDING, step=0))
        return codec.SUBMIT_REPLY.encode(SubmitReply(job=JobId(job), is_new=is_new))

    async def List(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsReply:
        await self._checked(context)
        known = list(self._script.jobs.values())
        if request.has_ended != request.is_going:
            known = [job for job in known if job.state.is_final == request.has_ended]
        if request.before:
            known = known[: [job.job for job in known].index(JobId(request.before))]
        page = known[-(request.limit or self._script.page_jobs) :]
        return jobs_pb2.ListJobsReply(
            jobs=[codec.JOB_STATUS.encode(job) for job in page],
            before=page[0].job if len(page) < len(known) else "",
            num_jobs=len(self._script.jobs),
        )

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.JobStatus:
        return codec.JOB_STATUS.encode(await self._known(request.job, context))

    async def Watch(
        self, request: jobs_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.JobEvent]:
        _ = await self._known(request.job, context)
        self._script.watched_since.append(request.since)
        left = self._script.break_after.pop(0) if self._script.break_after else None
        for told in self._script.story:
            # As an older coordinator might, it tells again what passed just before.
            if told.sequence < request.since or (told.sequence == request.since and told.line == 0):
                continue
            if left == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            left = None if left is None else left - 1
            yield codec.JOB_EVENT.encode(told)
        if not isinstance(self._script.story[-1].body, Ended) and not request.until_now:
            await asyncio.Event().wait()

    async def Cancel(self, request: jobs_pb2.CancelRequest, context: Context) -> jobs_pb2.JobStatus:
        _ = await self._known(request.job, context)
        self._script.wishes.append(request)
        self._script.jobs[request.job] = status(request.job, state=JobState.CANCELLED)
        return codec.JOB_STATUS.encode(self._script.jobs[request.job])

    async def Pause(self, request: jobs_pb2.PauseRequest, context: Context) -> jobs_pb2.JobStatus:
        _ = await self._known(request.job, context)
        self._script.wishes.append(request)
        self._script.jobs[request.job] = status(request.job, state=JobState.HELD)
        return codec.JOB_STATUS.encode(self._script.jobs[request.job])

    async def Resume(self, request: jobs_pb2.ResumeRequest, context: Context) -> jobs_pb2.JobStatus:
        _ = await self._known(request.job, context)
        self._script.wishes.append(request)
        self._script.jobs[request.job] = status(request.job, state=JobState.PENDING)
        self._script.story += self._script.sequel
        return codec.JOB_STATUS.encode(self._script.jobs[request.job])

    async def Workers(self, request: jobs_pb2.WorkersRequest, context: Context) -> jobs_pb2.WorkersReply:
        await self._checked(context)
        workers = [codec.WORKER_STATUS.encode(x) for x in self._script.workers]
        return jobs_pb2.WorkersReply(workers=workers, num_known=self._script.num_known)

    async def Drain(self, request: jobs_pb2.DrainRequest, context: Context) -> jobs_pb2.WorkerStatus:
        found = [x for x in self._script.workers if x.worker == request.worker]
        if not found:
            await refuse(
                context, UserError("worker", request.worker, "is not here"), grpc.StatusCode.NOT_FOUND
            )
        return codec.WORKER_STATUS.encode(worker(request.worker, state=WorkerState.DRAINING))

    async def Measure(self, request: jobs_pb2.MeasureRequest, context: Context) -> jobs_pb2.WorkersReply:
        await self._checked(context)
        script = self._script
        script.workers = [
            replace(x, profile=replace(x.profile, flops_per_s=3e10, spread=0.2), measured_age_s=0.0)
            for x in script.workers
        ]
        found = [x for x in script.workers if request.worker in ("", x.worker)]
        return jobs_pb2.WorkersReply(workers=[codec.WORKER_STATUS.encode(x) for x in found])

    async def OpenPage(self, request: jobs_pb2.OpenPageRequest, context: Context) -> jobs_pb2.PageLink:
        await self._checked(context)
        return codec.PAGE_LINK.encode(self._script.page)

    async def Links(self, request: jobs_pb2.LinksRequest, context: Context) -> jobs_pb2.LinksReply:
        await self._checked(context)
        return jobs_pb2.LinksReply(links=[codec.LINK.encode(link())])

    async def ListIncidents(
        self, request: jobs_pb2.ListIncidentsRequest, context: Context
    ) -> jobs_pb2.ListIncidentsReply:
        _ = await self._known(request.job, context)
        found = self._script.incidents
        page = [codec.INCIDENT.encode(one) for one in found[request.since : request.since + 2]]
        return jobs_pb2.ListIncidentsReply(incidents=page, num_incidents=len(found))


class _Checkpoint(checkpoint_pb2_grpc.CheckpointServicer):
    def __init__(self, script: Script) -> None:
        self._script = script

    async def Put(
        self, request_iterator: AsyncIterator[checkpoint_pb2.PutPart], context: Context
    ) -> checkpoint_pb2.PutReply:
        raise AssertionError("clients upload nothing")

    async def Get(
        self, request: checkpoint_pb2.GetRequest, context: Context
    ) -> AsyncIterator[checkpoint_pb2.GetPart]:
        self._script.offsets.append(request.offset)
        data = self._script.files[request.name]
        left = self._script.break_after.pop(0) if self._script.break_after else None
        yield codec.GET_PART.encode(GetStart(num_bytes=len(data)))
        for start in range(request.offset, len(data), 1000):
            if left == 0:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            left = None if left is None else left - 1
            yield codec.GET_PART.encode(FileData(data=data[start : start + 1000]))
        yield codec.GET_PART.encode(FileEnd(sha256=hashlib.sha256(data).hexdigest()))

    async def Manifest(
        self, request: checkpoint_pb2.ManifestRequest, context: Context
    ) -> checkpoint_pb2.ManifestReply:
        if self._script.manifest is None:
            error = UserError("checkpoint", request.job, "it has none yet")
            await refuse(context, error, grpc.StatusCode.NOT_FOUND)
        assert self._script.manifest is not None
        return codec.MANIFEST_REPLY.encode(self._script.manifest)

    async def List(
        self, request: checkpoint_pb2.ListCheckpointsRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        views = map(codec.CHECKPOINT_VIEW.encode, self._script.checkpoints)
        return checkpoint_pb2.ListCheckpointsReply(checkpoints=views)

    async def Verify(
        self, request: checkpoint_pb2.VerifyRequest, context: Context
    ) -> checkpoint_pb2.CheckpointView:
        self._script.verified.append(request.version)
        kept = [view for view in self._script.checkpoints if view.version == request.version]
        if not kept:
            await refuse(context, UserError("checkpoint", request.version, "gone"), grpc.StatusCode.NOT_FOUND)
        return codec.CHECKPOINT_VIEW.encode(kept[0])

    async def Delete(
        self, request: checkpoint_pb2.DeleteCheckpointRequest, context: Context
    ) -> checkpoint_pb2.ListCheckpointsReply:
        script = self._script
        script.checkpoints = [view for view in script.checkpoints if view.version != request.version]
        views = map(codec.CHECKPOINT_VIEW.encode, script.checkpoints)
        return checkpoint_pb2.ListCheckpointsReply(checkpoints=views)


@contextmanager
def serving(script: Script, *, credentials: Credentials = NO_CREDENTIALS) -> Iterator[str]:
    """The target of a coordinator that follows `script`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted-coordinator")
    thread.start()

    def run(work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        server, port = run(_start(script, credentials))
        try:
            yield f"127.0.0.1:{port}"
        finally:
            run(server.stop(None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(script: Script, credentials: Credentials) -> tuple[aio.Server, int]:
    server = open_server(credentials=credentials)
    jobs_pb2_grpc.add_JobsServicer_to_server(_Jobs(script), server)
    checkpoint_pb2_grpc.add_CheckpointServicer_to_server(_Checkpoint(script), server)
    port = bind(server, "127.0.0.1", 0, credentials=credentials)
    await server.start()
    return server, port
