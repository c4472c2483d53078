"""The coordinator's services over real connections on loopback, with a run log on disk and scripted workers."""

import asyncio
import hashlib
import json
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import serving
from coordinator.logfile import Holder, LogFull
from coordinator.metrics import Metrics
from coordinator.mirror import KEY_FILE
from coordinator.service import jobs as jobs_service
from coordinator.serving import Serving, ServingOptions
from coordinator.store import RunLog
from skein import PROTOCOL_VERSION
from skein.config.aggregation import Gossip
from skein.errors import LocalError, UserError
from skein.protocol.coordinator import MAX_REFUSED
from skein.protocol.messages import (
    CheckpointFile,
    Count,
    Directive,
    LogPosition,
    NewGeneration,
    Refused,
    Welcome,
)
from skein.protocol.positions import signed
from skein.protocol.records import JobEnded, Record
from skein.protocol.reports import Beat
from skein.storage.places import Places
from skein.types import Condition, Epoch, JobId, JobState, WorkerId
from skein.wire import codec
from skein.wire.channel import Lane, open_channel
from skein.wire.extra import FileData, FileEnd, GetStart, LogLevel, LogLine, LogLines, PutStart
from skein.wire.failures import error_of
from skein.wire.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
)
from skein.wire.views import CheckpointView
from tests.coordinator.builders import (
    WAIT_S,
    checkpointed,
    committed,
    eventually,
    hello,
    job_spec,
    plan_at_once,
    submitted,
)
from tests.support.incidents import incident
from tests.support.jobs import small_job

TOKEN = "correct-horse-battery"
DATA = bytes(range(256)) * 10
FILE = CheckpointFile(
    name="stage-000.model.safetensors",
    num_bytes=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    tensors=("w",),
)


@asynccontextmanager
async def coordinator(
    state_dir: Path, *, token: str | None = None, metrics_port: int | None = None
) -> AsyncIterator[Serving]:
    options = ServingOptions(state_dir=state_dir, token=token, metrics_port=metrics_port)
    running = await Serving.start(options, plan_at_once)
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def connected(running: Serving, *, token: str | None = None) -> AsyncIterator[aio.Channel]:
    channel = open_channel(running.where().address, Lane.CONTROL, token=token)
    async with channel, asyncio.timeout(WAIT_S):
        yield channel


def write_log(state_dir: Path, records: Sequence[Record]) -> None:
    """A state directory with a past."""
    with RunLog.open(state_dir, wall_s=1.0) as log:
        log.append(records)


class ScriptedWorker:
    """A control stream that says what a test tells it to."""

    def __init__(self, channel: aio.Channel) -> None:
        self.call = control_pb2_grpc.ControlStub(channel).Session()  # type: ignore[call-arg]

    async def say(self, report: codec.Upward) -> None:
        await self.call.write(codec.REPORT.encode(report))

    async def hear(self) -> Directive:
        message = await self.call.read()
        assert isinstance(message, control_pb2.Directive), "the stream has ended"
        return codec.DIRECTIVE.decode(message)


async def submit(channel: aio.Channel, key: str = "k", spec: str | None = None) -> jobs_pb2.SubmitReply:
    request = jobs_pb2.SubmitRequest(key=key, spec=spec or job_spec().canonical_json())
    return await jobs_pb2_grpc.JobsStub(channel).Submit(request)


def gossip(graph: str, *, if_unstable: str = "refuse") -> str:
    """A job of eight walkers, with AdamW's momentum of 0.9."""
    rule = {"rule": "gossip", "graph": graph, "if_unstable": if_unstable}
    sizes = {"parallel": {"stages": 1, "replicas": 8}, "batch": {"samples": 8, "microbatch_samples": 1}}
    return json.dumps(job_spec().model_dump(mode="json") | sizes | {"aggregation": rule})


def stored_at(url: str) -> str:
    """A job whose checkpoints shall lie there."""
    return json.dumps(job_spec().model_dump(mode="json") | {"checkpoint": {"url": url}})


async def status_of(call: Awaitable[object]) -> StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code()


