"""The Run machine: one attempt to carry the active job forward, from gathering workers to the last checkpoint.

Rules of this file
- Whatever goes wrong opens a new generation: `_bump`. There is no second way to recover. A step in progress then goes
  on with what its workers have done of it, if each stage has a holder left; else it begins anew.
- Nothing is assigned before every member has acknowledged the generation: that is the fence.
- The parameters' version is the log's. A worker at another version holds nothing.
- Nobody is let go, and nothing waits for more workers, while what they hold could be saved and is not.
"""

from typing import assert_never

from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import CheckpointVerified, ManifestWritten, Outbox, PlanMade
from skein.protocol.coordinator.runs.checkpoints.savings import Savings
from skein.protocol.coordinator.runs.checkpoints.storage import Storage
from skein.protocol.coordinator.runs.ending import Ending, Rewind, Stop
from skein.protocol.coordinator.runs.gathering import Gathering
from skein.protocol.coordinator.runs.improving.improving import Improving
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.phase import RunPhase
from skein.protocol.coordinator.runs.placing.asking import Asking
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.placing.planning import num_wanted, one_for_each_print
from skein.protocol.coordinator.runs.placing.resuming import Resumed
from skein.protocol.coordinator.runs.steps.counting import count_data
from skein.protocol.coordinator.runs.steps.evaluation import Evaluation
from skein.protocol.coordinator.runs.steps.leading import Leading
from skein.protocol.coordinator.runs.steps.stepping import Stepping
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.watching.vigil import Vigil
from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.coordinator.runs.workers.misfits import Misfits
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import IncidentKind, StepCommitted
from skein.protocol.membership.absence import Absence
from skein.protocol.membership.membership import (
    Entry,
    IsLeaving,
    Joined,
    Lost,
    Membership,
    MembershipChange,
    Rejected,
    Returned,
)
from skein.protocol.messages.directives import Commit, Start, StepRecord
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointUnread,
    CheckpointUnwritten,
    CheckpointWritten,
    ChunksReady,
    DataOpened,
    EvaluationDone,
    Prefetched,
    StageDone,
    Suspected,
    TimesMeasured,
    Trouble,
    Vote,
)
from skein.protocol.rounds.round import (
    GraceOver,
    LedgerHeard,
    Outvoted,
    Round,
    RoundEvent,
    StepDecided,
    VoteHeard,
)
from skein.topology.fleet import Link
from skein.types import JobState, WorkerId

RunReport = (
    Ack
    | ChunksReady
    | CheckpointUnread
    | StageDone
    | Vote
    | EvaluationDone
    | TimesMeasured
    | Suspected
    | Trouble
)
"""What belongs to one generation."""


