"""What clients ask about jobs, through the coordinator's services."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from grpc import StatusCode, aio

from coordinator.service import jobs as jobs_service
from coordinator.serving import Serving, ServingOptions
from skein.config.aggregation import Gossip
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.errors import UserError
from skein.protocol.log.records import JobEnded
from skein.storage.places import Places
from skein.types import JobId, JobState
from skein.wire import codec
from skein.wire.failures import error_of
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import committed, job_spec, plan_at_once, submitted
from tests.coordinator.serving import connected, coordinator, count_of, status_of, submit, write_log
from tests.support.incidents import incident
from tests.support.jobs import small_job


def gossip(graph: str, *, if_unstable: str = "refuse") -> str:
    """A job of eight walkers, with AdamW's momentum of 0.9."""
    rule = {"rule": "gossip", "graph": graph, "if_unstable": if_unstable}
    sizes = {"parallel": {"stages": 1, "replicas": 8}, "batch": {"samples": 8, "microbatch_samples": 1}}
    return json.dumps(job_spec().model_dump(mode="json") | sizes | {"aggregation": rule})


def stored_at(url: str) -> str:
    """A job whose checkpoints shall lie there."""
    return json.dumps(job_spec().model_dump(mode="json") | {"checkpoint": {"url": url}})


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
        (job_spec().canonical_json().replace('"batch":{', '"sede":1,"batch":{'), "sede"),
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
    by_name = small_job().canonical_json().replace('"/corpus"', '"data://books"')
    trial = SweepSpec(space={"data.sources[0].path": ValuesSpec(values=("data://books", "/etc/passwd"))})
    swept = small_job(stages=1, replicas=1).model_copy(update={"sweep": trial}).canonical_json()
    outside = {
        'trial 1 of sweep (data.sources[0].path: "/etc/passwd"), data.sources[0].path': swept.replace(
            '"/corpus"', '"data://books"'
        ),
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
            _ = await submit(channel, spec=by_name)
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


async def test_version_tells_the_clock_and_carries_the_ballast_that_was_asked_for(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        version = jobs_pb2_grpc.JobsStub(channel).Version
        began_s = time.time()
        reply = await version(jobs_pb2.VersionRequest(ballast=bytes(100_000), reply_bytes=200_000))
        assert len(reply.ballast) == 200_000
        assert began_s <= reply.wall_s <= time.time()
        with pytest.raises(aio.AioRpcError, match="reply_bytes: 1048577: ask for 1048576 at most"):
            await version(jobs_pb2.VersionRequest(reply_bytes=(1 << 20) + 1))


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
