"""Which checkpoints outlive newer ones: what a job could go back to."""

from dataclasses import replace
from math import nan

import pytest

from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec, RowOrigin
from skein.errors import UserError
from skein.protocol.coordinator.lifecycle import beginning
from skein.protocol.coordinator.runs.checkpoints.keeping import (
    begun_from,
    kept_with,
    newest_good,
    newest_sound,
)
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import (
    CheckpointChecked,
    CheckpointCommitted,
    Evaluated,
    JobSubmitted,
    Record,
    StepCommitted,
)
from skein.protocol.messages.directives import Beginning, Decision
from skein.types import JobId, Step
from tests.protocol.test_history import JOB, history_of
from tests.support.desk import checkpoint
from tests.support.hands import record
from tests.support.jobs import small_job


def steps(*losses: float) -> list[Record]:
    return [
        StepCommitted(
            job=JOB,
            record=replace(
                record(step, decision=Decision.APPLY if loss == loss else Decision.SKIP), loss=loss
            ),
            wall_s=1.0,
        )
        for step, loss in enumerate(losses)
    ]


def evaluated(version: int, loss: float) -> Evaluated:
    return Evaluated(job=JOB, version=Step(version), loss=loss, num_tokens=1, wall_s=1.0)


def saved(version: int, *keeps: int) -> CheckpointCommitted:
    return replace(checkpoint(JobId(JOB), version), keeps=tuple(map(Step, keeps)))


def job_of(*records: Record) -> JobHistory:
    return history_of(*records).jobs[JOB]


def test_the_best_one_is_kept_however_old() -> None:
    scores = [evaluated(1, 2.0), evaluated(2, 1.5), evaluated(3, 1.9), evaluated(4, 1.8)]
    job = job_of(*steps(3.0, 3.0, 3.0, 3.0), *scores, saved(1, 1), saved(2, 1, 2), saved(3, 2, 3))
    assert kept_with(job, Step(4)) == (2, 3, 4)


def test_the_newest_that_was_finite_is_kept_beside_those_that_are_not() -> None:
    scores = [evaluated(1, 2.0), evaluated(2, 2.1), evaluated(3, nan), evaluated(4, nan)]
    job = job_of(*steps(3.0, 3.0, 3.0, nan, nan), *scores, saved(1, 1), saved(2, 1, 2), saved(3, 1, 2, 3))
    assert kept_with(job, Step(4)) == (1, 2, 3, 4)
    assert newest_sound(job) == 2


def test_without_evaluations_the_newest_with_a_good_loss_is_kept() -> None:
    job = job_of(*steps(3.0, 3.0, 3.0, nan, nan, nan), saved(1, 1), saved(2, 1, 2), saved(4, 2, 4))
    assert kept_with(job, Step(5)) == (2, 4, 5)
    assert kept_with(job, Step(6)) == (2, 4, 6)


@pytest.mark.parametrize(
    ("losses", "score", "begins_at"),
    [
        ((3.0, 3.0, 3.0), None, 3),  # as a job ends
        ((3.0, 3.0, 3.0), 2.5, 3),
        ((3.0, 3.0, 3.0), nan, 1),
        ((3.0, 3.0, nan), None, 1),
        ((3.0,) * 16 + (1.0,) * 15, 9.0, 1),  # far above what was learned
    ],
)
def test_another_job_begins_with_the_last_version_if_nothing_speaks_against_it(
    losses: tuple[float, ...], score: float | None, begins_at: int
) -> None:
    last = len(losses)
    scores = [] if score is None else [evaluated(last, score)]
    job = job_of(*steps(*losses), saved(1, 1), *scores, saved(last, 1, last))
    assert newest_good(job) == begins_at


def beginning_with(version: int, *records: Record) -> JobHistory:
    """Another job that begins with a version of the first."""
    submitted = JobSubmitted(
        job=JobId("other-2"),
        key="other",
        spec=small_job().canonical_json(),
        wall_s=1.0,
        begins=Beginning(job=JOB, version=Step(version)),
    )
    return history_of(submitted, *records).jobs[JobId("other-2")]


