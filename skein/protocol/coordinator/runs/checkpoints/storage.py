"""Checkpoints that cannot be read: who says so, what the coordinator finds, and when it looks again.

Rules of this file
- A worker's word sets no checkpoint aside: the coordinator reads all of it first. A damaged one is set aside, which is
  recorded; of one that is whole, that worker alone gets nothing, and is set aside itself.
- Steps are given up for a checkpoint only once the coordinator has read all of it, and has found each newer one
  damaged. A newer one may be on its way back, so the run waits for it as long as the steps are worth. A place that
  shows no file of any checkpoint may not be mounted: the run waits for that without end.
- No job ends for what storage did. It waits, says what is to be mended, and looks again. What was deleted
  is not put back: a job ends that cannot begin without it.
"""

from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import CheckpointVerified, Outbox, VerifyCheckpoint
from skein.protocol.coordinator.runs.ending import rewind_of
from skein.protocol.coordinator.runs.gathering import Gathering
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.part import RunPart
from skein.protocol.coordinator.runs.placing.giving_up import patience_s
from skein.protocol.coordinator.runs.placing.sources import Sources
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import CheckpointChecked, CheckpointCommitted, IncidentKind
from skein.protocol.messages.directives import SourceKind, StepRecord
from skein.protocol.messages.reports import CheckpointUnread
from skein.types import Condition, Step, WorkerId
from skein.units import counted


def judge_checkpoint(job: JobHistory, event: CheckpointVerified, outbox: Outbox, *, now: float) -> None:
    """Record what was found of a checkpoint, if that is news."""
    version, is_set_aside = event.checkpoint.version, event.checkpoint.version in job.damaged
    is_damaged = event.condition is Condition.DAMAGED
    if event.checkpoint not in job.checkpoints or event.condition is Condition.UNKNOWN:
        return
    if is_damaged != is_set_aside:
        checked = CheckpointChecked(
            job=job.job, version=version, is_whole=not is_damaged, reason=event.reason, wall_s=now
        )
        outbox.record(checked)
        said = f"is damaged and set aside: {event.reason}" if is_damaged else "is whole again"
        outbox.log(f"checkpoint={version} {said}", job=job.job)


def lost_beginning(job: JobHistory, history: History) -> str:
    """Reason why a job cannot begin: the checkpoint of another that it begins with is no more; "" if it can."""
    begins = job.begins
    if begins is None or any(x.version == begins.version for x in history.jobs[begins.job].checkpoints):
        return ""
    return f"checkpoint {begins.version} of {begins.job}, with which it begins, is no more: submit it with another"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of a look: `reason` to plan anew or to end, or to wait if it `must_wait`; "" for nothing."""

    reason: str = ""
    must_wait: bool = False
    is_held_back: bool = False
    """The plan waits for checkpoints that are being read, and the run asks again at `Storage.looks_at`."""


WHOLE_FOR_S, OTHERWISE_FOR_S = 120.0, 4.0
"""Seconds for which a finding counts, on a checkpoint that is whole and on another, which may be mended meanwhile."""
LOOK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Result of reading a checkpoint."""

    condition: Condition
    reason: str
    at_s: float

    def counts(self, *, now: float) -> bool:
        """Whether it still says what is there."""
        age_s = now - self.at_s
        return 0 <= age_s < (WHOLE_FOR_S if self.condition is Condition.WHOLE else OTHERWISE_FOR_S)


