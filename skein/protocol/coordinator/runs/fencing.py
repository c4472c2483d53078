"""The way from a new generation to chunks that are being built.

Rules of this file
- Whatever goes wrong opens a new generation: `Fence.open`. There is no second way to recover. A step in progress then
  goes on with what its workers have done of it, if each stage has a holder left; else it begins anew.
- No plan is assigned before every member has acknowledged the generation: that is the fence.
"""

from typing import assert_never

from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import PlanMade
from skein.protocol.coordinator.runs import phase as phases
from skein.protocol.coordinator.runs.checking.inquiry import Again, Cleared, Convicted, Undecided, Verdict
from skein.protocol.coordinator.runs.course import RunCourse
from skein.protocol.coordinator.runs.part import Adoption
from skein.protocol.coordinator.runs.parts import Parts
from skein.protocol.coordinator.runs.placing.resuming import Resumed
from skein.protocol.coordinator.runs.stopping import Stopping
from skein.protocol.log.records import IncidentKind
from skein.protocol.messages.reports import Ack, Suspected, Trouble
from skein.protocol.rounds.round import RoundFailed
from skein.types import WorkerId


class Fence:
    """Opens generations, and puts a plan in place behind the fence."""

    def __init__(self, parts: Parts, course: RunCourse, stopping: Stopping) -> None:
        self._parts = parts
        self._course = course
        self._stopping = stopping

    # --- what goes wrong ---

    def failed(self, kind: IncidentKind, worker: WorkerId | None, reason: str, *, now: float) -> None:
        """Note a failure, at this worker if at any, and begin anew."""
        who = () if worker is None else (worker,)
        self._parts.incidents.noticed(kind, who, reason, now=now)
        self.open(reason, now=now)

    def broke(self, worker: WorkerId, *, now: float) -> None:
        """A worker lost its stream, and with it perhaps what it was told; it has another one."""
        if not self._course.depends_on(worker):
            return
        reason = f"{worker} came back on a new stream"
        if self._has_to_answer(worker):
            reason = f"{reason} without an answer to what it was sent"
            self._parts.blame.missed(worker, reason)
        self.failed(IncidentKind.LINK_FAILED, worker, reason, now=now)

    def _has_to_answer(self, worker: WorkerId) -> bool:
        """Whether a member was sent a generation, or its part of a plan, and has not answered."""
        members = self._parts.members
        is_building = self._course.is_in(phases.BuildPhase)
        if self._course.is_in(phases.FencePhase):
            return worker in members.unacknowledged()
        return is_building and worker in members.placed and worker not in members.ready

    def blame(self, worker: WorkerId, reason: str, *, now: float) -> None:
        """Strike a worker for a failure on it, and try again: without it after too many times."""
        if self._course.is_in(phases.GatherPhase) or worker not in self._parts.members:
            return
        self._parts.blame.strike(worker, reason)
        self.failed(IncidentKind.WORKER_FAILED, worker, f"{worker}: {reason}", now=now)

    def suspected(self, accuser: WorkerId, report: Suspected, *, now: float) -> None:
        """A worker does not reach a peer, or so it says: try again, without one of the two after too many times.

        An accusation that the plan rules out changes nothing for the step, so it opens no generation.
        """
        peer, reason = report.peer, f"{accuser} cannot reach it: {report.reason}"
        if self._course.is_in(phases.GatherPhase):
            return
        is_possible = self._course.may_suspect(accuser, peer)
        going = self._parts.blame.accused(accuser, peer, reason, is_possible=is_possible)
        if is_possible:
            self.failed(IncidentKind.LINK_FAILED, going or peer, f"{peer}: {reason}", now=now)

    def troubled(self, worker: WorkerId, trouble: Trouble, *, now: float) -> None:
        """A worker cannot do its part, for it or the job is unfit, or for what may not happen again."""
        if not (trouble.is_fatal or trouble.is_unfit):
            self.blame(worker, trouble.reason, now=now)
            return
        here = (entry.hello.worker for entry in self._parts.candidates())
        reason = self._parts.blame.judge(worker, trouble, [x for x in here if x != worker])
        if reason is not None:
            self._stopping.fail(reason, now=now)
        else:
            self.failed(IncidentKind.WORKER_FAILED, worker, f"{worker}: {trouble.reason}", now=now)

    def checked(self, verdict: Verdict, *, now: float) -> None:
        """A step was computed again: act on what that shows, and have it computed once more."""
        parts, step = self._parts, self._parts.job.version
        match verdict:
            case Again():
                reason = f"step {step}: {verdict.reason}"
            case Cleared():
                reason = f"step {step} came out the same without the suspects"
            case Convicted():
                reason = f"step {step}: {verdict.worker} is quarantined: {verdict.reason}"
                parts.blame.quarantine(verdict.worker, verdict.reason, now=now)
                parts.incidents.noticed(IncidentKind.WORKER_FAILED, [verdict.worker], reason, now=now)
            case Undecided():
                reason = f"step {step}: {verdict.reason}"
                if verdict.workers:
                    parts.blame.judged(RoundFailed(reason=reason, blamed=verdict.workers, is_disputed=True))
                    parts.incidents.noticed(IncidentKind.WORKER_FAILED, verdict.workers, reason, now=now)
            case _:
                assert_never(verdict)
        self.open(reason, now=now)

    def pardon(self) -> bool:
        """Give another chance to those whom a broken link may have made look bad."""
        if not self._parts.blame.pardon():
            return False
        self._parts.gathering.pardoned()
        return True

    # --- a new generation ---

    def open(self, reason: str, *, waits_for_deaf: bool = False, now: float) -> None:
        """Fence everything older, then plan anew with the workers that are here.

        Args:
            reason: in words.
            waits_for_deaf: whether the generation has workers that did not answer of late, for what they may hold.
            now: seconds.
        """
        parts, phase = self._parts, self._course.phase
        if not parts.num_candidates and not parts.may_save():
            self.give_up_or_wait(reason, now=now)
            return
        self._course.enter(phases.FencePhase(may_go_on=phase.may_go_on or phase.is_computing), reason)
        parts.fenced(now=now)
        parts.members.open_generation(
            reason, without=frozenset() if waits_for_deaf else parts.blame.deaf, now=now
        )
        parts.asking.opened(now=now)

    def change(self, reason: str, *, may_go_on: bool, now: float) -> None:
        """Between steps another plan is wanted, unless the run may go on with the present one."""
        self._course.enter(phases.FencePhase(may_go_on=may_go_on))
        self.open(reason, now=now)

    def give_up_or_wait(self, reason: str, *, now: float) -> None:
        """Wait, pardon workers or fail the job: no worker is here that may be given work."""
        parts = self._parts
        blame, gathering = parts.blame, parts.gathering
        if not parts.live or parts.holders():
            if blame.may_pardon:
                gathering.pardons_later(now=now)
            self._stopping.wait(f"no workers ({reason})")
        elif blame.lacking is not None:
            gathering.failed(may_pardon=True, now=now)
            self._stopping.wait(f"nobody can use {blame.lacking}: {reason}")
        elif self.pardon():
            self.open(reason, now=now)
        else:
            self._stopping.fail(f"no worker can run it; the last reason: {reason}", now=now)

    # --- behind the fence ---

    def acknowledged(self, worker: WorkerId, ack: Ack, *, now: float) -> None:
        """The last acknowledgement closes the fence; what it and the others hold is what a plan starts from."""
        parts = self._parts
        if not self._course.is_in(phases.FencePhase):
            return
        parts.members.acknowledged(worker, ack)
        if not parts.members.is_fenced:
            return
        parts.incidents.closed(now=now)
        resumed = parts.placement.resume(parts.holders(), anew=parts.checks.anew)
        chosen = parts.placement.take_chosen(parts.candidates())
        may_go_on = chosen is None and self._course.phase.may_go_on
        if resumed is not None and (resumed.is_begun or may_go_on):
            self._resume(resumed, now=now)
            return
        ready = chosen or parts.placement.ask(parts.candidates())
        if ready is not None:
            parts.improving.kept(ready)
            self.build(ready, now=now)

    def answered(self, made: PlanMade, *, now: float) -> None:
        """The planner answered what was asked last."""
        parts, plan = self._parts, made.result
        if not self._course.is_in(phases.FencePhase):
            parts.improving.answered(made, now=now)
        elif isinstance(plan, Infeasible) and (verdict := parts.checks.failed()) is not None:
            self.checked(verdict, now=now)
        elif isinstance(plan, Infeasible):
            self._stopping.pause(plan.reason, now=now)
        elif parts.holdings.is_recut(plan) and parts.savings.is_behind():
            self._stopping.save_held("saving, for stages are cut anew", phases.ThenRecut())
        else:
            # A worker that came after the question was asked is none of those that the plan was made for.
            asked_for = [x for x in parts.candidates() if parts.members.is_this(x)]
            parts.improving.chose(plan, asked_for, may_improve=made.may_improve)
            self.build(plan, now=now)

    def _resume(self, resumed: Resumed, *, now: float) -> None:
        parts = self._parts
        self._course.enter(phases.BuildPhase(may_go_on=self._course.phase.may_go_on))
        parts.asking.over()
        plan = parts.placement.go_on(resumed)
        parts.adopted(Adoption(plan=plan, resumed=resumed), now=now)

    def look_again(self, *, now: float) -> None:
        """The time of a plan that is held back, if one is, may have come."""
        phase = self._course.phase
        if isinstance(phase, phases.FencePhase) and phase.held_back is not None:
            self.build(phase.held_back, now=now)

    def build(self, plan: Plan, *, now: float) -> None:
        """Put a plan in place, if nothing has to be asked, found or mended first."""
        parts = self._parts
        if (first := parts.asking.before(plan, now=now)) is not None:
            parts.storage.holds_nothing()
            self._course.explain(first.reason)
            if first.opens_generation:
                self.open(first.reason, waits_for_deaf=True, now=now)
            else:
                self._course.enter(phases.FencePhase(held_back=plan, may_go_on=self._course.phase.may_go_on))
            return
        step_s = parts.measured.step_s or plan.predicted_step_s
        lacking = parts.storage.lacks(parts.holdings.sources(plan), step_s=step_s, now=now)
        if lacking.is_held_back:
            self._course.explain(lacking.reason)
            self._course.enter(phases.FencePhase(held_back=plan, may_go_on=self._course.phase.may_go_on))
        elif lacking.must_wait:
            self._stopping.wait(lacking.reason)
        elif lacking.reason:
            self._stopping.fail(lacking.reason, now=now)
        else:
            self._put(plan, now=now)

    def _put(self, plan: Plan, *, now: float) -> None:
        parts, version = self._parts, self._parts.job.version
        self._course.enter(phases.BuildPhase())
        sources = parts.placement.put(plan, because=parts.asking.outcome, now=now)
        adoption = Adoption(
            plan=plan,
            num_begun=parts.members.num_begun(),
            num_steps_lost=version - parts.job.version,
            is_averaged=bool(sources.averaged),
        )
        parts.adopted(adoption, now=now)
