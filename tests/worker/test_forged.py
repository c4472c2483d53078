"""Tensors in another worker's name, from somebody who is let in: refused, counted, told, and without effect."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from skein.plan.ops import Direction
from skein.protocol.log.records import Incident, StepCommitted
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import (
    Envelope,
    HopTensor,
    Phase,
    Refusal,
    ShardKind,
    ShardTensor,
    TensorHeader,
)
from skein.types import (
    Attempt,
    ChunkRef,
    JobState,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
    parse_group,
)
from skein.wire.channel import Lane, open_channel
from skein.wire.codec import FETCH_STATE, PART_REPLY, TENSOR_PART
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import (
    CreditGranted,
    DType,
    FetchStateRequest,
    StateKind,
    TensorData,
    TensorRefused,
)
from skein.wire.v1 import peer_pb2_grpc
from tests.worker.cluster import Cluster, Disk, cluster
from tests.worker.lab import tiny_job, write_text
from tests.worker.puppet import Running
from tests.worker.test_run import assert_same_curve, job_of, undisturbed
from worker.bundle import WireTensor
from worker.transport.checksum import checksum
from worker.transport.parts import announce

NUM_FORGED = 16


def member_of(here: Cluster, worker: str) -> Member:
    return here._machine.membership.live[WorkerId(worker)].member


def forged(here: Cluster, victim: Running, turn: int, name: str) -> Envelope:
    """What `name` could send now, of the kinds by which others' numbers could be changed."""
    machine = victim.inbox._machine
    attempt = Attempt(epoch=machine.epoch, generation=machine.generation, number=turn % 2)
    stage = StageIndex(turn % 2)
    header: TensorHeader = ShardTensor(
        kind=(ShardKind.PART, ShardKind.RESULT)[turn % 2],
        step=machine.version,
        group=parse_group(f"s{stage}"),
        attempt=attempt,
        shard=turn % 3,
        member=ChunkRef(stage=stage, worker=WorkerId(name)),
    )
    plan = None if here._machine.run is None else here._machine.run.plan
    if turn % 4 == 3 and plan is not None:
        header = HopTensor(
            direction=Direction.FORWARD,
            phase=Phase.TRAIN,
            step=machine.version,
            microbatch=MicrobatchId(turn % len(plan.paths)),
            hop=1,
            path=plan.paths[turn % len(plan.paths)],
        )
    assert machine.job is not None
    return Envelope(
        job=machine.job,
        epoch=machine.epoch,
        generation=machine.generation,
        sender=WorkerId(name),
        incarnation=member_of(here, name).incarnation,
        header=header,
        secret=("", "0" * 32)[turn % 2],
    )


async def attack(here: Cluster, victim: Running, name: str) -> set[Refusal]:
    """Send forged tensors to a worker; what became of them."""
    zeros = WireTensor(name="shard", dtype=DType.FLOAT64, shape=(4,), data=bytes(32))
    found: set[Refusal] = set()
    address = member_of(here, victim.inbox._machine.identity.worker).address
    async with open_channel(address, Lane.REDUCE, credentials=NO_CREDENTIALS) as channel:
        call = peer_pb2_grpc.PeerStub(channel).Deliver(None)
        replies = aiter(call)
        for turn in range(NUM_FORGED):
            message = announce(turn, forged(here, victim, turn, name), (zeros,))
            await call.write(TENSOR_PART.encode(message))
            reply = PART_REPLY.decode(await anext(replies))
            while isinstance(reply, CreditGranted):
                reply = PART_REPLY.decode(await anext(replies))
            assert isinstance(reply, TensorRefused), "a forged tensor was taken"
            found.add(reply.reason)
        call.cancel()
    return found


async def test_tensors_in_another_workers_name_are_refused_and_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(write_text(tmp_path))
    steps, _ = undisturbed(job)
    names = ["w0", "w1"]
    async with cluster(Disk()) as here, here.workers(*names) as workers:
        here.submit(job)
        await here.first(StepCommitted, 2)
        with caplog.at_level(logging.WARNING):
            for index, victim in enumerate(workers):
                found = await attack(here, victim, names[1 - index])
                assert found <= {Refusal.FORGED, Refusal.STALE, Refusal.UNKNOWN_JOB, Refusal.NOT_YET}
            machine = victim.inbox._machine
            secret = machine._standing.key.tensor_secret(WorkerId("w0"), member_of(here, "w0").incarnation)
            for door in ("", secret):
                assert await asked_for_state(here, "w1", door) is StatusCode.PERMISSION_DENIED
        assert await here.finished() == JobState.FINISHED
        assert_same_curve(here.steps, steps)
        assert not here.all(Incident)
    assert any("state is asked for and refused" in line for line in caplog.messages)
    assert any("incident: tensors in the name of worker=w1 are forged" in line for line in caplog.messages)


async def asked_for_state(here: Cluster, worker: str, door: str) -> StatusCode:
    """What somebody who is let in gets that nobody has told to fetch."""
    job = next(iter(here._machine.history.jobs))
    request = FetchStateRequest(
        job=job, stage=StageIndex(1), version=Step(1), names=(), kind=StateKind.STATE, door=door
    )
    async with open_channel(
        member_of(here, worker).address, Lane.STATE, credentials=NO_CREDENTIALS
    ) as channel:
        call = peer_pb2_grpc.PeerStub(channel).FetchState(FETCH_STATE.encode(request))
        with pytest.raises(AioRpcError) as caught:
            await anext(aiter(call))
    return caught.value.code()


async def spoil(here: Cluster, victim: Running, name: str) -> None:
    """As a member that makes parts of a reduction without the tensor that belongs into them, until it is noticed."""
    address = member_of(here, victim.inbox._machine.identity.worker).address
    nothing = WireTensor(name="other", dtype=DType.FLOAT64, shape=(4,), data=bytes(32))
    async with open_channel(address, Lane.REDUCE, credentials=NO_CREDENTIALS) as channel:
        call = peer_pb2_grpc.PeerStub(channel).Deliver(None)
        replies, number = aiter(call), 0
        while not here.all(Incident):
            for shard in range(4):
                told = forged(here, victim, 0, name)
                assert isinstance(told.header, ShardTensor)
                key = victim.inbox._machine._standing.key
                secret = key.tensor_secret(WorkerId(name), told.incarnation)
                envelope = replace(told, secret=secret, header=replace(told.header, shard=shard))
                number += 1
                await call.write(TENSOR_PART.encode(announce(number, envelope, (nothing,))))
                data = TensorData(
                    tensor=number, offset=0, data=bytes(32), checksum=checksum(memoryview(bytes(32)))
                )
                await call.write(TENSOR_PART.encode(data))
            await anext(replies)
        call.cancel()


async def test_a_malformed_shard_is_its_senders_fault(tmp_path: Path) -> None:
    one_stage = tiny_job(write_text(tmp_path), stages=1, replicas=2)
    job = job_of(tmp_path / "text.txt", replicas=2).model_copy(update={"parallel": one_stage.parallel})
    steps, _ = undisturbed(job)
    async with cluster(Disk()) as here, here.workers("w0", "w1") as workers:
        here.submit(job)
        await here.first(StepCommitted)
        await spoil(here, workers[0], "w1")
        assert await here.finished() == JobState.FINISHED
        assert_same_curve(here.steps, steps)
        found = here.all(Incident)
        assert {worker for incident in found for worker in incident.workers} == {"w1"}
        assert "give one tensor 'shard' of" in found[0].reason
