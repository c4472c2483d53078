"""The Run machine: one attempt to carry the active job forward, from gathering workers to the last checkpoint.

Rules of this file
- What happens comes in here, and goes to whom it concerns: `Parts` keep state, `Fence` opens generations and puts plans
  in place, `Boundary` steps, `Stopping` waits and ends. The phase is in `RunCourse`.
- What belongs to another generation is dropped, unless it is as true under the present one.
"""

from collections.abc import Mapping
from math import inf
from typing import assert_never

from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import (
    CheckpointVerified,
    ManifestWritten,
    PlanMade,
    RowsChosen,
)
from skein.protocol.coordinator.runs import phase as phases
from skein.protocol.coordinator.runs.boundary import Boundary
from skein.protocol.coordinator.runs.course import RunCourse
from skein.protocol.coordinator.runs.ending import Stop
from skein.protocol.coordinator.runs.fencing import Fence
from skein.protocol.coordinator.runs.incidents import OpenIncident
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.stopping import Stopping
from skein.protocol.coordinator.runs.workers.probation import Exclusion
from skein.protocol.deadline import TimePassed
from skein.protocol.membership import membership
from skein.protocol.messages import reports
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.rounds.round import LedgerHeard, SketchHeard
from skein.types import Incarnation, JobState, Step, WorkerId