def count_of(running: Serving, method: str, reason: str) -> float:
    """Refusals of a kind, as metrics have them."""
    wanted = f'skein_rpc_errors_total{{method="{method}",reason="{reason}"}} '
    lines = running.metrics.render().decode().splitlines()
    return float(next((line.removeprefix(wanted) for line in lines if line.startswith(wanted)), 0))


# --- control streams ---


async def test_a_worker_is_welcomed_and_fenced_into_a_job(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        welcome = await worker.hear()
        assert isinstance(welcome, Welcome)
        assert welcome.epoch == 1
        reply = await submit(channel)
        fence = await worker.hear()
        assert isinstance(fence, NewGeneration)
        assert (fence.epoch, fence.job) == (1, reply.job)


async def test_a_worker_of_another_release_is_refused_and_let_go(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello(version=PROTOCOL_VERSION + 1))
        refused = await worker.hear()
        assert isinstance(refused, Refused)
        assert "install the same release" in refused.reason
        assert not isinstance(await worker.call.read(), control_pb2.Directive)


@pytest.mark.parametrize("incarnation", ["second", "first"])
async def test_a_stranger_under_a_used_name_is_refused_and_the_worker_goes_on(
    tmp_path: Path, incarnation: str
) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        first, stranger = ScriptedWorker(channel), ScriptedWorker(channel)
        await first.say(replace(hello(), host="lab-3"))
        assert isinstance(await first.hear(), Welcome)
        await stranger.say(hello(incarnation=incarnation, secret="another"))
        refused = await stranger.hear()
        assert isinstance(refused, Refused)
        assert (
            "on lab-3, at 127.0.0.1:1" if incarnation == "second" else "another process is w1"
        ) in refused.reason
        assert not isinstance(await stranger.call.read(), control_pb2.Directive)
        await submit(channel)
        assert isinstance(await first.hear(), NewGeneration)


async def test_a_restart_that_knows_the_secret_takes_its_place_at_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        first, again = ScriptedWorker(channel), ScriptedWorker(channel)
        await first.say(hello())
        assert isinstance(await first.hear(), Welcome)
        await again.say(hello(incarnation="second"))
        assert isinstance(await again.hear(), Welcome)
        assert isinstance(await first.hear(), Refused)


async def test_a_name_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        assert isinstance(await worker.hear(), Welcome)
        await submit(channel)
        assert isinstance(await worker.hear(), NewGeneration)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        stranger, worker = ScriptedWorker(channel), ScriptedWorker(channel)
        await stranger.say(hello(incarnation="second", secret="another"))
        assert isinstance(await stranger.hear(), Refused)
        await worker.say(hello())
        assert isinstance(await worker.hear(), Welcome)


@pytest.mark.parametrize(
    "first",
    [
        Beat(progress=0, running_s=0.0, statistics=()),
        hello("no/slashes"),
        hello(""),
        hello("x" * 65),
        hello(incarnation="ä"),
        hello(secret="x" * 65),
    ],
)
async def test_a_stream_that_begins_with_no_proper_hello_is_refused(
    tmp_path: Path, first: codec.Upward
) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(first)
        assert await worker.call.code() is StatusCode.FAILED_PRECONDITION
        assert count_of(running, "Session", "failed_precondition") == 1
        assert running.driver.num_streams == 0


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (control_pb2.Report(), "Report.body is missing"),
        (control_pb2.Report(beat=control_pb2.Beat(running_s=-1.0)), "Beat.running_s: -1.0: give seconds"),
        (codec.REPORT.encode(hello()), "a second Hello"),
    ],
)
async def test_who_sends_what_cannot_be_is_turned_away_with_the_reason_and_counted(
    tmp_path: Path, message: control_pb2.Report, why: str
) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        for _ in range(MAX_REFUSED):
            await worker.call.write(message)
        refused = await worker.hear()
        assert isinstance(refused, Refused)
        assert why in refused.reason
        assert count_of(running, "Session", "malformed") == MAX_REFUSED
        await eventually(lambda: running.driver.num_streams == 0)


