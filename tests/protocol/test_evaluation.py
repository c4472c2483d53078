"""When a job is evaluated, and when it cannot be."""

from skein.config.job import BatchSpec, EvaluationSpec, JobSpec
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.ending import Ending, Stop
from skein.protocol.coordinator.runs.steps.evaluation import Evaluation
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import Evaluated, HaltAsked
from skein.types import JobId, JobState, Step
from tests.support.jobs import small_job
from tests.support.row_choices import RowsBench, array


def evaluation(spec: JobSpec | None = None, *, sweep: JobId | None = None) -> tuple[Evaluation, Outbox]:
    outbox = Outbox(History())
    job = JobHistory(job=JobId("j-1"), key="k", spec=spec or small_job(), submitted_wall_s=0.0, sweep=sweep)
    return Evaluation(Members(job, {}, outbox)), outbox


def test_too_few_validation_samples_are_told_and_never_due() -> None:
    machine, outbox = evaluation()
    machine.found(small_job().batch.microbatch_samples - 1)
    (line,) = [command.line for command in outbox.drain() if isinstance(command, Log)]
    assert "data.validation_ratio" in line
    assert not machine.is_due()


def test_enough_validation_samples_are_no_news() -> None:
    machine, outbox = evaluation()
    machine.found(small_job().batch.microbatch_samples)
    assert not outbox.drain()


def test_trials_are_evaluated_on_all_samples_in_an_array_and_alone() -> None:
    trial = small_job(stages=1, replicas=1).model_copy(
        update={"evaluation": EvaluationSpec(samples=9), "batch": BatchSpec(samples=8, microbatch_samples=2)}
    )
    array = ArraySpec(
        rows=(ArrayRow(trial=0, optimizer=trial.optimizer, seed=0),), last_step=1, schedule_steps=9
    )
    for spec, num_microbatches in ((array_job(trial, array, round_steps=1), 1), (trial, 3)):
        machine, outbox = evaluation(spec, sweep=JobId("j"))
        machine.found(5)
        assert not outbox.drain()
        machine._job.version = Step(1)
        assert machine.is_due(is_last=True)
        assert machine._available() == num_microbatches


def test_what_is_the_last_is_evaluated_whatever_the_period_is() -> None:
    machine, _ = evaluation()
    machine.found(small_job().batch.microbatch_samples)
    machine._job.version = Step(1)
    assert not machine.is_due()
    assert machine.is_due(is_last=True)


def test_of_an_array_that_ends_with_its_round_rows_that_are_through_are_evaluated() -> None:
    bench = RowsBench(array("array 3"))
    last = array("array 3").array.last_step
    ending = Ending(Members(bench.job, {}, bench.outbox))
    bench.round(last - 2, last - 1, 1)
    halt = HaltAsked(job=bench.job.job, state=JobState.FINISHED, reason="others wait", wall_s=1.0)
    bench.outbox.history.apply(halt)
    assert ending.due() == Stop(state=JobState.FINISHED, reason="others wait", saves=True)
    bench.round(last - 1, last, 2)
    assert ending.due() == Stop(state=JobState.FINISHED, reason="others wait", evaluates=True, saves=True)


def test_an_array_that_no_worker_has_waits_for_one_where_a_row_is_through_and_not_evaluated() -> None:
    bench = RowsBench(array("array 3"))
    last = array("array 3").array.last_step
    ending = Ending(Members(bench.job, {}, bench.outbox))
    bench.round(last - 2, last - 1, 1)
    assert [ending.may_end_unbuilt(Step(saved)) for saved in (0, 1)] == [False, True]
    bench.round(last - 1, last, 2)
    assert not ending.may_end_unbuilt(Step(2))
    told = Evaluated(job=bench.job.job, version=Step(2), loss=1.0, num_tokens=1, wall_s=2.0)
    bench.outbox.history.apply(told)
    assert ending.may_end_unbuilt(Step(2))


def test_an_array_ends_once_no_row_of_it_makes_steps_any_more() -> None:
    bench = RowsBench(array("array 3"))
    last = array("array 3").array.last_step
    ending = Ending(Members(bench.job, {}, bench.outbox))
    bench.round(last, last - 1, 1, retired=(2,))
    assert ending.due() is None
    bench.round(last, last - 1, 1, retired=(1, 2))
    stop = ending.due()
    assert isinstance(stop, Stop)
    assert stop.evaluates
