"""Workers that keep, give and fetch copies over gRPC on loopback: a lab's benches as donors, and newcomers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from skein.protocol.messages.directives import ChunkVersion, Member, Prefetch, StepRecord
from skein.protocol.worker.ops import SnapshotOp
from skein.protocol.worker.worker_io import (
    CopyKind,
    FollowCommit,
    PrefetchEnded,
    SnapshotsHeld,
    StartPrefetch,
    WorkerEvent,
)
from skein.types import Epoch, Generation, JobId, Step, WorkerId
from skein.wire.channel import open_channel_to
from skein.wire.credentials import NO_CREDENTIALS
from tests.support.device import DEVICE
from tests.worker.lab import Lab
from tests.worker.transport.loopback import serving
from worker.chunks.copies import ChunkCopies
from worker.compute.ops import Compute
from worker.executor import Executor
from worker.service import PeerService
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

JOB = JobId("j1")
"""As the lab calls its job."""
ROOM_BYTES = 1 << 30


@dataclass(kw_only=True)
class Keeper:
    """One worker's copies, its way to peers, and what it was told."""

    member: Member
    compute: Compute
    executor: Executor
    copies: ChunkCopies
    peers: Peers
    service: PeerService
    events: asyncio.Queue[WorkerEvent]

    async def reached(self, version: int, kind: CopyKind = CopyKind.FOLLOWED) -> PrefetchEnded:
        """The event that a copy is at `version`; every other until then is passed over."""
        while True:
            event = await self.events.get()
            if isinstance(event, PrefetchEnded) and (event.version, event.kind) == (version, kind):
                return event

    async def snapshots(self) -> tuple[ChunkVersion, ...]:
        """What the next event about snapshots says."""
        while True:
            event = await self.events.get()
            if isinstance(event, SnapshotsHeld):
                return event.copies

    def start(self, prefetch: Prefetch) -> None:
        self.copies.carry_out(StartPrefetch(prefetch=prefetch))

    def follow(self, prefetch: Prefetch, *records: StepRecord) -> None:
        for record in records:
            self.copies.carry_out(FollowCommit(job=prefetch.job, stage=prefetch.stage, record=record))


@asynccontextmanager
async def keeping(
    name: str,
    compute: Compute | None = None,
    *,
    kind: type[PeerService] = PeerService,
    memory_bytes: int = ROOM_BYTES,
    patience_s: float = 10.0,
) -> AsyncIterator[Keeper]:
    """A worker that serves and fetches, without a machine above it."""
    compute = Compute(DEVICE) if compute is None else compute
    executor = Executor(compute)
    executor.start()
    events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
    copies = ChunkCopies(executor, post=events.put_nowait, memory_bytes=memory_bytes, patience_s=patience_s)
    statistics = Statistics()
    service = kind(
        accepts=lambda _: None,
        on_tensor=lambda *_: None,
        state_of=copies.give,
        statistics=statistics,
    )
    async with serving(service) as served, asyncio.TaskGroup() as group:
        member = replace(served, worker=WorkerId(name))
        peers = Peers(
            member.worker,
            group=group,
            dial=partial(open_channel_to, credentials=NO_CREDENTIALS),
            on_failed=lambda *_: None,
            statistics=statistics,
            fetch_patience_s=10.0,
        )
        copies.start(group, peers)
        try:
            yield Keeper(
                member=member,
                compute=compute,
                executor=executor,
                copies=copies,
                peers=peers,
                service=service,
                events=events,
            )
        finally:
            copies.close()
            await peers.close()
            executor.stop()


@asynccontextmanager
async def holding(
    lab: Lab, stage: int = 0, *, kinds: tuple[type[PeerService], ...] = ()
) -> AsyncIterator[list[Keeper]]:
    """The holders of a stage of `lab`, serving; the services of the first are of `kinds`."""
    names = [ref.worker for ref in lab.arrangement.chunks if ref.stage == stage]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                keeping(name, lab.benches[name].compute, kind=kinds[i] if i < len(kinds) else PeerService)
            )
            for i, name in enumerate(names)
        ]


async def snapshot(lab: Lab, holders: list[Keeper], version: int, stage: int = 0) -> None:
    """Have every holder take one now, and keep what follows."""
    for holder in holders:
        op = SnapshotOp(
            generation=Generation(1),
            version=Step(version),
            stage=lab.arrangement.stages[stage].index,
            keeps_results=True,
        )
        lab.run(holder.member.worker, op)
        holder.copies.snapshot_begun(JOB)
        await holder.snapshots()


def prefetch_of(
    lab: Lab, version: int, donors: list[Keeper], *, stage: int = 0, is_backup: bool = False
) -> Prefetch:
    return Prefetch(
        epoch=Epoch(1),
        job=JOB,
        job_spec=lab.job.canonical_json(),
        stage=lab.arrangement.stages[stage],
        version=Step(version),
        donors=tuple(donor.member for donor in donors),
        is_backup=is_backup,
        drops_before=Step(0),
    )