class Run:
    """The active job."""

    def __init__(self, parts: Parts, *, now: float) -> None:
        self.job = parts.job
        self._parts = parts
        self._course = RunCourse(parts)
        self._stopping = Stopping(parts, self._course)
        self._fence = Fence(parts, self._course, self._stopping)
        self._boundary = Boundary(parts, self._course, self._stopping, self._fence)
        if parts.job.members:
            parts.incidents.restarted(now=now)

    # --- the way in ---

    def met(self, worker: WorkerId) -> None:
        """A worker was here before the run began."""
        self._parts.blame.joined(self._parts.live[worker])
        self._parts.gathering.met(worker)

    def changed(self, change: membership.MembershipChange, *, now: float) -> None:
        """Take in that a worker came, went or wants to go."""
        match change:
            case membership.IncarnationJoined():
                self._joined(change.worker, now=now)
            case membership.Returned():
                self._parts.joining.broke(change.worker)
                self._fence.broke(change.worker, now=now)
            case membership.Lost():
                is_missed = self._course.depends_on(change.worker)
                self._parts.lost(change, is_missed=is_missed, now=now)
                if is_missed:
                    self._fence.open(f"lost {change.worker} ({change.reason})", now=now)
            case membership.IsLeaving():
                if self.may_spare(change.worker):
                    self._parts.members.let_go(change.worker)
            case membership.Rejected():
                pass
            case _:
                assert_never(change)
        self.tick(now=now)

    def may_spare(self, worker: WorkerId) -> bool:
        """Whether nothing here depends on a worker, now or in what is about to be tried."""
        return not self._course.depends_on(worker) and not self._course.is_to_fence()

    def released(self, change: membership.Lost, *, now: float) -> None:
        """A worker that could be spared is with another run from now on."""
        self._parts.lost(change, is_missed=False, now=now)
        self.tick(now=now)

    def _joined(self, worker: WorkerId, *, now: float) -> None:
        parts, entry = self._parts, self._parts.live[worker]
        parts.blame.joined(entry)
        parts.asking.joined(entry, now=now)
        parts.gathering.joined(worker, is_member=parts.members.is_this(entry), now=now)

    def report(self, worker: WorkerId, report: reports.Report, *, now: float) -> None:
        """A worker reported; what belongs to another generation is dropped."""
        parts, entry = self._parts, self._parts.live.get(worker)
        if entry is not None and entry.progressed_at == now:
            parts.vigil.moved(now=now)
        match report:
            case reports.Prefetched() | reports.DataOpened() if report.job != self.job.job:
                pass  # Of a run that the worker has left.
            case reports.Beat():
                parts.vigil.beat(worker, report)
            case reports.Prefetched():
                parts.members.copied(worker, report)
                parts.joining.prefetched(worker, report)
                parts.backups.prefetched(report)
            case reports.DataOpened():
                parts.joining.opened(worker, report)
                if worker not in parts.members.placed:  # who has a place keeps that
                    parts.blame.opened(worker, report)
            case reports.CheckpointWritten() | reports.CheckpointUnwritten():
                parts.vigil.moved(now=now)
                parts.savings.heard(worker, report, now=now)
                self._show_savings()
                self._save_on(now=now)
            case reports.PeersSeen():
                self.tick(now=now)
            case reports.Hello() | reports.LinksMeasured() | reports.SpeedMeasured() | reports.Leaving():
                pass  # Of no run.
            case _ if report.generation != self.job.generation or worker not in parts.members:
                pass  # Of another generation.
            case reports.Ack():
                self._fence.acknowledged(worker, report, now=now)
            case reports.ChunksReady():
                self._boundary.chunks_ready(worker, report, now=now)
            case reports.StageDone():
                parts.members.computed(worker, report.step)
                self._boundary.drive(LedgerHeard(worker=worker, done=report), now=now)
            case reports.Vote():
                parts.members.computed(worker, report.step)
                self._boundary.voted(worker, report, now=now)
            case reports.SketchTaken():
                self._boundary.drive(SketchHeard(worker=worker, taken=report), now=now)
            case reports.EvaluationDone():
                self._boundary.evaluated(worker, report, now=now)
            case CandidatesPicked():
                parts.selecting.picked(worker, report, now=now)
            case reports.TimesMeasured():
                parts.blame.reached(worker, (x.receiver for x in report.transfers if x.sender == worker))
                if self.plan is not None:
                    parts.measured.take(worker, report, self.plan)
            case reports.Suspected():
                self._fence.suspected(worker, report, now=now)
            case reports.CheckpointUnread():
                if reason := parts.storage.unread(worker, report, parts.incidents, now=now):
                    self._fence.open(reason, now=now)
            case reports.Trouble():
                self._fence.troubled(worker, report, now=now)
            case _:
                assert_never(report)

    def planned(self, event: PlanMade, *, now: float) -> None:
        """The planner answered."""
        if self._parts.placement.is_answer(event):
            self._fence.answered(event, now=now)
            self.tick(now=now)

    def chose(self, event: RowsChosen, *, now: float) -> None:
        """Rows were chosen; an answer to what was asked before a generation was opened is dropped."""
        if self._parts.selecting.is_answer(event):
            self._boundary.chose(event, now=now)
            self.tick(now=now)

    def end(self, state: JobState, reason: str, *, now: float) -> None:
        """Record the end and free the workers."""
        self._stopping.stop(Stop(state=state, reason=reason), now=now)

    # --- checkpoints ---

    def verified(self, event: CheckpointVerified, *, now: float) -> None:
        """The coordinator has looked at a checkpoint; what it found is recorded."""
        found = self._parts.storage.looked(event, now=now)
        if found.must_wait and self._course.is_in(phases.BuildPhase):
            self._stopping.wait(found.reason)
        elif found.reason and self._course.is_in(phases.BuildPhase):
            self._fence.open(found.reason, now=now)
        self.tick(now=now)

    def manifest_written(self, event: ManifestWritten, *, now: float) -> None:
        """A checkpoint exists, or could not be completed."""
        self._parts.vigil.moved(now=now)
        self._parts.savings.finished(event, now=now)
        self._show_savings()
        phase = self.phase
        if (
            event.error
            or not isinstance(phase, phases.SavePhase)
            or event.checkpoint.version != self.job.version
        ):
            return
        match phase.then:
            case phases.ThenWait():
                self._stopping.wait(phase.then.reason)
                self.tick(now=now)
            case phases.ThenRecut():
                self._fence.open("saved what another cut of the stages needs", now=now)
            case phases.ThenGoOn():
                self._boundary.go_on(now=now)
            case _:
                assert_never(phase.then)

    def _show_savings(self) -> None:
        if self._course.is_in(phases.SavePhase) and self._parts.savings.waits_for:
            self._course.explain(f"waits to save {self._parts.savings.waits_for}")

    # --- time ---

    def tick(self, *, now: float) -> None:
        """Do what is due."""
        parts, course = self._parts, self._course
        if self._stopping.halted(now=now):
            return
        if course.is_in(phases.GatherPhase):
            self._gather(now=now)
        elif isinstance(self.phase, phases.FencePhase):
            self._fence.look_again(now=now)
        elif isinstance(self.phase, phases.StepPhase) and now >= parts.stepping.grace_ends_at():
            self._boundary.drive(TimePassed(), now=now)
        elif course.is_selecting and now >= parts.selecting.late_at():
            parts.selecting.late()
        elif course.is_watched() and now >= parts.vigil.barks_at(self.plan):
            owing = parts.stepping.owing
            reason = parts.vigil.barked(self.phase, parts.incidents, parts.blame, owing=owing, now=now)
            self._fence.open(reason, now=now)
        else:
            self._save_on(now=now)

    def _save_on(self, *, now: float) -> None:
        """Save again what failed; where the run would only wait then, rather try with workers that came meanwhile."""
        phase, parts = self.phase, self._parts
        if not isinstance(phase, phases.SavePhase):
            return
        would_wait = isinstance(phase.then, phases.ThenWait) and self.job.halt is None
        has_failed = parts.savings.again_at is not None
        if would_wait and has_failed and parts.gathering.has_newcomer and parts.candidates():
            self._fence.open("workers came while it could not be saved", now=now)
        else:
            parts.savings.tick(now=now)

    def _gather(self, *, now: float) -> None:
        if self._parts.gathering.may_pardon(now=now):
            self._parts.storage.look_again(now=now)
            self._fence.pardon()
        if self._course.is_to_fence() and now >= self._course.gathers_at():
            self._fence.open("workers gathered", now=now)

    def pardon(self, *, now: float) -> None:
        """Ask workers again that were left out for what they lack: the job takes something else from here on."""
        self._fence.pardon()
        self.tick(now=now)

    def stuck(self, *, now: float) -> tuple[tuple[WorkerId, str], ...]:
        """Workers that live and get nowhere, to be turned away, each with the reason."""
        return self._parts.vigil.stuck(self.plan, is_fencing=self._course.is_in(phases.FencePhase), now=now)

    def deadline(self) -> float | None:
        """Time at which `tick` is wanted next; None: it is not."""
        parts, course = self._parts, self._course
        if course.is_in(phases.GatherPhase):
            gathers_at = max(course.gathers_at(), parts.asking.deadline() or 0.0)
            is_ending = self.job.halt is not None and not self.job.ends_with_round
            return gathers_at if course.is_to_fence() or is_ending else parts.gathering.pardons_at
        if isinstance(self.phase, phases.FencePhase):
            gives_up_at = parts.vigil.gives_up_at(self.plan)
            if not parts.members.is_fenced:
                return gives_up_at
            is_held_back = self.phase.held_back is not None
            return parts.storage.looks_at or parts.asking.deadline(is_held_back=is_held_back)
        if not course.is_watched():
            return parts.savings.again_at if course.is_in(phases.SavePhase) else None
        late_at = parts.selecting.late_at() if course.is_selecting else inf
        return min(parts.stepping.grace_ends_at(), parts.vigil.barks_at(self.plan), late_at)

    # --- for others to see ---

    def may_await(self, incarnation: Incarnation) -> bool:
        """Whether a process may hold something of the job."""
        known = {**self.job.may_hold, **self._parts.members.keepers}
        return any(member.incarnation == incarnation for member in known)

    @property
    def excluded(self) -> Mapping[WorkerId, str]:
        """Workers that get no more work here for now, each with the reason."""
        return self._parts.blame.excluded

    @property
    def savers(self) -> frozenset[tuple[WorkerId, Step]]:
        """Workers, each with a version of which it is to write files now."""
        return self._parts.savings.savers

    @property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """The same by name, each with the cause."""
        return self._parts.blame.exclusions

    @property
    def open_incident(self) -> OpenIncident | None:
        """The failure that the run is recovering from; None: it is recovering from none."""
        return self._parts.incidents.open

    @property
    def phase(self) -> phases.RunPhase:
        """Phase in which the run is."""
        return self._course.phase

    @property
    def reason(self) -> str:
        """Reason why the run is in its phase."""
        return self._course.reason

    @property
    def has_ended(self) -> bool:
        """Whether the run is over."""
        return self._course.is_in(phases.EndPhase)

    @property
    def plan(self) -> Plan | None:
        """The plan that is in place, or was the last."""
        return self._parts.placement.plan
