"""Streams that say nothing, and callers that read nothing, block nobody: by real gRPC."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, NoReturn, cast

import pytest
from grpc import StatusCode, aio

from skein.protocol.messages.directives import Member
from skein.types import StageIndex, Step
from skein.wire.channel import Lane, open_channel
from skein.wire.codec import FETCH_STATE
from skein.wire.credentials import NO_CREDENTIALS
from skein.wire.extra import FetchStateRequest, StateKind
from skein.wire.v1 import peer_pb2_grpc
from tests.worker.transport.loopback import JOB, Receiver, hop_envelope, sending, serving, tensor_of
from worker.bundle import Limits
from worker.transport.receiving import slots
from worker.transport.receiving.slots import CrowdedError, IdleError, Slots, StreamSlot

WAIT_S = 10.0
"""Far above what anything here takes."""


class Told(Counter[str]):
    """Counts, and lets a test wait until one has come so far."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        self._news.set()

    async def reach(self, name: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self[name] < count:
                self._news.clear()
                await self._news.wait()


def receiver_of(limits: Limits, *, num_bytes: int = 9) -> tuple[Receiver, Told]:
    state = {"x": tensor_of(num_bytes)}
    receiver = Receiver(state=lambda *_: state, limits=limits)
    told = receiver.statistics.refusals = Told()
    return receiver, told


@asynccontextmanager
async def silent(member: Member, method: Literal["Deliver", "Probe"], count: int) -> AsyncIterator[None]:
    """So many streams that have begun and say nothing, each on a connection of its own."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            channel = await stack.enter_async_context(
                open_channel(member.address, Lane.FORWARD, credentials=NO_CREDENTIALS)
            )
            call = getattr(peer_pb2_grpc.PeerStub(channel), method)(None)
            await call.wait_for_connection()
            stack.callback(call.cancel)
        yield


async def test_silent_streams_give_way_to_peers_that_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GIVES_WAY_S", 0.0)
    receiver, told = receiver_of(Limits(max_streams=2))
    async with serving(receiver.service()) as member, silent(member, "Deliver", 6), sending() as sender:
        sender.peers.send(member, hop_envelope(), ())
        await receiver.arrived.get()
        await told.reach("silent", 4)


async def test_a_stream_that_is_silent_for_too_long_is_ended_and_its_peer_dials_again() -> None:
    receiver, told = receiver_of(Limits(silent_s=0.02))
    async with serving(receiver.service()) as member, sending() as sender:
        for index in range(2):
            sender.peers.send(member, hop_envelope(index), ())
            await receiver.arrived.get()
            await told.reach("silent", index + 1)
        assert sender.failed.empty()


async def test_the_end_of_a_silent_stream_says_how_long_it_was_silent() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with Slots(most=1, most_of_one=1, silent_s=0.01).take("a") as slot:
        slot.heard_s -= 7.0
        with pytest.raises(IdleError, match=r"silent for (?!0\.0)\d"):
            await anext(slot.each(nothing()))


async def test_silent_probes_keep_nobody_from_state_nor_from_probing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GIVES_WAY_S", 0.0)
    receiver, _ = receiver_of(Limits())
    async with serving(receiver.service()) as member, silent(member, "Probe", 16), sending() as sender:
        assert await sender.peers.fetch_state(member, JOB, StageIndex(0), Step(0))
        there, _ = (await sender.peers.measure_link(member)).links
        assert there.bytes_per_s > 0


async def test_who_reads_no_state_is_not_waited_for() -> None:
    receiver, told = receiver_of(Limits(silent_s=0.05), num_bytes=64 << 20)
    asked = FetchStateRequest(job=JOB, stage=StageIndex(0), version=Step(0), names=(), kind=StateKind.STATE)
    async with (
        serving(receiver.service()) as member,
        open_channel(member.address, Lane.STATE, credentials=NO_CREDENTIALS) as channel,
    ):
        call = peer_pb2_grpc.PeerStub(channel).FetchState(FETCH_STATE.encode(asked))
        await told.reach("silent", 1)
        call.cancel()


class Gone:
    """The context of a call whose caller goes as soon as something is written."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def write(self, message: object) -> None:
        raise asyncio.CancelledError

    async def abort(self, code: StatusCode, details: str) -> NoReturn:
        raise AssertionError(f"{code}: {details}")


async def test_a_caller_that_goes_gives_its_place_back_at_once() -> None:
    receiver, _ = receiver_of(Limits(max_transfers=1))
    service, context = receiver.service(), cast(aio.ServicerContext[object, object], Gone())
    asked = FetchStateRequest(job=JOB, stage=StageIndex(0), version=Step(0), names=(), kind=StateKind.STATE)
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await service.give_state(FETCH_STATE.encode(asked), context)


async def test_bytes_that_are_no_message_are_refused_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    receiver, _ = receiver_of(Limits())
    async with (
        serving(receiver.service()) as member,
        open_channel(member.address, Lane.STATE, credentials=NO_CREDENTIALS) as channel,
    ):
        for method in ("FetchState", "Probe"):
            call = channel.stream_stream(f"/skein.wire.v1.Peer/{method}", None, None)(iter([b"\x0f\xff"]))
            assert await call.code() is StatusCode.INVALID_ARGUMENT
            assert f"no request of {method}" in (await call.details() or "")
    assert not [record for record in caplog.records if record.name != "asyncio"]


async def test_one_peer_leaves_room_for_others() -> None:
    places = Slots(most=4, most_of_one=2, silent_s=WAIT_S)
    with places.take("a"), places.take("a"):
        with pytest.raises(CrowdedError, match="2 streams are open already"), places.take("a"):
            raise AssertionError
        with places.take("b"), places.take("b"), pytest.raises(CrowdedError), places.take("c"):
            raise AssertionError


async def test_who_speaks_keeps_its_place_and_who_comes_is_told_to_come_again() -> None:
    receiver, told = receiver_of(Limits(max_probes=1))
    async with serving(receiver.service()) as member, silent(member, "Probe", 1):
        async with open_channel(member.address, Lane.STATE, credentials=NO_CREDENTIALS) as channel:
            call = peer_pb2_grpc.PeerStub(channel).Probe(None)
            with pytest.raises(aio.AioRpcError) as caught:
                await anext(aiter(call))
        assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
        await told.reach("too_many", 1)


async def test_a_stream_that_silence_is_ending_anyway_gives_way_to_who_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "GIVES_WAY_S", 0.0)
    places, loop, taken = Slots(most=1, most_of_one=1, silent_s=WAIT_S), asyncio.get_running_loop(), []

    def come() -> None:
        with places.take("b") as slot:
            taken.append((slot.peer, wait.expired()))

    async def read(slot: StreamSlot) -> None:
        with slot.awaited(wait):
            # The timeout, and the newcomer before the wait has ended.
            wait.reschedule(loop.time())
            loop.call_soon(come)
            await asyncio.Event().wait()

    with places.take("a") as slot, pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as wait:
            await read(slot)
    assert taken == [("b", True)]
