"""When a job is evaluated, and when it cannot be."""

from skein.protocol.coordinator.coordinator_io import Log, Outbox
from skein.protocol.coordinator.runs.steps.evaluation import Evaluation
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.types import JobId
from tests.support.jobs import small_job


def evaluation() -> tuple[Evaluation, Outbox]:
    outbox = Outbox(History())
    job = JobHistory(job=JobId("j-1"), key="k", spec=small_job(), submitted_wall_s=0.0)
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
