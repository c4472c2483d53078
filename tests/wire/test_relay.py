"""Connections by way of a relay, on loopback: what passes, who is refused, and what ends when somebody is gone."""

import asyncio
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc import aio

from skein.protocol.messages.ways import RelayPlace, Way
from skein.types import Incarnation, WorkerId
from skein.wire.channel import Lane, bind, join_address, open_channel, open_channel_to, open_server
from skein.wire.codec import CARRY_PART
from skein.wire.credentials import NO_CREDENTIALS, Credentials, Wallet
from skein.wire.extra import AnswerCall, CallPeer, CarriedBytes, CarryPart
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import COORDINATOR, Caller, worker_caller
from skein.wire.relay import switchboard
from skein.wire.relay.answering import Listening
from skein.wire.relay.calling import RelayedPeers
from skein.wire.relay.carrying import DialRelay
from skein.wire.relay.switchboard import Switchboard
from skein.wire.v1 import peer_pb2, peer_pb2_grpc, relay_pb2, relay_pb2_grpc
from tests.support.addresses import own_addresses
from tests.support.turns import until

ALICE, BOB = WorkerId("alice"), WorkerId("bob")
ONE = Incarnation("1")
RELAY = RelayPlace(worker=WorkerId(""), address="")
WAIT_S = 20.0
"""Far above what loopback takes; reached only when something hangs."""
NOW_S = time.time()
"""Of the clock that TLS looks at, which no test can set."""
AUTHORITY = Authority.new(now_s=NOW_S)
PART = peer_pb2.ProbePart(data=bytes(1 << 20))


