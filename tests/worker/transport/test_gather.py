"""One state from several donors over loopback: shares, deaths, corruption, patience."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.types import StageIndex, Step, WorkerId
from skein.wire.v1 import peer_pb2
from tests.worker.transport.loopback import JOB, Receiver, Sender, sending, serving, tensor_of
from worker.bundle import WireTensor
from worker.service import PeerService
from worker.transport.fetching import gather
from worker.transport.fetching.gather import (
    BATCHES_PER_DONOR,
    LEAST_BATCH_BYTES,
    STREAMS_PER_DONOR,
    StateGathering,
)

STAGE, VERSION = StageIndex(1), Step(7)
STATE = {f"t{i:02d}": tensor_of(LEAST_BATCH_BYTES // 2 + i, name=f"t{i:02d}") for i in range(24)}
SIZES = {name: len(tensor.data) for name, tensor in STATE.items()}

Context = aio.ServicerContext[object, object]
Parts = AsyncGenerator[peer_pb2.StatePart, None]


class Donor(PeerService):
    """Counts what it gives; may be spoilt, stop after some streams, or wait before each."""

    def __init__(self, **callbacks: object) -> None:
        super().__init__(**callbacks)  # type: ignore[arg-type]
        self.given: list[str] = []
        self.asked: list[set[str]] = []
        self.num_streams = 0
        self.dies_after: int | None = None
        self.spoils = False
        self.is_asked_again = asyncio.Event()
        """For the third time."""
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        self.num_streams += 1
        if self.num_streams == 3:
            self.is_asked_again.set()
        self.asked.append(set(request.names))
        await self.goes_on.wait()
        async for part in super().FetchState(request, context):
            if self.dies_after is not None and self.num_streams > self.dies_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
            if self.spoils and part.HasField("state_data"):
                part.state_data.data = bytes(len(part.state_data.data))
            yield part
            if part.HasField("state_tensor"):
                self.given.append(part.state_tensor.meta.name)


def having(state: Mapping[str, WireTensor]) -> Donor:
    return Receiver(
        state=lambda stage, version: state if (stage, version) == (STAGE, VERSION) else None
    ).service_of(Donor)


@asynccontextmanager
async def donors(*services: Donor) -> AsyncIterator[tuple[Member, ...]]:
    """Each of `services` on a port of its own."""
    async with AsyncExitStack() as stack:
        members = [await stack.enter_async_context(serving(service)) for service in services]
        yield tuple(replace(member, worker=WorkerId(f"d{i}")) for i, member in enumerate(members))


def gathering(sender: Sender, *, patience_s: float = 10.0) -> StateGathering:
    async def fetch(donor: Member, names: frozenset[str]) -> Mapping[str, WireTensor]:
        return await sender.peers.fetch_state(donor, JOB, STAGE, VERSION, names)

    return StateGathering(fetch, SIZES, patience_s=patience_s)


def assert_whole(gathered: StateGathering) -> None:
    assert not gathered.missing
    assert {name: bytes(tensor.data) for name, tensor in gathered.tensors.items()} == {
        name: bytes(tensor.data) for name, tensor in STATE.items()
    }


async def test_every_donor_gives_a_share() -> None:
    services = [having(STATE) for _ in range(3)]
    async with donors(*services) as members, sending() as sender:
        gathered = gathering(sender)
        await gathered.run(members)
    assert_whole(gathered)
    assert all(service.given for service in services)


async def test_the_largest_come_first_in_batches_of_about_equal_size() -> None:
    service = having(STATE)
    async with donors(service) as members, sending() as sender:
        gathered = gathering(sender)
        await gathered.run(members)
    assert BATCHES_PER_DONOR // 2 < len(service.asked) <= BATCHES_PER_DONOR
    first = min(service.asked, key=lambda names: -max(SIZES[name] for name in names))
    assert first == set(sorted(STATE, reverse=True)[: len(first)])
    assert sorted(name for names in service.asked for name in names) == sorted(STATE)
    assert {len(names) for names in service.asked} <= {3, 4}  # of 24 tensors
    assert first in service.asked[:STREAMS_PER_DONOR]


async def test_a_slow_donor_does_not_hold_up_the_rest() -> None:
    slow, fast = having(STATE), having(STATE)
    slow.goes_on.clear()
    async with donors(slow, fast) as members, sending() as sender:
        gathered = gathering(sender)
        await gathered.run(members)
        given_by_slow = list(slow.given)
        slow.goes_on.set()
    assert_whole(gathered)
    assert (given_by_slow, set(fast.given)) == ([], set(STATE))


def _dies(service: Donor) -> None:
    service.dies_after = 1


def _spoils(service: Donor) -> None:
    service.spoils = True


@pytest.mark.parametrize("strike", [_dies, _spoils], ids=["dies halfway", "spoils every byte"])
async def test_the_share_of_a_donor_that_fails_comes_from_the_others(
    strike: Callable[[Donor], None],
) -> None:
    services = [having(STATE), having(STATE)]
    strike(services[0])
    async with donors(*services) as members, sending() as sender:
        gathered = gathering(sender)
        await gathered.run(members)
    assert_whole(gathered)


async def test_a_donor_that_has_only_a_part_is_no_donor() -> None:
    part, whole = having({name: STATE[name] for name in sorted(STATE)[:2]}), having(STATE)
    async with donors(part, whole) as members, sending() as sender:
        gathered = gathering(sender)
        await gathered.run(members)
    assert_whole(gathered)


async def test_what_came_is_kept_for_another_try() -> None:
    dying, other = having(STATE), having(STATE)
    dying.dies_after = 2
    async with donors(dying, other) as members, sending() as sender:
        gathered = gathering(sender)
        with pytest.raises(RemoteError, match="killed"):
            await gathered.run(members[:1])
        before = set(gathered.tensors)
        await gathered.run(members[1:])
    assert before
    assert_whole(gathered)
    assert set(other.given) == set(STATE) - before


async def test_a_state_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_PAUSE_S", 0.0)
    here: dict[str, WireTensor] = {}
    late = having(here)
    async with donors(late) as members, sending() as sender:
        gathered = gathering(sender)
        running = asyncio.create_task(gathered.run(members))
        async with asyncio.timeout(120.0):
            await late.is_asked_again.wait()
        here |= STATE
        await running
    assert_whole(gathered)


async def test_a_state_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_PAUSE_S", 0.0)
    async with donors(having({}), having({})) as members, sending() as sender:
        with pytest.raises(RemoteError, match="is not here"):
            await gathering(sender, patience_s=0.0).run(members)


async def test_without_donors_nothing_comes() -> None:
    async with sending() as sender:
        with pytest.raises(RemoteError, match="no donor"):
            await gathering(sender).run(())
