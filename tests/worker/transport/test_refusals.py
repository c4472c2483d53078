"""What a receiver of tensors refuses, and what becomes of that."""

import grpc
import pytest
from grpc import aio

from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.wire.channel import Lane, open_channel
from skein.wire.codec import TENSOR_PART
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import TensorData, TensorStart
from skein.wire.v1 import peer_pb2, peer_pb2_grpc
from tests.worker.transport.loopback import B, Receiver, hop_envelope, sending, serving, tensor_of
from worker.bundle import Limits
from worker.transport.parts import announce


async def test_a_stale_tensor_is_dropped_quietly_and_counted() -> None:
    receiver = Receiver(refusal_of=lambda envelope: Refusal.STALE if envelope.generation < 2 else None)
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(0), (tensor_of(10),))
        sender.peers.send(member, hop_envelope(1, generation=2), (tensor_of(10),))
        assert (await receiver.arrived.get())[0] == hop_envelope(1, generation=2)
    assert receiver.statistics.refusals == {"stale": 1}
    assert sender.statistics.refused == {"stale": 1}
    assert sender.failed.empty()


async def test_a_tensor_that_comes_too_early_is_offered_again() -> None:
    answers: list[Refusal | None] = [Refusal.NOT_YET, None, None]
    receiver = Receiver(refusal_of=lambda _: answers.pop(0))
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        assert await receiver.arrived.get() == (hop_envelope(), (tensor_of(10),))
    assert sender.statistics.refused == {"not_yet": 1}
    assert sender.statistics.resent[Lane.FORWARD] == 1


@pytest.mark.parametrize(
    ("refusal", "limits", "expected"),
    [
        (Refusal.UNKNOWN_JOB, Limits(), Refusal.UNKNOWN_JOB),
        (Refusal.UNEXPECTED, Limits(), Refusal.UNEXPECTED),
        (Refusal.CORRUPT, Limits(), Refusal.CORRUPT),
        (None, Limits(max_bundle_bytes=9), Refusal.TOO_LARGE),
        (None, Limits(max_dims=0), Refusal.TOO_LARGE),
    ],
)
async def test_a_tensor_that_will_never_be_taken_is_given_up(
    refusal: Refusal | None, limits: Limits, expected: Refusal
) -> None:
    receiver = Receiver(refusal_of=lambda _: refusal, limits=limits)
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        worker, generation, reason = await sender.failed.get()
    assert (worker, generation) == (B, 1)
    assert expected in reason
    assert receiver.statistics.refusals[expected] == sender.statistics.refused[expected] > 0


async def refused_stream(member: Member, *messages: peer_pb2.TensorPart) -> aio.AioRpcError:
    """How a stream with `messages` ends."""
    async with open_channel(member.address, Lane.FORWARD, credentials=NO_CREDENTIALS) as channel:
        call = peer_pb2_grpc.PeerStub(channel).Deliver(None)
        for message in messages:
            await call.write(message)
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in call:
                pass
    return caught.value


def announcement(envelope: Envelope, dtype: int) -> peer_pb2.TensorPart:
    message = TENSOR_PART.encode(announce(1, envelope, (tensor_of(10),)))
    message.tensor_start.tensors[0].dtype = dtype  # type: ignore[assignment]
    return message


@pytest.mark.parametrize(
    "message",
    [
        announcement(hop_envelope(), 0),
        announcement(hop_envelope(), 99),
        peer_pb2.TensorPart(),
        TENSOR_PART.encode(TensorData(tensor=0, offset=0, data=b"x", checksum=0)),
    ],
    ids=["no dtype", "unknown dtype", "nothing", "unannounced bytes"],
)
async def test_a_malformed_part_ends_the_stream_and_is_counted(message: peer_pb2.TensorPart) -> None:
    receiver = Receiver()
    async with serving(receiver.service()) as member:
        error = await refused_stream(member, message)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert receiver.statistics.refusals == {"malformed": 1}


async def test_streams_beyond_the_limit_are_refused() -> None:
    receiver = Receiver(limits=Limits(max_streams=1))
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), ())
        await receiver.arrived.get()
        error = await refused_stream(member)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert receiver.statistics.refusals == {"too_many": 1}


async def test_wrong_lengths_are_refused_before_anything_is_allocated() -> None:
    receiver = Receiver()
    start = announce(1, hop_envelope(), (tensor_of(10),))
    wrong = TensorStart(tensor=1, envelope=start.envelope, tensors=start.tensors, num_bytes=1 << 31)
    async with (
        serving(receiver.service()) as member,
        open_channel(member.address, Lane.FORWARD, credentials=NO_CREDENTIALS) as channel,
    ):
        call = peer_pb2_grpc.PeerStub(channel).Deliver(None)
        await call.write(TENSOR_PART.encode(wrong))
        replies = aiter(call)
        await anext(replies)
        refused = await anext(replies)
    assert refused.tensor_refused.reason == peer_pb2.REFUSAL_CORRUPT
    assert receiver.statistics.refusals == {"corrupt": 1}
