"""Two workers on loopback: "a" sends, "b" serves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from bench.emulated.fleet import Links
from bench.emulated.links import Relay
from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase, Refusal, ShardKind, ShardTensor
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
    parse_group,
)
from skein.wire.channel import bind, open_channel_to, open_server
from skein.wire.credentials import NO_CREDENTIALS, Credentials
from skein.wire.extra import DType, FetchStateRequest, StateKind
from skein.wire.identity.callers import NamedCallers
from worker.bundle import Bundle, Limits, WireTensor
from worker.service import PeerService
from worker.transport.links import Probed, never_dialled
from worker.transport.pace import PeerPatience
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

A, B = WorkerId("a"), WorkerId("b")
JOB = JobId("j")
PATH = Path(hops=(ChunkRef(stage=StageIndex(0), worker=A), ChunkRef(stage=StageIndex(1), worker=B)))

S = TypeVar("S", bound=PeerService)
Arrived = tuple[Envelope, Bundle]


def hop_envelope(
    microbatch: int = 0, *, generation: int = 1, direction: Direction = Direction.FORWARD
) -> Envelope:
    return Envelope(
        job=JOB,
        epoch=Epoch(1),
        generation=Generation(generation),
        sender=A,
        incarnation=Incarnation("i"),
        header=HopTensor(
            direction=direction,
            phase=Phase.TRAIN,
            step=Step(0),
            microbatch=MicrobatchId(microbatch),
            hop=1 if direction is Direction.FORWARD else 0,
            path=PATH,
        ),
    )


def shard_envelope(shard: int = 0) -> Envelope:
    return Envelope(
        job=JOB,
        epoch=Epoch(1),
        generation=Generation(1),
        sender=A,
        incarnation=Incarnation("i"),
        header=ShardTensor(
            kind=ShardKind.PART,
            step=Step(0),
            group=parse_group("s0"),
            attempt=Attempt(epoch=Epoch(1), generation=Generation(1), number=0),
            shard=shard,
            member=PATH.hops[0],
        ),
    )


def tensor_of(num_bytes: int, *, name: str = "x") -> WireTensor:
    """Bytes that differ from one part to the next."""
    data = bytes(i * 31 % 251 for i in range(1 << 10)) * (num_bytes // (1 << 10) + 1)
    return WireTensor(name=name, dtype=DType.UINT8, shape=(num_bytes,), data=data[:num_bytes])


@dataclass(kw_only=True)
class Receiver:
    """What worker "b" would do with what arrives."""

    arrived: asyncio.Queue[Arrived] = field(default_factory=asyncio.Queue)
    statistics: Statistics = field(default_factory=Statistics)
    limits: Limits = field(default_factory=Limits)
    refusal_of: Callable[[Envelope], Refusal | None] = lambda _: None
    state: Callable[[StageIndex, Step], Mapping[str, WireTensor] | None] = lambda *_: None
    result: Callable[[StageIndex, Step], Mapping[str, WireTensor] | None] = lambda *_: None
    may: Callable[[str], bool] = lambda _: True
    """Whether whoever shows this may fetch and probe."""

    def service(self) -> PeerService:
        return self.service_of(PeerService)

    def service_of(self, kind: type[S]) -> S:
        return kind(
            accepts=self.refusal_of,
            on_tensor=lambda envelope, bundle: self.arrived.put_nowait((envelope, bundle)),
            state_of=self._state_of,
            statistics=self.statistics,
            limits=self.limits,
            may_fetch=self.may,
            probed=Probed(incarnation=Incarnation("i"), may_probe=self.may, dial_back=never_dialled),
        )

    async def _state_of(self, request: FetchStateRequest) -> Mapping[str, WireTensor] | None:
        given = self.state if request.kind is StateKind.STATE else self.result
        return given(request.stage, request.version)


@asynccontextmanager
async def serving(
    service: PeerService, *, credentials: Credentials = NO_CREDENTIALS, named: NamedCallers | None = None
) -> AsyncIterator[Member]:
    """Worker "b" with `service`, as a member that can be reached."""
    server = open_server(credentials=credentials, named=named)
    service.attach(server)
    port = bind(server, "127.0.0.1", 0, credentials=credentials)
    await server.start()
    try:
        yield Member(worker=B, incarnation=Incarnation("i"), address=f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


@dataclass(kw_only=True)
class Sender:
    """Worker "a"'s sending half, with what it was told."""

    peers: Peers
    statistics: Statistics
    failed: asyncio.Queue[tuple[WorkerId, Generation, str]]
    taken: asyncio.Queue[tuple[WorkerId, Envelope, int, float]]


@asynccontextmanager
async def sending(
    *,
    patience: PeerPatience | None = None,
    credentials: Credentials = NO_CREDENTIALS,
    limits: Limits | None = None,
) -> AsyncIterator[Sender]:
    """Worker "a"'s sending half. A test that waits in vain ends by pytest's own timeout."""
    statistics = Statistics()
    failed: asyncio.Queue[tuple[WorkerId, Generation, str]] = asyncio.Queue()
    taken: asyncio.Queue[tuple[WorkerId, Envelope, int, float]] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        peers = Peers(
            A,
            group=group,
            dial=partial(open_channel_to, credentials=credentials),
            has_checksums=credentials.wallet is None,
            on_failed=lambda *failure: failed.put_nowait(failure),
            on_taken=lambda *taking: taken.put_nowait(taking),
            statistics=statistics,
            limits=limits,
            patience=patience,
            fetch_patience_s=10.0,
        )
        try:
            yield Sender(peers=peers, statistics=statistics, failed=failed, taken=taken)
        finally:
            await peers.close()


@asynccontextmanager
async def over(member: Member, *, latency_s: float, bytes_per_s: float) -> AsyncIterator[Member]:
    """`member` as it is reached over a link like this, the same both ways."""
    links = Links(
        addresses=("here", member.address),
        latency_s=((0.0, latency_s), (latency_s, 0.0)),
        bytes_per_s=((1.0, bytes_per_s), (bytes_per_s, 1.0)),
    )
    relay = Relay(links)
    relays = await relay.listen()
    try:
        yield replace(member, address=relays.ways[0][member.address])
    finally:
        relay.close()


async def gathered(get: Callable[[], Awaitable[Arrived]], count: int) -> list[Arrived]:
    """The next `count` arrivals."""
    return [await get() for _ in range(count)]
