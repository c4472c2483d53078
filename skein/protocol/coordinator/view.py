"""View of a Coordinator machine for those who answer clients: all of it to read, nothing of it to change."""

from collections.abc import Mapping
from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.coordinator.quotas import QuotaUses
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.log.history import History, JobHistory
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Link
from skein.types import JobId, JobState, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at the moment: its job, the plan that is in place or was the last, and why it is in its state."""

    job: JobHistory
    plan: Plan | None
    state: JobState
    reason: str
    crew: tuple[WorkerId, ...] = ()
    """Workers that are with it, sorted."""


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
        return JobState.PENDING if run is None else run.state

    def waits_since_s(self, job: JobId) -> float | None:
        """Wall-clock time since which a job waits for workers; None: it does not."""
        known, run = self.history.jobs[job], self.runs.get(job)
        if self.history.state_of(job) is not None or (run is not None and run.crew):
            return None
        return known.last_wall_s

    def reason_of(self, job: JobId) -> str:
        """Reason for the job's state, in one line."""
        known, run = self.history.jobs[job], self.runs.get(job)
        at_rest = known.end or known.held
        if at_rest is not None:
            return at_rest.reason
        if run is None or (job in self.waits and known.halt is None):
            return self.waits.get(job, "waiting")
        if known.halt is not None:
            return f"to be {known.halt.state.value} when it is saved ({known.halt.reason}); {run.reason}"
        return run.reason
