import asyncio
import socket
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import torch
from grpc import aio

from skein.plan.ops import Direction
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import HopTensor, Refusal
from skein.types import Generation, Incarnation
from skein.wire.channel import Lane
from skein.wire.codec import PART_REPLY
from skein.wire.credentials import Credentials, Wallet
from skein.wire.extra import CreditGranted, DType, PartReply, TensorAccepted
from skein.wire.identity.authority import Authority
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.names import Caller, CallerRole, worker_caller
from skein.wire.v1 import peer_pb2
from tests.support.turns import until
from tests.worker.transport.loopback import (
    A,
    B,
    Receiver,
    gathered,
    hop_envelope,
    over,
    sending,
    serving,
    shard_envelope,
    tensor_of,
)
from worker.bundle import to_torch, to_wire
from worker.service import PeerService
from worker.transport.framing import FramedPart, read_part
from worker.transport.pace import PeerPatience

MIB = 1 << 20
SHORT = PeerPatience(least_s=0.2, most_s=0.2)
"""For tests that wait for a peer to be given up."""

Context = aio.ServicerContext[object, object]
Parts = AsyncIterator[bytes]
"""Messages as they come."""
Replies = AsyncIterator[peer_pb2.PartReply]


# --- the normal case ---


@pytest.mark.parametrize("dtype", list(DType))
async def test_a_bundle_arrives_equal(dtype: DType) -> None:
    receiver = Receiver()
    tensors = [
        (torch.arange(size).reshape(shape) % 2).to(getattr(torch, dtype))
        for size, shape in ((1, ()), (0, (0, 3)), (300_000, (3, 100_000)))
    ]
    bundle = tuple(to_wire(f"x{i}", tensor) for i, tensor in enumerate(tensors))
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), bundle)
        envelope, arrived = await receiver.arrived.get()
    assert envelope == hop_envelope()
    for got, tensor in zip(arrived, tensors, strict=True):
        assert torch.equal(to_torch(got), tensor)


async def test_each_lane_delivers_and_counts() -> None:
    receiver = Receiver()
    envelopes = [hop_envelope(), hop_envelope(direction=Direction.BACKWARD), shard_envelope()]
    async with serving(receiver.service()) as member, sending() as sender:
        for envelope in envelopes:
            sender.peers.send(member, envelope, (tensor_of(3 * MIB + 5),))
        arrived = await gathered(receiver.arrived.get, 3)
        assert set(sender.peers.queue_depths()) == {Lane.FORWARD, Lane.BACKWARD, Lane.REDUCE}
        await until(lambda: sender.statistics.accepted == {Lane.FORWARD: 1, Lane.BACKWARD: 1, Lane.REDUCE: 1})
    assert sorted(map(repr, envelopes)) == sorted(repr(envelope) for envelope, _ in arrived)
    assert all(bundle == (tensor_of(3 * MIB + 5),) for _, bundle in arrived)
    assert sender.statistics.sent_bytes == {B: 3 * (3 * MIB + 5)}
    assert sender.statistics.shard_bytes == {(shard_envelope().job, B): 3 * MIB + 5}
    assert receiver.statistics.received_bytes == {A: 3 * (3 * MIB + 5)}


async def test_a_release_without_tensors_arrives() -> None:
    receiver = Receiver()
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), ())
        assert await receiver.arrived.get() == (hop_envelope(), ())


async def test_an_accepted_tensor_is_told_with_its_bytes_and_its_time() -> None:
    receiver, loop = Receiver(), asyncio.get_running_loop()
    async with serving(receiver.service()) as member, sending() as sender:
        began_s = loop.time()
        sender.peers.send(member, hop_envelope(), (tensor_of(3 * MIB + 5),))
        to, envelope, num_bytes, seconds = await sender.taken.get()
        assert (to, envelope, num_bytes) == (B, hop_envelope(), 3 * MIB + 5)
        assert 0 < seconds <= loop.time() - began_s