class Storage(RunPart):
    """Knowledge of one run about the place where its checkpoints lie, and what it waits for there."""

    def __init__(self, members: Members, blame: Blame, gathering: Gathering) -> None:
        super().__init__(members)
        self._blame = blame
        self._gathering = gathering
        self._is_waiting = False
        self._is_lost = False
        """Whether the run waits for one of the checkpoints that are damaged."""
        self._looks_elsewhere = True
        """A look at another job's checkpoint, with which this one begins, may tell something."""
        self._unread: dict[Step, dict[WorkerId, str]] = {}
        self._asked: set[Step] = set()
        self._seen: dict[Step, _Seen] = {}
        """Newest findings on this run's checkpoints."""
        self._back_since: float | None = None
        """Time since which steps would be given up, if a newer checkpoint were not waited for."""
        self.looks_at: float | None = None
        """Time at which a plan that is held back for checkpoints is looked at again; None: no plan is."""

    @property
    def is_looking(self) -> bool:
        """Whether the coordinator reads a checkpoint for somebody; its driver sees to it that this comes to an end."""
        return any(version in self._asked for version in self._unread)

    def fenced(self, *, now: float) -> None:
        """A new generation: who could not read is asked anew, if at all."""
        self._unread.clear()
        self._is_waiting = self._is_lost = False
        self.looks_at = None

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is made: what was given up before it is given up for good."""
        self._back_since = None

    def unread(self, worker: WorkerId, report: CheckpointUnread, incidents: Incidents, *, now: float) -> str:
        """A worker cannot read a checkpoint; gives a reason to plan anew, or "": the coordinator reads it first."""
        incidents.noticed(IncidentKind.STORAGE_FAILED, (worker,), report.reason, now=now)
        if not report.version:
            self._blame.set_aside({worker: report.reason})
            return f"{worker}: {report.reason}"
        self._unread.setdefault(report.version, {})[worker] = report.reason
        self._look_at([c for c in self._job.checkpoints if c.version == report.version])
        return "" if self.is_looking else f"checkpoint {report.version} is no more"

    def looked(self, event: CheckpointVerified, *, now: float) -> Finding:
        """The coordinator has read a checkpoint, and what it found is recorded."""
        version, condition = event.checkpoint.version, event.condition
        if event.checkpoint.job != self._job.job:
            begins = self._job.begins
            if begins is None or (event.checkpoint.job, version) != (begins.job, begins.version):
                return Finding()  # Of nothing that this job reads.
            self._looks_elsewhere = condition is not Condition.WHOLE
            if self._is_waiting and condition is Condition.WHOLE:
                self._gathering.pardoned()
            return Finding()
        is_known = condition is not Condition.UNKNOWN
        self._asked.discard(version)
        self._seen[version] = _Seen(condition=condition, reason=event.reason, at_s=now)
        is_news = condition is Condition.WHOLE if self._is_lost else is_known
        if self._is_waiting and is_news and self._job.newest_checkpoint is not None:
            self._gathering.pardoned()
        unread = self._unread.pop(version, {})
        if not unread:
            return Finding()
        if condition is Condition.WHOLE:
            self._blame.set_aside(unread)
            reason = f"checkpoint {version} is whole, and {', '.join(sorted(unread))} cannot read it"
            return Finding(reason=reason)
        if not is_known:
            self._wait(now=now)
        said = "is damaged" if is_known else "cannot be read"
        return Finding(reason=f"checkpoint {version} {said}: {event.reason}", must_wait=not is_known)

    # --- waiting ---

    def _before_going_back(self, sources: Sources, step_s: float, *, now: float) -> Finding | None:
        """Finding on checkpoints that have to be read, or waited for, before steps are given up; None: on none."""
        job = self._job
        is_rewind = rewind_of(job) is not None
        in_question = [
            checkpoint
            for checkpoint in job.checkpoints
            if sources.version < checkpoint.version <= job.version and not is_rewind
        ]
        if any(source.kind is SourceKind.CHECKPOINT for source in sources.by_chunk.values()):
            in_question += [x for x in job.checkpoints if x.version == sources.version]
        if sources.version >= job.version or not in_question:
            return None
        unseen = [x for x in in_question if not self._has_seen(x.version, now=now)]
        if unseen:
            self._look_at(unseen)
            return self._hold_back(f"reading checkpoint {_named(unseen)} before steps are given up", now=now)
        for version, seen in ((x.version, self._seen[x.version]) for x in in_question):
            if seen.condition is Condition.UNKNOWN:
                self._wait(now=now)
                return Finding(reason=f"checkpoint {version} cannot be read: {seen.reason}", must_wait=True)
        newer = [x for x in in_question if x.version > sources.version]
        if newer and now < self._waits_until(job.version - sources.version, step_s, now=now):
            cost = counted(job.version - sources.version, "step")
            return self._hold_back(
                f"waiting for checkpoint {_named(newer)}, for going back would cost {cost}", now=now
            )
        return None

    def holds_nothing(self) -> None:
        """Silent workers hold a plan back now, and no checkpoint: a time that was set for one would be in the past."""
        self.looks_at = None

    def _has_seen(self, version: Step, *, now: float) -> bool:
        seen = self._seen.get(version)
        return seen is not None and seen.counts(now=now)

    def _waits_until(self, num_steps: int, step_s: float, *, now: float) -> float:
        """Time from which a damaged checkpoint is not waited for any more; as for a silent worker."""
        self._back_since = now if self._back_since is None else self._back_since
        return self._back_since + patience_s(cost_s=num_steps * step_s, silences_s=())

    def _hold_back(self, reason: str, *, now: float) -> Finding:
        if self.looks_at is None or now >= self.looks_at:
            self.looks_at = now + LOOK_AGAIN_S
        return Finding(reason=reason, is_held_back=True)

    def lacks(self, sources: Sources, *, step_s: float, now: float) -> Finding:
        """Finding on why the run waits or ends instead of taking state from `sources`, if it does.

        Args:
            sources: of the state of a plan's chunks.
            step_s: seconds of a step, by which steps that would be given up are weighed.
            now: seconds.
        """
        job = self._job
        if job.damaged and job.version and not sources.version:
            return Finding(reason=self._lost(now=now), must_wait=True)
        if (found := self._before_going_back(sources, step_s, now=now)) is not None:
            return found
        self.looks_at = None
        begins = job.begins
        is_drawn = any(source.kind is SourceKind.INITIAL for source in sources.by_chunk.values())
        if begins is None or not is_drawn:
            return Finding()
        if lost := lost_beginning(job, self._out.history):
            return Finding(reason=lost)
        damage = self._out.history.jobs[begins.job].damaged.get(begins.version)
        if damage is None:
            return Finding()
        self._wait(now=now)
        which = f"checkpoint {begins.version} of {begins.job}, with which it begins, is damaged"
        reason = f"{which}: put it back, or cancel and submit it with another ({damage})"
        return Finding(reason=reason, must_wait=True)

    def _lost(self, *, now: float) -> str:
        """Every checkpoint that it could go on from is damaged, so the run waits; gives why."""
        self._is_lost = True
        self._wait(now=now)
        job = self._job
        found = "; ".join(
            f"checkpoint {version}: {reason}" for version, reason in sorted(job.damaged.items())
        )
        return f"no worker holds version {job.version}, and no checkpoint is whole: put one back, or cancel ({found})"

    def _wait(self, *, now: float) -> None:
        """Have checkpoints looked at until somebody has mended them, or comes who has what is missing."""
        self._is_waiting = True
        self._gathering.failed(may_pardon=True, now=now)

    def look_again(self, *, now: float) -> None:
        """Read checkpoints again: an awaited one may be mended by now, and one that nobody can read may be damaged."""
        begins, has_own = self._job.begins, bool(self._job.version and self._job.checkpoints)
        # With a version and no checkpoint of its own, a job may have to begin again.
        may_begin = not has_own or (self._is_waiting and not self._is_lost)
        if begins is not None and may_begin and self._looks_elsewhere:
            found = [x for x in self._out.history.jobs[begins.job].checkpoints if x.version == begins.version]
            self._out.do(*(VerifyCheckpoint(checkpoint=checkpoint) for checkpoint in found))
            self._looks_elsewhere = False
        if self._is_waiting:
            job, newest = self._job, self._job.newest_checkpoint
            damaged = [c for c in job.checkpoints if c.version in job.damaged]
            self._look_at(damaged if self._is_lost or newest is None else [newest])
            self._wait(now=now)

    def _look_at(self, checkpoints: list[CheckpointCommitted]) -> None:
        for checkpoint in checkpoints:
            if checkpoint.version not in self._asked:
                self._asked.add(checkpoint.version)
                self._out.do(VerifyCheckpoint(checkpoint=checkpoint))


def _named(checkpoints: list[CheckpointCommitted]) -> str:
    """Versions, ascending, with commas between."""
    return ", ".join(str(version) for version in sorted(x.version for x in checkpoints))