async def test_a_hello_with_an_impossible_profile_admits_nobody_and_says_why(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        said = hello()
        await worker.say(replace(said, profile=replace(said.profile, flops_per_s=nan)))
        assert await worker.call.code() is StatusCode.FAILED_PRECONDITION
        assert "Profile.flops_per_s: nan" in str(await worker.call.details())
        assert not running.driver.machine.membership.live


async def test_a_broken_stream_is_noticed(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        entry = running.driver.machine.membership.live[WorkerId("w1")]
        worker.call.cancel()
        await eventually(lambda: not entry.is_connected)


async def test_log_lines_and_statistics_of_a_worker_are_passed_on(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        job = (await submit(channel)).job
        await worker.hear()
        count = Count(name="skein_worker_bubble_ratio", label="", value=0.25)
        await worker.say(Beat(progress=1, running_s=0.0, statistics=(count,)))
        await worker.say(
            LogLines(lines=(LogLine(level=LogLevel.WARNING, wall_s=1.0, text="a \n" + "b" * 9000),))
        )
        async for event in jobs_pb2_grpc.JobsStub(channel).Watch(jobs_pb2.WatchRequest(job=job)):
            if event.WhichOneof("body") == "line_logged" and event.line_logged.worker == "w1":
                assert len(event.line_logged.line.text) <= 2000
                break
        workers = await jobs_pb2_grpc.JobsStub(channel).Workers(jobs_pb2.WorkersRequest())
        assert [w.worker for w in workers.workers] == ["w1"]


# --- jobs ---


async def test_submitting_a_key_again_gives_the_same_job(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        first, again = await asyncio.gather(submit(channel), submit(channel))
        assert first.job == again.job
        assert sorted([first.is_new, again.is_new]) == [False, True]
        assert (await submit(channel, "other")).job != first.job


async def test_what_is_stored_is_the_settled_job_and_asking_again_finds_it(tmp_path: Path) -> None:
    spec = gossip("one_peer_exponential", if_unstable="qg_dmsgd")
    async with coordinator(tmp_path) as running, connected(running) as channel:
        first, again = await submit(channel, spec=spec), await submit(channel, spec=spec)
        assert (first.is_new, again.is_new) == (True, False)
        [job] = running.driver.machine.history.jobs.values()
        assert isinstance(job.spec.aggregation, Gossip)
        assert job.spec.aggregation.method == "qg_dmsgd"


async def test_a_key_does_not_stand_for_two_jobs(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await submit(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await submit(channel, spec=job_spec("another").canonical_json())
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("{", "job"),
        ("{}", "name"),
        (job_spec().canonical_json().replace('"samples":4', '"samples":-4'), "batch.samples"),
        (job_spec().canonical_json().replace('"seed":0', '"seed":0,"sede":1'), "sede"),
        (job_spec().canonical_json().replace('"stages":1', '"stages":400'), "parallel.stages"),
        (job_spec().canonical_json().replace('"url":null', '"url":"nosuch://x"'), "checkpoint.url"),
        (gossip("static_exponential"), "aggregation.graph"),
        (gossip("ring").replace('"replicas": 8', '"replicas": 1'), "parallel.replicas"),
        ('{"name":"' + "x" * (1 << 20) + '"}', "job"),
        (stored_at("reference::/srv/templates.json"), "checkpoint.url"),
        (stored_at("s3//bucket"), "checkpoint.url"),
    ],
)
async def test_a_job_that_nobody_can_run_is_refused_with_the_field(
    tmp_path: Path, spec: str, field: str
) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await submit(channel, spec=spec)
        error = error_of(caught.value, "here")
        assert isinstance(error, UserError)
        assert error.field == field
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT
        assert running.driver.machine.history.jobs == {}


async def test_a_job_that_names_what_lies_out_of_the_roots_is_refused_at_submit(tmp_path: Path) -> None:
    places = Places.of([tmp_path / "data"], [str(tmp_path / "kept")])
    running = await Serving.start(ServingOptions(state_dir=tmp_path / "state", places=places), plan_at_once)
    outside = {
        "checkpoint.url": stored_at("/etc/cron.d"),
        "data.sources[0].path": small_job().canonical_json().replace('"/corpus"', '"/etc/passwd"'),
    }
    try:
        async with connected(running) as channel:
            for field, spec in outside.items():
                with pytest.raises(aio.AioRpcError) as caught:
                    await submit(channel, spec=spec)
                error = error_of(caught.value, "here")
                assert isinstance(error, UserError)
                assert error.field == field
                assert str(tmp_path) in error.hint
            assert running.driver.machine.history.jobs == {}
    finally:
        await running.stop()


async def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        files = checkpoint_pb2_grpc.CheckpointStub(channel)
        calls = (
            jobs.Get(jobs_pb2.GetJobRequest(job="none")),
            jobs.Cancel(jobs_pb2.CancelRequest(job="none")),
            jobs.Drain(jobs_pb2.DrainRequest(worker="none")),
            jobs.ListIncidents(jobs_pb2.ListIncidentsRequest(job="none")),
            files.Manifest(checkpoint_pb2.ManifestRequest(job="none")),
        )
        assert [await status_of(call) for call in calls] == [StatusCode.NOT_FOUND] * 5
        assert await jobs.Watch(jobs_pb2.WatchRequest(job="none")).code() is StatusCode.NOT_FOUND
        assert count_of(running, "Get", "not_found") == 1


async def test_a_cancelled_job_is_over_for_all_who_watch(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        job = (await submit(channel)).job
        watching = jobs.Watch(jobs_pb2.WatchRequest(job=job))
        status = codec.JOB_STATUS.decode(await jobs.Cancel(jobs_pb2.CancelRequest(job=job)))
        assert status.state == "cancelled"
        bodies = [event.WhichOneof("body") async for event in watching]
        assert bodies[0] == "state_changed"
        assert "ended" in bodies


async def test_a_job_is_held_and_goes_on_for_all_who_watch(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        job = (await submit(channel)).job
        status = codec.JOB_STATUS.decode(await jobs.Pause(jobs_pb2.PauseRequest(job=job, reason="lunch")))
        assert (status.state, status.reason) == ("held", "lunch")
        status = codec.JOB_STATUS.decode(await jobs.Resume(jobs_pb2.ResumeRequest(job=job)))
        assert status.state == "paused"
        await jobs.Cancel(jobs_pb2.CancelRequest(job=job))
        assert await status_of(jobs.Pause(jobs_pb2.PauseRequest(job=job))) is StatusCode.INVALID_ARGUMENT
        status = codec.JOB_STATUS.decode(await jobs.Resume(jobs_pb2.ResumeRequest(job=job, steps=7)))
        assert (status.state, status.total_steps) == ("paused", 7)
        watching = jobs.Watch(jobs_pb2.WatchRequest(job=job))
        await jobs.Cancel(jobs_pb2.CancelRequest(job=job, discards=True))
        recorded = [event.WhichOneof("body") async for event in watching]
        assert recorded.count("ended") == 2


async def test_a_job_that_is_done_wants_more_steps_to_go_on(tmp_path: Path) -> None:
    end = JobEnded(job=JobId("digits-1"), state=JobState.FINISHED, reason="5 steps done", wall_s=20.0)
    steps = [committed("digits-1", step, wall_s=10.0 + step) for step in range(5)]
    write_log(tmp_path, [submitted("digits-1"), *steps, end])
    async with coordinator(tmp_path) as running, connected(running) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        for request in (
            jobs_pb2.ResumeRequest(job="digits-1"),
            jobs_pb2.ResumeRequest(job="digits-1", steps=5),
        ):
            assert await status_of(jobs.Resume(request)) is StatusCode.INVALID_ARGUMENT
        status = codec.JOB_STATUS.decode(await jobs.Resume(jobs_pb2.ResumeRequest(job="digits-1", steps=500)))
        assert (status.state, status.step, status.total_steps) == ("paused", 5, 500)


async def test_a_restart_keeps_jobs_and_their_numbers(tmp_path: Path) -> None:
    steps = [committed("digits-1", step, wall_s=10.0 + step) for step in range(5)]
    write_log(tmp_path, [submitted("digits-1"), *steps])
    async with coordinator(tmp_path) as running, connected(running) as channel:
        jobs = jobs_pb2_grpc.JobsStub(channel)
        listed = await jobs.List(jobs_pb2.ListJobsRequest())
        status = codec.JOB_STATUS.decode(listed.jobs[0])
        assert (status.step, status.num_tokens, status.loss) == (5, 500, 4.6)
        assert (await jobs.Version(jobs_pb2.VersionRequest())).epoch == 2
        watching = jobs.Watch(jobs_pb2.WatchRequest(job="digits-1", since=4))
        events = [await watching.read(), await watching.read()]
        assert [e.step_finished.record.step for e in events if isinstance(e, jobs_pb2.JobEvent)] == [3, 4]
    async with coordinator(tmp_path) as running:
        assert running.where().epoch == 3
        assert 'skein_committed_steps_total{job="digits-1"} 5.0' in running.metrics.render().decode()


@pytest.mark.parametrize(
    ("since", "limit", "expected"), [(0, 0, range(5)), (2, 2, range(2, 4)), (4, 9, range(4, 5)), (7, 0, ())]
)
async def test_incidents_are_had_from_any_number_on(
    tmp_path: Path, since: int, limit: int, expected: Sequence[int]
) -> None:
    over = [incident("digits-1", wall_s=float(number)) for number in range(5)]
    write_log(tmp_path, [submitted("digits-1"), submitted("digits-2"), incident("digits-2"), *over])
    async with coordinator(tmp_path) as running, connected(running) as channel:
        request = jobs_pb2.ListIncidentsRequest(job="digits-1", since=since, limit=limit)
        reply = await jobs_pb2_grpc.JobsStub(channel).ListIncidents(request)
        assert [codec.INCIDENT.decode(one) for one in reply.incidents] == [over[n] for n in expected]
        assert reply.num_incidents == 5


async def test_a_status_says_how_many_incidents_there_were_and_what_was_lost(tmp_path: Path) -> None:
    over = [incident("digits-1", num_steps_lost=lost) for lost in (0, 2, 3)]
    write_log(tmp_path, [submitted("digits-1"), *over])
    async with coordinator(tmp_path) as running, connected(running) as channel:
        request = jobs_pb2.GetJobRequest(job="digits-1")
        status = codec.JOB_STATUS.decode(await jobs_pb2_grpc.JobsStub(channel).Get(request))
        assert (status.num_incidents, status.num_steps_lost) == (3, 5)


@pytest.mark.parametrize(("max_bytes", "num_sent"), [(1, 1), (250, 2), (1 << 20, 3)])
async def test_a_reply_holds_as_many_incidents_as_fit_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, num_sent: int
) -> None:
    monkeypatch.setattr(jobs_service, "MAX_INCIDENT_BYTES", max_bytes)
    over = [incident("digits-1", reason="x" * 60)] * 3
    assert {100 < len(codec.INCIDENT.to_bytes(one)) <= 125 for one in over} == {True}
    write_log(tmp_path, [submitted("digits-1"), *over])
    async with coordinator(tmp_path) as running, connected(running) as channel:
        request = jobs_pb2.ListIncidentsRequest(job="digits-1")
        reply = await jobs_pb2_grpc.JobsStub(channel).ListIncidents(request)
        assert (len(reply.incidents), reply.num_incidents) == (num_sent, 3)


# --- checkpoint files ---


async def put(
    channel: aio.Channel,
    *,
    version: int = 5,
    sha256: str = FILE.sha256,
    data: bytes = DATA,
    name: str = FILE.name,
) -> None:
    parts = (
        PutStart(
            job=submitted("digits-1").job,
            version=committed("", version, wall_s=0).record.step,
            name=name,
            num_bytes=len(DATA),
        ),
        FileData(data=data[:1000]),
        FileData(data=data[1000:]),
        FileEnd(sha256=sha256),
    )
    call = checkpoint_pb2_grpc.CheckpointStub(channel).Put(codec.PUT_PART.encode(part) for part in parts)
    reply = codec.PUT_REPLY.decode(await call)
    assert (reply.num_bytes, reply.sha256) == (len(DATA), FILE.sha256)


def log_with_steps(state_dir: Path, *more: Record) -> None:
    write_log(
        state_dir, [submitted("digits-1"), *(committed("digits-1", s, wall_s=s) for s in range(5)), *more]
    )


async def test_an_uploaded_file_lies_under_its_version(tmp_path: Path) -> None:
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel)
    assert (tmp_path / "checkpoints" / "digits-1" / "v00000005" / FILE.name).read_bytes() == DATA


async def test_checkpoints_are_listed_and_read_and_what_is_damaged_is_set_aside(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 3, FILE), checkpointed("digits-1", 5, FILE))
    store = tmp_path / "checkpoints" / "digits-1"
    for version in (3, 5):
        (store / f"v{version:08d}").mkdir(parents=True)
        (store / f"v{version:08d}" / FILE.name).write_bytes(DATA)
    (store / "v00000005" / FILE.name).write_bytes(DATA[:-1] + b"!")
    async with coordinator(tmp_path) as running, connected(running) as channel:
        stub = checkpoint_pb2_grpc.CheckpointStub(channel)

        async def listed() -> list[tuple[int, Condition]]:
            reply = await stub.List(checkpoint_pb2.ListCheckpointsRequest(job="digits-1"))
            views = map(codec.CHECKPOINT_VIEW.decode, reply.checkpoints)
            return [(view.version, view.condition) for view in views]

        async def verified(version: int) -> CheckpointView:
            asked = checkpoint_pb2.VerifyRequest(job="digits-1", version=version)
            return codec.CHECKPOINT_VIEW.decode(await stub.Verify(asked))

        assert await listed() == [(3, Condition.WHOLE), (5, Condition.WHOLE)]
        assert (await verified(3)).condition is Condition.WHOLE
        found = await verified(5)
        assert (found.condition, found.num_files, found.num_bytes) == (Condition.DAMAGED, 1, len(DATA))
        assert "is not what was written" in found.reason
        assert await listed() == [(3, Condition.WHOLE), (5, Condition.DAMAGED)]
        # Who exports now gets the one before it.
        newest = await stub.Manifest(checkpoint_pb2.ManifestRequest(job="digits-1"))
        assert newest.version == 3
        assert b'skein_checkpoints_damaged_total{job="digits-1"} 1.0' in running.metrics.render()
        (store / "v00000005" / FILE.name).write_bytes(DATA)
        assert (await verified(5)).condition is Condition.WHOLE
        with pytest.raises(aio.AioRpcError) as none:
            await verified(4)
        assert none.value.code() is StatusCode.NOT_FOUND
        assert await listed() == [(3, Condition.WHOLE), (5, Condition.WHOLE)]


async def test_a_checkpoints_file_that_is_gone_is_not_found(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        request = checkpoint_pb2.GetRequest(job="digits-1", version=5, name=FILE.name)
        with pytest.raises(aio.AioRpcError, match="cannot be read: No such file") as gone:
            [_ async for _ in checkpoint_pb2_grpc.CheckpointStub(channel).Get(request)]
        assert gone.value.code() is StatusCode.NOT_FOUND


async def test_a_file_that_is_not_what_was_sent_is_refused(tmp_path: Path) -> None:
    log_with_steps(tmp_path)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        for call in (
            put(channel, sha256="0" * 64),
            put(channel, data=DATA[:-1]),
            put(channel, data=DATA + b"x"),
            put(channel, version=6),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is StatusCode.FAILED_PRECONDITION
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == []


async def test_only_files_of_checkpoints_that_exist_can_be_had(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    folder = tmp_path / "checkpoints" / "digits-1" / "v00000005"
    folder.mkdir(parents=True)
    (folder / FILE.name).write_bytes(DATA)
    (folder / "stage-001.model.safetensors").write_bytes(DATA)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        files = checkpoint_pb2_grpc.CheckpointStub(channel)
        manifest = codec.MANIFEST_REPLY.decode(
            await files.Manifest(checkpoint_pb2.ManifestRequest(job="digits-1"))
        )
        assert (manifest.version, manifest.stages[0].files) == (5, (FILE,))
        request = checkpoint_pb2.GetRequest(job="digits-1", version=5, name=FILE.name, offset=1500)
        start, data, end = [codec.GET_PART.decode(part) async for part in files.Get(request)]
        assert (start, end) == (GetStart(num_bytes=len(DATA)), FileEnd(sha256=FILE.sha256))
        assert data == FileData(data=DATA[1500:])
        for name in ("stage-001.model.safetensors", "../../../run.sqlite3", "manifest.json"):
            call = files.Get(checkpoint_pb2.GetRequest(job="digits-1", version=5, name=name))
            assert await call.code() is StatusCode.NOT_FOUND


async def test_a_late_file_of_another_generation_leaves_the_checkpoint_that_exists(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    manifest = tmp_path / "checkpoints" / "digits-1" / "v00000005" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel, name="stage-000.g1.model.safetensors")
        assert manifest.exists()


async def test_a_file_of_a_checkpoint_that_exists_cannot_be_replaced_by_another(tmp_path: Path) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 5, FILE))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        await put(channel)
        other = bytes(len(DATA))
        with pytest.raises(aio.AioRpcError) as caught:
            await put(channel, data=other, sha256=hashlib.sha256(other).hexdigest())
        assert "exists with other content" in str(caught.value.details())


# --- who may call, and how much is told ---


async def test_without_the_token_every_call_is_refused_and_counted(tmp_path: Path) -> None:
    async with coordinator(tmp_path, token=TOKEN) as running:
        async with connected(running) as channel:
            version = jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())
            assert await status_of(version) is StatusCode.UNAUTHENTICATED
            assert await ScriptedWorker(channel).call.code() is StatusCode.UNAUTHENTICATED
            watch = jobs_pb2_grpc.JobsStub(channel).Watch(jobs_pb2.WatchRequest(job="x"))
            assert await watch.code() is StatusCode.UNAUTHENTICATED
            unknown = channel.unary_unary("/skein.wire.v1.Jobs/Nothing", None, None)(b"")
            assert await status_of(unknown) is StatusCode.UNAUTHENTICATED
        await eventually(lambda: count_of(running, "Version", "unauthenticated") == 1)
        await eventually(lambda: count_of(running, "Session", "unauthenticated") == 1)
        async with connected(running, token=TOKEN) as channel:
            await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())


async def test_health_needs_no_token(tmp_path: Path) -> None:
    async with coordinator(tmp_path, token=TOKEN) as running, connected(running) as channel:
        for service in ("", "skein.wire.v1.Control", "skein.wire.v1.Jobs", "skein.wire.v1.Checkpoint"):
            request = health_pb2.HealthCheckRequest(service=service)
            reply = await health_pb2_grpc.HealthStub(channel).Check(request)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_method_that_does_not_exist_is_unimplemented_and_counted(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        call = channel.unary_unary("/skein.wire.v1.Jobs/Nothing", None, None)(b"")
        assert await status_of(call) is StatusCode.UNIMPLEMENTED
        assert count_of(running, "unknown", "unimplemented") == 1


# --- as a whole ---


async def test_two_coordinators_never_share_a_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LOCK_WAIT_S", 0.05)
    async with coordinator(tmp_path):
        with pytest.raises(UserError, match="is using it"):
            await Serving.start(ServingOptions(state_dir=tmp_path), plan_at_once)
    async with coordinator(tmp_path) as second:
        assert second.where().epoch == 2


async def test_a_start_on_a_full_disk_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[float] = []
    really = RunLog.open

    def open_log(directory: Path, *, wall_s: float, holder: Holder, **others: object) -> RunLog:
        tries.append(wall_s)
        if len(tries) < 3:
            raise LogFull("database or disk is full")
        return really(directory, wall_s=wall_s, holder=holder)

    monkeypatch.setattr(RunLog, "open", open_log)
    monkeypatch.setattr(serving, "AGAIN_S", 0.0)
    async with coordinator(tmp_path) as here:
        assert here.where().epoch == 1
    said = [record.getMessage() for record in caplog.records if "make room" in record.getMessage()]
    assert said == ["cannot open the run log: database or disk is full; waiting, make room"]


async def test_a_port_in_use_is_named_and_the_directory_is_free_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options in (
            ServingOptions(state_dir=tmp_path, port=port, metrics_port=0),
            ServingOptions(state_dir=tmp_path, metrics_port=port),
        ):
            with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
                await Serving.start(options, plan_at_once)
    async with coordinator(tmp_path):
        pass


async def test_a_coordinator_that_crashes_again_and_again_stops(tmp_path: Path) -> None:
    for _ in range(serving.MAX_OPENINGS):
        async with coordinator(tmp_path):
            pass
    with pytest.raises(LocalError, match="crashes again and again"):
        async with coordinator(tmp_path):
            pass


async def test_a_clock_that_was_set_back_does_not_look_like_a_crash(tmp_path: Path) -> None:
    for day in range(serving.MAX_OPENINGS + 1):
        RunLog.open(tmp_path, wall_s=time.time() + 86400 * day + 60).close()
    async with coordinator(tmp_path):
        pass


async def test_another_owner_of_the_log_ends_a_coordinator(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        (tmp_path / "lock").unlink()
        with RunLog.open(tmp_path, wall_s=1.0):
            with pytest.raises(aio.AioRpcError):
                await submit(channel)
            assert "epoch 1 is over" in await running.ended()


async def test_a_worker_that_knows_more_than_the_log_ends_the_coordinator_in_one_line(tmp_path: Path) -> None:
    write_log(tmp_path, [submitted("j")])
    claimed = LogPosition(origin_s=1.0, epoch=Epoch(1), opened_s=1.0, entry=7)
    known = signed(claimed, bytes.fromhex((tmp_path / KEY_FILE).read_text()))
    async with coordinator(tmp_path) as running, connected(running) as channel:
        # Whoever has the token can say so.
        stranger = ScriptedWorker(channel)
        await stranger.say(replace(hello("w9", "w9-1"), epoch=Epoch(1), position=claimed))
        refused = await stranger.hear()
        assert isinstance(refused, Refused)
        assert "without a signature" in refused.reason
        worker = ScriptedWorker(channel)
        await worker.say(replace(hello(), epoch=Epoch(1), position=known))
        assert await running.ended() == (
            "the run log ended at entry 2 of epoch 1, but worker w1 knows entry 7 of epoch 1: "
            "restore it from a backup; or give --accept-lost-log, which goes on without what was lost"
        )
    options = ServingOptions(state_dir=tmp_path, accepts_lost_log=True)
    running = await Serving.start(options, plan_at_once)
    async with connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(replace(hello(), epoch=Epoch(1), position=known))
        refused = await worker.hear()
        assert isinstance(refused, Refused)
        assert "start the worker again" in refused.reason
    await running.stop()


async def test_metrics_are_served_with_discovery(tmp_path: Path) -> None:
    async with coordinator(tmp_path, metrics_port=0) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        address = running.where().metrics_address

        def get(path: str) -> str:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_S) as reply:
                return str(reply.read().decode())

        text = await asyncio.to_thread(get, "/metrics")
        assert "skein_build_info" in text
        assert f'"targets": ["{address}"]' in await asyncio.to_thread(get, "/sd")


async def test_a_failure_beside_the_driver_ends_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SAMPLE_S", 0.0)

    def sample(self: Metrics, *args: object, num_streams: int, lag_s: float, now: float) -> None:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(Metrics, "sample", sample)
    async with coordinator(tmp_path) as running:
        with pytest.raises(ArithmeticError, match="no such number"):
            await running.ended()


async def test_a_worker_that_was_lost_is_still_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SAMPLE_S", 0.01)
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        page = running.metrics
        await eventually(lambda: 'skein_workers{state="idle"} 1.0' in page.render().decode())
        worker.call.cancel()
        await eventually(lambda: 'skein_workers{state="lost"} 1.0' in page.render().decode())
        listed = await jobs_pb2_grpc.JobsStub(channel).Workers(jobs_pb2.WorkersRequest())
        assert [codec.WORKER_STATUS.decode(w).state for w in listed.workers] == ["lost"]
