"""Why a run stops at a step's boundary, or goes back: its budget is spent, or training has diverged.

Rules of this file
- A batch that spoils its own step is left out by that step, so what makes training diverge are updates that are too
  large: it is tried again with a lower learning rate, on the same samples in the same order.
- All of it follows from the run log. A coordinator that dies in between comes to the same.
"""

from dataclasses import dataclass

from skein.protocol.coordinator_io import Outbox
from skein.protocol.divergence import Doubt
from skein.protocol.history import JobHistory
from skein.protocol.records import Diverged
from skein.protocol.runs.keeping import newest_sound
from skein.types import JobState, Step

MAX_REWINDS = 3
"""Times that a job is tried again; it then learns at an eighth of its learning rate."""
LEARNING_RATE_RATIO = 0.5
"""What is left of the learning rate after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How a run ends here. `evaluates`, `saves`: what is held is evaluated and saved before, if it was not."""

    state: JobState
    reason: str
    evaluates: bool
    saves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Going back to a checkpoint because training has diverged; version 0 is what the seed draws."""

    version: Step
    reason: str


def rewind_of(job: JobHistory) -> Rewind | None:
    """Where a job that has diverged goes back to, if it is one that does and has not done so too often."""
    is_wanted = job.spec.on_divergence == "rewind" and len(job.rewinds) < MAX_REWINDS
    if job.diverged is None or not is_wanted:
        return None
    return Rewind(version=newest_sound(job), reason=told(job, job.diverged))


def told(job: JobHistory, diverged: Diverged) -> str:
    """A divergence in one line: the step is named by the version that it begins with."""
    good = newest_sound(job)
    checkpoint = f"checkpoint {good}" if good else "no checkpoint"
    left = f"last good version {diverged.last_good}, {checkpoint}"
    return f"diverged at step {diverged.step}: {diverged.reason}; {left}"


class Ending:
    """Looks at what is recorded of a job at every boundary between two steps."""

    def __init__(self, job: JobHistory, outbox: Outbox) -> None:
        self._job = job
        self._out = outbox

    def look(self, *, is_evaluated: bool, now: float) -> None:
        """Record that training has diverged, once, if it has; the last version is judged when it is evaluated."""
        job = self._job
        doubt = job.losses.doubt()
        if doubt is None and is_evaluated and job.version >= job.total_steps:
            doubt = job.losses.last_doubt(job.version, job.scores.get(job.version))
        if doubt is not None and job.diverged is None:
            self._record(doubt, now=now)

    def _record(self, doubt: Doubt, *, now: float) -> None:
        job = self._job
        diverged = Diverged(
            job=job.job, step=doubt.step, last_good=doubt.last_good, reason=doubt.reason, wall_s=now
        )
        self._out.record(diverged)
        does = "" if job.spec.on_divergence != "ignore" else "; it goes on, for on_divergence is ignore"
        self._out.log(f"job={job.job} {told(job, diverged)}{does}")

    def due(self) -> Stop | None:
        """How the run ends at the job's version; None if it goes on, perhaps from an older one."""
        job = self._job
        if job.diverged is not None and job.spec.on_divergence != "ignore" and rewind_of(job) is None:
            return Stop(state=JobState.FAILED, reason=self._failure(), evaluates=False, saves=False)
        if job.version >= job.total_steps:
            reason = f"{job.version} steps done"
            return Stop(state=JobState.FINISHED, reason=reason, evaluates=True, saves=True)
        return None

    def _failure(self) -> str:
        assert self._job.diverged is not None
        reason, num_rewinds = told(self._job, self._job.diverged), len(self._job.rewinds)
        return f"{reason}; {num_rewinds} rewinds did not help" if num_rewinds else reason