async def test_a_refused_tensor_is_not_told_as_accepted() -> None:
    receiver = Receiver(refusal_of=lambda envelope: Refusal.STALE if envelope == hop_envelope(0) else None)
    async with serving(receiver.service()) as member, sending() as sender:
        for microbatch in (0, 1):
            sender.peers.send(member, hop_envelope(microbatch), (tensor_of(10),))
        assert (await sender.taken.get())[1] == hop_envelope(1)
        assert sender.taken.empty()


async def test_the_oldest_microbatch_goes_first() -> None:
    receiver = Receiver()
    async with serving(receiver.service()) as member, sending() as sender:
        for microbatch in (3, 1, 2, 0):
            sender.peers.send(member, hop_envelope(microbatch), (tensor_of(10),))
        arrived = await gathered(receiver.arrived.get, 4)
    assert [envelope for envelope, _ in arrived] == [hop_envelope(m) for m in range(4)]


async def test_a_peer_that_moved_is_reached_at_its_new_address() -> None:
    before, after = Receiver(), Receiver()
    async with sending() as sender:
        async with serving(before.service()) as member:
            sender.peers.send(member, hop_envelope(0), ())
            await before.arrived.get()
        async with serving(after.service()) as member:
            moved = Member(worker=B, incarnation=Incarnation("i2"), address=member.address)
            sender.peers.send(moved, hop_envelope(1), ())
            assert await after.arrived.get() == (hop_envelope(1), ())


# --- credit ---


class Miser(PeerService):
    """Grants what the test says, and tells when the sender has used all of it up."""

    def __init__(self, **callbacks: object) -> None:
        super().__init__(**callbacks)  # type: ignore[arg-type]
        self.granted = self.received = 0
        self.grants: asyncio.Queue[int] = asyncio.Queue()
        self.spent: asyncio.Queue[int] = asyncio.Queue()

    async def Deliver(self, request_iterator: Parts, context: Context) -> Replies:
        yield await self.grant()
        async for message in request_iterator:
            part = read_part(message)
            if isinstance(part, FramedPart):
                self.received += len(part.data)
                assert self.received <= self.granted
                if self.received == self.granted:
                    self.spent.put_nowait(self.received)
                    yield await self.grant()

    async def grant(self) -> peer_pb2.PartReply:
        num_bytes = await self.grants.get()
        self.granted += num_bytes
        return PART_REPLY.encode(CreditGranted(num_bytes=num_bytes))


async def test_bytes_on_the_way_never_exceed_the_credit_of_a_slow_receiver() -> None:
    miser = Receiver().service_of(Miser)
    async with serving(miser) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(7 * MIB),))
        for grant, total in ((2, 2), (1, 3), (3, 6)):
            miser.grants.put_nowait(grant * MIB)
            assert await miser.spent.get() == total * MIB
            assert sender.statistics.sent_bytes[B] <= total * MIB
            assert sender.peers.queue_depths()[Lane.FORWARD] == 1


# --- what goes wrong on the way ---


class Flaky(PeerService):
    """Spoils the first stream in one way; later ones are as they should be."""

    num_streams = 0

    async def Deliver(self, request_iterator: Parts, context: Context) -> Replies:
        self.num_streams += 1
        if self.num_streams > 1:
            async for reply in super().Deliver(request_iterator, context):
                yield reply
            return
        async for reply in super().Deliver(self.spoil(request_iterator, context), context):
            await self.may_pass(PART_REPLY.decode(reply), context)
            yield reply

    async def spoil(self, parts: Parts, context: Context) -> Parts:
        async for part in parts:
            yield part

    async def may_pass(self, reply: PartReply, context: Context) -> None:
        return


class BitFlipping(Flaky):
    async def spoil(self, parts: Parts, context: Context) -> Parts:
        is_done = False
        async for message in parts:
            if isinstance(read_part(message), FramedPart) and not is_done:
                is_done = True
                message = message[:-1] + bytes([message[-1] ^ 1])
            yield message


