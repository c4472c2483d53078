"""Sweeps: which arrays of theirs are to be made, and what becomes of a sweep once all have come to rest.

Rules of this file
- What is to be done follows from the records alone, so a coordinator that starts again goes on where the last was.
- As many arrays are begun as workers are here, and a few more, so that no worker waits for a decision; what is left
  is packed when it is their turn, for the workers of that time.
- A sweep has no run. It ends, or is held, when all its arrays have.
"""

from collections.abc import Mapping, Sequence, Sized

from skein.config.job import JobSpec
from skein.config.sweep.trials import SweepTrial
from skein.plan.sweeping.packing import MOST_ROWS, packed
from skein.protocol.coordinator import lifecycle
from skein.protocol.coordinator.coordinator_io import CancelAsked, Outbox, PauseAsked, ResumeAsked
from skein.protocol.coordinator.quotas import QuotaUses
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.coordinator.sweeping.standing import TrialStand, progress_words, stands_of
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import HaltAsked, JobEnded, JobHeld, JobResumed, JobSubmitted
from skein.types import DEFAULT_NAMESPACE, JobId, JobState

_NUM_AHEAD = 2
"""Arrays that wait, so that a worker whose array has ended finds another."""
_HALTED = (JobState.HELD, JobState.CANCELLED)
"""States that an array comes to with its sweep only."""


