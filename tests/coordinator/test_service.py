"""The coordinator's services over real connections on loopback, with a run log on disk and scripted workers."""

import asyncio
import socket
import time
import urllib.request
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator import serving
from coordinator.records.logfile import Holder, LogFull
from coordinator.records.mirror import KEY_FILE
from coordinator.records.store import RunLog
from coordinator.serving import Serving, ServingOptions
from coordinator.telling.metrics import CoordinatorMetrics
from skein import PROTOCOL_VERSION
from skein.config.location import MAX_OFFERS
from skein.config.resources import MAX_LABELS, Label
from skein.errors import LocalError, UserError
from skein.protocol.coordinator.coordinator import MAX_REFUSED
from skein.protocol.messages.directives import NewGeneration, Refused, Welcome
from skein.protocol.messages.positions import LogPosition, signed
from skein.protocol.messages.reports import Beat, Count
from skein.types import Epoch, SiteId, WorkerId
from skein.wire import codec
from skein.wire.channel import open_enrolment_channel
from skein.wire.extra import LogLevel, LogLine, LogLines, Upward
from skein.wire.v1 import control_pb2, jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import WAIT_S, eventually, hello, plan_at_once, submitted
from tests.coordinator.serving import (
    ScriptedWorker,
    admin_of,
    connected,
    coordinator,
    count_of,
    status_of,
    submit,
    write_log,
)

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
        replace(hello(), site=SiteId("here; moves there")),
        replace(hello(), labels=(Label(key="gpu", value="h100\n"),)),
        replace(hello(), offers=("../books",)),
        replace(hello(), offers=tuple(f"n{i}" for i in range(MAX_OFFERS + 1))),
        replace(hello(), labels=(Label(key="gpu", value="a"), Label(key="gpu", value="b"))),
        replace(hello(), labels=tuple(Label(key=f"k{i}", value="v") for i in range(MAX_LABELS + 1))),
    ],
)
async def test_a_stream_that_begins_with_no_proper_hello_is_refused(tmp_path: Path, first: Upward) -> None:
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


# --- who may call, and how much is told ---


async def test_without_a_certificate_every_call_is_refused_and_counted(tmp_path: Path) -> None:
    async with coordinator(tmp_path, has_certificates=True) as running:
        admin = admin_of(tmp_path)
        async with open_enrolment_channel(admin.enrol_addresses, admin.authority) as channel:
            version = jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())
            assert await status_of(version) is StatusCode.UNAUTHENTICATED
            assert await ScriptedWorker(channel).call.code() is StatusCode.UNAUTHENTICATED
            watch = jobs_pb2_grpc.JobsStub(channel).Watch(jobs_pb2.WatchRequest(job="x"))
            assert await watch.code() is StatusCode.UNAUTHENTICATED
            unknown = channel.unary_unary("/skein.wire.v1.Jobs/Nothing", None, None)(b"")
            assert await status_of(unknown) is StatusCode.UNAUTHENTICATED
        await eventually(lambda: count_of(running, "Version", "unauthenticated") == 1)
        await eventually(lambda: count_of(running, "Session", "unauthenticated") == 1)


async def test_health_is_told_to_anybody(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
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
        # Any worker can say so.
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
        assert "whose loss was accepted" in refused.reason
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

    def sample(self: CoordinatorMetrics, *args: object, **about: object) -> None:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(CoordinatorMetrics, "sample", sample)
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