class Run:
    """The active job. It reads who is live from `membership` and writes to `outbox`."""

    def __init__(
        self,
        job: JobHistory,
        membership: Membership,
        absence: Absence,
        outbox: Outbox,
        links: dict[tuple[WorkerId, WorkerId], Link],
        measured: Measured,
        *,
        now: float,
    ) -> None:
        self.job = job
        self.phase = RunPhase.GATHERING
        self.reason = "waiting for workers"
        self._num_wanted = num_wanted(job.spec.parallel)
        self._live = membership.live
        self._out = outbox
        self._measured = measured
        self._gathering = Gathering((member.worker for member in job.members), now=now)
        self._members = Members(job, membership, outbox)
        self._blamed = Blame(job, outbox)
        self._strikes = self._blamed.strikes
        self._misfits = Misfits(job, self._blamed)
        self._storage = Storage(job, self._blamed, self._gathering, outbox)
        self._savings = Savings(job, self._members, outbox)
        self._evaluation = Evaluation(job, self._members, outbox)
        self._placement = Placement(job, self._members, self._savings, outbox, links=links, measured=measured)
        self._asking = Asking(job, self._members, absence, self._placement, measured, outbox, now=now)
        self._improving = Improving(job, self._members, self._placement, measured, outbox, links)
        self._revision = self._improving.revision
        self._leading = Leading(job, self._members, outbox)
        self._stepping = Stepping(job, self._placement, self._members, self._leading, outbox)
        self._incidents = Incidents(job, outbox)
        self._ending = Ending(job, outbox)
        self._may_go_on = False
        """The plan was computed with, and nobody wants another."""
        self._paused_for: str | None = None
        """What is being saved is the last thing before the run waits, for this reason."""
        self._is_to_recut = False
        """What is being saved is then read again by stages that are cut otherwise."""
        self._vigil = Vigil(self._members, measured, now=now)
        self._watchdog = self._vigil.watchdog
        if job.members:
            silent_s = max(0.0, now - job.last_wall_s)
            reason = "the coordinator started again"
            self._incidents.noticed(IncidentKind.COORDINATOR_LOST, (), reason, silent_s=silent_s, now=now)

    # --- the way in ---

    def met(self, worker: WorkerId) -> None:
        """A worker was here before the run began."""
        self._blamed.joined(self._live[worker])
        self._gathering.met(worker)

    def changed(self, change: MembershipChange, *, now: float) -> None:
        """Somebody came, went or wants to go."""
        match change:
            case Joined():
                self._blamed.joined(self._live[change.worker])
                self._asking.joined(self._live[change.worker], now=now)
                is_member = self._members.is_this(self._live[change.worker])
                self._gathering.joined(change.worker, is_member=is_member, now=now)
            case Returned():
                if self._depends_on(change.worker):
                    reason = f"{change.worker} came back on a new stream"
                    self._failed(IncidentKind.LINK_FAILED, change.worker, reason, now=now)
            case Lost():
                is_missed = self._depends_on(change.worker)
                self._members.lose(change.worker)
                self._measured.lose(change.worker)
                self._vigil.lose(change.worker)
                self._improving.lost(change.worker, is_missed=is_missed, now=now)
                if is_missed:
                    self._incidents.lost(change, now=now)
                    self._bump(f"lost {change.worker} ({change.reason})", now=now)
            case IsLeaving():
                if not self._depends_on(change.worker) and not self._is_to_fence():
                    self._members.let_go(change.worker)
            case Rejected():
                pass
            case _:
                assert_never(change)
        self.tick(now=now)

    def report(self, worker: WorkerId, report: RunReport, *, now: float) -> None:
        """A worker reported; what belongs to another generation is dropped."""
        if report.generation != self._out.history.generation or worker not in self._members:
            return
        match report:
            case Ack():
                self._acknowledged(worker, report, now=now)
            case ChunksReady():
                self._chunks_ready(worker, report, now=now)
            case StageDone():
                self._drive(LedgerHeard(worker=worker, done=report), now=now)
            case Vote():
                self._voted(worker, report, now=now)
            case EvaluationDone():
                self._evaluation_done(worker, report, now=now)
            case TimesMeasured():
                if self.plan is not None:
                    self._measured.take(worker, report, self.plan)
            case Suspected():
                reason = f"{worker} cannot reach it: {report.reason}"
                self._blame(report.peer, reason, is_hearsay=True, now=now)
            case CheckpointUnread():
                if reason := self._storage.unread(worker, report, self._incidents, now=now):
                    self._bump(reason, now=now)
            case Trouble():
                self._troubled(worker, report, now=now)
            case _:
                assert_never(report)

    def planned(self, event: PlanMade, *, now: float) -> None:
        """The planner answered."""
        if not self._placement.is_answer(event):
            return
        if self.phase is not RunPhase.FENCING:
            self._improving.answered(event, now=now)
        elif isinstance(event.result, Infeasible):
            self._pause(event.result.reason, now=now)
        elif self._placement.is_recut(event.result) and self._savings.is_behind():
            self._save_held("saving, for stages are cut anew")
        else:
            self._revision.adopted(event.result, self._candidates(), may_improve=event.may_improve)
            self._build(event.result, now=now)
        self.tick(now=now)

    def _failed(self, kind: IncidentKind, worker: WorkerId | None, reason: str, *, now: float) -> None:
        self._incidents.noticed(kind, () if worker is None else (worker,), reason, silent_s=0.0, now=now)
        self._bump(reason, now=now)

    # --- checkpoints ---

    def verified(self, event: CheckpointVerified, *, now: float) -> None:
        """The coordinator has looked at a checkpoint; what it found is recorded."""
        found = self._storage.looked(event, now=now)
        if found.must_wait and self.phase is RunPhase.BUILDING:
            self._wait(found.reason)
        elif found.reason and self.phase is RunPhase.BUILDING:
            self._bump(found.reason, now=now)
        self.tick(now=now)

    def saved(self, worker: WorkerId, report: CheckpointWritten | CheckpointUnwritten, *, now: float) -> None:
        """A stage of a checkpoint is durable or could not be written, under whatever generation it was begun."""
        self._watchdog.moved(now=now)
        self._savings.heard(worker, report, now=now)
        self._show_savings()

    def manifest_written(self, event: ManifestWritten, *, now: float) -> None:
        """A checkpoint exists, or could not be completed."""
        self._watchdog.moved(now=now)
        self._savings.finished(event, now=now)
        self._show_savings()
        if event.error or self.phase is not RunPhase.SAVING or event.checkpoint.version != self.job.version:
            return
        if self._paused_for is not None:
            self._wait(self._paused_for)
            self.tick(now=now)
        elif self._is_to_recut:
            self._bump("saved what another cut of the stages needs", now=now)
        else:
            self._go_on(now=now)

    def _show_savings(self) -> None:
        if self.phase is RunPhase.SAVING and self._savings.waits_for:
            self.reason = f"waits to save {self._savings.waits_for}"

    def progressed(self, *, now: float) -> None:
        """Some worker's op ended."""
        self._watchdog.moved(now=now)

    def beat(self, worker: WorkerId, beat: Beat) -> None:
        """A worker lives, and says how long its running op has been at it."""
        self._vigil.beat(worker, beat)

    def prefetched(self, worker: WorkerId, report: Prefetched) -> None:
        """A copy of a stage is whole, or cannot be had."""
        self._improving.prefetched(worker, report)

    def data_opened(self, worker: WorkerId, report: DataOpened, *, now: float) -> None:
        """A worker has the job's data open, or cannot have them."""
        self._improving.opened(worker, report)
        if worker not in self._members.placed:  # who has a place keeps that
            self._misfits.opened(worker, report, now=now)

    # --- time ---

    def tick(self, *, now: float) -> None:
        """Do what is due."""
        if self._halted(now=now):
            return
        if self.phase is RunPhase.GATHERING:
            if self._gathering.may_pardon(now=now):
                self._storage.look_again(now=now)
                self._pardon()
            if self._is_to_fence() and now >= self._gathers_at():
                self._bump("workers gathered", now=now)
        elif self.phase is RunPhase.FENCING and self._asking.held_back is not None:
            self._build(self._asking.held_back, now=now)
        elif self.phase is RunPhase.STEPPING and now >= self._stepping.grace_ends_at():
            self._drive(GraceOver(), now=now)
        elif self._is_watched() and now >= self._watchdog.barks_at(self.plan):
            self._bump(self._vigil.barked(self.phase, self._incidents, self._blamed, now=now), now=now)
        elif self.phase is RunPhase.SAVING:
            self._savings.tick(now=now)

    def _halted(self, *, now: float) -> bool:
        """Whether the run has ended, at somebody's wish, with nothing left that could be saved."""
        is_hopeless = self.phase is RunPhase.GATHERING and now >= self._gathers_at()
        may_save = not is_hopeless or (self._may_save() and not self._gathering.is_hopeless)
        saved = self._savings.newest
        waits = None if may_save or self.job.halt is None else self._asking.before_ending(saved, now=now)
        self.reason = waits or self.reason
        stop = self._ending.halted(saved, may_save=may_save or bool(waits), because=self._asking.outcome)
        if stop is not None and self.phase is not RunPhase.ENDED:
            self._stop(stop, now=now)
        return self.phase is RunPhase.ENDED

    def _is_watched(self) -> bool:
        """Whether something should move by now and then."""
        is_building = self.phase is RunPhase.BUILDING and not self._storage.is_looking
        is_saving = self.phase is RunPhase.SAVING and not self._savings.is_resting
        return self.phase.is_computing or is_building or is_saving

    def stuck(self, *, now: float) -> tuple[tuple[WorkerId, str], ...]:
        """Workers that live and get nowhere, to be turned away, each with the reason."""
        return self._vigil.stuck(self.plan, is_fencing=self.phase is RunPhase.FENCING, now=now)

    def deadline(self) -> float | None:
        """When `tick` is wanted next."""
        if self.phase is RunPhase.GATHERING:
            gathers_at = max(self._gathers_at(), self._asking.deadline() or 0.0)
            return gathers_at if self._is_to_fence() or self.job.halt else self._gathering.pardons_at
        if self.phase is RunPhase.FENCING:
            gives_up_at = self._watchdog.gives_up_at(self.plan)
            return self._asking.deadline() if self._members.is_fenced else gives_up_at
        if not self._is_watched():
            return self._savings.again_at if self.phase is RunPhase.SAVING else None
        return min(self._stepping.grace_ends_at(), self._watchdog.barks_at(self.plan))

    def _gathers_at(self) -> float:
        return self._gathering.ends_at(num_here=len(self._candidates()), num_wanted=self._num_wanted)

    # --- for others to see ---

    def story(self, about: str) -> tuple[str, ...]:
        """The last lines about "generation" or a worker."""
        return self._blamed.story.of(about)

    @property
    def round(self) -> Round | None:
        """The step in progress."""
        return self._stepping.round

    @property
    def plan(self) -> Plan | None:
        """The plan that is in place, or was the last."""
        return self._placement.plan

    # --- who is here, and who is to blame ---

    def _candidates(self) -> list[Entry]:
        """Workers that may be given work, by id."""
        return [entry for entry in self._holders() if not entry.is_leaving]

    def _holders(self) -> list[Entry]:
        """Workers whose part of a step in progress counts, by id: also those that want to go when it is over."""
        return [self._live[w] for w in sorted(self._live) if w not in self._strikes.excluded]

    def _may_save(self) -> bool:
        """Whether workers that get no more work may still hold what no checkpoint has."""
        return bool(self._holders()) and self._savings.is_behind()

    def _is_to_fence(self) -> bool:
        """Whether a generation is to be opened when enough workers are here, to go on or at least to save."""
        if self.phase is not RunPhase.GATHERING or self._gathering.is_hopeless:
            return False
        return bool(self._candidates()) or self._may_save()

    def _depends_on(self, worker: WorkerId) -> bool:
        """Whether the present phase would miss this worker."""
        is_placed = self.phase.is_of_plan and worker in self._members.placed
        return worker in self._members and (self.phase.is_of_all or is_placed)

    def _blame(self, worker: WorkerId, reason: str, *, is_hearsay: bool, now: float) -> None:
        """Something failed on or towards this worker: try again, without it after too many times."""
        if self.phase is RunPhase.GATHERING or worker not in self._members:
            return
        self._blamed.strike(worker, reason, is_hearsay=is_hearsay, now=now)
        kind = IncidentKind.LINK_FAILED if is_hearsay else IncidentKind.WORKER_FAILED
        self._failed(kind, worker, f"{worker}: {reason}", now=now)

    def _troubled(self, worker: WorkerId, trouble: Trouble, *, now: float) -> None:
        """A worker cannot do its part, for it or the job is unfit, or for what may not happen again."""
        if not (trouble.is_fatal or trouble.is_unfit):
            self._blame(worker, trouble.reason, is_hearsay=False, now=now)
            return
        others = [entry.hello.worker for entry in self._candidates() if entry.hello.worker != worker]
        failed = self._misfits.judge(worker, trouble, others, now=now)
        if failed is not None:
            self.end(JobState.FAILED, failed, now=now)
        else:
            self._failed(IncidentKind.WORKER_FAILED, worker, f"{worker}: {trouble.reason}", now=now)

    def _pardon(self) -> bool:
        """Give another chance to those whom a broken link may have made look bad."""
        if not self._blamed.pardon():
            return False
        self._gathering.pardoned()
        return True

    # --- the end, and waiting ---

    def end(self, state: JobState, reason: str, *, now: float) -> None:
        """Record the end and free the workers."""
        self._stop(Stop(state=state, reason=reason), now=now)

    def _stop(self, stop: Stop, *, now: float) -> None:
        self.phase, self.reason = RunPhase.ENDED, stop.reason
        self._ending.record(stop, now=now)
        self._members.free_all()

    def _wait(self, reason: str) -> None:
        self.phase, self._may_go_on = RunPhase.GATHERING, False
        self._stepping.round = None
        # An answer would be about workers who are gone.
        self._placement.awaited = None
        # How long somebody has been silent is counted anew once there is a plan again.
        self._asking.over()
        self._members.let_leaving_go()
        if reason != self.reason:
            self._out.log(f"job={self.job.job} paused: {reason}")
        self.reason = reason

    def _give_up_or_wait(self, reason: str, *, now: float) -> None:
        if not self._live or self._holders():
            if self._strikes.may_pardon:
                self._gathering.pardons_later(now=now)
            self._wait(f"no workers ({reason})")
        elif self._strikes.lacking is not None:
            self._gathering.failed(may_pardon=True, now=now)
            self._wait(f"nobody can use {self._strikes.lacking}: {reason}")
        elif self._pardon():
            self._bump(reason, now=now)
        else:
            self.end(JobState.FAILED, f"no worker can run it; the last reason: {reason}", now=now)

    def _pause(self, reason: str, *, now: float) -> None:
        """No plan exists: save what is held, then wait for more workers."""
        self._gathering.failed(may_pardon=self._strikes.may_pardon, now=now)
        if self._placement.held() is None or not self._savings.is_behind():
            self._wait(reason)
            return
        self._save_held(f"saving, for no plan exists: {reason}")
        self._paused_for = reason

    def _save_held(self, reason: str) -> None:
        """No plan fits what is held as it is: save it, all of it being there."""
        held = self._placement.held()
        assert held is not None
        self.reason = reason
        self._is_to_recut = True
        self._members.placed = dict.fromkeys(held.workers)
        self.phase = RunPhase.SAVING
        self._save(held)

    def _save(self, plan: Plan) -> None:
        """Have the job's version saved; whoever led last is the main walker of the checkpoint."""
        self._savings.ask(plan, main=self._leading.main(plan), is_awaited=self.phase is RunPhase.SAVING)

    # --- a new generation ---

    def _bump(self, reason: str, *, now: float) -> None:
        """Fence everything older, then plan anew with whoever is here."""
        if not self._candidates() and not self._may_save():
            self._give_up_or_wait(reason, now=now)
            return
        self._may_go_on = self._may_go_on or self.phase.is_computing
        self.phase = RunPhase.FENCING
        self.reason = reason
        self._stepping.round = None
        self._paused_for, self._is_to_recut = None, False
        self._watchdog.moved(now=now)
        self._gathering.opened()
        self._savings.fenced()
        self._storage.fenced()
        self._leading.fenced()
        self._stepping.fenced()
        self._improving.fenced(now=now)
        generation = self._members.open_generation(reason, now=now)
        self._asking.opened(now=now)
        self._blamed.story.tell("generation", f"{generation}: {reason}", now=now)

    def _acknowledged(self, worker: WorkerId, ack: Ack, *, now: float) -> None:
        """The last acknowledgement closes the fence; what it and the others hold is what a plan starts from."""
        if self.phase is not RunPhase.FENCING:
            return
        self._members.acknowledged(worker, ack)
        if not self._members.is_fenced:
            return
        self._incidents.fenced(now=now)
        resumed = self._placement.resume(self._holders())
        chosen = self._placement.take_chosen(self._candidates())
        if resumed is not None and (resumed.is_begun or (chosen is None and self._may_go_on)):
            self._resume(resumed, now=now)
            return
        ready = chosen or self._placement.ask(self._candidates())
        if ready is not None:
            self._revision.kept(ready)
            self._build(ready, now=now)

    def _resume(self, resumed: Resumed, *, now: float) -> None:
        self.phase = RunPhase.BUILDING
        self._asking.over()
        self._incidents.resumed(resumed)
        self._placement.go_on(resumed)
        assert self.plan is not None
        self._vigil.planned(self.plan)
        self._revision.resumed(self.plan, now=now)

    def _build(self, plan: Plan, *, now: float) -> None:
        first = self._asking.before(plan, now=now)
        if first is not None:
            self.reason = first.reason
            if first.opens_generation:
                self._bump(first.reason, now=now)
            return
        lacking = self._storage.lacks(self._placement.sources(plan), now=now)
        if lacking.must_wait:
            self._wait(lacking.reason)
            return
        if lacking.reason:
            self.end(JobState.FAILED, lacking.reason, now=now)
            return
        self.phase = RunPhase.BUILDING
        self._may_go_on = False
        version = self.job.version
        self._incidents.planned_anew(num_begun=self._members.num_begun())
        sources = self._placement.put(plan, because=self._asking.outcome, now=now)
        self._vigil.planned(plan)
        self._improving.placed_anew()
        if sources.averaged or self.job.version < version:
            self._improving.rolled_back()
            self._incidents.gave_up(version - self.job.version, is_averaged=bool(sources.averaged))

    def _chunks_ready(self, worker: WorkerId, report: ChunksReady, *, now: float) -> None:
        if self.phase is not RunPhase.BUILDING:
            return
        self._watchdog.moved(now=now)
        if not self._placement.is_built(worker, report):
            return
        if odd := self._placement.odd_readers():
            self._other_data(odd, now=now)
            return
        num_validation_samples, num_train_samples = self._placement.num_samples()
        doubt = count_data(self.job, num_train_samples, self._out, now=now)
        if doubt is not None:
            self.end(JobState.FAILED, doubt, now=now)
            return
        self._evaluation.found(num_validation_samples)
        self._members.free_unplaced()
        self._incidents.over(now=now)
        if self._placement.resumed is not None and self._placement.resumed.is_begun:
            self._start_step(now=now)
        else:
            self._go_on(now=now)

    def _other_data(self, odd: tuple[WorkerId, ...], *, now: float) -> None:
        if self.job.version == 0:
            who = " and ".join(one_for_each_print(self._members.ready))
            self.end(JobState.FAILED, f"{who} read different data: give all workers the same files", now=now)
            return
        reason = f"{' and '.join(odd)} read other data than before: give all workers the same files"
        for worker in odd:
            self._blamed.strike(worker, reason, is_hearsay=False, now=now)
        self._bump(reason, now=now)

    # --- at a version, between steps ---

    def _change_wanted(self, *, now: float) -> str | None:
        """Why another plan is wanted at the next boundary."""
        leaving = [worker for worker in self._members.placed if self._members.is_leaving(worker)]
        if leaving:
            return f"{', '.join(leaving)} leaving"
        if banned := [worker for worker in self._members.placed if worker in self._strikes.excluded]:
            return f"without {', '.join(banned)}: {self._strikes.excluded[banned[0]]}"
        return self._improving.wish

    def _go_on(self, *, now: float) -> None:
        """Everybody is at the log's version and waits: evaluate, save and end, change the plan, or step."""
        self._watchdog.moved(now=now)
        self._ending.look(is_evaluated=not self._evaluation.is_due(), now=now)
        stop, change = self._ending.due(), self._change_wanted(now=now)
        assert self.plan is not None
        if isinstance(stop, Rewind):
            self._failed(IncidentKind.DIVERGED, None, stop.reason, now=now)
        elif self._evaluation.is_due() and (stop is None or stop.evaluates):
            self.phase = RunPhase.EVALUATING
            self._stepping.round = None
            self._evaluation.begin()
        elif stop is not None and not (stop.saves and self._savings.is_behind()):
            self._stop(stop, now=now)
        elif stop is not None or (change is not None and not self._candidates()):
            if self._savings.is_behind():
                self.phase = RunPhase.SAVING
                self._save(self.plan)
            else:
                self._give_up_or_wait(change or "", now=now)
        elif change is not None:
            # Between steps whatever was chosen can be put in place; without that, what is here can go on.
            self._may_go_on = self._improving.wish == change
            self.phase = RunPhase.FENCING
            self._bump(change, now=now)
        else:
            self._start_step(now=now)

    def _start_step(self, *, now: float) -> None:
        """Have everybody begin the next step, or go on with it; walkers that elect leaders are scored first."""
        self._watchdog.moved(now=now)
        if self._is_probe_due() and self.plan is not None:
            self.phase = RunPhase.EVALUATING
            self._stepping.round = None
            self._leading.begin(self.plan)
            return
        if self._savings.is_due(now=now) and self.plan is not None:
            self._save(self.plan)
        self._placement.begun()
        self._begin_step(now=now)
        step, history = self.job.version, self._out.history
        self._members.send_placed(Start(epoch=history.epoch, generation=history.generation, step=step))

    def _evaluation_done(self, worker: WorkerId, report: EvaluationDone, *, now: float) -> None:
        if self.phase is not RunPhase.EVALUATING or self.plan is None:
            return
        if self._evaluation.is_complete(worker, report, now=now):
            self._go_on(now=now)
        elif self._leading.is_complete(worker, report, self.plan):
            self._start_step(now=now)

    def _is_probe_due(self) -> bool:
        return self._leading.is_due(num_validation_samples=self._evaluation.num_validation_samples)

    def _voted(self, worker: WorkerId, vote: Vote, *, now: float) -> None:
        group = None if self.round is None else self.round.group(vote)
        liar = None if group is None else self._leading.doubts(worker, vote, group)
        if liar is None:
            self._drive(VoteHeard(worker=worker, vote=vote), now=now)
        else:
            self._blame(liar, "its parameters are not what it claimed", is_hearsay=False, now=now)

    # --- a step ---

    def _begin_step(self, *, now: float) -> None:
        self.phase = RunPhase.STEPPING
        self._stepping.begin(now=now)
        self._improving.step_begins(self._candidates(), now=now)

    def _drive(self, event: RoundEvent, *, now: float) -> None:
        for end in self._stepping.handle(event, now=now):
            if isinstance(end, StepDecided):
                self._commit(end.record, now=now)
                continue
            self._blamed.judged(end, now=now)
            if isinstance(end, Outvoted):
                continue
            self._incidents.noticed(IncidentKind.WORKER_FAILED, end.blamed, end.reason, silent_s=0.0, now=now)
            self._bump(end.reason, now=now)

    def _commit(self, record: StepRecord, *, now: float) -> None:
        """Phase two: durable first, then announced."""
        self._out.record(StepCommitted(job=self.job.job, record=record, wall_s=now))
        self._placement.resumed = None
        self._blamed.committed(() if self.plan is None else self.plan.groups)
        self._vigil.committed(now=now)
        self._stepping.round = None
        self._ending.look(is_evaluated=False, now=now)
        self._revision.step_ended(now=now)
        is_over = self._evaluation.is_due() or self._is_probe_due() or self._ending.due() is not None
        goes_on = not is_over and self._change_wanted(now=now) is None
        self._improving.committed(record)
        if goes_on:
            self._improving.look(self._candidates(), now=now)
        self._members.send_placed(
            Commit(
                epoch=self._out.history.epoch,
                generation=self._out.history.generation,
                record=record,
                goes_on=goes_on,
                keeps_late=self._stepping.keeps_late,
                position=self._out.position,
            )
        )
        if self._savings.is_due(now=now) and self.plan is not None:
            self._save(self.plan)
        if goes_on:
            self._begin_step(now=now)
        else:
            self._go_on(now=now)
