"""Status of a sweep and of its trials as clients see them, made of its arrays.

Rules of this file
- A status goes into one message, however many trials there are and whatever they set: what is too long for that is told
  by its length.
"""

import json
from dataclasses import replace
from math import fsum

from coordinator.records.journal import Journal
from coordinator.telling.choices import choice_of_row, choice_status
from skein.config.job import ArrayJob
from skein.config.sweep.trials import Settings
from skein.protocol.coordinator.sweeping.deciding import course_of
from skein.protocol.coordinator.sweeping.standing import TrialStand, best_trial
from skein.protocol.coordinator.sweeping.totals import SweepTotals, totals_of
from skein.protocol.coordinator.view import CoordinatorView
from skein.protocol.log.history import JobHistory
from skein.types import JobId, JobState, Step
from skein.wire.views import JobStatus, SavedRow, TrialStatus

_MOST_CHARACTERS = 1 << 20
"""Characters of the settings of all trials together, and four times those of their reasons, which may take four bytes
each: a message has four times as many."""


def sweep_status(view: CoordinatorView, journal: Journal, status: JobStatus) -> JobStatus:
    """Status of a sweep with what its arrays have come to, and with each of its trials."""
    sweep = view.history.jobs[status.job]
    course = course_of(sweep, view.history)
    stands, best = course.stands, best_trial(course.stands, sweep)
    most = _MOST_CHARACTERS // len(stands)
    return replace(
        brief_sweep_status(view, journal, status, totals_of(sweep, stands)),
        trials=tuple(
            _trial(view, stand, course.ended.get(stand.trial.number, ""), most=most, is_best=stand is best)
            for stand in stands
        ),
    )


def brief_sweep_status(
    view: CoordinatorView, journal: Journal, status: JobStatus, totals: SweepTotals
) -> JobStatus:
    """Status of a sweep without its trials: steps are those of all, losses the best one's."""
    arrays = [view.history.jobs[job] for job in view.history.jobs[status.job].arrays]
    return replace(
        status,
        step=totals.step,
        total_steps=totals.total_steps,
        loss=totals.loss,
        evaluation_loss=totals.evaluation_loss,
        num_tokens=sum(array.num_tokens for array in arrays),
        tokens_per_s=fsum(journal.rates(run.job.job).tokens_per_s for run in view.arrays_of(status.job)),
        step_s=_step_s(view, journal, status.job),
        num_workers=len(view.crew_of(status.job)),
    )


def _step_s(view: CoordinatorView, journal: Journal, sweep: JobId) -> float:
    """Seconds in which all arrays of a sweep together make a step of one trial; 0: it is not known yet."""
    pace = 0.0
    for run in view.arrays_of(sweep):
        round_s = journal.rates(run.job.job).step_s
        if round_s > 0:
            pace += _steps_of_round(run.job) / round_s
    return 1 / pace if pace else 0.0


def _steps_of_round(array: JobHistory) -> int:
    """Steps that the trials of an array make between two commits, together."""
    made = None if array.last_commit is None else array.last_commit.array
    if made is None or not isinstance(array.spec, ArrayJob):
        return 1
    return made.num_alive * array.spec.round_steps


def settings_json(settings: Settings, most: int) -> str:
    """JSON object of a trial's settings, of so many characters or hardly more: longer values are told by their length.

    >>> settings_json({"seed": 3, "model.widths": [1] * 40}, 60)
    '{"seed": 3, "model.widths": "(120 characters)"}'
    """
    text = json.dumps(settings)
    if len(text) <= most:
        return text
    told = {key: json.dumps(value) for key, value in settings.items()}
    room = most // len(settings)
    return json.dumps(
        {
            key: settings[key] if len(key) + len(x) <= room else f"({len(x)} characters)"
            for key, x in told.items()
        }
    )


def _trial(view: CoordinatorView, stand: TrialStand, ended: str, *, most: int, is_best: bool) -> TrialStatus:
    state, reason = _state(view, stand, ended)
    status = TrialStatus(
        trial=stand.trial.number,
        settings=settings_json(stand.trial.settings, most),
        state=state,
        reason=reason if len(reason) <= most // 4 else f"{reason[: most // 4]}...",
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
    is_row = isinstance(array.spec, ArrayJob)
    last = array.last_commit if is_row else None
    made = None if last is None else last.array
    return replace(
        status,
        workers=view.crew_of(array.job),
        array=array.job,
        row=stand.row,
        saved=_saved(stand),
        pass_kind=None if made is None else made.pass_kind,
        speedup=None if made is None else made.speedup,
        choice=choice_of_row(array, stand.row) if is_row else choice_status(array),
    )


def _saved(stand: TrialStand) -> SavedRow | None:
    if (origin := stand.origin) is None:
        return None
    return SavedRow(
        array=JobId(origin.job),
        version=Step(origin.version),
        row=origin.row,
        num_steps=stand.num_steps_saved,
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
