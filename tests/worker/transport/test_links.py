import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import grpc
import pytest
from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.types import Incarnation
from skein.wire.channel import Lane, open_channel
from skein.wire.codec import PROBE_PART
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import ProbePart
from skein.wire.v1 import peer_pb2, peer_pb2_grpc
from tests.worker.transport.loopback import A, B, Receiver, sending, serving
from worker.service import PeerService
from worker.transport.links import Sight, bytes_per_s, look_at

Context = aio.ServicerContext[object, object]


async def test_a_probe_measures_both_directions() -> None:
    async with serving(Receiver().service()) as member, sending() as sender:
        there, back = (await sender.peers.measure_link(member)).links
    assert (there.sender, there.receiver) == (A, B)
    assert (back.sender, back.receiver) == (B, A)
    for link in (there, back):
        assert 0 < link.latency_s < math.inf
        assert 0 < link.bytes_per_s < math.inf


async def test_a_peer_that_is_gone_cannot_be_measured() -> None:
    async with serving(Receiver().service()) as member:
        pass
    async with sending() as sender:
        with pytest.raises(RemoteError, match="nothing listens there"):
            await sender.peers.measure_link(member)


async def test_a_stranger_is_seen_and_may_not_load_a_link() -> None:
    receiver = Receiver(may="told".__eq__)
    async with serving(receiver.service()) as member, sending() as sender:
        there, _ = (await sender.peers.measure_link(replace(member, door="told"))).links
        assert there.bytes_per_s > 0
        assert (
            await look_at(member, dial=partial(open_channel, credentials=NO_CREDENTIALS), patience_s=5.0)
            is Sight.REACHED
        )
        for door in ("", "made up"):
            with pytest.raises(RemoteError, match="whom the coordinator has told to measure this link"):
                await sender.peers.measure_link(replace(member, door=door))


async def test_a_probe_that_comes_before_the_word_of_the_coordinator_is_no_stranger_later() -> None:
    heard: list[str] = []
    receiver = Receiver(may=lambda door: door in heard)
    async with serving(receiver.service()) as member, sending() as sender:
        channel = open_channel(member.address, Lane.STATE, credentials=NO_CREDENTIALS)
        call = peer_pb2_grpc.PeerStub(channel).Probe(None)
        replies = aiter(call)
        for number, data in enumerate((b"", bytes(1 << 20))):
            part = ProbePart(sequence=number, data=data, reply_bytes=0, door="" if number else "told")
            await call.write(PROBE_PART.encode(part))
            await anext(replies)
            heard.append("told")
        await channel.close(None)
        assert sender.failed.empty()


class Mute(PeerService):
    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: Context
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        async for _ in request_iterator:
            await asyncio.Event().wait()
            yield peer_pb2.ProbeReply()


async def test_a_look_tells_who_answers_from_who_is_silent_and_who_is_gone() -> None:
    dial = partial(open_channel, credentials=NO_CREDENTIALS)
    async with serving(Receiver().service()) as member:
        assert await look_at(member, dial=dial, patience_s=5.0) is Sight.REACHED
    assert await look_at(member, dial=dial, patience_s=5.0) is Sight.GONE
    async with serving(Receiver().service_of(Mute)) as member:
        assert await look_at(member, dial=dial, patience_s=0.05) is Sight.SILENT


async def test_a_machine_that_hangs_up_is_no_witness_of_a_death() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        peer = Member(worker=B, incarnation=Incarnation("i"), address=f"127.0.0.1:{port}")
        sight = await look_at(peer, dial=partial(open_channel, credentials=NO_CREDENTIALS), patience_s=0.5)
    assert sight is Sight.SILENT


class Confused(PeerService):
    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: Context
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        async for _ in request_iterator:
            yield peer_pb2.ProbeReply(sequence=99)


async def test_an_answer_to_another_question_is_a_remote_error() -> None:
    async with serving(Receiver().service_of(Confused)) as member, sending() as sender:
        with pytest.raises(RemoteError, match="answered probe 0"):
            await sender.peers.measure_link(member)


@pytest.mark.parametrize(("data", "reply_bytes"), [(bytes((2 << 20) + 1), 0), (b"", (2 << 20) + 1)])
async def test_a_probe_of_more_than_a_measurement_needs_is_refused(data: bytes, reply_bytes: int) -> None:
    receiver = Receiver()
    async with (
        serving(receiver.service()) as member,
        open_channel(member.address, Lane.STATE, credentials=NO_CREDENTIALS) as channel,
    ):
        call = peer_pb2_grpc.PeerStub(channel).Probe(None)
        await call.write(PROBE_PART.encode(ProbePart(sequence=0, data=data, reply_bytes=reply_bytes)))
        with pytest.raises(aio.AioRpcError) as caught:
            await anext(aiter(call))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert receiver.statistics.refusals == {"malformed": 1}


class SlowStart:
    """A connection over a long link: it sends ten packets in the first round trip, and twice as many in each that
    follows, up to what the link carries; the pace stays from one transfer to the next."""

    def __init__(self, round_trip_s: float, bytes_per_s: float) -> None:
        self._round_trip_s = round_trip_s
        self._most_bytes = bytes_per_s * round_trip_s
        self._window_bytes = 14_600.0

    async def exchange(self, num_parts: int, data: bytes, reply_bytes: int) -> float:
        left = float(num_parts * max(len(data), reply_bytes))
        elapsed_s = self._round_trip_s
        while left > self._window_bytes and self._window_bytes < self._most_bytes:
            left -= self._window_bytes
            elapsed_s += self._round_trip_s
            self._window_bytes = min(2 * self._window_bytes, self._most_bytes)
        return elapsed_s + left / self._most_bytes * self._round_trip_s


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize(
    ("round_trip_s", "carries"), [(0.256, 10e6), (0.08, 20e6), (0.01, 100e6), (0.2, 1e6)]
)
async def test_a_connection_that_begins_slowly_does_not_make_a_slow_link(
    round_trip_s: float, carries: float, is_up: bool
) -> None:
    found = await bytes_per_s(SlowStart(round_trip_s, carries), round_trip_s, is_up=is_up)
    assert 0.7 * carries < found < 1.3 * carries
