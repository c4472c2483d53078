"""Status of a sweep and of its trials as clients see them, made of its arrays."""

import json
from dataclasses import replace
from math import fsum

from coordinator.records.journal import Journal
from skein.config.job import ArrayJob
from skein.plan.sweeping.hyperband import steps_of
from skein.plan.sweeping.packing import brackets_of_sweep
from skein.protocol.coordinator.sweeping.deciding import course_of
from skein.protocol.coordinator.sweeping.standing import TrialStand, best_trial
from skein.protocol.coordinator.view import CoordinatorView
from skein.protocol.log.history import JobHistory
from skein.types import JobState, Step
from skein.wire.views import JobStatus, TrialStatus


def sweep_status(view: CoordinatorView, journal: Journal, status: JobStatus) -> JobStatus:
    """Status of a sweep with what its arrays have come to: steps are those of all trials, losses the best trial's."""
    sweep = view.history.jobs[status.job]
    arrays = [view.history.jobs[job] for job in sweep.arrays]
    course = course_of(sweep, view.history)
    stands, brackets = course.stands, brackets_of_sweep(sweep.spec)
    num_steps = sum(map(steps_of, brackets)) or sum(stand.num_steps_wanted for stand in stands)
    best = best_trial(stands, sweep)
    return replace(
        status,
        step=Step(sum(stand.num_steps for stand in stands)),
        total_steps=num_steps,
        loss=None if best is None else best.loss,
        evaluation_loss=None if best is None else best.evaluation_loss,
        num_tokens=sum(array.num_tokens for array in arrays),
        tokens_per_s=fsum(journal.rates(run.job.job).tokens_per_s for run in view.arrays_of(status.job)),
        num_workers=len(view.crew_of(status.job)),
        num_incidents=sum(len(array.incidents) for array in arrays),
        num_steps_lost=sum(x.num_steps_lost for array in arrays for x in array.incidents),
        trials=tuple(
            _trial(view, stand, course.ended.get(stand.trial.number, ""), is_best=stand is best)
            for stand in stands
        ),
    )


def _trial(view: CoordinatorView, stand: TrialStand, ended: str, *, is_best: bool) -> TrialStatus:
    state, reason = _state(view, stand, ended)
    status = TrialStatus(
        trial=stand.trial.number,
        settings=json.dumps(stand.trial.settings),
        state=state,
        reason=reason,
        num_steps=stand.num_steps,
        num_steps_wanted=stand.num_steps_wanted,
        loss=stand.loss,
        evaluation_loss=stand.evaluation_loss,
        is_best=is_best,
    )
    return status if stand.array is None else _in_array(view, stand, stand.array, status)


def _in_array(
    view: CoordinatorView, stand: TrialStand, array: JobHistory, status: TrialStatus
) -> TrialStatus:
    last = array.last_commit if isinstance(array.spec, ArrayJob) else None
    made = None if last is None else last.array
    return replace(
        status,
        workers=view.crew_of(array.job),
        array=array.job,
        row=stand.row,
        checkpoint_version=stand.checkpoint,
        pass_kind=None if made is None else made.pass_kind,
        speedup=None if made is None else made.speedup,
    )


def _state(view: CoordinatorView, stand: TrialStand, ended: str) -> tuple[JobState, str]:
    """State of a trial, and why it is in that; `ended` by a rung, if it was."""
    if stand.failure:
        return JobState.FAILED, stand.failure
    if ended:
        return JobState.FINISHED, ended
    if stand.is_done:
        return JobState.FINISHED, f"{stand.num_steps} steps done"
    array = stand.array
    if array is None or (array.end is not None and array.end.state is JobState.FINISHED):
        return JobState.PENDING, "waits for its turn"
    return view.state_of(array.job), view.reason_of(array.job)
