"""Checkpoints in the making, strikes, and stories: small things with a memory."""

import pytest

from skein.protocol.coordinator_io import Outbox
from skein.protocol.history import History, JobHistory
from skein.protocol.membership import Membership
from skein.protocol.messages import CheckpointFile
from skein.protocol.reports import CheckpointWritten
from skein.protocol.runs.members import Members
from skein.protocol.runs.savings import Savings
from skein.protocol.runs.strikes import MAX_STRIKES, Strikes
from skein.protocol.story import Story
from skein.types import Generation, JobId, StageIndex, Step, WorkerId
from tests.support.desk import checkpoint
from tests.support.jobs import small_job

W, V = WorkerId("w"), WorkerId("v")


def written(version: int, stage: int, *names: str, generation: int = 1) -> CheckpointWritten:
    files = tuple(CheckpointFile(name=name, num_bytes=1, sha256="", tensors=()) for name in names)
    return CheckpointWritten(
        generation=Generation(generation), version=Step(version), stage=StageIndex(stage), files=files
    )


def savings(*versions: int) -> Savings:
    found = savings_of(job_of())
    for version in versions:
        found.expect(Generation(1), Step(version), (StageIndex(0), StageIndex(1)))
    return found


def savings_of(job: JobHistory) -> Savings:
    outbox = Outbox(History())
    return Savings(job, Members(job, Membership(), outbox), outbox)


def job_of(*, version: int = 0, save_every: int = 4, steps: int = 20, saved: int = 0) -> JobHistory:
    spec = small_job(save_every=save_every, steps=steps)
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"url": "s3://b"})})
    job = JobHistory(job=JobId("j"), key="k", spec=spec, submitted_wall_s=0.0, version=Step(version))
    if saved:
        job.checkpoints.append(checkpoint(job.job, saved))
    return job


def test_a_checkpoint_is_complete_with_its_last_stage() -> None:
    found = savings(4)
    assert found.written(written(4, 1, "b"), wall_s=1.0) is None
    done = found.written(written(4, 0, "a"), wall_s=2.0)
    assert done is not None
    assert (done.job, done.version, done.url, done.wall_s) == ("j", 4, "s3://b", 2.0)
    assert [(s.stage, [f.name for f in s.files]) for s in done.stages] == [(0, ["a"]), (1, ["b"])]


def test_what_was_not_asked_for_or_came_before_is_ignored() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    for report in (written(4, 0), written(4, 7), written(5, 1)):
        assert found.written(report, wall_s=1.0) is None


def test_several_checkpoints_may_be_in_the_making() -> None:
    found = savings(4, 6)
    found.written(written(4, 0), wall_s=1.0)
    found.written(written(6, 0), wall_s=1.0)
    done = found.written(written(6, 1), wall_s=1.0)
    assert done is not None
    assert done.version == 6
    late = found.written(written(4, 1), wall_s=1.0)
    assert late is not None
    assert late.version == 4


def test_no_checkpoint_has_stages_that_two_generations_asked_for() -> None:
    found = savings(4)
    found.written(written(4, 0, "old"), wall_s=1.0)
    found.expect(Generation(2), Step(4), (StageIndex(0), StageIndex(1)))
    assert found.written(written(4, 1, generation=2), wall_s=1.0) is None
    assert found.written(written(4, 0, generation=3), wall_s=1.0) is None
    done = found.written(written(4, 0, "new", generation=2), wall_s=1.0)
    assert done is not None
    assert [file.name for file in done.stages[0].files] == ["new"]


def test_asking_again_forgets_what_was_written_before() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    found.expect(Generation(1), Step(4), (StageIndex(0), StageIndex(1)))
    assert found.written(written(4, 1), wall_s=1.0) is None


def test_what_is_older_than_the_newest_checkpoint_is_of_no_use() -> None:
    found = savings_of(job_of(version=8, saved=6))
    found.expect(Generation(1), Step(4), (StageIndex(0),))
    assert found.written(written(4, 0), wall_s=1.0) is None


def test_a_roll_back_forgets_what_was_being_written() -> None:
    found = savings(4)
    found.written(written(4, 0), wall_s=1.0)
    found.rolled_back()
    assert found.written(written(4, 1), wall_s=1.0) is None


@pytest.mark.parametrize(
    ("job", "is_due"),
    [
        (job_of(version=3), False),
        (job_of(version=4), True),
        (job_of(version=5), True),
        (job_of(version=5, saved=4), False),
        (job_of(version=9, saved=4), True),
        (job_of(version=20), False),
        (job_of(version=4, save_every=0), False),
    ],
)
def test_a_checkpoint_is_due_when_the_newest_is_older_than_it_should_be(
    job: JobHistory, is_due: bool
) -> None:
    assert savings_of(job).is_due() is is_due


def test_what_was_asked_for_is_not_due_until_a_fence() -> None:
    found = savings_of(job_of(version=5))
    found.expect(Generation(1), Step(5), (StageIndex(0),))
    assert not found.is_due()
    found.fenced()
    assert found.is_due()


def test_workers_may_hold_what_no_checkpoint_has() -> None:
    assert savings_of(job_of(version=5, saved=4)).is_behind()
    assert not savings_of(job_of(version=4, saved=4)).is_behind()
    assert not savings_of(job_of()).is_behind()


def strike_often(strikes: Strikes, worker: WorkerId, *hearsay: bool) -> list[bool]:
    return [strikes.strike(worker, "failed", is_hearsay=is_hearsay) for is_hearsay in hearsay]


def test_the_third_strike_excludes() -> None:
    strikes = Strikes()
    assert strike_often(strikes, W, *[False] * MAX_STRIKES) == [False] * (MAX_STRIKES - 1) + [True]
    assert strikes.excluded == {"w": "failed"}


def test_strikes_count_by_worker_and_between_commits() -> None:
    strikes = Strikes()
    strike_often(strikes, W, False, False)
    strike_often(strikes, V, False, False)
    strikes.committed()
    strike_often(strikes, W, False, False)
    assert strikes.excluded == {}


def test_only_hearsay_can_be_pardoned() -> None:
    strikes = Strikes()
    strike_often(strikes, W, True, True, True)
    strike_often(strikes, V, True, False, True)
    assert strikes.may_pardon
    assert strikes.pardon() == (W,)
    assert strikes.excluded == {"v": "failed"}
    assert strikes.pardon() == ()


def test_a_new_process_begins_without_strikes() -> None:
    strikes = Strikes()
    strike_often(strikes, W, False, False, False)
    strikes.forget(W)
    assert strikes.excluded == {}
    assert strike_often(strikes, W, False, False) == [False, False]


def test_a_story_keeps_its_last_lines_of_the_ids_last_touched() -> None:
    story = Story(num_lines=2, num_ids=2)
    for line in ("one", "two", "three"):
        story.tell("a", line, now=1.0)
    story.tell("b", "one", now=2.0)
    assert story.of("a") == ("1.000 two", "1.000 three")
    story.tell("c", "one", now=3.0)
    assert story.of("a") == ()
    assert story.of("b") == ("2.000 one",)
    assert story.of("nobody") == ()