class BreakingHalfway(Flaky):
    async def spoil(self, parts: Parts, context: Context) -> Parts:
        async for message in parts:
            part = read_part(message)
            if isinstance(part, FramedPart) and part.offset >= MIB:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            yield message


class CutOften(PeerService):
    """Cuts its first streams after a few messages, in either direction."""

    def __init__(self, **callbacks: object) -> None:
        super().__init__(**callbacks)  # type: ignore[arg-type]
        self.cuts = [5, 1, 9, 4, 7, 2]

    async def Deliver(self, request_iterator: Parts, context: Context) -> Replies:
        cut = self.cuts.pop(0) if self.cuts else None
        count = 0
        async for reply in super().Deliver(request_iterator, context):
            if count == cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            count += 1
            yield reply


class BreakingAlways(PeerService):
    async def Deliver(self, request_iterator: Parts, context: Context) -> Replies:
        yield PART_REPLY.encode(CreditGranted(num_bytes=4 * MIB))
        await anext(aiter(request_iterator))
        await context.abort(grpc.StatusCode.UNKNOWN, "this tensor is my ruin")


class LosingTheAnswer(Flaky):
    async def may_pass(self, reply: PartReply, context: Context) -> None:
        if isinstance(reply, TensorAccepted):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")


class SilentAtFirst(Flaky):
    async def may_pass(self, reply: PartReply, context: Context) -> None:
        if isinstance(reply, TensorAccepted):
            await asyncio.Event().wait()


async def test_a_tensor_that_was_spoilt_on_the_way_is_sent_again() -> None:
    receiver = Receiver()
    async with serving(receiver.service_of(BitFlipping)) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(2 * MIB),))
        assert await receiver.arrived.get() == (hop_envelope(), (tensor_of(2 * MIB),))
    assert receiver.statistics.refusals == {"corrupt": 1}
    assert sender.statistics.refused == {"corrupt": 1}
    assert sender.statistics.resent[Lane.FORWARD] == 1


@pytest.mark.parametrize(("kind", "num_duplicates"), [(BreakingHalfway, 0), (LosingTheAnswer, 1)])
async def test_a_broken_stream_loses_nothing_and_repeats_nothing(
    kind: type[Flaky], num_duplicates: int
) -> None:
    receiver = Receiver()
    async with serving(receiver.service_of(kind)) as member, sending() as sender:
        for microbatch in range(3):
            sender.peers.send(member, hop_envelope(microbatch), (tensor_of(2 * MIB),))
        arrived = await gathered(receiver.arrived.get, 3)
    assert [envelope for envelope, _ in arrived] == [hop_envelope(m) for m in range(3)]
    assert all(bundle == (tensor_of(2 * MIB),) for _, bundle in arrived)
    assert receiver.arrived.empty()
    assert receiver.statistics.duplicates == num_duplicates
    assert sender.statistics.resent[Lane.FORWARD] >= 1
    assert sender.failed.empty()


async def test_a_line_that_is_cut_again_and_again_delivers_each_tensor_once() -> None:
    receiver = Receiver()
    service = receiver.service_of(CutOften)
    async with serving(service) as member, sending() as sender:
        for microbatch in range(20):
            sender.peers.send(member, hop_envelope(microbatch), (tensor_of((microbatch % 3) * MIB + 1),))
        arrived = await gathered(receiver.arrived.get, 20)
    assert service.cuts == []
    assert {envelope.header for envelope, _ in arrived} == {hop_envelope(m).header for m in range(20)}
    for envelope, bundle in arrived:
        assert isinstance(envelope.header, HopTensor)
        assert bundle == (tensor_of((envelope.header.microbatch % 3) * MIB + 1),)
    assert receiver.arrived.empty()
    assert sender.failed.empty()


async def test_a_tensor_that_breaks_every_stream_is_given_up() -> None:
    async with serving(Receiver().service_of(BreakingAlways)) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        _, _, reason = await sender.failed.get()
    assert "this tensor is my ruin" in reason


