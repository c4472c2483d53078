"""View of a Coordinator machine for those who answer clients: all of it to read, nothing of it to change."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from skein.plan.plan import Plan
from skein.protocol.coordinator.quotas import QuotaUses
from skein.protocol.coordinator.runs.incidents import OpenIncident
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.probation import Exclusion
from skein.protocol.coordinator.sweeping.deciding import course_of, progress_words
from skein.protocol.log.history import History, JobHistory
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Link
from skein.types import JobId, JobState, Step, WorkerId
from skein.units import counted

_LIVELIEST = (JobState.RUNNING, JobState.PLANNING, JobState.PAUSED)
"""States of arrays that a sweep is in if one of them is, the first of them that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at the moment: its job, the plan that is in place or was the last, and why it is in its state."""

    job: JobHistory
    plan: Plan | None
    state: JobState
    reason: str
    crew: tuple[WorkerId, ...] = ()
    """Workers that are with it, sorted."""
    savers: frozenset[tuple[WorkerId, Step]] = frozenset()
    """Workers, each with a version of which it is to write files now."""
    exclusions: tuple[Exclusion, ...] = ()
    """Workers that get no more work of it for now, by name."""
    open_incident: OpenIncident | None = None
    """The failure that it is recovering from; None: it is recovering from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorView:
    """A coordinator at the moment: to be read at once, for the next event changes what it shows."""

    history: History
    live: Mapping[WorkerId, Entry]
    links: Mapping[tuple[WorkerId, WorkerId], Link]
    relays: Mapping[tuple[WorkerId, WorkerId], WorkerId]
    """Relay from one worker to another, "" for the coordinator, where one does not dial the other."""
    measured: Mapping[JobId, Measured]
    runs: Mapping[JobId, RunView]
    waits: Mapping[JobId, str]
    """Jobs without workers, where several share them, each with what it waits for."""
    kept_for: Mapping[WorkerId, JobId]
    """Workers on which no job starts but the one named, which has waited for long."""
    quotas: QuotaUses

    def run_of(self, worker: WorkerId) -> RunView | None:
        """The run that a worker is with."""
        return next((run for run in self.runs.values() if worker in run.crew), None)

    def state_of(self, job: JobId) -> JobState:
        """A job's state for users."""
        final, run = self.history.state_of(job), self.runs.get(job)
        if final is not None:
            return final
        if arrays := self.arrays_of(job):
            states = {array.state for array in arrays}
            return next((state for state in _LIVELIEST if state in states), JobState.PENDING)
        return JobState.PENDING if run is None else run.state

    def arrays_of(self, job: JobId) -> tuple[RunView, ...]:
        """Runs of a sweep's arrays, in the order in which they began."""
        return tuple(run for run in self.runs.values() if run.job.sweep == job)

    def crew_of(self, job: JobId) -> tuple[WorkerId, ...]:
        """Workers that are with a job, or with the arrays of a sweep, sorted."""
        runs = [run for run in self.runs.values() if run.job.asked_as == job or run.job.job == job]
        return tuple(sorted(worker for run in runs for worker in run.crew))

    def waits_since_s(self, job: JobId) -> float | None:
        """Wall-clock time since which a job waits for workers; None: it does not."""
        known = self.history.jobs[job]
        if known.is_at_rest or self.crew_of(job):
            return None
        return known.last_wall_s

    def reason_of(self, job: JobId) -> str:
        """Reason for the job's state, in one line."""
        known, run = self.history.jobs[job], self.runs.get(job)
        at_rest = known.end or known.held
        if at_rest is not None:
            return at_rest.reason
        if known.spec.sweep is not None:
            return self._reason_of_sweep(known)
        if run is None or (job in self.waits and known.halt is None):
            return self.waits.get(job, "waiting")
        if known.halt is not None:
            return f"to be {known.halt.state.value} when it is saved ({known.halt.reason}); {run.reason}"
        return run.reason

    def _reason_of_sweep(self, sweep: JobHistory) -> str:
        words = progress_words(course_of(sweep, self.history), sweep)
        arrays = self.arrays_of(sweep.job)
        waiting = [job for job in sweep.arrays if not self.history.jobs[job].is_at_rest]
        if sweep.halt is not None:
            halted = (run for run in arrays if run.job.job in waiting)
            why = "".join(f"; {run.job.job}: {run.reason}" for run in islice(halted, 1))
            return f"to be {sweep.halt.state.value} when its arrays are saved ({sweep.halt.reason}){why}; {words}"
        if stuck := [run for run in arrays if run.crew and run.state is JobState.PAUSED]:
            return f"{words}; {stuck[0].job.job} waits: {stuck[0].reason}"
        if self.crew_of(sweep.job):
            return f"{words}; {counted(len(arrays), 'array')} at work"
        if not sweep.arrays:
            return f"{words}; waiting for workers"
        return f"{words}; {self.reason_of(waiting[0])}" if waiting else words
