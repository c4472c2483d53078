"""A whole worker process, but for the process: control stream, draining, errors. Real gRPC on loopback."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skein import PROTOCOL_VERSION
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import CheckpointSpec, JobSpec
from skein.errors import UserError
from skein.plan.plan import Path as Hops
from skein.protocol.messages.directives import (
    Assign,
    ChunkAssignment,
    Dismiss,
    Look,
    Member,
    NewGeneration,
    OpenData,
    Origin,
    Probe,
    Refused,
    Save,
    SourceKind,
    StateSource,
)
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointUnwritten,
    CheckpointWritten,
    ChunksReady,
    DataOpened,
    Leaving,
    LinksMeasured,
    PeersSeen,
    Suspected,
    Trouble,
)
from skein.protocol.worker.worker_io import DirectiveArrived, StopRequested
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
from skein.wire.credentials import Credentials, Wallet
from skein.wire.extra import LogLevel, LogLine, LogLines
from skein.wire.identity.authority import Authority
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.names import COORDINATOR, worker_caller
from tests.support.plans import schedule
from tests.worker.lab import tiny_job, write_text
from tests.worker.puppet import WELCOME, Session, puppet, running, setting
from worker.telling.logs import LogTail

STOP = StopRequested(reason="enough")
JOB = JobId("j1")


async def test_a_worker_says_who_it_is_and_beats() -> None:
    line = LogLine(level=LogLevel.INFO, wall_s=1.0, text="hello")
    lines = [line]

    def take() -> tuple[LogLine, ...]:
        taken, lines[:] = tuple(lines), []
        return taken

    async with puppet() as (coordinator, port), running(setting(port, take_log_lines=take)):
        session = await coordinator.session()
        hello = session.hello
        assert (hello.worker, hello.protocol_version, hello.site) == ("w0", PROTOCOL_VERSION, "lab")
        assert hello.profile.flops_per_s > 0
        session.say(WELCOME)
        assert await session.heard(LogLines) == LogLines(lines=(line,))
        names = {count.name for count in (await session.heard(Beat)).statistics}
        assert {"skein_worker_control_streams", "skein_worker_bubble_ratio"} <= names


async def test_a_lost_stream_is_opened_again_by_the_same_incarnation() -> None:
    async with puppet() as (coordinator, port), running(setting(port)):
        first = await coordinator.session()
        first.say(WELCOME)
        await first.heard(Beat)
        first.end()
        second = await coordinator.session()
        assert second.hello.incarnation == first.hello.incarnation
        assert second.hello.epoch == WELCOME.epoch


async def test_a_coordinator_that_comes_back_is_found_again() -> None:
    async with puppet() as (coordinator, port):
        worker = running(setting(port))
        await worker.__aenter__()
        (await coordinator.session()).say(WELCOME)
    try:
        async with puppet(port=port) as (returned, _):
            assert (await returned.session()).hello.worker == "w0"
    finally:
        await worker.__aexit__(None, None, None)


async def test_draining_asks_first_and_leaves_when_it_may() -> None:
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        session = await coordinator.session()
        session.say(WELCOME)
        worker.inbox.post(STOP)
        assert isinstance(await session.next(), Leaving)
        await session.heard(Beat)
        assert not worker.ended.done()
        session.say(Dismiss(epoch=WELCOME.epoch, job=None, may_exit=True))
        assert (await worker.end()).is_clean


async def test_a_refusal_ends_the_worker_with_the_reason() -> None:
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        (await coordinator.session()).say(Refused(reason="protocol version 9 is needed"))
        end = await worker.end()
        assert not end.is_clean
        assert "version 9" in end.reason


async def test_without_a_coordinator_stopping_needs_nobody() -> None:
    async with puppet() as (_, port):
        pass
    async with running(setting(port)) as worker:
        worker.inbox.post(STOP)
        assert (await worker.end()).is_clean


async def test_to_be_revoked_is_fatal_and_says_so() -> None:
    authority, now_s = Authority.new(now_s=time.time()), time.time()
    own, theirs = (
        Credentials(wallet=Wallet(authority.make_out(caller, now_s=now_s)))
        for caller in (COORDINATOR, worker_caller("w0"))
    )
    async with (
        puppet(credentials=own, named=NamedCallers(lambda _: True)) as (_, port),
        running(setting(port, credentials=theirs)) as worker,
    ):
        with pytest.raises(ExceptionGroup) as failure:
            await worker.end()
        error = failure.value.exceptions[0]
        assert isinstance(error, UserError)
        assert "worker w0 was revoked" in str(error)


async def test_a_port_in_use_is_named() -> None:
    async with puppet() as (_, port):
        with pytest.raises(UserError, match=str(port)):
            async with running(replace(setting(port), port=port)):
                pass


async def to_be_probed(session: Session) -> Member:
    """A worker, once it has heard what those show who are told to probe it."""
    session.say(replace(WELCOME, door="told"), Look(peers=()))
    _ = await session.heard(PeersSeen)
    told = session.hello
    return Member(worker=told.worker, incarnation=told.incarnation, address=told.address, door="told")


async def test_links_are_measured_in_both_directions() -> None:
    async with (
        puppet() as (coordinator, port),
        running(setting(port)),
        running(setting(port, name="w1", incarnation="i1")),
    ):
        sessions = {s.hello.worker: s for s in (await coordinator.session(), await coordinator.session())}
        peer = await to_be_probed(sessions[WorkerId("w1")])
        nobody = Member(worker=WorkerId("w9"), incarnation=Incarnation("i9"), address=f"127.0.0.1:{port}")
        sessions[WorkerId("w0")].say(WELCOME, Probe(peers=(nobody, peer)))
        links = (await sessions[WorkerId("w0")].heard(LinksMeasured)).links
        assert [(link.sender, link.receiver) for link in links] == [("w0", "w1"), ("w1", "w0")]
        assert all(link.bytes_per_s > 0 and link.latency_s > 0 for link in links)
        # Another than could never be dialled: of that one a refusal says nothing.
        gone = replace(nobody, incarnation=Incarnation("i8"), address="127.0.0.1:1")
        sessions[WorkerId("w0")].say(Look(peers=(gone, peer)))
        seen = await sessions[WorkerId("w0")].heard(PeersSeen)
        assert (seen.reached, seen.gone) == ((peer.incarnation,), (gone.incarnation,))


async def test_a_peer_is_dialled_where_the_setting_says() -> None:
    """The advertised address answers calls too, but not as a worker does."""
    async with puppet() as (coordinator, port), running(setting(port, name="w1", incarnation="i1")):
        peer = await to_be_probed(await coordinator.session())
        ways = {f"127.0.0.1:{port}": peer.address}
        async with running(replace(setting(port), way_to=lambda address: ways[address])):
            session = await coordinator.session()
            advertised = replace(peer, address=f"127.0.0.1:{port}")
            session.say(WELCOME, Probe(peers=(advertised,)))
            links = (await session.heard(LinksMeasured)).links
            assert {link.sender for link in links} == {"w0", "w1"}


# --- building ---


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


def new_generation(session: Session, generation: int, *others: Member) -> NewGeneration:
    hello = session.hello
    me = Member(worker=hello.worker, incarnation=hello.incarnation, address=hello.address)
    return NewGeneration(
        epoch=WELCOME.epoch,
        generation=Generation(generation),
        job=JOB,
        members=(me, *others),
        last_commit=None,
    )


async def test_who_only_evaluates_opens_the_data_too(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(session, 1))
        await session.heard(Ack)
        told = assignment(text, 1)
        session.say(replace(told, origins=(), schedule=replace(told.schedule, ops=())))
        assert (await session.heard(ChunksReady)).num_validation_samples > 0


async def test_an_assignment_is_built_and_kept_over_a_generation(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(session, 1))
        assert (await session.heard(Ack)).chunks == ()
        session.say(assignment(text, 1))
        ready = await session.heard(ChunksReady)
        assert ready.num_train_samples > ready.num_validation_samples > 0
        assert ready.data_fingerprint
        session.say(new_generation(session, 2))
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
        session.say(WELCOME, new_generation(session, 1))
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
        session.say(WELCOME, new_generation(session, 1))
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
            session.say(WELCOME, new_generation(session, 1))
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
        session.say(WELCOME, new_generation(session, 1))
        await session.heard(Ack)
        session.say(assignment(text, 1))
        trouble = await session.heard(Trouble)
        assert trouble.is_fatal
        assert "64.0 KiB" in trouble.reason


async def test_what_is_not_here_cannot_be_kept(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        session.say(WELCOME, new_generation(session, 1))
        await session.heard(Ack)
        session.say(assignment(text, 1, source=StateSource(kind=SourceKind.KEEP, version=Step(0))))
        assert not (await session.heard(Trouble)).is_fatal


async def test_a_donor_that_cannot_be_reached_is_suspected(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)):
        session = await coordinator.session()
        # The coordinator's own port: something listens there, but it is no peer.
        donor = Member(worker=WorkerId("w9"), incarnation=Incarnation("i9"), address=f"127.0.0.1:{port}")
        session.say(WELCOME, new_generation(session, 1, donor))
        await session.heard(Ack)
        source = StateSource(kind=SourceKind.PEER, version=Step(0), peer=WorkerId("w9"))
        session.say(assignment(text, 1, source=source))
        assert (await session.heard(Suspected)).peer == "w9"


async def test_a_build_that_is_overtaken_gives_way_to_the_next(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    async with puppet() as (coordinator, port), running(setting(port)) as worker:
        session = await coordinator.session()
        session.say(WELCOME, new_generation(session, 1))
        await session.heard(Ack)
        # Without a pause between them, so that the build is cancelled before it has begun.
        worker.inbox.post(DirectiveArrived(directive=assignment(text, 1)))
        worker.inbox.post(DirectiveArrived(directive=new_generation(session, 2)))
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
            hello = donor.hello
            member = Member(worker=hello.worker, incarnation=hello.incarnation, address=hello.address)
            session.say(WELCOME, new_generation(taker, 1, member))
            await session.heard(Ack)
        donor.say(assignment(text, 1))
        await donor.heard(ChunksReady)
        taker.say(
            assignment(
                text, 1, source=StateSource(kind=SourceKind.PEER, version=Step(0), peer=WorkerId("w0"))
            )
        )
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
        session.say(WELCOME, new_generation(session, 1))
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
        session.say(WELCOME, new_generation(session, 1))
        await session.heard(Ack)
        session.say(assignment(write_text(tmp_path), 1))
        await session.heard(ChunksReady)
        session.say(save(url))
        failed = await session.heard(CheckpointUnwritten)
        assert (failed.version, failed.stage) == (0, 0)
        assert part in failed.reason
