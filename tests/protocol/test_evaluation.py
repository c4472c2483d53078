"""When a job is evaluated, and when it cannot be."""

from skein.config.job import BatchSpec, EvaluationSpec, JobSpec
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec
from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.steps.evaluation import Evaluation
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.types import JobId, Step
from tests.support.jobs import small_job


def evaluation(spec: JobSpec | None = None) -> tuple[Evaluation, Outbox]:
    outbox = Outbox(History())
    job = JobHistory(job=JobId("j-1"), key="k", spec=spec or small_job(), submitted_wall_s=0.0)
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


def test_rows_are_evaluated_though_their_batch_is_larger_than_all_validation_samples() -> None:
    trial = small_job(stages=1, replicas=1).model_copy(
        update={"evaluation": EvaluationSpec(samples=5), "batch": BatchSpec(samples=8, microbatch_samples=1)}
    )
    array = ArraySpec(
        rows=(ArrayRow(trial=0, optimizer=trial.optimizer, seed=0),), last_step=1, schedule_steps=9
    )
    machine, outbox = evaluation(array_job(trial, array, round_steps=1))
    machine.found(5)
    assert not outbox.drain()
    machine._job.version = Step(1)
    assert machine.is_due()
