"""Quotas at a coordinator that serves: who is refused, with which status and in which words."""

import asyncio
from pathlib import Path

import pytest
from grpc import StatusCode, aio

from skein.config.quota import QuotaSpec, QuotasSpec
from skein.errors import UserError
from skein.protocol.log.records import JobEnded, Record
from skein.protocol.messages.directives import CheckpointFile
from skein.types import JobId, JobState
from skein.wire.failures import error_of
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from tests.coordinator.builders import checkpointed, committed, eventually, job_spec, submitted
from tests.coordinator.serving import connected, coordinator, status_of, submit, write_log
from tests.coordinator.test_identities import cluster


def quotas(**default: int) -> QuotasSpec:
    return QuotasSpec(default=QuotaSpec(**default))


async def refused(call: "asyncio.Future[object]") -> UserError:
    """The user's error that a call ends with, as a client has it."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    error = error_of(caught.value, "here")
    assert isinstance(error, UserError)
    return error


async def test_a_namespace_whose_queue_is_full_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async with cluster(tmp_path, quotas=quotas(queued_jobs=2)) as known:
        ada = await known.passport("ada", "submitter", namespace="lab")
        eve = await known.passport("eve", "submitter", namespace="mill")
        async with known.channel(ada) as lab, known.channel(eve) as mill:
            made = [(await submit(lab, f"key-{number}")).job for number in range(2)]
            error = await refused(asyncio.ensure_future(submit(lab, "one more")))
            assert (error.field, error.value) == ("quota.queued_jobs", "2 of 2")
            assert error.hint.startswith(
                "so many jobs of namespace lab wait already: cancel or pause some, or ask"
            )
            [first, _] = (await jobs_pb2_grpc.JobsStub(lab).List(jobs_pb2.ListJobsRequest())).jobs
            assert [(use.quota, use.used, use.most) for use in first.quotas] == [("queued_jobs", 2, 2)]
            # Who sends a key again asks for nothing new.
            assert (await submit(lab, "key-1")).job == made[1]
            assert (await submit(mill)).is_new
            held = jobs_pb2.PauseRequest(job=made[0])
            _ = await jobs_pb2_grpc.JobsStub(lab).Pause(held)
            assert (await submit(lab, "one more")).is_new
            resumed = jobs_pb2_grpc.JobsStub(lab).Resume(jobs_pb2.ResumeRequest(job=made[0]))
            assert (await refused(asyncio.ensure_future(resumed))).field == "quota.queued_jobs"


async def test_of_many_who_come_at_once_no_more_are_taken_than_the_quota_says(tmp_path: Path) -> None:
    async with coordinator(tmp_path, quotas=quotas(queued_jobs=3)) as running, connected(running) as channel:
        calls = (submit(channel, f"key-{number}") for number in range(20))
        found = await asyncio.gather(*calls, return_exceptions=True)
        codes = [x.code() for x in found if isinstance(x, aio.AioRpcError)]
        assert codes == [StatusCode.RESOURCE_EXHAUSTED] * 17
        assert len(running.driver.machine.history.jobs) == 3


async def test_a_job_file_above_the_quota_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path, quotas=quotas(job_bytes=100)) as running, connected(running) as channel:
        error = await refused(asyncio.ensure_future(submit(channel)))
        assert error.field == "quota.job_bytes"
        assert f"{len(job_spec().canonical_json())} of 100 bytes" in str(error)


async def test_a_namespace_that_has_stored_too_much_submits_nothing(tmp_path: Path) -> None:
    file = CheckpointFile(name="stage-000.model.safetensors", num_bytes=4096, sha256="0" * 64, tensors=())
    ended = JobEnded(job=JobId("digits-1"), state=JobState.FINISHED, reason="", wall_s=60.0)
    past: list[Record] = [
        submitted("digits-1"),
        committed("digits-1", 0, wall_s=40.0),
        checkpointed("digits-1", 1, file),
        ended,
    ]
    write_log(tmp_path, past)
    async with (
        coordinator(tmp_path, quotas=quotas(stored_bytes=4096)) as running,
        connected(running) as channel,
    ):
        error = await refused(asyncio.ensure_future(submit(channel)))
        assert (error.field, error.value) == ("quota.stored_bytes", "4.0 KiB of 4.0 KiB")
        again = jobs_pb2_grpc.JobsStub(channel).Resume(jobs_pb2.ResumeRequest(job="digits-1", steps=99))
        assert (await refused(asyncio.ensure_future(again))).field == "quota.stored_bytes"
        folder = tmp_path / "checkpoints" / "digits-1" / "v00000001"
        folder.mkdir(parents=True)
        (folder / file.name).write_bytes(bytes(file.num_bytes))
        stub = checkpoint_pb2_grpc.CheckpointStub(channel)
        gone = checkpoint_pb2.DeleteCheckpointRequest(job="digits-1", version=1)
        assert (await stub.Delete(gone)).checkpoints == []
        assert (await submit(channel)).is_new
        assert await status_of(stub.Delete(gone)) is StatusCode.INVALID_ARGUMENT
        await eventually(lambda: not folder.exists())
