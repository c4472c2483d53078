"""What a worker process does with an assignment: builds, keeps, refuses, saves. Real gRPC on loopback."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import CheckpointSpec, JobSpec
from skein.plan.plan import Path as Hops
from skein.protocol.messages.directives import (
    Assign,
    ChunkAssignment,
    Member,
    NewGeneration,
    OpenData,
    Origin,
    Save,
    SourceKind,
    StateSource,
)
from skein.protocol.messages.reports import (
    Ack,
    CheckpointUnwritten,
    CheckpointWritten,
    ChunksReady,
    DataOpened,
    Suspected,
    Trouble,
)
from skein.protocol.worker.worker_io import DirectiveArrived
from skein.storage.places import Places
from skein.types import (
    ChunkRef,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)
from skein.wire.extra import LogLines
from tests.support.plans import schedule
from tests.worker.lab import tiny_job, write_text
from tests.worker.puppet import WELCOME, puppet, running, setting
from worker.telling.logs import LogTail

JOB = JobId("j1")


def assignment(
    text: Path, generation: int, *, source: StateSource | None = None, job: JobSpec | None = None
) -> Assign:
    """All of a tiny model on w0."""
    chunk = ChunkRef(stage=StageIndex(0), worker=WorkerId("w0"))
    path = Hops(hops=(chunk,))
    return Assign(
        epoch=WELCOME.epoch,
        generation=Generation(generation),
        job=JOB,
        job_spec=(job or tiny_job(text, stages=1)).canonical_json(),
        version=Step(0),
        num_paths=4,
        chunks=(
            ChunkAssignment(
                stage=StageSpec(index=StageIndex(0), first=0, stop=6),
                slots=1,
                source=source or StateSource(kind=SourceKind.INITIAL, version=Step(0)),
                evaluation_paths=(0,),
            ),
        ),
        schedule=schedule("w0", "L0.0 L0.1 L0.2 L0.3"),
        origins=tuple(Origin(microbatch=MicrobatchId(m), path=path) for m in range(4)),
        num_evaluation_paths=1,
        evaluation_origins=(Origin(microbatch=MicrobatchId(0), path=path),),
        groups=(),
        resumption=None,
    )


def new_generation(generation: int) -> NewGeneration:
    return NewGeneration(
        epoch=WELCOME.epoch,
        generation=Generation(generation),
        job=JOB,
        key=b"of all members",
        last_commit=None,
    )


async def test_who_only_evaluates_opens_the_data_too(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        told = assignment(text, 1)
        session.say(replace(told, origins=(), schedule=replace(told.schedule, ops=())))
        assert (await session.heard(ChunksReady)).num_validation_samples > 0


async def test_an_assignment_is_built_and_kept_over_a_generation(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        assert (await session.heard(Ack)).chunks == ()
        session.say(assignment(text, 1))
        ready = await session.heard(ChunksReady)
        assert ready.num_train_samples > ready.num_validation_samples > 0
        assert ready.data_fingerprint
        session.say(new_generation(2))
        assert [chunk.version for chunk in (await session.heard(Ack)).chunks] == [0]
        session.say(assignment(text, 2, source=StateSource(kind=SourceKind.KEEP, version=Step(0))))
        assert (await session.heard(ChunksReady)).generation == 2


def absent_data(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"data": DataSpec(sources=(TextSource(path="/nowhere/absent.txt"),))})


def absent_weights(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"init_from": "/nowhere/weights"})})


def unwritable_checkpoints(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"checkpoint": CheckpointSpec(url="/proc/nowhere")})


@pytest.mark.parametrize("spoil", [absent_data, absent_weights, unwritable_checkpoints])
async def test_what_no_worker_could_do_fails_the_job_with_its_cause(
    tmp_path: Path, spoil: Callable[[JobSpec], JobSpec]
) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(text, 1, job=spoil(tiny_job(text, stages=1))))
        trouble = await session.heard(Trouble)
        assert trouble.is_unfit or trouble.is_fatal
        assert "nowhere" in trouble.reason
        assert "\n" not in trouble.reason


def secret_data(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"data": DataSpec(sources=(TextSource(path="/proc/self/environ"),))})


def secret_tokenizer(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": "/etc/passwd"})})


def secret_weights(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"init_from": "/root"})})


def system_folder(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"checkpoint": CheckpointSpec(url="/etc/cron.d")})


@pytest.mark.parametrize("lead_out", [secret_data, secret_tokenizer, secret_weights, system_folder])
async def test_a_job_that_leads_out_of_a_root_is_refused_with_its_name(
    tmp_path: Path, lead_out: Callable[[JobSpec], JobSpec]
) -> None:
    (tmp_path / "root").mkdir()
    text = write_text(tmp_path / "root")
    places = Places.of([tmp_path / "root"], [str(tmp_path / "root")])
    async with puppet() as (coordinator, port), running(replace(setting(port), places=places)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(text, 1, job=lead_out(tiny_job(text, stages=1))))
        reason = (await session.heard(Trouble)).reason
        assert "out of the" in reason
        assert f"{tmp_path}/root" in reason


async def test_a_job_names_data_that_a_worker_offers_and_no_other(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    places = Places.of([], [], {"books": text})
    job = tiny_job(text, stages=1)

    def naming(path: str) -> str:
        sources = (job.data.sources[0].model_copy(update={"path": path}),)
        data = job.data.model_copy(update={"sources": sources})
        return job.model_copy(update={"data": data}).canonical_json()

    async with puppet() as (coordinator, port), running(replace(setting(port), places=places)):
        session = await coordinator.session()
        session.say(WELCOME)
        for path, cause in (
            ("data://books", ""),
            ("data://films", "which offers data://books"),
            (str(text), "bare"),
        ):
            session.say(OpenData(epoch=WELCOME.epoch, job=JobId("j1"), job_spec=naming(path)))
            opened = await session.heard(DataOpened)
            assert opened.is_unfit == bool(cause)
            assert cause in opened.error


async def test_data_that_will_be_wanted_are_open_before_anybody_waits(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    job = tiny_job(text, stages=1)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME)
        session.say(OpenData(epoch=WELCOME.epoch, job=JobId("j1"), job_spec=job.canonical_json()))
        assert await session.heard(DataOpened) == DataOpened(job=JobId("j1"), error="", is_unfit=False)
        absent = absent_data(job).canonical_json()
        session.say(OpenData(epoch=WELCOME.epoch, job=JobId("j1"), job_spec=absent))
        failed = await session.heard(DataOpened)
        assert "nowhere" in failed.error
        assert failed.is_unfit


async def test_what_was_logged_about_trouble_is_told_before_it(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    tail = LogTail()
    logging.getLogger("worker").addHandler(tail)
    try:
        async with puppet() as (coordinator, port), running(setting(port, take_log_lines=tail.take)):
            session = await coordinator.session()
            session.say(WELCOME, new_generation(1))
            await session.heard(Ack)
            session.say(assignment(text, 1, job=absent_data(tiny_job(text, stages=1))))
            told = await session.heard(LogLines)
            assert any("nowhere" in line.text for line in told.lines)
            await session.heard(Trouble)
    finally:
        logging.getLogger("worker").removeHandler(tail)


async def test_chunks_beyond_the_memory_limit_fail_the_job(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port, memory_bytes=1 << 16)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(text, 1))
        trouble = await session.heard(Trouble)
        assert trouble.is_fatal
        assert "64.0 KiB" in trouble.reason


async def test_what_is_not_here_cannot_be_kept(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(text, 1, source=StateSource(kind=SourceKind.KEEP, version=Step(0))))
        assert not (await session.heard(Trouble)).is_fatal


async def test_a_donor_that_cannot_be_reached_is_suspected(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        # The coordinator's own port: something listens there, but it is no peer.
        donor = Member(worker=WorkerId("w9"), incarnation=Incarnation("i9"), address=f"127.0.0.1:{port}")
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        source = StateSource(kind=SourceKind.PEER, version=Step(0), peer=WorkerId("w9"))
        session.say(replace(assignment(text, 1, source=source), peers=(donor,)))
        assert (await session.heard(Suspected)).peer == "w9"


async def test_a_build_that_is_overtaken_gives_way_to_the_next(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        # Without a pause between them, so that the build is cancelled before it has begun.
        worker.inbox.post(DirectiveArrived(directive=assignment(text, 1)))
        worker.inbox.post(DirectiveArrived(directive=new_generation(2)))
        assert (await session.heard(Ack)).generation == 2
        session.say(assignment(text, 2))
        assert (await session.heard(ChunksReady)).generation == 2


async def test_state_comes_from_a_peer(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with (
        puppet() as (coordinator, port),
        running(setting(port)),
        running(setting(port, name="w1", incarnation="i1")),
    ):
        sessions = {s.hello.worker: s for s in (await coordinator.session(), await coordinator.session())}
        donor, taker = sessions[WorkerId("w0")], sessions[WorkerId("w1")]
        for session in sessions.values():
            session.say(WELCOME, new_generation(1))
            await session.heard(Ack)
        donor.say(assignment(text, 1))
        await donor.heard(ChunksReady)
        hello = donor.hello
        member = Member(worker=hello.worker, incarnation=hello.incarnation, address=hello.address)
        source = StateSource(kind=SourceKind.PEER, version=Step(0), peer=WorkerId("w0"))
        taker.say(replace(assignment(text, 1, source=source), peers=(member,)))
        assert (await taker.heard(ChunksReady)).num_train_samples > 0


# --- saving ---


def save(url: str | None) -> Save:
    return Save(
        epoch=WELCOME.epoch,
        generation=Generation(1),
        version=Step(0),
        stages=(StageIndex(0),),
        url=url,
        walkers=(0,),
    )


async def test_a_stage_is_written_where_the_job_says(tmp_path: Path) -> None:
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(write_text(tmp_path), 1))
        await session.heard(ChunksReady)
        session.say(save(f"file://{tmp_path}/ck"))
        written = await session.heard(CheckpointWritten)
        assert (written.version, written.stage) == (0, 0)
        for file in written.files:
            assert (tmp_path / "ck" / JOB / "v00000000" / file.name).stat().st_size == file.num_bytes


@pytest.mark.parametrize(("url", "part"), [("/proc/nowhere", "nowhere"), (None, "release")])
async def test_a_stage_that_cannot_be_written_is_told_and_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None, part: str
) -> None:
    """The puppet keeps no files, so uploads end like those to another release."""
    monkeypatch.setattr("worker.chunks.saving._PAUSES_S", (0.0,))
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(1))
        await session.heard(Ack)
        session.say(assignment(write_text(tmp_path), 1))
        await session.heard(ChunksReady)
        session.say(save(url))
        failed = await session.heard(CheckpointUnwritten)
        assert (failed.version, failed.stage) == (0, 0)
        assert part in failed.reason