async def test_a_peer_where_nothing_listens_is_given_up() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        member = Member(worker=B, incarnation=Incarnation("i"), address=f"127.0.0.1:{port}")
        async with sending(patience=SHORT) as sender:
            for envelope in (hop_envelope(0), hop_envelope(1), hop_envelope(2, generation=2)):
                sender.peers.send(member, envelope, ())
            failures = [await sender.failed.get() for _ in range(2)]
            assert sender.peers.queue_depths()[Lane.FORWARD] == 0
    assert [(worker, generation) for worker, generation, _ in failures] == [(B, 1), (B, 2)]
    assert "nothing listens there" in failures[0][2]
    assert sender.statistics.failed == {B: 3}


async def test_a_peer_whose_machine_refuses_is_given_up_however_long_silence_is_borne() -> None:
    async with serving(Receiver().service()) as member:
        pass
    patient = PeerPatience(least_s=3600.0, most_s=3600.0, gone_s=0.1)
    async with sending(patience=patient) as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        worker, _, reason = await sender.failed.get()
    assert worker == B
    assert "nothing listens there" in reason


async def test_a_peer_that_dies_in_the_midst_of_a_tensor_is_given_up_as_soon() -> None:
    miser = Receiver().service_of(Miser)
    patient = PeerPatience(least_s=3600.0, most_s=3600.0, gone_s=0.1)
    async with sending(patience=patient) as sender:
        async with serving(miser) as member:
            miser.grants.put_nowait(MIB)
            sender.peers.send(member, hop_envelope(), (tensor_of(2 * MIB),))
            await miser.spent.get()
        worker, _, _ = await sender.failed.get()
    assert worker == B


async def test_a_slow_link_raises_no_suspicion_while_bytes_move() -> None:
    """A quarter of a second for a part of full size, beyond the least patience; all bytes take five times that."""
    receiver = Receiver()
    num_tensors, num_bytes = 2, 2 * MIB
    async with (
        serving(receiver.service()) as member,
        over(member, latency_s=0.05, bytes_per_s=4e6) as far,
        sending(patience=PeerPatience(least_s=0.2)) as sender,
    ):
        for microbatch in range(num_tensors):
            sender.peers.send(far, hop_envelope(microbatch), (tensor_of(num_bytes),))
        arrived = await gathered(receiver.arrived.get, num_tensors)
        assert sender.failed.empty()
    assert [envelope for envelope, _ in arrived] == [hop_envelope(m) for m in range(num_tensors)]
    assert sender.statistics.resent[Lane.FORWARD] == 0


async def test_a_peer_that_stands_still_is_given_up() -> None:
    miser = Receiver().service_of(Miser)
    async with serving(miser) as member, sending(patience=SHORT) as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        worker, generation, reason = await sender.failed.get()
    assert (worker, generation) == (B, 1)
    assert "silent" in reason


async def test_a_peer_given_up_is_tried_again_for_the_next_tensor() -> None:
    receiver = Receiver()
    async with serving(receiver.service()) as member:
        pass
    async with sending(patience=SHORT) as sender:
        sender.peers.send(member, hop_envelope(), ())
        await sender.failed.get()
        sender.peers.send(member, hop_envelope(1), ())
        assert (await sender.failed.get())[:2] == (B, 1)


async def test_a_peer_is_not_blamed_for_a_standstill_of_ones_own() -> None:
    receiver, loop = Receiver(), asyncio.get_running_loop()
    patient = PeerPatience(least_s=1.0, most_s=1.0)
    async with serving(receiver.service_of(SilentAtFirst)) as member, sending(patience=patient) as sender:
        sender.peers.send(member, hop_envelope(), (tensor_of(10),))
        await receiver.arrived.get()
        until_s = loop.time() + 1.7  # all patience, and so late that it shows
        while loop.time() < until_s:
            pass
        sender.peers.send(member, hop_envelope(1), (tensor_of(10),))
        # The answer to the first may have been lost on the stream that was given up, and may not.
        while (await sender.taken.get())[1] != hop_envelope(1):
            pass
        assert sender.failed.empty()
        assert sender.statistics.accepted[Lane.FORWARD] == 2


