"""Outcomes of a sweep's trials, beside those that it comes to when nothing happens."""

from collections.abc import Sequence
from dataclasses import dataclass

from skein.protocol.coordinator.sweeping.deciding import course_of
from skein.protocol.coordinator.sweeping.standing import asked_of
from skein.protocol.log.history import History
from skein.sim.judging.invariants import Violated
from skein.types import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """Outcome of a trial: steps that count, losses of the newest round and evaluation, and why it makes no more.

    A trial that no rung can end may be the only one of its array, which is a job with losses of its own; those told of
    one that was retired depend on how long the rows beside it went on: there are none here.
    """

    num_steps: int
    losses: tuple[float | None, ...]
    ended: str


def trial_outcomes(history: History, sweep: JobId) -> tuple[TrialOutcome, ...]:
    """Outcomes of all trials, in the order of their numbers."""
    job = history.jobs[sweep]
    course = course_of(job, history)
    are_rows = asked_of(job).search == "hyperband"
    return tuple(
        TrialOutcome(
            num_steps=stand.num_steps,
            losses=(stand.loss, stand.evaluation_loss) if are_rows and not stand.failure else (),
            ended=course.ended.get(stand.trial.number, stand.failure),
        )
        for stand in course.stands
    )


def check_trials(history: History, sweep: JobId, undisturbed: Sequence[TrialOutcome]) -> None:
    """Trials have made the steps, and ended at the rungs, that they do when nothing happens.

    Raises:
        Violated: one has not.
    """
    for trial, (found, wanted) in enumerate(zip(trial_outcomes(history, sweep), undisturbed, strict=True)):
        if found != wanted:
            raise Violated(f"trial {trial} of {sweep} came to {found}, undisturbed to {wanted}")
