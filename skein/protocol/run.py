"""The Run machine: one attempt to carry the active job forward, from gathering workers to the last checkpoint.

GATHERING (too few workers) -> FENCING (a generation is open; acknowledgements and a plan come in) -> BUILDING (workers
make their chunks present) -> STEPPING <-> EVALUATING -> SAVING (a checkpoint that something waits for) -> ENDED.

Rules of this file
- Whatever goes wrong opens a new generation: `_bump`. There is no second way to recover.
- Nothing is assigned before every member has acknowledged the generation: that is the fence.
- The parameters' version is the log's. A worker at another version holds nothing.
- Nobody is let go, and nothing waits for more workers, while what they hold could be saved and is not.
"""

from enum import StrEnum
from typing import assert_never

from skein.config.schedule import learning_rate
from skein.plan.check import violations
from skein.plan.plan import ChunkPlan, Infeasible, Plan
from skein.protocol.coordinator_io import (
    MakePlan,
    ManifestWritten,
    Outbox,
    PlanMade,
    PruneCheckpoints,
    Send,
    WriteManifest,
)
from skein.protocol.history import JobHistory
from skein.protocol.membership import (
    Entry,
    IsLeaving,
    Joined,
    Lost,
    Membership,
    MembershipChange,
    Rejected,
    Returned,
)
from skein.protocol.messages import (
    Ack,
    CheckpointWritten,
    ChunksReady,
    Commit,
    Directive,
    Dismiss,
    Evaluate,
    EvaluationDone,
    NewGeneration,
    Prepare,
    Save,
    StageDone,
    Start,
    StepRecord,
    Suspected,
    Trouble,
    Vote,
)
from skein.protocol.ops import exact_sum
from skein.protocol.records import (
    Evaluated,
    GenerationMember,
    GenerationOpened,
    JobEnded,
    PlanAdopted,
    RolledBack,
    StepCommitted,
)
from skein.protocol.round import (
    AskReduction,
    LedgerHeard,
    Round,
    RoundCommand,
    RoundFailed,
    StepDecided,
    StepTerms,
    VoteHeard,
)
from skein.protocol.savings import Savings
from skein.protocol.sources import Sources, assignments, choose_sources
from skein.protocol.story import Story
from skein.protocol.strikes import Strikes
from skein.topology.fleet import Fleet, Link, rounded
from skein.types import (
    ChunkRef,
    Epoch,
    Generation,
    JobState,
    Layout,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
)

GATHER_S = 3.0
"""How long to wait for more workers after the last one came, while fewer are here than the job asks for."""
RETURN_S = 10.0
"""How long a restarted coordinator waits for the members that it had."""
STALL_S = 120.0
"""No op has ended anywhere for so long in a running step: something is stuck, and a new generation unsticks it.

Steps that are predicted to take longer have `STALL_STEPS` of their own time. Who does not even acknowledge the new
generation for so long is the stuck one, and is turned away.
"""
STALL_STEPS = 4.0
PARDON_S = 30.0
"""How long who was excluded on the word of peers stays so when without them no plan exists."""

RunReport = Ack | ChunksReady | StageDone | Vote | EvaluationDone | Suspected | Trouble
"""What belongs to one generation."""


class RunPhase(StrEnum):
    """Where a run is."""

    GATHERING = "gathering"
    FENCING = "fencing"
    BUILDING = "building"
    STEPPING = "stepping"
    EVALUATING = "evaluating"
    SAVING = "saving"
    ENDED = "ended"


_COMPUTING = (RunPhase.STEPPING, RunPhase.EVALUATING)


