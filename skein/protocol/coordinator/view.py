"""View of a Coordinator machine for those who answer clients: all of it to read, nothing of it to change."""

from collections.abc import Mapping
from dataclasses import dataclass

from skein.plan.plan import Plan
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorView:
    """A coordinator at the moment: to be read at once, for the next event changes what it shows."""

    history: History
    live: Mapping[WorkerId, Entry]
    links: Mapping[tuple[WorkerId, WorkerId], Link]
    measured: Mapping[JobId, Measured]
    runs: Mapping[JobId, RunView]

    @property
    def run(self) -> RunView | None:
        """The run of the job that is active."""
        return next(iter(self.runs.values()), None)

    def state_of(self, job: JobId) -> JobState:
        """A job's state for users."""
        final, run = self.history.state_of(job), self.runs.get(job)
        if final is not None:
            return final
        return JobState.PENDING if run is None else run.state

    def reason_of(self, job: JobId) -> str:
        """Reason for the job's state, in one line."""
        known, run = self.history.jobs[job], self.runs.get(job)
        at_rest = known.end or known.held
        if at_rest is not None:
            return at_rest.reason
        if run is None:
            ahead = [other.job for other in self.history.pending() if other.job != job]
            return f"waiting for {ahead[0]}" if ahead else "waiting"
        if known.halt is not None:
            return f"to be {known.halt.state.value} when it is saved ({known.halt.reason}); {run.reason}"
        return run.reason
