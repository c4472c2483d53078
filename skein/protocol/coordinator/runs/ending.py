"""Reasons for a run to stop at a step's boundary, or go back: a wish, a spent budget, training that has diverged.

Rules of this file
- A batch that spoils its own step is left out by that step, so what makes training diverge are updates that are too
  large: it is tried again with a lower learning rate, on the same samples in the same order.
- All of it follows from the run log. A coordinator that dies in between comes to the same.
"""

from dataclasses import dataclass

from skein.config.job import ArrayJob
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.checkpoints.keeping import newest_sound
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.log.divergence import Doubt
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import Diverged, JobEnded, JobHeld
from skein.protocol.messages.directives import StepRecord
from skein.types import JobState, Step

MAX_REWINDS = 3
"""Times that a job is tried again; it then learns at an eighth of its learning rate."""
LEARNING_RATE_RATIO = 0.5
"""Share of the learning rate that is left after each rewind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End of a run at a boundary. `evaluates`, `saves`: what is held is evaluated and saved before, if it was not."""

    state: JobState
    reason: str
    evaluates: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Going back to a checkpoint because training has diverged; version 0 is what the seed draws."""

    version: Step
    reason: str


def rewind_of(job: JobHistory) -> Rewind | None:
    """Rewind of a job that has diverged, if it is one that goes back and has not done so too often; else None.

    A user who resumes a job that has failed so wants it to go back once more, whatever its job file says.
    """
    is_wanted = job.spec.on_divergence == "rewind" and len(job.rewinds) < MAX_REWINDS
    if job.diverged is None or not (is_wanted or job.may_rewind):
        return None
    return Rewind(version=newest_sound(job), reason=divergence_text(job, job.diverged))


def divergence_text(job: JobHistory, diverged: Diverged) -> str:
    """A divergence in one line: the step is named by the version that it begins with."""
    good = newest_sound(job)
    checkpoint = f"checkpoint {good}" if good else "no checkpoint"
    left = f"last good version {diverged.last_good}, {checkpoint}"
    return f"diverged at step {diverged.step}: {diverged.reason}; {left}"


def _has_no_row_left(job: JobHistory) -> bool:
    """Whether no row of an array makes steps any more."""
    return bool(job.places) and not any(place.is_going for place in job.places)


def _has_row_through(job: JobHistory) -> bool:
    """Whether a row of an array has made all of its steps."""
    return isinstance(job.spec, ArrayJob) and any(x.count >= job.spec.array.last_step for x in job.places)


class Ending(RunPart):
    """Looks at what is recorded of a job at every boundary between two steps."""

    def look(self, *, is_evaluated: bool, now: float) -> None:
        """Record that training has diverged, once, if it has; the last version is judged when it is evaluated."""
        job = self._job
        if job.spec.rows:
            return  # Each row is judged on its own, where it is.
        doubt = job.losses.doubt()
        if doubt is None and is_evaluated and job.version >= job.total_steps:
            doubt = job.losses.last_doubt(job.version, job.scores.get(job.version))
        if doubt is not None and job.diverged is None:
            self._record(doubt, now=now)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: what it cost may show that training has diverged."""
        self.look(is_evaluated=False, now=now)

    def _record(self, doubt: Doubt, *, now: float) -> None:
        job = self._job
        diverged = Diverged(
            job=job.job, step=doubt.step, last_good=doubt.last_good, reason=doubt.reason, wall_s=now
        )
        self._out.record(diverged)
        does = "" if job.spec.on_divergence != "ignore" else "; it goes on, for on_divergence is ignore"
        self._log(f"{divergence_text(job, diverged)}{does}")

    def due(self) -> Stop | Rewind | None:
        """Stop or rewind that comes after the job's version instead of the next step; None if that step does."""
        job = self._job
        if job.halt is not None:
            # Of what has diverged nobody wants the newest, unless the job says so.
            saves = job.diverged is None or job.spec.on_divergence == "ignore"
            # Rows that are through go on nowhere: what they have come to is told here, or never.
            evaluates = job.ends_with_round and _has_row_through(job)
            return Stop(state=job.halt.state, reason=job.halt.reason, evaluates=evaluates, saves=saves)
        rewind = rewind_of(job)
        if rewind is not None:
            return rewind
        if job.diverged is not None and job.spec.on_divergence != "ignore":
            return Stop(state=JobState.FAILED, reason=self._failure())
        if _has_no_row_left(job):
            reason = f"no row makes steps any more after {job.version} rounds"
            return Stop(state=JobState.FINISHED, reason=reason, evaluates=True, saves=True)
        if job.version >= job.total_steps:
            reason = f"{job.version} steps done"
            return Stop(state=JobState.FINISHED, reason=reason, evaluates=True, saves=True)
        return None

    def may_end_unbuilt(self, saved: Step) -> bool:
        """Whether an array that is to end with its round may do so while no worker has it, `saved` being its newest."""
        last = self._job.last_evaluation
        is_told = last is not None and last.version == self._job.version
        return saved >= self._job.version and (is_told or not _has_row_through(self._job))

    def record(self, stop: Stop, *, now: float) -> None:
        """Record that the job is held, or how it has ended."""
        job = self._job.job
        if stop.state is JobState.HELD:
            self._out.record(JobHeld(job=job, reason=stop.reason, wall_s=now))
        else:
            self._out.record(JobEnded(job=job, state=stop.state, reason=stop.reason, wall_s=now))
        self._log(f"{stop.state.value}: {stop.reason}")

    def halted(self, saved: Step, *, may_save: bool, because: str = "") -> Stop | None:
        """Stop of a run that somebody wants to end, if nothing newer than version `saved` is to come; else None.

        Args:
            saved: version of the newest checkpoint.
            may_save: something newer may be saved yet.
            because: what became of workers that may have it.
        """
        halt = self._job.halt
        if halt is None or (may_save and saved < self._job.version):
            return None
        because = because and f"; {because}"
        lost = f"; the steps after {saved} are with no worker that is here{because}"
        reason = f"{halt.reason}{lost if saved < self._job.version else ''}"
        return Stop(state=halt.state, reason=reason)

    def _failure(self) -> str:
        assert self._job.diverged is not None
        reason, num_rewinds = divergence_text(self._job, self._job.diverged), len(self._job.rewinds)
        return f"{reason}; {num_rewinds} rewinds did not help" if num_rewinds else reason
