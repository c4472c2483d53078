"""What watchers are told: everything recorded, once and in order, whatever happens to them or to the coordinator."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from coordinator.records import journal
from coordinator.records.journal import Fold, Journal
from coordinator.telling.joblines import JobLines
from skein.protocol.log.records import (
    GenerationMember,
    GenerationOpened,
    JobEnded,
    PlanAdopted,
    Record,
    RolledBack,
    job_of_record,
)
from skein.storage.outside import Outside
from skein.types import Generation, Incarnation, JobId, JobState, Step, WorkerId
from skein.wire.extra import LogLevel, LogLine
from skein.wire.views import Ended, IncidentEnded, JobEvent, LineLogged, StateChanged, StepFinished
from tests.coordinator.builders import WAIT_S, checkpointed, committed, one_worker_plan, opened, submitted
from tests.support.incidents import incident

JOB = JobId("digits-1")


def generation(number: int) -> GenerationOpened:
    member = GenerationMember(worker=WorkerId("w1"), incarnation=Incarnation("a"))
    return GenerationOpened(
        job=JOB, generation=Generation(number), members=(member,), reason="gathered", wall_s=1.0
    )


def adopted(number: int) -> PlanAdopted:
    return PlanAdopted(job=JOB, generation=Generation(number), plan=one_worker_plan())


def ended() -> JobEnded:
    return JobEnded(job=JOB, state=JobState.FINISHED, reason="10 steps done", wall_s=99.0)


def line(text: str) -> LogLine:
    return LogLine(level=LogLevel.INFO, wall_s=1.0, text=text)


LOG: tuple[Record, ...] = (
    opened(1),
    submitted(JOB),
    generation(1),
    adopted(1),
    *(committed(JOB, step, wall_s=10.0 + 2 * step) for step in range(10)),
    checkpointed(JOB, 10),
    submitted("digits-2"),
    ended(),
)


def journal_of(records: Sequence[Record], *, num_kept: int = 100, num_lines: int = 100) -> Journal:
    """A journal that has seen these records, and reads them again from the same log."""

    async def read(job: JobId) -> AsyncIterator[Sequence[Record]]:
        own = [record for record in records if job_of_record(record) == job]
        for start in range(0, len(own), 3):
            yield own[start : start + 3]

    journal = Journal(read, num_kept=num_kept, num_lines=num_lines)
    journal.recorded(records)
    return journal


async def all_of(journal: Journal, since: int = 0) -> list[JobEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in journal.watch(JOB, since=since)]


async def test_numbers_count_what_is_recorded_of_a_job() -> None:
    events = await all_of(journal_of(LOG))
    assert [event.sequence for event in events] == list(range(1, 15))
    assert isinstance(events[-1].body, Ended)


@pytest.mark.parametrize("since", [0, 1, 5, 12, 14, 99])
async def test_watching_since_a_number_tells_what_came_after(since: int) -> None:
    events = await all_of(journal_of(LOG), since)
    assert [event.sequence for event in events] == list(range(since + 1, 15))


@pytest.mark.parametrize("num_kept", [1, 2, 5, 13])
async def test_what_is_no_longer_kept_is_read_from_the_log(num_kept: int) -> None:
    assert await all_of(journal_of(LOG, num_kept=num_kept), 2) == await all_of(journal_of(LOG), 2)


async def test_an_ended_job_costs_little_memory_and_is_still_told_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "NUM_KEPT_ENDED", 2)
    machine = journal_of(LOG[:-1])
    watching = machine.watch(JOB, since=0)
    told = [await anext(watching)]
    machine.recorded(LOG[-1:])
    assert len(machine._kept[JOB].recorded) == 2
    told += [event async for event in watching]
    assert [event.sequence for event in told] == list(range(1, 15))


async def test_a_restart_changes_no_number() -> None:
    before = await all_of(journal_of(LOG))
    after = await all_of(journal_of((*LOG, opened(2))))
    assert after == before


async def test_a_watcher_is_woken_by_each_happening() -> None:
    journal = journal_of(LOG[:3])
    watching = asyncio.create_task(all_of(journal))
    for record in LOG[3:]:
        await asyncio.wait({watching}, timeout=0)
        journal.recorded([record])
    assert await watching == await all_of(journal_of(LOG))


async def test_passing_happenings_come_between_and_have_no_number_of_their_own() -> None:
    journal = journal_of(LOG[:5])
    journal.line(JOB, WorkerId("w1"), line("hello"))
    journal.recorded(LOG[5:])
    events = await all_of(journal)
    said = [event for event in events if isinstance(event.body, LineLogged)]
    assert [(event.sequence, events.index(event)) for event in said] == [(3, 3)]
    assert [e.sequence for e in events if e not in said] == list(range(1, 15))


@pytest.mark.parametrize("num_kept", [1, 3, 100])
@pytest.mark.parametrize("since", [0, 4, 9])
async def test_passing_happenings_keep_their_place_among_those_of_the_log(num_kept: int, since: int) -> None:
    records: list[Record] = []

    async def read(job: JobId) -> AsyncIterator[Sequence[Record]]:
        yield [record for record in records if job_of_record(record) == job]

    journal = Journal(read, num_kept=num_kept)
    for number, record in enumerate(LOG):
        records.append(record)
        journal.recorded([record])
        journal.line(JOB, None, line(f"after {number}"))
    events = await all_of(journal, since)
    numbers = [event.sequence for event in events]
    said = [event.body.line.text for event in events if isinstance(event.body, LineLogged)]
    assert numbers == sorted(numbers)
    assert sorted(set(numbers)) == list(range(since, 15))
    assert said == sorted(said, key=lambda text: int(text.split()[1]))
    assert said[-1] == f"after {len(LOG) - 1}"


async def test_a_slow_watcher_loses_lines_and_no_step() -> None:
    journal = journal_of(LOG[:4], num_kept=2, num_lines=2)
    watching = journal.watch(JOB, since=0)
    first = await anext(watching)
    for number, record in enumerate(LOG[4:]):
        journal.line(JOB, None, line(f"before {number}"))
        journal.recorded([record])
    events = [first, *[event async for event in watching]]
    told = [event for event in events if isinstance(event.body, LineLogged)]
    assert len(told) == 2
    # The journal read from its own log, which ends where the test began: what is gone is gone for it as well.
    assert [e.sequence for e in events if e not in told][-2:] == [13, 14]


async def test_only_another_state_is_news() -> None:
    journal = journal_of(LOG[:2])
    journal.state(JOB, JobState.PENDING, "submitted", wall_s=1.0)
    journal.state(JOB, JobState.PAUSED, "waiting for workers", wall_s=2.0)
    journal.state(JOB, JobState.PAUSED, "waiting for workers", wall_s=3.0)
    journal.recorded([ended()])
    states = [event.body.state for event in await all_of(journal) if isinstance(event.body, StateChanged)]
    assert states == [JobState.PENDING, JobState.PAUSED]


def test_rates_follow_from_the_times_of_commits() -> None:
    fold = Fold()
    for record in LOG[1:8]:
        fold.take(record)
    assert fold.step_s == 2.0
    assert fold.tokens_per_s == 50.0


def test_time_without_a_generation_is_no_step() -> None:
    fold = Fold()
    fold.take(committed(JOB, 0, wall_s=1.0))
    fold.take(committed(JOB, 1, wall_s=2.0))
    fold.take(generation(2))
    event = fold.take(committed(JOB, 2, wall_s=500.0))
    assert fold.last_step_s is None
    assert event is not None
    assert isinstance(event.body, StepFinished)
    assert event.body.step_s == 1.0


async def test_a_way_back_is_told() -> None:
    back = RolledBack(
        job=JOB, from_version=Step(10), to_version=Step(0), reason="nobody held it", wall_s=60.0
    )
    events = await all_of(journal_of((*LOG[:-1], back, ended())))
    assert [type(event.body).__name__ for event in events[-2:]] == ["WentBack", "Ended"]


async def test_an_incident_is_told_when_it_is_over_and_keeps_its_number() -> None:
    over = incident(JOB, wall_s=40.0, seconds=2.5)
    records = (*LOG[:-2], over, *LOG[-2:])
    told = await all_of(journal_of(records), 13)
    assert told[0] == JobEvent(sequence=14, wall_s=42.5, body=IncidentEnded(incident=over))
    assert isinstance(told[1].body, Ended)
    assert await all_of(journal_of(records, num_kept=1), 13) == told


# --- what passes, kept with the job ---


def stored(folder: Path, records: Sequence[Record], **sizes: int) -> tuple[Journal, JobLines]:
    """A journal over these records whose lines lie in `folder`, as a coordinator that starts there has it."""

    async def read(job: JobId) -> AsyncIterator[Sequence[Record]]:
        yield [record for record in records if job_of_record(record) == job]

    lines = JobLines(folder)
    journal = Journal(
        read, lines=lines, num_kept=sizes.get("num_kept", 100), num_lines=sizes.get("num_lines", 100)
    )
    journal.recorded(records)
    return journal, lines


def texts(events: Sequence[JobEvent]) -> list[str]:
    return [event.body.line.text for event in events if isinstance(event.body, LineLogged)]


async def test_lines_of_an_ended_job_are_told_after_a_restart(tmp_path: Path) -> None:
    records = list(LOG[:4])
    journal, lines = stored(tmp_path, records)
    for number, record in enumerate(LOG[4:]):
        journal.line(JOB, WorkerId("w1"), line(f"before {number}"))
        journal.state(JOB, JobState.RUNNING, f"{number}", wall_s=1.0)
        records.append(record)
        journal.recorded([record])
    journal.line(JOB, None, line("and after the end"))
    before = await all_of(journal)
    await lines.close()
    again, lines = stored(tmp_path, [*records, opened(2)])
    assert await all_of(again) == before
    assert texts(before) == [*(f"before {number}" for number in range(len(LOG) - 4)), "and after the end"]
    await lines.close()


@pytest.mark.parametrize("num_lines", [2, 100])
async def test_each_event_is_told_once_and_in_order_from_wherever_a_watcher_left_off(
    tmp_path: Path, num_lines: int
) -> None:
    records = list(LOG[:4])
    journal, lines = stored(tmp_path, records, num_kept=3, num_lines=num_lines)
    for number, record in enumerate(LOG[4:9]):
        journal.line(JOB, None, line(f"first {number}"))
        records.append(record)
        journal.recorded([record])
    await lines.close()
    records.append(opened(2))
    journal, lines = stored(tmp_path, records, num_kept=3, num_lines=num_lines)
    for number, record in enumerate(LOG[9:]):
        journal.line(JOB, None, line(f"second {number}"))
        journal.line(JOB, None, line(f"third {number}"))
        records.append(record)
        journal.recorded([record])
    whole = await all_of(journal)
    assert [event.key for event in whole] == sorted({event.key for event in whole})
    assert len(texts(whole)) == 5 + 2 * len(LOG[9:])
    for at, event in enumerate(whole):
        rest = [x async for x in journal.watch(JOB, since=event.sequence, since_line=event.line)]
        assert rest == whole[at + 1 :]
    await lines.close()


async def test_what_is_in_memory_is_not_read_from_disk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, lines = stored(tmp_path, LOG[:6])
    for number in range(5):
        journal.line(JOB, None, line(f"{number}"))
    whole = [event async for event in journal.watch(JOB, since=0, is_following=False)]
    assert texts(whole) == [f"{number}" for number in range(5)]

    async def refuse(job: JobId) -> list[JobEvent]:
        raise AssertionError(f"{job} is read from disk")

    monkeypatch.setattr(lines, "read", refuse)
    for at in range(len(whole) - 5, len(whole)):
        cursor = whole[at]
        newer = journal.watch(JOB, since=cursor.sequence, since_line=cursor.line, is_following=False)
        assert [event async for event in newer] == whole[at + 1 :]
    await lines.close()


async def test_asking_for_what_is_known_ends_there(tmp_path: Path) -> None:
    journal, lines = stored(tmp_path, LOG[:6])
    journal.line(JOB, None, line("the newest"))
    found = [event async for event in journal.watch(JOB, since=0, is_following=False)]
    assert [event.sequence for event in found] == [1, 2, 3, 4, 4]
    assert texts(found) == ["the newest"]
    await lines.close()


async def test_lines_of_a_job_and_of_all_jobs_are_bounded(tmp_path: Path) -> None:
    lines = JobLines(tmp_path / "lines", max_bytes=4_000, max_total_bytes=9_000)
    for name in ("a", "b", "c"):
        for number in range(100):
            body = LineLogged(worker=None, line=line(f"{number} of {name}"))
            lines.append(JobId(name), JobEvent(sequence=1, line=number + 1, wall_s=1.0, body=body))
        found = texts(await lines.read(JobId(name)))
        assert found[-1] == f"99 of {name}"
        assert found == [f"{number} of {name}" for number in range(100 - len(found), 100)]
        assert 5 < len(found) < 100
    assert not (tmp_path / "lines" / "a.jsonl").exists()
    assert sum(path.stat().st_size for path in (tmp_path / "lines").iterdir()) <= 9_000
    await lines.close()


async def test_a_disk_that_does_not_answer_keeps_no_reader_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    monkeypatch.setattr(JobLines, "_path", lambda *_: never.wait() and tmp_path / "lines")
    lines = JobLines(tmp_path, outside=Outside(silent_s=0.05))
    body = LineLogged(worker=None, line=line("never written"))
    lines.append(JOB, JobEvent(sequence=1, line=1, wall_s=1.0, body=body))
    assert await lines.read(JOB) == []
    await lines.close()
    never.set()
    assert [record.getMessage() for record in caplog.records] == [
        f"lines of jobs are not kept in {tmp_path}: the lines of {JOB} gave no sign of life for 0 s"
    ]


async def test_a_name_that_is_no_text_is_kept_with_its_bytes_spelt_out(tmp_path: Path) -> None:
    lines = JobLines(tmp_path, outside=Outside(silent_s=0.5))
    for number, text in enumerate(("before", "cannot read /data/\udcff", "after"), start=1):
        body = LineLogged(worker=None, line=line(text))
        lines.append(JOB, JobEvent(sequence=1, line=number, wall_s=1.0, body=body))
    assert texts(await lines.read(JOB)) == ["before", r"cannot read /data/\udcff", "after"]
    await lines.close()


async def test_a_torn_line_and_a_disk_that_takes_none_cost_only_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, lines = stored(tmp_path, LOG[:6])
    journal.line(JOB, None, line("whole"))
    assert texts(await lines.read(JOB)) == ["whole"]
    path = tmp_path / f"{JOB}.jsonl"
    path.write_text(path.read_text() + path.read_text()[:20])
    assert texts(await lines.read(JOB)) == ["whole"]
    path.unlink()
    path.mkdir()
    journal.line(JOB, None, line("not kept"))
    journal.line(JOB, None, line("nor this"))
    journal.recorded(LOG[6:])
    assert texts(await all_of(journal)) == ["whole", "not kept", "nor this"]
    await lines.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "lines of jobs are not kept" in said[0]
