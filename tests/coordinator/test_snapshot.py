"""A snapshot and the entries since give the state that all entries give, or the snapshot does not count."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.lead.standby import Standby
from coordinator.records.logfile import LOG_FILE, insert, open_database, transaction
from coordinator.records.snapshot import SNAPSHOT_FILE
from coordinator.records.store import Lookout, RunLog
from coordinator.replayed import ReplayedLog, SnapshotMaker
from coordinator.serving import Serving, ServingOptions
from coordinator.telling.status import job_status
from skein.config.quota import UNBOUNDED
from skein.protocol.log.records import EpochOpened, JobEnded, JobResumed, Record, job_of_record
from skein.protocol.log.shelved import JobCard
from skein.sim.scenario import disturbed, run_to_end
from skein.sim.shapes import shape_of
from skein.types import Epoch, JobId, JobState
from skein.wire.views import Ended, JobEvent
from tests.coordinator.builders import eventually, plan_at_once
from tests.support.extent import examples

SIMULATED = (
    ("line 2x2", 3),
    ("loop 3x2 tied", 1),
    ("line 2x2 on 5 + line 1x1 array 4", 2),
    ("line 1x1 array 3 chosen shared rewinds on 3 + line 1x3 chosen", 5),
    ("line 1x1 sweep 8 rungs 3 rewinds on 4 + line 1x1 sweep 5 + line 1x1 array 3", 4),
    ("line 2x3 ring", 6),
)


@cache
def simulated(text: str, seed: int) -> tuple[Record, ...]:
    """The log of a simulated coordinator that faults have struck, with jobs that ended and one that went on."""
    shape = shape_of(text)
    world = disturbed(shape, seed=seed, num_faults=6)
    run_to_end(world, limit_s=2000.0)
    return tuple(world.log)


def append(directory: Path, records: Sequence[Record]) -> None:
    """Write entries as a coordinator does, under the epochs that the records open."""
    with closing(open_database(directory / LOG_FILE)) as connection, transaction(connection, directory):
        for record in records:
            epoch = record.epoch if isinstance(record, EpochOpened) else Epoch(1)
            insert(connection, epoch, [record])
            connection.execute("UPDATE owner SET epoch = max(epoch, ?)", (epoch,))


def state_of(directory: Path) -> ReplayedLog:
    """A state of which nothing was read."""
    return ReplayedLog(directory, lease_s=2.5, quotas=UNBOUNDED)


def maker_of(directory: Path) -> SnapshotMaker:
    return SnapshotMaker(directory, lambda: state_of(directory))


def recalled(directory: Path) -> tuple[ReplayedLog, str | None]:
    """The state by the snapshot and the entries since, and why a snapshot was ignored."""
    memory = state_of(directory)
    with closing(Lookout(directory)) as lookout:
        reason = memory.recall(lookout)
        while records := lookout.news():
            memory.replay(records)
    return memory, reason


def replayed(directory: Path, records: Sequence[Record]) -> ReplayedLog:
    memory = state_of(directory)
    memory.replay(records)
    return memory


def assert_equal(found: ReplayedLog, wanted: ReplayedLog) -> None:
    """All that a coordinator knows by its log is the same."""
    ours, theirs = found.machine.history, wanted.machine.history
    assert ours.head() == theirs.head()
    assert dict(ours.jobs) == dict(theirs.jobs)
    assert [x.job for x in ours.jobs.all()] == [x.job for x in theirs.jobs.all()]
    assert ours.job_by_key == theirs.job_by_key
    assert found.metrics.render() == wanted.metrics.render()
    for job in theirs.jobs:
        assert found.journal.rates(job) == wanted.journal.rates(job)
        assert job_status(found.machine.view, found.journal, job) == job_status(
            wanted.machine.view, wanted.journal, job
        )


# --- equal states ---


@pytest.mark.parametrize(("shape", "seed"), SIMULATED)
def test_replay_from_a_snapshot_equals_replay_from_the_start(shape: str, seed: int, tmp_path: Path) -> None:
    log, random = simulated(shape, seed), Random(seed)
    cuts = sorted(random.sample(range(1, len(log)), 4))
    for begin, end in zip((0, *cuts), (*cuts, len(log)), strict=True):
        append(tmp_path, log[begin:end])
        found, reason = recalled(tmp_path)
        assert reason is None
        assert_equal(found, replayed(tmp_path, log[:end]))
        found.close()
        assert maker_of(tmp_path).advance(most=1 << 15)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_any_cut_of_a_log_goes_on_as_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = simulated(*data.draw(st.sampled_from(SIMULATED)))
    covered = data.draw(st.integers(1, len(log)))
    directory = tmp_path_factory.mktemp("cut")
    append(directory, log)
    # A snapshot covers whole pieces of the log, so it is made before the rest is there.
    with closing(sqlite3.connect(directory / LOG_FILE)) as connection, connection:
        connection.execute("CREATE TABLE rest AS SELECT * FROM entries WHERE number > ?", (covered,))
        connection.execute("DELETE FROM entries WHERE number > ?", (covered,))
    assert maker_of(directory).advance(most=1 << 15)
    with closing(sqlite3.connect(directory / LOG_FILE)) as connection, connection:
        connection.execute("INSERT INTO entries SELECT * FROM rest")
    found, reason = recalled(directory)
    assert reason is None
    assert found.num_covered == covered
    assert_equal(found, replayed(directory, log))
    found.close()


def test_an_ended_job_is_on_the_shelf_until_it_goes_on(tmp_path: Path) -> None:
    log = simulated("line 2x2", 3)
    job = next(record.job for record in log if isinstance(record, JobEnded))
    append(tmp_path, log)
    assert maker_of(tmp_path).advance(most=1 << 15)
    resumed = JobResumed(job=job, steps=99, wall_s=1e9)
    append(tmp_path, [resumed])
    found, _ = recalled(tmp_path)
    assert_equal(found, replayed(tmp_path, [*log, resumed]))
    assert [job.job for job in found.machine.history.pending()] == [job]
    found.close()
    assert maker_of(tmp_path).advance(most=1 << 15)
    again, _ = recalled(tmp_path)
    assert_equal(again, replayed(tmp_path, [*log, resumed]))
    again.close()


def test_a_coordinator_lets_go_of_jobs_that_a_snapshot_has(tmp_path: Path) -> None:
    shape, seed = SIMULATED[4]
    log = simulated(shape, seed)
    append(tmp_path, log)
    memory = replayed(tmp_path, log)
    assert maker_of(tmp_path).advance(most=1 << 15)
    with closing(Lookout(tmp_path)) as lookout:
        assert memory.let_go(lookout) == len(memory.machine.history.jobs)
    assert all(isinstance(job, JobCard) for job in memory.machine.history.jobs.all())
    assert not memory.machine.history.jobs.resident()
    assert_equal(memory, replayed(tmp_path, log))
    memory.close()


def test_pieces_of_a_long_log_are_snapshots_on_the_way(tmp_path: Path) -> None:
    log = simulated(*SIMULATED[4])
    append(tmp_path, log)
    maker = maker_of(tmp_path)
    covered = []
    while maker.advance(most=1):
        found, _ = recalled(tmp_path)
        covered.append(found.num_covered)
        found.close()
    assert covered == sorted({min(n, len(log)) for n in range(256, len(log) + 256, 256)})
    assert len(covered) > 1


# --- what does not fit ---


@pytest.fixture
def covered(tmp_path: Path) -> Path:
    """A directory with a log and a snapshot of all of it."""
    append(tmp_path, simulated("line 2x2", 3))
    assert maker_of(tmp_path).advance(most=1 << 15)
    return tmp_path


def test_a_snapshot_overwritten_by_noise_is_ignored_with_a_reason(covered: Path) -> None:
    whole = (covered / SNAPSHOT_FILE).read_bytes()
    wanted = replayed(covered, simulated("line 2x2", 3))
    reasons = 0
    for seed in range(40):
        random = Random(seed)
        begin = random.randrange(len(whole))
        noise = random.randbytes(min(random.randrange(1, 6000), len(whole) - begin))
        (covered / SNAPSHOT_FILE).write_bytes(whole[:begin] + noise + whole[begin + len(noise) :])
        found, reason = recalled(covered)
        reasons += reason is not None
        assert_equal(found, wanted)
        found.close()
    # Of a small file half of the pages are empty.
    assert reasons > 10


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_cut_snapshot_is_ignored_and_made_anew(covered: Path, size: int) -> None:
    whole = (covered / SNAPSHOT_FILE).read_bytes()
    (covered / SNAPSHOT_FILE).write_bytes(whole[:size])
    found, reason = recalled(covered)
    assert reason is not None
    found.close()
    assert maker_of(covered).advance(most=1 << 15)
    again, reason = recalled(covered)
    assert (reason, again.num_covered) == (None, len(simulated("line 2x2", 3)))
    again.close()


def test_a_snapshot_of_another_log_is_ignored(
    covered: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    log = simulated("loop 3x2 tied", 1)
    append(other, log)
    (other / SNAPSHOT_FILE).write_bytes((covered / SNAPSHOT_FILE).read_bytes())
    found, reason = recalled(other)
    assert reason is not None
    assert "which the run log does not have" in reason
    assert_equal(found, replayed(other, log))
    found.close()


def test_a_snapshot_of_a_log_that_lost_its_end_is_ignored(covered: Path) -> None:
    log = simulated("line 2x2", 3)
    with closing(sqlite3.connect(covered / LOG_FILE)) as connection, connection:
        connection.execute("DELETE FROM entries WHERE number > ?", (len(log) - 5,))
    found, reason = recalled(covered)
    assert reason is not None
    assert_equal(found, replayed(covered, log[:-5]))
    found.close()


def test_a_snapshot_in_another_layout_is_ignored(covered: Path) -> None:
    with closing(sqlite3.connect(covered / SNAPSHOT_FILE)) as connection, connection:
        connection.execute("UPDATE head SET layout = 'of another release'")
    found, reason = recalled(covered)
    assert reason == "it was written by another release"
    found.close()


def test_a_changed_row_of_a_snapshot_makes_it_damaged(covered: Path) -> None:
    with closing(sqlite3.connect(covered / SNAPSHOT_FILE)) as connection, connection:
        connection.execute("UPDATE jobs SET card = replace(card, 'finished', 'failed')")
    found, reason = recalled(covered)
    assert reason == "it is damaged"
    found.close()


def test_of_two_writers_one_fails(covered: Path) -> None:
    append(covered, [JobResumed(job=JobId("sim-1"), steps=99, wall_s=1e9)])
    slow, quick = recalled(covered)[0], maker_of(covered)
    assert quick.advance(most=1 << 15)
    with closing(Lookout(covered)) as lookout:
        tail = lookout.entry_at(slow.num_records)
    assert tail is not None
    assert not slow.save(tail, [])
    slow.close()


# --- a job's entries alone ---


def test_entries_of_a_job_are_read_by_the_index_and_beyond_it(tmp_path: Path) -> None:
    shape, seed = SIMULATED[2]
    log = simulated(shape, seed)
    with RunLog.open(tmp_path, wall_s=0.0) as run_log:
        run_log.append([record for record in log[: len(log) // 2] if not isinstance(record, EpochOpened)])
        assert maker_of(tmp_path).advance(most=1 << 15)
        run_log.append([record for record in log[len(log) // 2 :] if not isinstance(record, EpochOpened)])
        jobs = {job for record in log if (job := job_of_record(record)) is not None}
        assert len(jobs) > 1
        for job in jobs:
            assert list(run_log.read(job)) == [record for record in log if job_of_record(record) == job]
        (tmp_path / SNAPSHOT_FILE).write_bytes(b"noise")
        for job in jobs:
            assert list(run_log.read(job)) == [record for record in log if job_of_record(record) == job]


# --- coordinators ---


async def events_of(serving: Serving, job: JobId) -> list[JobEvent]:
    return [event async for event in serving.driver.journal.watch(job, since=0, is_following=False)]


async def test_a_coordinator_and_its_standby_start_from_a_snapshot(tmp_path: Path) -> None:
    shape, seed = SIMULATED[2]
    log = simulated(shape, seed)
    append(tmp_path, log)
    assert maker_of(tmp_path).advance(most=1 << 15)
    jobs = replayed(tmp_path, log).machine.history.jobs
    options = ServingOptions(state_dir=tmp_path, takeover_s=0.5)
    serving = await Serving.start(options, plan_at_once)
    standby = await Standby.start(replace(options, name="b"))
    leading = asyncio.create_task(standby.lead(plan_at_once))
    try:
        assert not serving.driver.machine.history.jobs.resident()
        told = {job: await events_of(serving, job) for job in jobs}
        for job in jobs:
            assert [x.sequence for x in told[job]] == list(range(1, len(told[job]) + 1))
            end = jobs[job].end
            assert end is not None
            assert told[job][-1].body == Ended(state=JobState.FINISHED, reason=end.reason)
        await eventually(lambda: standby.num_replayed == len(log) + 1)
    finally:
        await serving.stop()
    successor = await leading
    try:
        assert not successor.driver.machine.history.jobs.resident()
        assert {job: await events_of(successor, job) for job in jobs} == told
    finally:
        await successor.stop()


async def test_a_coordinator_that_serves_has_its_snapshot_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = simulated(*SIMULATED[4])
    append(tmp_path, log)
    monkeypatch.setattr("coordinator.serving.SNAPSHOT_ENTRIES", 1)
    monkeypatch.setattr("coordinator.serving.SAMPLE_S", 0.01)
    serving = await Serving.start(ServingOptions(state_dir=tmp_path), plan_at_once)
    try:
        await eventually(lambda: not serving.driver.machine.history.jobs.resident())
    finally:
        await serving.stop()
    found, reason = recalled(tmp_path)
    assert (reason, found.num_covered) == (None, len(log) + 1)
    found.close()