class Peer(peer_pb2_grpc.PeerServicer):
    """Answers by how much it got, and begins when it is let."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: object
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        async for part in request_iterator:
            await self.goes_on.wait()
            yield peer_pb2.ProbeReply(sequence=part.sequence, num_bytes=len(part.data))


@dataclass(slots=True, kw_only=True)
class Scene:
    """A relay; Bob, who only dials out and listens there; and Alice, who calls him."""

    port: int
    host: str
    board: Switchboard
    relay: aio.Server
    alice: RelayedPeers
    bob: Peer
    shown: Credentials
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def call(
        self, expected: WorkerId = BOB
    ) -> "aio.StreamStreamCall[peer_pb2.ProbePart, peer_pb2.ProbeReply]":
        """A stream to whoever answers for Bob."""
        dial = open_channel_to(
            expected, credentials=self.shown, way_to=lambda _: self.alice.target(BOB) or ""
        )
        channel = dial("bob:1", Lane.STATE)
        self.stack.push_async_callback(channel.close, None)
        return peer_pb2_grpc.PeerStub(channel).Probe(None)

    def stub(self) -> "relay_pb2_grpc.RelayAsyncStub":
        """The relay, for calls by hand."""
        channel = open_channel(join_address(self.host, self.port), Lane.STATE, credentials=self.shown)
        self.stack.push_async_callback(channel.close, None)
        return relay_pb2_grpc.RelayStub(channel)


@asynccontextmanager
async def scene(
    *,
    has_certificates: bool = False,
    is_offered: bool = True,
    listens: bool = True,
    host: str = "127.0.0.1",
) -> AsyncIterator[Scene]:
    def shown(caller: Caller) -> Credentials:
        return (
            Credentials(wallet=Wallet(AUTHORITY.make_out(caller, now_s=NOW_S)))
            if has_certificates
            else NO_CREDENTIALS
        )

    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        board, bob = Switchboard(is_offered=is_offered), Peer()  # type: ignore[abstract]
        relay = open_server(credentials=shown(COORDINATOR))
        board.attach(relay)
        port = bind(relay, host, 0, credentials=shown(COORDINATOR))
        await relay.start()
        stack.push_async_callback(relay.stop, None)
        server = open_server(credentials=shown(worker_caller(BOB)))
        peer_pb2_grpc.add_PeerServicer_to_server(bob, server)
        own = bind(server, "127.0.0.1", 0, credentials=shown(worker_caller(BOB)))
        await server.start()
        stack.push_async_callback(server.stop, None)

        def dial_as(caller: Caller) -> DialRelay:
            return lambda _, lane: open_channel(join_address(host, port), lane, credentials=shown(caller))

        listening = Listening(BOB, ONE, dial=dial_as(worker_caller(BOB)), host="127.0.0.1", port=own)
        listening.take([RELAY] if listens else [])
        stack.callback(listening.close)
        alice = RelayedPeers(dial_as(worker_caller(ALICE)))
        alice.take([Way(peer=BOB, incarnation=ONE, relay=RELAY)])
        stack.callback(alice.close)
        made = Scene(
            port=port,
            host=host,
            board=board,
            relay=relay,
            alice=alice,
            bob=bob,
            shown=shown(worker_caller(ALICE)),
        )
        stack.push_async_callback(made.stack.aclose)
        yield made


async def exchange(call: "aio.StreamStreamCall[peer_pb2.ProbePart, peer_pb2.ProbeReply]") -> int:
    await call.write(PART)
    reply = await call.read()
    assert isinstance(reply, peer_pb2.ProbeReply)
    return reply.num_bytes


@pytest.mark.parametrize("has_certificates", [False, True])
async def test_a_worker_that_only_dials_out_is_called_by_way_of_the_relay(has_certificates: bool) -> None:
    async with scene(has_certificates=has_certificates) as made:
        call = made.call()
        assert [await exchange(call) for _ in range(3)] == [len(PART.data)] * 3
        assert made.board.num_bytes > 3 * len(PART.data)
        assert made.board.num_connections == 1


@pytest.mark.parametrize("host", own_addresses())
async def test_a_worker_that_listens_at_an_own_address_calls_back_the_one_that_listens_there(
    host: str,
) -> None:
    async with scene(is_offered=False, host=host) as made:
        assert await exchange(made.call()) == len(PART.data)
        assert made.alice.trouble(BOB) == ""


async def test_a_refusal_by_the_relay_is_the_reason_that_its_caller_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switchboard, "is_from_here", lambda _: False)
    async with scene(is_offered=False) as made:
        with pytest.raises(aio.AioRpcError):
            await exchange(made.call())
        assert made.alice.trouble(BOB) == (
            "the relay coordinator: this worker relays for itself only: see --relay"
        )


async def test_whoever_answers_by_another_name_is_not_spoken_to() -> None:
    async with scene(has_certificates=True) as made:
        with pytest.raises(aio.AioRpcError) as caught:
            await exchange(made.call(expected=ALICE))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nobody_listens_under_the_name_of_another() -> None:
    async with scene(has_certificates=True) as made:
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in made.stub().Listen(relay_pb2.ListenRequest(worker=BOB, incarnation=ONE)):
                pass
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_who_reads_nothing_holds_up_no_other_connection_and_little_is_kept_for_it() -> None:
    async with scene() as made:
        stuck, quick = made.call(), made.call()
        await exchange(quick)
        made.bob.goes_on.clear()
        writing = asyncio.create_task(_write_for_ever(stuck))
        before = -1
        while before < (before := made.board.num_bytes):
            # Until nothing moves for as long as a probe of another relay connection takes.
            other = made.stub().Carry(None)
            await other.write(_part(AnswerCall(connection="none")))
            await other.code()
        writing.cancel()
        made.bob.goes_on.set()
        assert await exchange(quick) == len(PART.data)


async def test_both_ends_of_a_connection_end_when_the_relay_dies() -> None:
    async with scene() as made:
        call = made.call()
        await exchange(call)
        await made.relay.stop(None)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_way_that_is_taken_back_ends_its_connections() -> None:
    async with scene() as made:
        call = made.call()
        await exchange(call)
        made.alice.take(())
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert made.alice.target(BOB) is None


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (CarriedBytes(data=b"x"), grpc.StatusCode.INVALID_ARGUMENT),
        (AnswerCall(connection="guessed"), grpc.StatusCode.NOT_FOUND),
        (CallPeer(worker=WorkerId("carol"), incarnation=ONE), grpc.StatusCode.UNAVAILABLE),
        (CallPeer(worker=BOB, incarnation=Incarnation("0")), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_connection_to_nobody_is_refused(
    part: CarryPart, code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "ANSWER_S", 0.01)
    async with scene() as made:
        carried = made.stub().Carry(None)
        await carried.write(_part(part))
        assert await carried.code() is code
        await until(lambda: made.board.num_connections == 0)


async def test_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "MAX_OF_ONE", 1)
    async with scene() as made:
        await exchange(made.call())
        carried = made.stub().Carry(None)
        await carried.write(_part(CallPeer(worker=BOB, incarnation=ONE)))
        assert await carried.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert made.board.num_refused == 1


async def test_a_worker_that_listens_as_many_processes_leaves_room_for_others() -> None:
    async with scene() as made:
        await exchange(made.call())
        crowd = [
            made.stub().Listen(relay_pb2.ListenRequest(worker=ALICE, incarnation=str(number)))
            for number in range(switchboard.MAX_PROCESSES)
        ]
        await until(lambda: made.board.num_listening == 1 + len(crowd))
        one_more = made.stub().Listen(relay_pb2.ListenRequest(worker=ALICE, incarnation="last"))
        assert await one_more.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for listening in crowd:
            listening.cancel()
        await until(lambda: made.board.num_listening == 1)


async def test_who_connects_while_no_file_is_left_is_carried_once_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, failed = asyncio.get_running_loop(), asyncio.Event()
    accept = loop.sock_accept

    async def watched(listening: socket.socket) -> tuple[socket.socket, object]:
        try:
            return await accept(listening)
        except OSError:
            failed.set()
            raise

    monkeypatch.setattr(loop, "sock_accept", watched)
    async with scene() as made:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as early:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                early.connect((made.alice.target(BOB) or "").removeprefix("unix:"))
                async with asyncio.timeout(WAIT_S):
                    await failed.wait()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await exchange(made.call()) == len(PART.data)


async def _write_for_ever(call: "aio.StreamStreamCall[peer_pb2.ProbePart, peer_pb2.ProbeReply]") -> None:
    while True:
        await call.write(PART)


def _part(part: CarryPart) -> relay_pb2.CarryPart:
    return CARRY_PART.encode(part)
