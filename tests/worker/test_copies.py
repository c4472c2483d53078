"""Copies over gRPC on loopback: fetched from several holders, kept up to date, served, and built from."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio
from torch import Tensor

from skein.plan.plan import Schedule
from skein.protocol.messages.directives import Assign, ChunkAssignment, Decision, SourceKind, StateSource
from skein.protocol.worker.ops import SnapshotOp
from skein.protocol.worker.worker_io import (
    BuildFailed,
    Built,
    CopyKind,
    DropCopies,
    PrefetchEnded,
    PrefetchFailed,
)
from skein.types import Epoch, Generation, JobId, StageIndex, Step, WorkerId
from skein.wire.v1 import peer_pb2
from tests.support import extent
from tests.support.device import DEVICE
from tests.worker.holders import JOB, Keeper, holding, keeping, prefetch_of, snapshot
from tests.worker.lab import Lab, tiny_job
from worker.chunks import fetched
from worker.chunks.build import Builder
from worker.compute.state import STEP, state_sizes
from worker.service import PeerService
from worker.transport.fetching import gather

Context = aio.ServicerContext[object, object]
Parts = AsyncGenerator[peer_pb2.StatePart, None]
STAGE = StageIndex(0)
IS_RESULT = peer_pb2.STATE_KIND_RESULT


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_PAUSE_S", 0.0)
    monkeypatch.setattr(fetched, "_PAUSE_S", 0.0)


@pytest.fixture
def lab(text: Path, labs: list[Lab]) -> Lab:
    """Two holders of stage 0, after one step."""
    made = Lab(tiny_job(text, stages=2, replicas=2))
    labs.append(made)
    made.step(0)
    return made


async def caught_up(keeper: Keeper, lab: Lab, version: int, *holders: Keeper) -> Mapping[str, Tensor] | None:
    """The worker's followed copy at `version`, with what `holders` still have."""
    members = [holder.member for holder in holders]
    return await keeper.copies.caught_up(JOB, lab.arrangement.stages[0], Step(version), members)


def assert_is_chunk(state: Mapping[str, Tensor] | None, lab: Lab) -> None:
    """To the last bit what the lab's first stage is now."""
    assert state is not None
    expected = lab.chunk(0).copy_state()
    assert state.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])] == []


# --- following ---