class Run:
    """The active job. It reads who is live from `membership` and writes to `outbox`."""

    def __init__(
        self,
        job: JobHistory,
        membership: Membership,
        outbox: Outbox,
        links: dict[tuple[WorkerId, WorkerId], Link],
        *,
        now: float,
    ) -> None:
        self.job = job
        self.phase = RunPhase.GATHERING
        self.reason = "waiting for workers"
        self.plan: Plan | None = None
        self._placed: dict[WorkerId, None] = {}
        """Workers of the plan, sorted."""
        self._spec_json = job.spec.canonical_json()
        self._membership = membership
        self._out = outbox
        self._links = links
        self._gather_until = now + GATHER_S
        self._return_until = now + RETURN_S
        self._awaited = {member.worker for member in job.members}
        self._is_infeasible = False
        self._has_newcomer = False
        self._paused_for: str | None = None
        """What is being saved is the last thing before the run waits, for this reason."""
        self._request = 0
        self._members: dict[WorkerId, Entry] = {}
        self._acks: dict[WorkerId, Ack] = {}
        self._expected: dict[ChunkRef, tuple[MicrobatchId, ...]] = {}
        self._ready: dict[WorkerId, ChunksReady] = {}
        self._round: Round | None = None
        self._evaluations: dict[tuple[WorkerId, int], EvaluationDone] = {}
        self._num_evaluation = 0
        self._num_validation_samples = 0
        self._saving_version = Step(0)
        self._savings = Savings(job.job, job.spec.checkpoint.url)
        self._strikes = Strikes()
        self._pardon_at: float | None = None
        self._moved_at = now
        self._story = Story()

    # --- the way in ---

    def met(self, worker: WorkerId) -> None:
        """A worker was here before the run began."""
        self._awaited.discard(worker)

    def changed(self, change: MembershipChange, *, now: float) -> None:
        """Somebody came, went or wants to go."""
        match change:
            case Joined():
                self._strikes.forget(change.worker)
                self._awaited.discard(change.worker)
                self._gather_until = now + GATHER_S
                self._is_infeasible = False
                if not self._is_member(change.worker):
                    self._has_newcomer = True
            case Returned():
                if self._depends_on(change.worker):
                    self._bump(f"{change.worker} came back on a new stream", now=now)
            case Lost():
                is_missed = self._depends_on(change.worker)
                self._members.pop(change.worker, None)
                if is_missed:
                    self._bump(f"lost {change.worker} ({change.reason})", now=now)
            case IsLeaving():
                if not self._depends_on(change.worker) and not self._is_to_fence():
                    self._let_go(change.worker)
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
                if self._round is not None:
                    self._drive(self._round.handle(LedgerHeard(worker=worker, done=report), now=now), now=now)
            case Vote():
                if self._round is not None:
                    self._drive(self._round.handle(VoteHeard(worker=worker, vote=report), now=now), now=now)
            case EvaluationDone():
                self._evaluation_done(worker, report, now=now)
            case Suspected():
                reason = f"{worker} cannot reach it: {report.reason}"
                self._blame(report.peer, reason, is_hearsay=True, now=now)
            case Trouble():
                if report.is_fatal:
                    self.end(JobState.FAILED, f"{worker}: {report.reason}", now=now)
                else:
                    self._blame(worker, report.reason, is_hearsay=False, now=now)
            case _:
                assert_never(report)

    def planned(self, event: PlanMade, *, now: float) -> None:
        """The planner answered."""
        if event.request != self._request or self.phase is not RunPhase.FENCING:
            return
        if isinstance(event.result, Infeasible):
            self._pause(event.result.reason, now=now)
        else:
            self._put_into_place(event.result, now=now)
        self.tick(now=now)

    def saved(self, report: CheckpointWritten, *, now: float) -> None:
        """A stage of a checkpoint is durable, under whatever generation it was begun."""
        checkpoint = self._savings.written(report, wall_s=now)
        if checkpoint is not None and checkpoint.version > self._saved_version:
            self._out.commands.append(WriteManifest(checkpoint=checkpoint))

    def manifest_written(self, event: ManifestWritten, *, now: float) -> None:
        """A checkpoint exists, or could not be completed."""
        checkpoint = event.checkpoint
        is_awaited = self.phase is RunPhase.SAVING and checkpoint.version == self.job.version
        if event.error is not None:
            self._out.log(f"job={self.job.job} checkpoint={checkpoint.version} failed: {event.error}")
            if is_awaited:
                self.end(JobState.FAILED, f"the last checkpoint could not be written: {event.error}", now=now)
            return
        if not self._saved_version < checkpoint.version <= self.job.version:
            return
        self._out.record(checkpoint)
        self._out.log(f"job={self.job.job} checkpoint={checkpoint.version}")
        keep = tuple(kept.version for kept in self.job.checkpoints)
        self._out.commands.append(PruneCheckpoints(job=self.job.job, url=checkpoint.url, keep=keep))
        if is_awaited and self._paused_for is not None:
            self._wait(self._paused_for)
            self.tick(now=now)
        elif is_awaited:
            self._go_on(now=now)

    def progressed(self, *, now: float) -> None:
        """Some worker's op ended."""
        self._moved_at = now

    def tick(self, *, now: float) -> None:
        """Do what is due."""
        if self.phase is RunPhase.GATHERING:
            if self._pardon_at is not None and now >= self._pardon_at:
                self._pardon()
            if self._is_to_fence() and now >= self._gathers_at():
                self._bump("workers gathered", now=now)
        elif self.phase in _COMPUTING and now >= self._stalls_at():
            self._bump(f"no op ended for {now - self._moved_at:.0f} s", now=now)

    def stuck(self, *, now: float) -> tuple[WorkerId, ...]:
        """Members that have not acknowledged the generation although nothing moves any more: to be turned away."""
        if self.phase is not RunPhase.FENCING or now < self._stalls_at():
            return ()
        return tuple(worker for worker in self._members if worker not in self._acks)

    def deadline(self) -> float | None:
        """When `tick` is wanted next."""
        if self._is_to_fence():
            return self._gathers_at()
        if self.phase is RunPhase.GATHERING:
            return self._pardon_at
        if self.phase in _COMPUTING or (
            self.phase is RunPhase.FENCING and len(self._acks) < len(self._members)
        ):
            return self._stalls_at()
        return None

    def _stalls_at(self) -> float:
        step_s = 0.0 if self.plan is None else self.plan.predicted_step_s
        return self._moved_at + max(STALL_S, STALL_STEPS * step_s)

    def end(self, state: JobState, reason: str, *, now: float) -> None:
        """Record the end and free the workers."""
        self.phase = RunPhase.ENDED
        self.reason = reason
        self._out.record(JobEnded(job=self.job.job, state=state, reason=reason, wall_s=now))
        self._out.log(f"job={self.job.job} {state.value}: {reason}")
        for entry in self._membership.live.values():
            self._send(entry, Dismiss(epoch=self._epoch, job=self.job.job, may_exit=entry.is_leaving))

    def story(self, about: str) -> tuple[str, ...]:
        """The last lines about "generation" or a worker."""
        return self._story.of(about)

    @property
    def round(self) -> Round | None:
        """The step in progress."""
        return self._round

    # --- who is here ---

    @property
    def _epoch(self) -> Epoch:
        return self._out.history.epoch

    def _candidates(self) -> list[Entry]:
        """Workers that may be given work, by id."""
        live = self._membership.live
        excluded = self._strikes.excluded
        return [live[w] for w in sorted(live) if not live[w].is_leaving and w not in excluded]

    def _is_to_fence(self) -> bool:
        """Whether a generation is to be opened when enough workers are here, to go on or at least to save."""
        if self.phase is not RunPhase.GATHERING or self._is_infeasible:
            return False
        return bool(self._candidates()) or self._may_save()

    def _may_save(self) -> bool:
        """Whether workers that get no more work may still hold what no checkpoint has."""
        is_anybody_here = any(worker not in self._strikes.excluded for worker in self._membership.live)
        return is_anybody_here and self._is_unsaved()

    @property
    def _saved_version(self) -> Step:
        """Of the newest checkpoint; older ones that are completed after it are of no use."""
        newest = self.job.newest_checkpoint
        return Step(0) if newest is None else newest.version

    def _is_unsaved(self) -> bool:
        return self.job.version > self._saved_version

    def _num_wanted(self) -> int:
        return self.job.spec.parallel.stages * self.job.spec.parallel.replicas

    def _gathers_at(self) -> float:
        if self._awaited:
            return self._return_until
        return 0.0 if len(self._candidates()) >= self._num_wanted() else self._gather_until

    def _depends_on(self, worker: WorkerId) -> bool:
        """Whether the present phase would miss this worker."""
        if worker not in self._members:
            return False
        if self.phase in (RunPhase.FENCING, RunPhase.BUILDING):
            return True
        return worker in self._placed and self.phase in (
            RunPhase.STEPPING,
            RunPhase.EVALUATING,
            RunPhase.SAVING,
        )

    def _is_member(self, worker: WorkerId) -> bool:
        """Whether this very process is one of the newest generation."""
        return self._members.get(worker) is self._membership.live[worker]

    def _blame(self, worker: WorkerId, reason: str, *, is_hearsay: bool, now: float) -> None:
        """Something failed on or towards this worker: try again, without it after too many times."""
        if self.phase is RunPhase.GATHERING or worker not in self._members:
            return
        self._strike(worker, reason, is_hearsay=is_hearsay, now=now)
        self._bump(f"{worker}: {reason}", now=now)

    def _strike(self, worker: WorkerId, reason: str, *, is_hearsay: bool, now: float) -> None:
        self._story.tell(worker, reason, now=now)
        if self._strikes.strike(worker, reason, is_hearsay=is_hearsay):
            self._out.log(f"job={self.job.job} excluded={worker}: {reason}")

    def _let_go(self, worker: WorkerId) -> None:
        entry = self._membership.live.get(worker)
        if entry is not None:
            self._send(entry, Dismiss(epoch=self._epoch, job=self.job.job, may_exit=True))

    def _send(self, entry: Entry, directive: Directive) -> None:
        hello = entry.hello
        self._out.commands.append(
            Send(worker=hello.worker, incarnation=hello.incarnation, directive=directive)
        )

    def _send_placed(self, directive: Directive) -> None:
        """To every worker of the plan."""
        for worker in self._placed:
            self._send(self._members[worker], directive)

    # --- a new generation ---

    def _wait(self, reason: str) -> None:
        self.phase = RunPhase.GATHERING
        self._round = None
        for worker, entry in self._membership.live.items():
            if entry.is_leaving:
                self._let_go(worker)
        if reason != self.reason:
            self._out.log(f"job={self.job.job} paused: {reason}")
        self.reason = reason

    def _bump(self, reason: str, *, now: float) -> None:
        """Fence everything older, then plan anew with whoever is here."""
        if not self._candidates() and not self._may_save():
            self._give_up_or_wait(reason, now=now)
            return
        self._members = dict(sorted(self._membership.live.items()))
        self._awaited.clear()
        self._moved_at = now
        self._acks.clear()
        self._ready.clear()
        self._evaluations.clear()
        self._round = self._paused_for = self._pardon_at = None
        self._saving_version = Step(0)
        self._request += 1  # a plan that is still being made is for other members
        self._has_newcomer = False
        self.phase = RunPhase.FENCING
        self.reason = reason
        history = self._out.history
        members = tuple(e.member for e in self._members.values())
        opened = GenerationOpened(
            job=self.job.job,
            generation=Generation(history.generation + 1),
            members=tuple(GenerationMember(worker=m.worker, incarnation=m.incarnation) for m in members),
            reason=reason,
            wall_s=now,
        )
        self._out.record(opened)
        self._out.log(f"job={self.job.job} generation={opened.generation} members={len(members)}: {reason}")
        self._story.tell("generation", f"{opened.generation}: {reason}", now=now)
        fence = NewGeneration(
            epoch=history.epoch,
            generation=opened.generation,
            job=self.job.job,
            members=members,
            last_commit=self.job.last_commit,
        )
        for entry in self._members.values():
            self._send(entry, fence)

    def _give_up_or_wait(self, reason: str, *, now: float) -> None:
        live = self._membership.live
        if live and all(worker in self._strikes.excluded for worker in live):
            if self._pardon():
                self._bump(reason, now=now)
                return
            self.end(JobState.FAILED, f"no worker can run it; the last reason: {reason}", now=now)
            return
        self._wait(f"no workers ({reason})")

    def _pardon(self) -> bool:
        """Give another chance to those whom a broken link may have made look bad."""
        self._pardon_at = None
        pardoned = self._strikes.pardon()
        for worker in pardoned:
            self._out.log(f"job={self.job.job} pardoned={worker}")
        self._is_infeasible = self._is_infeasible and not pardoned
        return bool(pardoned)

    def _pause(self, reason: str, *, now: float) -> None:
        """No plan exists: save what is held, then wait for more workers."""
        self._is_infeasible = not self._has_newcomer
        self._pardon_at = now + PARDON_S if self._strikes.may_pardon else None
        held = self._plan_held()
        if held is None or not self._is_unsaved():
            self._wait(reason)
            return
        self.phase = RunPhase.SAVING
        self.reason = f"saving, for no plan exists: {reason}"
        self._paused_for = reason
        self._placed = dict.fromkeys(held.workers)
        self._save(held)

    def _acknowledged(self, worker: WorkerId, ack: Ack, *, now: float) -> None:
        """The last acknowledgement closes the fence; what it and the others hold is what a plan starts from."""
        if self.phase is not RunPhase.FENCING:
            return
        self._acks[worker] = ack
        if len(self._acks) == len(self._members):
            self._ask_for_plan(now=now)

    def _ask_for_plan(self, *, now: float) -> None:
        self._request += 1
        candidates = [e for e in self._candidates() if self._members.get(e.hello.worker) is e]
        known = {entry.hello.worker for entry in candidates}
        links = tuple(self._links[k] for k in sorted(self._links) if k[0] in known and k[1] in known)
        fleet = rounded(Fleet(workers=tuple(entry.fleet_worker for entry in candidates), links=links))
        if (recorded := self._plan_again(fleet)) is not None:
            self._put_into_place(recorded, now=now)
            return
        previous = self._plan_held() or self.plan
        self._out.commands.append(
            MakePlan(request=self._request, job=self.job.spec, fleet=fleet, previous=previous)
        )

    def _plan_again(self, fleet: Fleet) -> Plan | None:
        """The recorded plan, if it is complete, all its workers are here and none could be added.

        Then nothing has changed but processes, and with equal sums in equal order the curve goes on unchanged.
        """
        plan = None if self.job.plan is None else self.job.plan.plan
        if plan is None or len(plan.workers) < min(self._num_wanted(), len(fleet.workers)):
            return None
        return None if violations(plan, self.job.spec, fleet) else plan

    def _plan_held(self) -> Plan | None:
        """What members hold at the log's version, as a plan without paths; None if a stage is missing."""
        spec, version = self.job.spec, self.job.version
        held = {(c.stage, w) for w, ack in self._acks.items() for c in ack.chunks if c.version == version}
        stages = tuple(sorted({stage for stage, _ in held}, key=lambda stage: stage.index))
        num_stages = spec.parallel.stages + (spec.parallel.layout is Layout.LOOP)
        if [stage.index for stage in stages] != list(range(num_stages)):
            return None
        chunks = sorted(ChunkRef(stage=stage.index, worker=worker) for stage, worker in held)
        return Plan(
            layout=spec.parallel.layout,
            stages=stages,
            chunks=tuple(ChunkPlan(chunk=chunk, slots=1) for chunk in chunks),
            paths=(),
            groups=(),
            predicted_step_s=0.0,
            lower_bound_s=0.0,
            reason="held",
        )

    def _put_into_place(self, plan: Plan, *, now: float) -> None:
        self.phase = RunPhase.BUILDING
        self.plan = plan
        self._placed = dict.fromkeys(plan.workers)
        self._expected = plan.microbatches_by_chunk()
        history = self._out.history
        sources = choose_sources(
            plan, self._acks, version=self.job.version, checkpoint=self.job.newest_checkpoint
        )
        self._roll_back_to(sources, now=now)
        self._out.record(PlanAdopted(job=self.job.job, generation=history.generation, plan=plan))
        self._out.log(f"job={self.job.job} generation={history.generation} plan: {plan.reason}")
        told = assignments(
            plan,
            sources,
            epoch=history.epoch,
            generation=history.generation,
            job=self.job.job,
            job_spec=self._spec_json,
            microbatches=self._expected,
        )
        for worker, assign in sorted(told.items()):
            self._send(self._members[worker], assign)

    def _roll_back_to(self, sources: Sources, *, now: float) -> None:
        version = self.job.version
        if sources.version == version:
            return
        self._savings = Savings(self.job.job, self.job.spec.checkpoint.url)
        stages = ", ".join(str(stage.index) for stage in sources.unheld)
        reason = f"no worker holds stage {stages} at version {version}"
        self._out.record(
            RolledBack(
                job=self.job.job,
                from_version=version,
                to_version=sources.version,
                reason=reason,
                wall_s=now,
            )
        )
        self._out.log(f"job={self.job.job} rolled back from={version} to={sources.version}: {reason}")

    def _chunks_ready(self, worker: WorkerId, report: ChunksReady, *, now: float) -> None:
        if self.phase is not RunPhase.BUILDING or worker not in self._placed:
            return
        assert self.plan is not None
        self._ready[worker] = report
        if len(self._ready) < len(self._placed):
            return
        origins = {path.hops[0].worker for path in self.plan.paths}
        prints = {self._ready[origin].data_fingerprint: origin for origin in sorted(origins)}
        if len(prints) > 1:
            who = " and ".join(sorted(prints.values()))
            self.end(JobState.FAILED, f"{who} read different data: give all workers the same files", now=now)
            return
        self._num_validation_samples = min(self._ready[o].num_validation_samples for o in origins)
        for worker_id, entry in self._members.items():
            if worker_id not in self._placed:
                self._send(entry, Dismiss(epoch=self._epoch, job=self.job.job, may_exit=entry.is_leaving))
        self._go_on(now=now)

    # --- at a version, between steps ---

    def _change_wanted(self) -> str | None:
        """Why another plan is wanted at the next boundary."""
        leaving = [w for w in self._placed if self._members[w].is_leaving]
        if leaving:
            return f"{', '.join(leaving)} leaving"
        is_short = len(self._placed) < self._num_wanted()
        return "newcomers" if self._has_newcomer and is_short else None

    def _go_on(self, *, now: float) -> None:
        """Everybody is at the log's version and waits: evaluate, save and end, change the plan, or step."""
        version = self.job.version
        is_last = version >= self.job.spec.budget.steps
        self._moved_at = now
        change = self._change_wanted()
        if self._evaluation_due():
            self._evaluate()
        elif is_last or (change is not None and not self._candidates()):
            if self._is_unsaved():
                self.phase = RunPhase.SAVING
                self._save(self.plan)
            elif is_last:
                self.end(JobState.FINISHED, f"{version} steps done", now=now)
            else:
                self._give_up_or_wait(change or "", now=now)
        elif change is not None:
            self._bump(change, now=now)
        else:
            if self._save_due():
                self._save(self.plan)
            self._begin_step()
            start = Start(epoch=self._epoch, generation=self._out.history.generation, step=version)
            self._send_placed(start)

    def _save(self, plan: Plan | None) -> None:
        """Ask one holder of each stage to save it; the first holder in plan order that stays."""
        assert plan is not None
        self._saving_version = self.job.version
        history = self._out.history
        stages_by_worker: dict[WorkerId, list[StageIndex]] = {}
        for stage in plan.stages:
            holders = plan.holders(stage.index)
            holder = min(
                holders, key=lambda w: (self._members[w].is_leaving, len(stages_by_worker.get(w, ())))
            )
            stages_by_worker.setdefault(holder, []).append(stage.index)
        self._savings.begin(self.job.version, tuple(stage.index for stage in plan.stages))
        for worker, stages in sorted(stages_by_worker.items()):
            save = Save(
                epoch=history.epoch,
                generation=history.generation,
                version=self.job.version,
                stages=tuple(stages),
                url=self.job.spec.checkpoint.url,
            )
            self._send(self._members[worker], save)

    def _save_due(self) -> bool:
        """Whether the newest checkpoint is older than it should be, and none was asked for under this generation."""
        every, version = self.job.spec.checkpoint.every_steps, self.job.version
        if not every or version >= self.job.spec.budget.steps:
            return False
        return version // every * every > max(self._saved_version, self._saving_version)

    # --- evaluation ---

    def _evaluation_due(self) -> bool:
        spec, version = self.job.spec, self.job.version
        last = self.job.last_evaluation
        if (last is not None and last.version == version) or not self._num_evaluation_microbatches():
            return False
        every = spec.evaluation.every_steps
        return version >= spec.budget.steps or (bool(every) and version % every == 0)

    def _num_evaluation_microbatches(self) -> int:
        spec = self.job.spec
        num_samples = min(spec.evaluation.samples, self._num_validation_samples)
        return num_samples // spec.batch.microbatch_samples

    def _evaluate(self) -> None:
        self.phase = RunPhase.EVALUATING
        self._round = None
        self._evaluations.clear()
        self._num_evaluation = self._num_evaluation_microbatches()
        self._send_placed(
            Evaluate(
                epoch=self._epoch,
                generation=self._out.history.generation,
                version=self.job.version,
                num_microbatches=self._num_evaluation,
            )
        )

    def _evaluation_done(self, worker: WorkerId, report: EvaluationDone, *, now: float) -> None:
        is_due = self.phase is RunPhase.EVALUATING and report.version == self.job.version
        if not is_due or not report.microbatches:
            return
        self._evaluations[worker, report.microbatches[0]] = report
        reports = [self._evaluations[key] for key in sorted(self._evaluations)]
        if len({m for r in reports for m in r.microbatches}) < self._num_evaluation:
            return
        num_tokens = sum(r.num_tokens for r in reports)
        loss = exact_sum(r.loss_sum for r in reports) / max(1, num_tokens)
        self._out.record(
            Evaluated(job=self.job.job, version=report.version, loss=loss, num_tokens=num_tokens, wall_s=now)
        )
        self._out.log(f"job={self.job.job} step={report.version} validation_loss={loss:.4f}")
        self._go_on(now=now)

    # --- a step ---

    def _begin_step(self) -> None:
        assert self.plan is not None
        spec = self.job.spec
        self.phase = RunPhase.STEPPING
        terms = StepTerms(
            step=self.job.version,
            learning_rate=learning_rate(spec.optimizer, self.job.version, spec.budget.steps),
            clip_norm=spec.optimizer.clip_norm,
            batch_samples=spec.batch.samples,
        )
        history = self._out.history
        self._round = Round(
            terms, self.plan, expected=self._expected, epoch=history.epoch, generation=history.generation
        )

    def _drive(self, commands: list[RoundCommand], *, now: float) -> None:
        history = self._out.history
        for command in commands:
            match command:
                case AskReduction():
                    prepare = Prepare(
                        epoch=history.epoch,
                        generation=history.generation,
                        step=self.job.version,
                        group=command.group.group,
                        attempt=command.attempt,
                        parts=command.parts,
                    )
                    for worker in dict.fromkeys(part.worker for part in command.parts):
                        self._send(self._members[worker], prepare)
                case StepDecided():
                    self._commit(command.record, now=now)
                case RoundFailed():
                    for worker in command.blamed:
                        self._strike(worker, command.reason, is_hearsay=False, now=now)
                    self._bump(command.reason, now=now)
                case _:
                    assert_never(command)

    def _commit(self, record: StepRecord, *, now: float) -> None:
        """Phase two: durable first, then announced."""
        self._out.record(StepCommitted(job=self.job.job, record=record, wall_s=now))
        self._strikes.committed()
        self._moved_at = now
        self._round = None
        is_last = self.job.version >= self.job.spec.budget.steps
        goes_on = not is_last and not self._evaluation_due() and self._change_wanted() is None
        history = self._out.history
        self._send_placed(
            Commit(epoch=history.epoch, generation=history.generation, record=record, goes_on=goes_on)
        )
        if self._save_due():
            self._save(self.plan)
        if goes_on:
            self._begin_step()
        else:
            self._go_on(now=now)