async def test_to_be_revoked_is_no_reason_to_try_again() -> None:
    receiver, revoked = Receiver(), NamedCallers(lambda _: True)
    async with (
        serving(receiver.service(), credentials=known_as(worker_caller(B)), named=revoked) as member,
        sending(credentials=known_as(worker_caller(A))) as sender,
    ):
        sender.peers.send(member, hop_envelope(), ())
        _, _, reason = await sender.failed.get()
    assert "worker a was revoked" in reason
    assert receiver.arrived.empty()


async def test_tensors_in_the_name_of_another_than_the_certificate_are_refused_and_those_of_that_one_arrive() -> (
    None
):
    receiver = Receiver()
    async with (
        serving(receiver.service(), credentials=known_as(worker_caller(B))) as member,
        sending(credentials=known_as(worker_caller(A))) as honest,
        sending(credentials=known_as(worker_caller("liar"))) as liar,
        sending(credentials=known_as(Caller(name=A, role=CallerRole.ADMIN))) as admin,
    ):
        liar.peers.send(member, hop_envelope(1), (tensor_of(10),))
        assert "the certificate is that of worker liar, not of worker a" in (await liar.failed.get())[2]
        admin.peers.send(member, hop_envelope(2), (tensor_of(10),))
        assert "admin a may not call Deliver, which is for: worker" in (await admin.failed.get())[2]
        honest.peers.send(member, hop_envelope(3), (tensor_of(10),))
        arrived, _ = await receiver.arrived.get()
        assert arrived == hop_envelope(3)
    assert receiver.arrived.empty()
    assert receiver.statistics.refusals[Refusal.FORGED] == 1


def known_as(caller: Caller) -> Credentials:
    return Credentials(wallet=Wallet(AUTHORITY.make_out(caller, now_s=time.time())))


AUTHORITY = Authority.new(now_s=time.time())


# --- ending ---


async def test_forgotten_generations_are_not_sent() -> None:
    miser, receiver = Receiver().service_of(Miser), Receiver()
    async with sending() as sender:
        async with serving(miser) as member:
            miser.grants.put_nowait(MIB)
            sender.peers.send(member, hop_envelope(0), (tensor_of(2 * MIB),))
            sender.peers.send(member, hop_envelope(1), (tensor_of(MIB),))
            await miser.spent.get()
            sender.peers.send(member, hop_envelope(2, generation=2), (tensor_of(MIB),))
            sender.peers.forget(Generation(2), members=[B])
            assert sender.peers.queue_depths()[Lane.FORWARD] == 1
        async with serving(receiver.service()) as moved:
            sender.peers.send(moved, hop_envelope(3, generation=2), ())
            assert (await receiver.arrived.get())[0] == hop_envelope(3, generation=2)


async def test_peers_outside_the_new_generation_are_hung_up_on() -> None:
    receiver = Receiver()
    async with serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(member, hop_envelope(0), ())
        await receiver.arrived.get()
        sender.peers.send(member, hop_envelope(1), (tensor_of(10),))
        sender.peers.forget(Generation(1), members=[A])
        assert sender.peers.queue_depths()[Lane.FORWARD] == 0
        sender.peers.send(member, hop_envelope(2), ())
        assert (await receiver.arrived.get())[0] == hop_envelope(2)


async def test_closing_leaves_nothing_running() -> None:
    receiver = Receiver()
    miser = receiver.service_of(Miser)
    async with serving(miser) as silent, serving(receiver.service()) as member, sending() as sender:
        sender.peers.send(silent, hop_envelope(direction=Direction.BACKWARD), (tensor_of(MIB),))
        sender.peers.send(member, hop_envelope(), ())
        await receiver.arrived.get()
        await sender.peers.close()
        running = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
        assert not {name for name in running if name.startswith("LaneOutbox")}
        assert sender.peers.queue_depths() == dict.fromkeys((Lane.FORWARD, Lane.BACKWARD, Lane.REDUCE), 0)
