"""Course of a sweep under Hyperband, as its records have it."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec, RowOrigin
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.config.sweep.trials import trials_of
from skein.plan.sweeping.hyperband import Advance
from skein.protocol.coordinator.sweeping.deciding import course_of
from skein.protocol.log.history import History
from skein.protocol.log.records import JobEnded, JobResumed, JobSubmitted, StepCommitted
from skein.protocol.messages.array_rounds import ArrayRound, PassKind
from skein.types import JobId, JobState
from tests.support.hands import record as step_record
from tests.support.jobs import small_job
from tests.support.reports import row_numbers

SWEEP = JobId("small-1")
RATES = {"optimizer.learning_rate": ValuesSpec(log_uniform=(0.001, 0.1))}
ASKED = SweepSpec(search="hyperband", space=RATES, num_trials=6, eta=2, least_steps=1)
ALONE = small_job(stages=1, replicas=1, microbatches=2, steps=4)
SPEC = ALONE.model_copy(update={"sweep": ASKED})


def begun() -> History:
    history = History()
    history.apply(JobSubmitted(job=SWEEP, key="k", spec=SPEC.canonical_json(), wall_s=0.0))
    return history


def begin(
    history: History,
    trials: tuple[int, ...],
    last_step: int,
    origins: Mapping[int, RowOrigin] = MappingProxyType({}),
) -> JobId:
    """An array of these trials, from their beginning or from where they were saved after a step."""
    all_trials = trials_of(SPEC)
    rows = tuple(
        ArrayRow(trial=x, optimizer=all_trials[x].job.optimizer, seed=0, origin=origins.get(x))
        for x in trials
    )
    array = ArraySpec(rows=rows, first_step=min(1, len(origins)), last_step=last_step, schedule_steps=4)
    spec = array_job(all_trials[trials[0]].job, array, round_steps=last_step)
    job = JobId(f"{SWEEP}-a{len(history.jobs[SWEEP].arrays) + 1}")
    history.apply(
        JobSubmitted(job=job, key=job, spec=spec.canonical_json(), wall_s=0.0, sweep=SWEEP, trials=trials)
    )
    return job


def end(history: History, job: JobId, losses: Mapping[int, float], num_steps: int) -> None:
    """The array comes to its end in one round, with these losses by trial."""
    rows = tuple(row_numbers(num_steps, loss=loss) for loss in losses.values())
    array = ArrayRound(rows=rows, num_local_steps=num_steps, pass_kind=PassKind.LOOPED, speedup=1.0)
    history.apply(StepCommitted(job=job, record=replace(step_record(), array=array), wall_s=1.0))
    history.apply(JobEnded(job=job, state=JobState.FINISHED, reason="done", wall_s=1.0))


def test_a_rung_that_is_open_again_has_those_after_it_wait() -> None:
    history = begun()
    assert {x.num_steps for x in course_of(history.jobs[SWEEP], history).due} == {1}
    first, lost = begin(history, (0, 1, 2), 1), begin(history, (3, 4, 5), 1)
    end(history, first, {0: 0.1, 1: 0.2, 2: 0.3}, 1)
    history.apply(JobEnded(job=lost, state=JobState.FAILED, reason="no room", wall_s=1.0))
    course = course_of(history.jobs[SWEEP], history)
    assert course.due == tuple(Advance(trial=x, num_steps=2) for x in (0, 1, 2))
    second = begin(history, (0, 1, 2), 2)
    end(history, second, {0: 0.1, 1: 0.2, 2: 0.3}, 2)
    assert course_of(history.jobs[SWEEP], history).due == (Advance(trial=0, num_steps=4),)
    # Somebody has the sweep go on, and with it what had failed.
    history.apply(JobResumed(job=lost, steps=None, wall_s=2.0))
    assert course_of(history.jobs[SWEEP], history).due == ()
    end(history, lost, {3: 0.9, 4: 0.8, 5: 0.01}, 1)
    course = course_of(history.jobs[SWEEP], history)
    assert course.due == (Advance(trial=5, num_steps=2),)
    assert sorted(course.ended) == [2, 3, 4]