async def test_a_newcomer_follows_training_to_the_very_bits(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        prefetch = prefetch_of(lab, 1, holders)
        newcomer.start(prefetch)
        await newcomer.reached(1)
        for step, decision in enumerate((Decision.APPLY, Decision.SKIP, Decision.APPLY), start=1):
            newcomer.follow(prefetch, lab.step(step, decision=decision))
            await newcomer.reached(step + 1)
        assert_is_chunk(await caught_up(newcomer, lab, 4), lab)


async def test_commits_that_come_before_the_state_wait_for_it(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9") as newcomer:
        prefetch = prefetch_of(lab, 1, holders)
        await snapshot(lab, holders, 1)
        records = [lab.step(1), lab.step(2)]
        newcomer.start(prefetch)
        newcomer.follow(prefetch, *records)
        for version in (1, 2, 3):
            await newcomer.reached(version)
        assert_is_chunk(await caught_up(newcomer, lab, 3), lab)


async def test_a_snapshot_that_is_not_taken_yet_is_waited_for(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9") as newcomer:
        newcomer.start(prefetch_of(lab, 2, holders))
        lab.step(1)
        await snapshot(lab, holders, 2)
        await newcomer.reached(2)
        assert_is_chunk(await caught_up(newcomer, lab, 2), lab)


async def test_what_was_missed_is_caught_up_with_when_it_is_needed(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9", patience_s=0.0) as newcomer:
        await snapshot(lab, holders, 1)
        nobody = prefetch_of(lab, 1, holders[:1])
        newcomer.start(nobody)
        await newcomer.reached(1)
        records = [lab.step(1), lab.step(2)]
        holders[0].compute.snapshots.clear()
        newcomer.follow(nobody, *records)
        assert await caught_up(newcomer, lab, 3, holders[0]) is None
        assert_is_chunk(await caught_up(newcomer, lab, 3, *holders), lab)


async def test_a_copy_cannot_reach_what_it_was_not_told_of_nor_go_back(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        newcomer.start(prefetch_of(lab, 1, holders))
        await newcomer.reached(1)
        lab.step(1)
        assert await caught_up(newcomer, lab, 2, *holders) is None
        assert await caught_up(newcomer, lab, 0, *holders) is None


async def test_a_copy_that_is_asked_for_again_while_it_catches_up_takes_each_step_once(lab: Lab) -> None:
    async def ask_again() -> None:
        newcomer.start(prefetch_of(lab, 1, holders))

    async with holding(lab) as holders, keeping("w9", patience_s=0.0) as newcomer:
        await snapshot(lab, holders, 1)
        nobody = prefetch_of(lab, 1, holders[:1])
        newcomer.start(nobody)
        await newcomer.reached(1)
        records = [lab.step(1), lab.step(2)]
        holders[0].compute.snapshots.clear()
        newcomer.follow(nobody, *records)
        state, _ = await asyncio.gather(caught_up(newcomer, lab, 3, *holders), ask_again())
        assert_is_chunk(state, lab)


# --- donors that fail ---


class Wary(PeerService):
    """Gives results to whoever shows what is new."""

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        if request.kind == IS_RESULT and request.door != "new":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not told to fetch")
        async for part in super().FetchState(request, context):
            yield part


async def test_a_copy_that_donors_refuse_goes_on_when_it_has_something_new_to_show(lab: Lab) -> None:
    async with holding(lab, kinds=(Wary, Wary)) as holders, keeping("w9", patience_s=0.0) as newcomer:
        await snapshot(lab, holders, 1)
        asked = prefetch_of(lab, 1, holders)
        newcomer.start(asked)
        await newcomer.reached(1)
        newcomer.follow(asked, lab.step(1))
        donors = tuple(replace(donor, door="new") for donor in asked.donors)
        newcomer.start(replace(asked, donors=donors))
        await newcomer.reached(2)
        assert_is_chunk(await caught_up(newcomer, lab, 2), lab)


class Dying(PeerService):
    """Breaks off every stream after a tensor."""

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        async for part in super().FetchState(request, context):
            yield part
            if part.HasField("state_tensor_end"):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")


class Corrupt(PeerService):
    """Changes bytes under way: the hashes do not fit."""

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        async for part in super().FetchState(request, context):
            if part.HasField("state_data"):
                part.state_data.data = bytes(len(part.state_data.data))
            yield part


class Wrong(PeerService):
    """Gives, whole and with fitting hashes, the result of another step."""

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        if request.kind == IS_RESULT:
            request.version = 1
        async for part in super().FetchState(request, context):
            yield part


class Misnaming(PeerService):
    """Gives, whole and with fitting hashes, results of what is no group."""

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        async for part in super().FetchState(request, context):
            if request.kind == IS_RESULT and part.HasField("state_tensor"):
                part.state_tensor.meta.name = f"no.{part.state_tensor.meta.name}"
            yield part


@pytest.mark.parametrize("kind", extent.part([Dying, Corrupt, Wrong, Misnaming], every=3))
async def test_one_sound_holder_is_enough(lab: Lab, kind: type[PeerService]) -> None:
    async with holding(lab, kinds=(kind,)) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        prefetch = prefetch_of(lab, 1, holders)
        newcomer.start(prefetch)
        newcomer.follow(prefetch, lab.step(1), lab.step(2))
        await newcomer.reached(3)
        assert_is_chunk(await caught_up(newcomer, lab, 3), lab)


async def test_a_prefetch_that_failed_goes_on_with_other_donors(lab: Lab) -> None:
    async with holding(lab, kinds=(Corrupt,)) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        newcomer.start(prefetch_of(lab, 1, holders[:1]))
        failed = await newcomer.events.get()
        assert isinstance(failed, PrefetchFailed)
        assert "hash" in failed.reason
        newcomer.start(prefetch_of(lab, 1, holders[1:]))
        await newcomer.reached(1)
        assert_is_chunk(await caught_up(newcomer, lab, 1), lab)


async def test_a_copy_without_room_is_refused(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9", memory_bytes=1000) as newcomer:
        newcomer.start(prefetch_of(lab, 1, holders))
        failed = await newcomer.events.get()
        assert isinstance(failed, PrefetchFailed)
        assert "are left for it" in failed.reason


async def test_what_came_of_a_copy_that_failed_makes_room_for_another(lab: Lab) -> None:
    room_bytes = sum(state_sizes(lab.job, lab.arrangement.stages[0]).values())
    async with holding(lab, kinds=(Corrupt,)) as holders, keeping("w9", memory_bytes=room_bytes) as newcomer:
        await snapshot(lab, holders, 1)
        newcomer.start(prefetch_of(lab, 1, holders[:1], is_backup=True))
        assert isinstance(await newcomer.events.get(), PrefetchFailed)
        newcomer.start(prefetch_of(lab, 1, holders[1:]))
        assert isinstance(await newcomer.events.get(), PrefetchEnded)
        newcomer.start(prefetch_of(lab, 1, holders[1:], is_backup=True))
        failed = await newcomer.events.get()
        assert isinstance(failed, PrefetchFailed)
        assert "are left for it" in failed.reason


# --- backups ---


async def test_a_backup_is_served_after_its_donors_have_gone(lab: Lab) -> None:
    async with keeping("w8") as buddy, keeping("w9") as newcomer:
        async with holding(lab) as holders:
            await snapshot(lab, holders, 1)
            buddy.start(prefetch_of(lab, 1, holders, is_backup=True))
            await buddy.reached(1, CopyKind.BACKUP)
        newcomer.start(prefetch_of(lab, 1, [buddy]))
        await newcomer.reached(1)
        assert_is_chunk(await caught_up(newcomer, lab, 1), lab)
        assert_is_chunk(buddy.copies.kept(JOB, STAGE, Step(1)), lab)


@pytest.mark.parametrize(
    "dropped",
    [
        DropCopies(followed=(), backups_before=Step(2), above=None),
        DropCopies(followed=(), backups_before=Step(0), above=Step(0)),
    ],
    ids=["older", "newer"],
)
async def test_backups_that_are_of_no_more_use_are_not_given(lab: Lab, dropped: DropCopies) -> None:
    async with holding(lab) as holders, keeping("w8") as buddy:
        await snapshot(lab, holders, 1)
        buddy.start(prefetch_of(lab, 1, holders, is_backup=True))
        await buddy.reached(1, CopyKind.BACKUP)
        buddy.copies.carry_out(dropped)
        assert buddy.copies.kept(JOB, STAGE, Step(1)) is None


async def test_going_back_takes_snapshots_too_and_says_so(lab: Lab) -> None:
    async with holding(lab) as holders:
        await snapshot(lab, holders, 1)
        holders[0].copies.carry_out(DropCopies(followed=(), backups_before=Step(0), above=Step(0)))
        assert await holders[0].snapshots() == ()


async def test_snapshots_of_a_job_that_is_over_are_not_told_as_those_of_the_next(lab: Lab) -> None:
    async with holding(lab) as holders:
        holder, stage = holders[0], lab.arrangement.stages[0].index
        op = SnapshotOp(generation=Generation(1), version=Step(1), stage=stage, keeps_results=True)
        lab.run(holder.member.worker, op)
        holder.copies.snapshot_begun(JOB)
        # The loop is busy meanwhile: what torch's thread has to say waits behind the end of the job.
        holder.executor.call(lambda: None).result()
        holder.copies.forget()
        holder.copies.snapshot_begun(JobId("other-1"))
        assert await holder.snapshots() == ()


async def test_a_forgotten_job_leaves_nothing(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w8") as buddy:
        await snapshot(lab, holders, 1)
        buddy.start(prefetch_of(lab, 1, holders, is_backup=True))
        await buddy.reached(1, CopyKind.BACKUP)
        for keeper in (buddy, holders[0]):
            keeper.copies.forget()
            await asyncio.wrap_future(keeper.executor.call(lambda: None))
            assert keeper.copies.kept(JOB, STAGE, Step(1)) is None


# --- building ---


class Counting(PeerService):
    """Counts the states that it gives, and knows which tensors of each were asked for."""

    num_states = 0
    asked: tuple[frozenset[str], ...] = ()

    async def FetchState(self, request: peer_pb2.FetchStateRequest, context: Context) -> Parts:
        self.num_states += request.kind != IS_RESULT
        self.asked = (*self.asked, frozenset(request.names))
        async for part in super().FetchState(request, context):
            yield part


class NoFiles:
    """The coordinator's files, of which these builds need none."""

    async def manifest(self, *_: object) -> object:
        raise NotImplementedError

    get = put = manifest


async def build(
    keeper: Keeper,
    lab: Lab,
    kind: SourceKind,
    version: int,
    holders: list[Keeper],
    peer: str | None = None,
    *,
    was_averaged: bool = False,
    num_stages: int = 1,
) -> Built | BuildFailed:
    """Build the lab's first stages on `keeper`."""
    builder = Builder(
        keeper.member.worker,
        executor=keeper.executor,
        donors=keeper.peers,
        copies=keeper.copies,
        files=NoFiles(),  # type: ignore[arg-type]
        device=DEVICE,
        memory_bytes=1 << 40,
    )
    source = StateSource(
        kind=kind,
        version=Step(version),
        peer=None if peer is None else WorkerId(peer),
        was_averaged=was_averaged,
    )
    chunks = tuple(
        ChunkAssignment(stage=stage, slots=1, source=source, evaluation_paths=())
        for stage in lab.arrangement.stages[:num_stages]
    )
    assign = Assign(
        epoch=Epoch(1),
        generation=Generation(2),
        job=JOB,
        job_spec=lab.job.canonical_json(),
        version=Step(version),
        num_paths=1,
        chunks=chunks,
        schedule=Schedule(worker=keeper.member.worker, ops=()),
        origins=(),
        num_evaluation_paths=0,
        evaluation_origins=(),
        groups=(),
        resumption=None,
    )
    members = tuple(sorted((holder.member for holder in (*holders, keeper)), key=lambda x: x.worker))
    return await builder.build(assign, members)


def built_state(keeper: Keeper) -> Mapping[str, Tensor]:
    holding = keeper.compute.holding
    assert holding is not None
    return holding.chunks[STAGE].copy_state()


async def test_a_chunk_is_built_from_the_prefetched_copy_and_the_results_that_it_lacks(lab: Lab) -> None:
    async with holding(lab, kinds=(Counting, Counting)) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        prefetch = prefetch_of(lab, 1, holders)
        newcomer.start(prefetch)
        await newcomer.reached(1)
        before = [holder.service.num_states for holder in holders]  # type: ignore[attr-defined]
        newcomer.follow(prefetch, lab.step(1), lab.step(2))
        ended = await build(newcomer, lab, SourceKind.PEER, 3, holders, peer="w10")
        assert isinstance(ended, Built)
        assert [holder.service.num_states for holder in holders] == before  # type: ignore[attr-defined]
        assert_is_chunk(built_state(newcomer), lab)


async def test_a_copy_of_what_was_averaged_since_is_not_used(lab: Lab) -> None:
    async with holding(lab, kinds=(Counting, Counting)) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        newcomer.start(prefetch_of(lab, 1, holders))
        await newcomer.reached(1)
        before = [holder.service.num_states for holder in holders]  # type: ignore[attr-defined]
        donor = holders[1].member.worker
        ended = await build(newcomer, lab, SourceKind.PEER, 1, holders, peer=donor, was_averaged=True)
        assert isinstance(ended, Built)
        after = [holder.service.num_states for holder in holders]  # type: ignore[attr-defined]
        assert after == [before[0], before[1] + 1]


async def test_a_copy_that_lags_too_far_is_replaced_by_a_peers_state(lab: Lab) -> None:
    async with holding(lab) as holders, keeping("w9") as newcomer:
        await snapshot(lab, holders, 1)
        newcomer.start(prefetch_of(lab, 1, holders))
        await newcomer.reached(1)
        lab.step(1)
        donor = holders[1].member.worker
        assert isinstance(await build(newcomer, lab, SourceKind.PEER, 2, holders, peer=donor), Built)
        assert_is_chunk(built_state(newcomer), lab)


@pytest.mark.parametrize(("kind", "peer"), [(SourceKind.KEEP, None), (SourceKind.PEER, "w8")])
async def test_the_buddy_itself_may_become_the_holder(lab: Lab, kind: SourceKind, peer: str | None) -> None:
    async with keeping("w8") as buddy:
        async with holding(lab) as holders:
            await snapshot(lab, holders, 1)
            buddy.start(prefetch_of(lab, 1, holders, is_backup=True))
            await buddy.reached(1, CopyKind.BACKUP)
        assert isinstance(await build(buddy, lab, kind, 1, [], peer=peer), Built)
        assert_is_chunk(built_state(buddy), lab)
        missing = await build(buddy, lab, kind, 2, [], peer=peer)
        assert isinstance(missing, BuildFailed)
        assert missing.report is not None
        assert "is not here to be kept" in missing.report.reason


async def test_a_holder_goes_back_to_its_own_snapshot(lab: Lab) -> None:
    async with holding(lab) as holders:
        await snapshot(lab, holders, 1)
        before = lab.chunk(0).copy_state()
        lab.step(1)
        assert isinstance(await build(holders[0], lab, SourceKind.KEEP, 1, []), Built)
        after = built_state(holders[0])
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


async def test_what_is_tied_travels_once_to_whoever_gets_both_ends(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text), num_holders=1)
    labs.append(lab)
    lab.step(0)
    async with holding(lab, kinds=(Counting,)) as [giver], keeping("w9") as newcomer:
        built = await build(newcomer, lab, SourceKind.PEER, 1, [giver], peer="w00", num_stages=2)
        assert isinstance(built, Built), built
        first, last = (state_sizes(lab.job, stage) for stage in lab.arrangement.stages)
        tied = {x for x in first.keys() & last.keys() if x != STEP}
        assert len(tied) == 3
        assert isinstance(giver.service, Counting)
        assert giver.service.asked == (frozenset(first), frozenset(last) - tied)
        assert_is_chunk(built_state(newcomer), lab)
        assert newcomer.compute.holding is not None
        other = newcomer.compute.holding.chunks[StageIndex(1)].copy_state()
        assert all(torch.equal(x, other[name]) for name, x in lab.chunk(1).copy_state().items())
