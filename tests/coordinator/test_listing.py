"""A list of jobs comes in pages: bounded in bytes, without specifications, and complete when asked for to its end."""

from contextlib import closing
from pathlib import Path

import pytest

from coordinator.records.store import Lookout
from coordinator.replayed import ReplayedLog
from coordinator.service.calls import NotFoundError
from coordinator.telling.listing import MAX_BYTES, MAX_JOBS, AskedPage, job_page
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import JobEnded, JobSubmitted, Record
from skein.types import JobId, JobState
from skein.wire import codec
from skein.wire.relay.switchboard import Switchboard
from skein.wire.v1 import jobs_pb2
from tests.coordinator.test_snapshot import append, maker_of, replayed
from tests.support.jobs import small_job

NUM_JOBS = 3000
GOING = {JobId("j7"), JobId("j2999")}


def past() -> list[Record]:
    """Three thousand jobs with long names and reasons, of which two have not ended; one is urgent."""
    spec = small_job(steps=9).model_copy(update={"name": "n" * 40})
    texts = {7: spec.model_copy(update={"priority": -3}).canonical_json()}
    found: list[Record] = []
    for number in range(NUM_JOBS):
        job = JobId(f"j{number}")
        text = texts.get(number, spec.canonical_json())
        found.append(JobSubmitted(job=job, key=job, spec=text, wall_s=float(number)))
        if job not in GOING:
            ended = JobEnded(job=job, state=JobState.FAILED, reason="why " * 300, wall_s=float(number))
            found.append(ended)
    return found


@pytest.fixture(scope="module")
def shelved(tmp_path_factory: pytest.TempPathFactory) -> ReplayedLog:
    """The jobs, those that have ended on the shelf."""
    directory = tmp_path_factory.mktemp("log")
    memory = replayed(directory, past())
    append(directory, past())
    assert maker_of(directory).advance(most=1 << 15)
    with closing(Lookout(directory)) as lookout:
        assert memory.let_go(lookout) == NUM_JOBS - len(GOING)
    return memory


def page(memory: ReplayedLog, asked: AskedPage) -> jobs_pb2.ListJobsReply:
    view = memory.machine.view
    return job_page(view, memory.journal, view.history.listed(), asked)


def all_pages(memory: ReplayedLog, **asked: bool) -> list[str]:
    found: list[str] = []
    before = ""
    while True:
        reply = page(memory, AskedPage(limit=0, before=before, **asked))
        assert reply.ByteSize() < 2 * MAX_BYTES
        assert len(reply.jobs) <= MAX_JOBS
        assert reply.num_jobs == NUM_JOBS
        found = [*(job.job for job in reply.jobs), *found]
        before = reply.before
        if not before:
            return found


def test_pages_together_are_all_jobs_in_order(shelved: ReplayedLog) -> None:
    assert all_pages(shelved) == [f"j{number}" for number in range(NUM_JOBS)]
    assert all_pages(shelved, is_going=True) == ["j7", "j2999"]
    assert len(all_pages(shelved, has_ended=True)) == NUM_JOBS - len(GOING)


def test_the_first_page_has_the_newest_jobs_as_a_replay_of_all_shows_them(
    shelved: ReplayedLog, tmp_path: Path
) -> None:
    wanted = page(replayed(tmp_path, past()), AskedPage(limit=5, before=""))
    found = page(shelved, AskedPage(limit=5, before=""))
    assert [job.job for job in found.jobs] == ["j2995", "j2996", "j2997", "j2998", "j2999"]
    assert found == wanted
    assert found.before == "j2995"
    assert all(job.spec == "" for job in found.jobs)


def test_a_row_has_priority_and_kind_and_a_reason_cut_short(shelved: ReplayedLog) -> None:
    urgent, newest = (
        codec.JOB_STATUS.decode(job)
        for job in page(shelved, AskedPage(limit=0, before="", is_going=True)).jobs
    )
    assert (urgent.priority, newest.priority, urgent.kind) == (-3, 0, "training")
    ended = page(shelved, AskedPage(limit=1, before="", has_ended=True)).jobs[0]
    assert len(ended.reason) == 500


def test_a_page_before_an_unknown_job_is_refused(shelved: ReplayedLog) -> None:
    with pytest.raises(NotFoundError, match="ask for the newest page"):
        page(shelved, AskedPage(limit=0, before="gone"))


def test_gauges_of_each_second_read_no_job_from_the_shelf(
    shelved: ReplayedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: JobId) -> JobHistory:
        raise AssertionError(f"{job} is read")

    monkeypatch.setattr(shelved.machine.history.jobs, "fetch", refuse)
    view = shelved.machine.view
    relay = Switchboard(is_offered=True)
    shelved.metrics.sample(view, (), relay=relay, num_streams=0, num_unaware=0, lag_s=0.0, now=5000.0)
    text = shelved.metrics.render().decode()
    assert f'skein_jobs{{state="failed"}} {float(NUM_JOBS - len(GOING))}' in text
    assert "skein_queue_jobs 2.0" in text