def test_what_another_job_begins_with_is_kept_until_that_has_a_checkpoint_of_its_own() -> None:
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job(keep=1).canonical_json(), wall_s=1.0)
    job = job_of(submitted, *steps(3.0, 3.0, 3.0, 3.0, 3.0), saved(1, 1), saved(3, 1, 3))
    own = replace(checkpoint(JobId("other-2"), 1), keeps=(Step(1),))
    made = [
        replace(step, job=JobId("other-2")) for step in steps(3.0, 3.0) if isinstance(step, StepCommitted)
    ]
    assert kept_with(job, Step(5), [beginning_with(1)]) == (1, 3, 5)
    assert kept_with(job, Step(5), [beginning_with(1, *made)]) == (1, 3, 5)
    assert kept_with(job, Step(5), [beginning_with(1, *made, own)]) == (3, 5)


def test_what_rows_of_an_array_go_on_from_is_kept_and_not_deleted() -> None:
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job(keep=1).canonical_json(), wall_s=1.0)
    job = job_of(submitted, *steps(3.0, 3.0, 3.0, 3.0, 3.0), saved(1, 1), saved(3, 1, 3))
    trial = small_job(stages=1, replicas=1)
    row = ArrayRow(trial=0, optimizer=trial.optimizer, seed=0, origin=RowOrigin(job=JOB, version=1, row=2))
    array = array_job(trial, ArraySpec(rows=(row,), last_step=4, schedule_steps=4), round_steps=2)
    other = JobSubmitted(job=JobId("other-2"), key="other", spec=array.canonical_json(), wall_s=1.0)
    history = history_of(other)
    assert kept_with(job, Step(5), history.jobs.values()) == (1, 3, 5)
    assert begun_from(JOB, history.jobs.values()) == {1}


def test_a_damaged_one_that_another_job_begins_with_stays_until_somebody_puts_it_back() -> None:
    damaged = CheckpointChecked(job=JOB, version=Step(1), is_whole=False, reason="other bytes", wall_s=1.0)
    before = [*steps(3.0, 3.0, 3.0), saved(1, 1), damaged]
    job = job_of(*before)
    assert kept_with(job, Step(3), [beginning_with(1)]) == (1, 3)
    assert kept_with(job, Step(3)) == (3,)
    kept = job_of(*before, saved(3, 1, 3))
    assert ([x.version for x in kept.whole_checkpoints], kept.damaged) == ([3], {1: "other bytes"})
    assert job_of(*before, saved(3, 3)).damaged == {}


def test_a_damaged_checkpoint_is_none_to_begin_with() -> None:
    damaged = CheckpointChecked(job=JOB, version=Step(1), is_whole=False, reason="other bytes", wall_s=1.0)
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job().canonical_json(), wall_s=1.0)
    job = job_of(submitted, *steps(3.0, 3.0, 3.0), saved(1, 1), saved(2, 1, 2), damaged)
    assert beginning(job, small_job(), None).version == 2
    with pytest.raises(UserError, match=r"from: .*version 1.*: is damaged \(other bytes\)"):
        beginning(job, small_job(), Step(1))


def test_a_checkpoint_says_what_is_kept_with_it() -> None:
    job = job_of(*steps(3.0, 3.0, 3.0, 3.0), saved(1, 1), saved(2, 1, 2), saved(3, 1, 3))
    assert [kept.version for kept in job.checkpoints] == [1, 3]


def test_scores_are_known_of_what_is_kept_and_of_what_may_come() -> None:
    submitted = JobSubmitted(job=JOB, key="k", spec=small_job(keep=1).canonical_json(), wall_s=1.0)
    scores = [evaluated(1, 2.0), evaluated(2, 2.5), evaluated(4, 2.2)]
    job = job_of(submitted, *steps(3.0, 3.0, 3.0, 3.0), *scores, saved(3, 3))
    assert job.scores == {4: 2.2}