class Sweeps:
    """Sweeps of a coordinator. `live` are its workers, `runs` those of all jobs."""

    def __init__(self, live: Sized, runs: Mapping[JobId, Run], outbox: Outbox) -> None:
        self._live = live
        self._runs = runs
        self._out = outbox
        self._seen = (-1, -1)

    def look(self, *, now: float) -> bool:
        """Begin arrays that are due, and end sweeps that are over; whether anything was recorded."""
        history = self._out.history
        num_records = history.num_records
        # At almost every event no job has begun or ended, and nobody came.
        while self._seen != (seen := (history.num_turns, len(self._live))):
            self._seen = seen
            for sweep in history.sweeps():
                self._go_on(sweep, now=now)
        return history.num_records > num_records

    def _go_on(self, sweep: JobHistory, *, now: float) -> None:
        active = self._active(sweep)
        if sweep.halt is not None:
            self._halt(sweep, active, now=now)
            return
        # A coordinator may have died when it had recorded that the sweep goes on, and not of all its arrays.
        if self._resume_arrays(sweep, _HALTED, now=now):
            active = self._active(sweep)
        num_wanted = len(self._live) + _NUM_AHEAD - len(active)
        if active and num_wanted <= 0:
            return
        stands = stands_of(sweep, self._out.history)
        waiting = [stand.trial for stand in stands if stand.array is None]
        if waiting:
            arrays = packed(waiting, most_rows=MOST_ROWS, num_workers=max(1, len(self._live)))
            for trials in arrays[: max(1, num_wanted)]:
                self._begin(sweep, trials, now=now)
        elif not active:
            self._end(sweep, stands, now=now)

    def _active(self, sweep: JobHistory) -> list[JobHistory]:
        """Arrays that have not come to rest."""
        arrays = (self._out.history.jobs[job] for job in sweep.arrays)
        return [array for array in arrays if not array.is_at_rest]

    def _begin(self, sweep: JobHistory, trials: tuple[SweepTrial, ...], *, now: float) -> None:
        job = JobId(f"{sweep.job}-a{len(sweep.arrays) + 1}")
        submitted = JobSubmitted(
            job=job,
            key=job,
            spec=_alone(trials[0].job).canonical_json(),
            wall_s=now,
            namespace="" if sweep.namespace == DEFAULT_NAMESPACE else sweep.namespace,
            sweep=sweep.job,
            trials=tuple(trial.number for trial in trials),
        )
        self._out.record(submitted)
        named = ", ".join(str(trial.number) for trial in trials)
        self._out.log(f"begins {job} with trials {named}", job=sweep.job)

    def _end(self, sweep: JobHistory, stands: tuple[TrialStand, ...], *, now: float) -> None:
        failures = [stand for stand in stands if stand.failure]
        if len(failures) == len(stands):
            first = failures[0]
            reason = f"no trial could be trained; trial {first.trial.number}: {first.failure}"
            state = JobState.FAILED
        else:
            reason, state = progress_words(stands, sweep), JobState.FINISHED
        self._out.record(JobEnded(job=sweep.job, state=state, reason=reason, wall_s=now))
        self._out.log(f"{state.value}: {reason}", job=sweep.job)

    # --- wishes ---

    def wish(
        self,
        sweep: JobHistory,
        event: CancelAsked | PauseAsked | ResumeAsked,
        quotas: QuotaUses,
        *,
        now: float,
    ) -> None:
        """Have all arrays of a sweep end, be held or go on, and then itself."""
        match event:
            case CancelAsked() if sweep.held is not None:
                self._cancel_held(sweep, event.reason or "cancelled while it was held", now=now)
            case CancelAsked() if sweep.end is None:
                reason = event.reason or "cancelled by a client"
                is_news = sweep.halt is None or sweep.halt.state is not JobState.CANCELLED
                if is_news or event.discards:
                    self._ask_to_halt(sweep, JobState.CANCELLED, reason, discards=event.discards, now=now)
            case PauseAsked() if not sweep.is_at_rest and sweep.halt is None:
                reason = event.reason or "paused by a client"
                self._ask_to_halt(sweep, JobState.HELD, reason, discards=False, now=now)
            case ResumeAsked():
                was_at_rest = sweep.is_at_rest or sweep.halt is not None
                lifecycle.resume_asked(sweep, event, quotas, self._out, now=now)
                if was_at_rest and not sweep.is_at_rest and sweep.halt is None:
                    self._resume_arrays(sweep, (*_HALTED, JobState.FAILED), now=now)
            case _:
                pass  # It is so already.

    def _cancel_held(self, sweep: JobHistory, reason: str, *, now: float) -> None:
        for array in (self._out.history.jobs[job] for job in sweep.arrays):
            wish = CancelAsked(job=array.job, reason=reason)
            lifecycle.cancel_asked(array, None, wish, self._out, now=now)
        ended = JobEnded(job=sweep.job, state=JobState.CANCELLED, reason=reason, wall_s=now)
        self._out.record(ended)

    def _ask_to_halt(
        self, sweep: JobHistory, state: JobState, reason: str, *, discards: bool, now: float
    ) -> None:
        self._out.record(HaltAsked(job=sweep.job, state=state, reason=reason, wall_s=now))
        self._out.log(f"is to be {state.value}: {reason}", job=sweep.job)
        if discards:
            for array in self._active(sweep):
                wish = CancelAsked(job=array.job, reason=reason, discards=True)
                lifecycle.cancel_asked(array, self._runs.get(array.job), wish, self._out, now=now)

    def _halt(self, sweep: JobHistory, active: list[JobHistory], *, now: float) -> None:
        """Have every array come to rest, and the sweep once all have."""
        halt = sweep.halt
        assert halt is not None, "asked by the caller"
        is_end = halt.state is JobState.CANCELLED
        for array in active:
            if array.halt is not None and array.halt.state is halt.state:
                continue  # It is being saved.
            run = self._runs.get(array.job)
            if is_end:
                wish = CancelAsked(job=array.job, reason=halt.reason)
                lifecycle.cancel_asked(array, run, wish, self._out, now=now)
            else:
                pause = PauseAsked(job=array.job, reason=halt.reason)
                lifecycle.pause_asked(array, run, pause, self._out, now=now)
        if self._active(sweep):
            return
        if is_end:
            ended = JobEnded(job=sweep.job, state=halt.state, reason=halt.reason, wall_s=now)
            self._out.record(ended)
        else:
            self._out.record(JobHeld(job=sweep.job, reason=halt.reason, wall_s=now))

    def _resume_arrays(self, sweep: JobHistory, states: Sequence[JobState], *, now: float) -> bool:
        """Have arrays go on that are in one of these states, or about to come to rest; whether there were any."""
        history = self._out.history
        arrays = [history.jobs[job] for job in sweep.arrays]
        resumed = [x for x in arrays if x.halt is not None or history.state_of(x.job) in states]
        for array in resumed:
            self._out.record(JobResumed(job=array.job, steps=None, wall_s=now))
        return bool(resumed)


def _alone(trial: JobSpec) -> JobSpec:
    """A trial's job, on one worker."""
    resources = trial.resources.model_copy(update={"min_workers": 1, "max_workers": 1})
    return trial.model_copy(update={"resources": resources})
