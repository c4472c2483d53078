"""A whole worker process joins others that train: prefetch, follow, build; and what they then hold is the same."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from skein.config.job import BudgetSpec, JobSpec, ParallelSpec
from skein.plan.plan import Group
from skein.plan.plan import Path as Hops
from skein.protocol.log.records import PlanAdopted, StepCommitted
from skein.protocol.messages.directives import (
    Assign,
    ChunkAssignment,
    ChunkVersion,
    Commit,
    Decision,
    Follow,
    GroupResult,
    Member,
    NewGeneration,
    Origin,
    Prefetch,
    Prepare,
    Snapshot,
    SourceKind,
    Start,
    StateSource,
    StepRecord,
)
from skein.protocol.messages.passes import GenerationKey
from skein.protocol.messages.reports import Ack, ChunksReady, Prefetched, StageDone, Vote
from skein.types import (
    Attempt,
    ChunkRef,
    Generation,
    JobId,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
    parse_group,
)
from skein.wire.channel import open_channel_to
from skein.wire.credentials import NO_CREDENTIALS
from tests.support.device import mesh_of
from tests.support.plans import schedule
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import HOST, Lab, tiny_job, write_text
from tests.worker.puppet import WELCOME, Session, puppet, running, setting
from worker.process import WorkerSetting
from worker.transport.peers import Peers
from worker.transport.statistics import Statistics

JOB, STAGE = JobId("tiny-1"), StageSpec(index=StageIndex(0), first=0, stop=6)
GROUP = parse_group("s0")
NUM_MICROBATCHES = 4
PAIR = mesh_of(2)


def member_of(session: Session) -> Member:
    hello = session.hello
    return Member(worker=hello.worker, incarnation=hello.incarnation, address=hello.address)


KEY = GenerationKey(value=b"of all members")


def new_generation(generation: int, *, last_commit: StepRecord | None = None) -> NewGeneration:
    return NewGeneration(
        epoch=WELCOME.epoch,
        generation=Generation(generation),
        job=JOB,
        key=KEY.value,
        last_commit=last_commit,
    )


def assignment(session: Session, job: JobSpec, source: StateSource, *, generation: int = 1) -> Assign:
    """All of the model on one worker, which reduces with nobody."""
    me = session.hello.worker
    chunk = ChunkRef(stage=STAGE.index, worker=me)
    path = Hops(hops=(chunk,))
    return Assign(
        epoch=WELCOME.epoch,
        generation=Generation(generation),
        job=JOB,
        job_spec=job.canonical_json(),
        version=source.version,
        num_paths=NUM_MICROBATCHES,
        chunks=(ChunkAssignment(stage=STAGE, slots=1, source=source, evaluation_paths=()),),
        schedule=schedule(me, " ".join(f"L0.{m}" for m in range(NUM_MICROBATCHES))),
        origins=tuple(Origin(microbatch=MicrobatchId(m), path=path) for m in range(NUM_MICROBATCHES)),
        num_evaluation_paths=0,
        evaluation_origins=(),
        groups=(Group(group=GROUP, members=(chunk,), num_shards=1),),
        resumption=None,
    )


async def step(session: Session, number: int, *, goes_on: bool) -> StepRecord:
    """See a step that has begun through to its commit."""
    done = await session.heard(StageDone)
    attempt = Attempt(epoch=WELCOME.epoch, generation=Generation(1), number=number)
    session.say(
        Prepare(
            epoch=WELCOME.epoch,
            generation=Generation(1),
            step=Step(number),
            group=Group(
                group=GROUP, members=(ChunkRef(stage=STAGE.index, worker=done.ledger.worker),), num_shards=1
            ),
            attempt=attempt,
            parts=(done.ledger,),
            exchange=None,
        )
    )
    vote = await session.heard(Vote)
    num_tokens = sum(done.tokens)
    result = GroupResult(
        group=GROUP,
        attempt=attempt,
        digest=vote.digest,
        squared_norm=vote.squared_norm,
        weight=1 / num_tokens,
        num_tokens=num_tokens,
    )
    record = StepRecord(
        step=Step(number),
        decision=Decision.APPLY,
        reason="",
        results=(result,),
        loss=done.loss_sum / num_tokens,
        num_tokens=num_tokens,
        weight=1 / num_tokens,
        gradient_norm=1.0,
        clip=0.7,
        learning_rate=0.01,
        samples_after=8 * (number + 1),
    )
    session.say(Commit(epoch=WELCOME.epoch, generation=Generation(1), record=record, goes_on=goes_on))
    return record


async def held_bytes(sessions: tuple[Session, ...], version: int) -> list[dict[str, bytes]]:
    """The state at `version` as each worker gives it to a peer."""
    async with asyncio.TaskGroup() as group:
        peers = Peers(
            WorkerId("test"),
            group=group,
            dial=partial(open_channel_to, credentials=NO_CREDENTIALS),
            on_failed=lambda *_: None,
            statistics=Statistics(),
        )
        states = [
            await peers.fetch_state(KEY.as_donor(member_of(session)), JOB, STAGE.index, Step(version))
            for session in sessions
        ]
        await peers.close()
    return [{name: bytes(tensor.data) for name, tensor in state.items()} for state in states]


async def test_a_worker_that_joins_brings_its_chunk_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skein.protocol.coordinator.runs.gathering.GATHER_S", 0.1)
    job = tiny_job(write_text(tmp_path), replicas=2)
    constant = job.optimizer.model_copy(update={"warmup_steps": 0, "final_learning_rate_ratio": 1.0})
    job = job.model_copy(update={"budget": BudgetSpec(steps=10_000), "optimizer": constant})
    async with cluster(Disk()) as here, here.workers("w0", "w1", "w2"):
        here.submit(job)
        await here.first(StepCommitted)
        with caplog.at_level(logging.INFO):
            async with here.workers("w3"):
                number = 1
                while "w3" not in (await here.first(PlanAdopted, number)).plan.workers:
                    number += 1
                num_steps = len(here.all(StepCommitted)) + 2
                await here.first(StepCommitted, num_steps)
                found = here.steps[:num_steps]
    assert any("copy=followed here" in message for message in caplog.messages)
    lab = Lab(job.model_copy(update={"parallel": ParallelSpec(stages=1)}))
    losses = [lab.step(step).loss for step in range(num_steps)]
    lab.close()
    # Float64 sums in another order: rounding stays far below this over so few steps.
    assert [record.loss for record in found] == pytest.approx(losses, rel=1e-9)


def on(worker: WorkerSetting, devices: tuple[str, ...]) -> WorkerSetting:
    """The worker on these devices of a mesh, if there are any."""
    return replace(worker, devices=devices, device=HOST) if devices else worker


@pytest.mark.parametrize(
    ("holds", "joins"),
    [((), ()), (PAIR, ()), ((), PAIR)],
    ids=["devices", "a device joins a mesh", "a mesh joins a device"],
)
async def test_a_newcomer_holds_what_training_has_made_of_the_state_meanwhile(
    tmp_path: Path, holds: tuple[str, ...], joins: tuple[str, ...]
) -> None:
    job = tiny_job(write_text(tmp_path), stages=1)
    async with (
        puppet() as (coordinator, port),
        running(on(setting(port), holds)),
        running(on(setting(port, name="w1", incarnation="i1"), joins)),
    ):
        sessions = {s.hello.worker: s for s in (await coordinator.session(), await coordinator.session())}
        holder, newcomer = sessions[WorkerId("w0")], sessions[WorkerId("w1")]
        for session in sessions.values():
            session.say(WELCOME)
        holder.say(new_generation(1))
        await holder.heard(Ack)
        initial = StateSource(kind=SourceKind.INITIAL, version=Step(0))
        holder.say(assignment(holder, job, initial))
        await holder.heard(ChunksReady)
        holder.say(Start(epoch=WELCOME.epoch, generation=Generation(1), step=Step(0)))

        # Asked for before it exists: the state after the step that runs.
        wish = Prefetch(
            epoch=WELCOME.epoch,
            job=JOB,
            job_spec=job.canonical_json(),
            stage=STAGE,
            version=Step(1),
            donors=(KEY.as_donor(member_of(holder)),),
            is_backup=False,
            drops_before=Step(0),
        )
        newcomer.say(wish)
        holder.say(
            Snapshot(
                epoch=WELCOME.epoch,
                generation=Generation(1),
                version=Step(1),
                stages=(STAGE.index,),
                keeps_results=True,
            )
        )
        records = [await step(holder, number, goes_on=number < 3) for number in range(4)]
        for record in records[:3]:
            newcomer.say(Follow(epoch=WELCOME.epoch, job=JOB, record=record))
        for version in (1, 2, 3):
            assert await newcomer.heard(Prefetched) == Prefetched(
                job=JOB, stage=STAGE, version=Step(version), error=""
            )

        for session in (holder, newcomer):
            session.say(new_generation(2, last_commit=records[3]))
        kept = await holder.heard(Ack)
        assert [copy.version for copy in kept.chunks] == [4]
        assert kept.backups == (ChunkVersion(stage=STAGE, version=Step(1)),)
        assert (await newcomer.heard(Ack)).chunks == ()
        source = StateSource(kind=SourceKind.PEER, version=Step(4), peer=WorkerId("w0"))
        told = assignment(newcomer, job, source, generation=2)
        newcomer.say(replace(told, peers=(member_of(holder),)))
        await newcomer.heard(ChunksReady)
        one, other = await held_bytes((holder, newcomer), 4)
        assert one == other

        newcomer.say(replace(wish, version=Step(1), is_backup=True))
        assert (await newcomer.heard(Prefetched)).version == 1
        newcomer.say(new_generation(3))
        assert (await newcomer.heard(Ack)).backups == kept.backups
