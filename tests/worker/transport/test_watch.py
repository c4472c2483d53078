"""Peers that nothing is sent to, over links that stop carrying anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from grpc import aio

from bench.chaosing.wires import Wires
from skein.protocol.messages.directives import Member
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import NO_CREDENTIALS
from tests.worker.transport.loopback import Receiver, hop_envelope, sending, serving
from worker.service import PeerService
from worker.transport.pace import PeerPace, PeerPatience
from worker.transport.watch import Watch


@asynccontextmanager
async def watching(
    member: Member, pace: PeerPace, *, patience: PeerPatience | None = None
) -> AsyncIterator[asyncio.Queue[str]]:
    """What a watch of `member` tells."""
    told: asyncio.Queue[str] = asyncio.Queue()
    watch = Watch(
        member,
        dial=partial(open_channel, credentials=NO_CREDENTIALS),
        patience=patience or PeerPatience(),
        pace=pace,
        on_silent=told.put_nowait,
    )
    running = asyncio.create_task(watch.run())
    try:
        yield told
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def behind_wires(service: PeerService) -> AsyncIterator[tuple[Member, Wires]]:
    """A peer with health, as "a" reaches it through wires that can be cut."""
    async with serving(service) as member:
        with Wires({"a": "127.0.0.1:1", "b": member.address}) as wires:
            yield replace(member, address=wires.way("a", "b")), wires


async def test_a_black_hole_is_told_though_nothing_is_sent() -> None:
    async with behind_wires(Receiver().service()) as (member, wires), watching(member, PeerPace()) as told:
        await connected(member)
        wires.cut("a", "b")
        reason = await told.get()
        wires.heal("a", "b")
    assert reason.startswith(member.address)


async def test_a_peer_that_cannot_even_be_dialled_is_told() -> None:
    async with behind_wires(Receiver().service()) as (member, wires):
        wires.cut("a", "b")
        async with watching(member, PeerPace(), patience=PeerPatience(first_s=0.2)) as told:
            assert "silent" in await told.get()
            wires.heal("a", "b")


async def connected(member: Member) -> None:
    """Returns when the peer has answered somebody over the same way."""
    async with sending() as sender:
        sender.peers.send(member, hop_envelope(), ())
        await sender.taken.get()


async def test_a_peer_that_died_is_dialled_again_and_not_told_as_silent() -> None:
    dials: asyncio.Queue[str] = asyncio.Queue()

    def dial(address: str, lane: Lane) -> aio.Channel:
        dials.put_nowait(address)
        return open_channel(address, lane, credentials=NO_CREDENTIALS)

    told: list[str] = []
    async with serving(Receiver().service()) as member:
        watch = Watch(member, dial=dial, patience=PeerPatience(), pace=PeerPace(), on_silent=told.append)
        running = asyncio.create_task(watch.run())
        await dials.get()
    for _ in range(2):
        assert await dials.get() == member.address
    running.cancel()
    assert told == []
