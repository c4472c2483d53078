"""While steps go on: a better plan is looked for, and what it needs is brought to where it needs it, beside them.

Rules of this file
- Nothing here stops a step. A plan that is wished for is put in place at a boundary, when its copies are there.
- What was lost is given back without a search: the plan as it was before, with whoever is here for it.
- Who comes and goes is let in less and less often.
- What a step applies is a reduced gradient under plain all-reduce alone: under other rules no copy can follow the
  steps, and who is new fetches what a peer has when the plan is put in place. Of many walkers nothing is kept
  elsewhere: a stage of one is of no use to another.
"""

from collections.abc import Mapping

from skein.config.job import ParallelSpec
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Outbox, PlanMade
from skein.protocol.coordinator.runs.improving.backups import Backups
from skein.protocol.coordinator.runs.improving.joining import Joining
from skein.protocol.coordinator.runs.improving.replanning import Backoff
from skein.protocol.coordinator.runs.improving.revision import Revision
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.placing.planning import num_wanted
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import JobHistory
from skein.protocol.membership.membership import Entry, Lost
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import DataOpened, Prefetched
from skein.topology.fleet import Link
from skein.types import WorkerId

FLAP_S = 2.0
"""After its first loss a worker is let in again at once, after the second within a short time not for so long."""


class Improving(RunPart):
    """Work that goes on beside the steps of a run. The run says what happens, and asks what is wanted."""

    def __init__(
        self,
        job: JobHistory,
        members: Members,
        placement: Placement,
        measured: Measured,
        outbox: Outbox,
        links: Mapping[tuple[WorkerId, WorkerId], Link],
    ) -> None:
        self._revision = Revision(job, placement, measured, outbox)
        parallel: ParallelSpec = job.spec.parallel
        self._num_wanted = num_wanted(parallel)
        self._members = members
        self._placement = placement
        self._measured = measured
        may_follow = job.spec.aggregation.is_additive
        self._joining = Joining(job, members, outbox, may_follow=may_follow)
        self._backups = Backups(job, members, outbox, links)
        self._losses: dict[WorkerId, Backoff] = {}
        self._may_back_up = job.spec.aggregation.walkers.have_equal_holders

    # --- what happens ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone; who had a place is not let in again at once each time."""
        worker = change.worker
        self._joining.lose(worker)
        if is_missed:
            self._losses.setdefault(worker, Backoff(FLAP_S)).happened(now=now)

    def fenced(self, *, now: float) -> None:
        """A generation is opened: whatever was asked for beside the older one is void."""
        self._backups.fenced()
        self._joining.fenced()
        self._revision.fenced(now=now)

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """Stop fetching, for the plan that it was for is in place, unless the run goes on by the plan that it had."""
        if adoption.resumed is None:
            self._joining.over()
        else:
            self._revision.resumed(adoption.plan, now=now)
        if adoption.gives_up:
            self._backups.rolled_back()

    def kept(self, plan: Plan) -> None:
        """A plan that was at hand is to be put in place."""
        self._revision.kept(plan)

    def chose(self, plan: Plan, candidates: list[Entry], *, may_improve: bool) -> None:
        """A plan made for these candidates is to be put in place."""
        self._revision.adopted(plan, candidates, may_improve=may_improve)

    def answered(self, made: PlanMade, *, now: float) -> None:
        """The plan that was asked for beside the present one."""
        self._revision.answered(made)
        self._prepare(now=now)

    def prefetched(self, worker: WorkerId, report: Prefetched) -> None:
        """A copy of a stage is whole, or cannot be had."""
        self._members.copied(worker, report)
        self._joining.prefetched(worker, report)
        self._backups.prefetched(report)

    def opened(self, worker: WorkerId, report: DataOpened) -> None:
        """A worker has the job's data open, or cannot."""
        self._joining.opened(worker, report)

    def step_begins(self, candidates: list[Entry], *, now: float) -> None:
        """Note that all workers are told to begin a step, or were by the last commit; ask for copies that are due."""
        self._revision.step_begins(now=now)
        plan = self._placement.plan
        if plan is not None and self._may_back_up and self._backups.is_due():
            self._backups.ask(plan, candidates, step_s=self._measured.step_s)

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is committed: copies follow."""
        self._revision.step_ended(now=now)
        self._joining.committed(record)

    # --- what is wanted ---

    @property
    def wish(self) -> str | None:
        """Reason to put another plan in place at the next boundary, all that it needs being there; else None."""
        return self._revision.wish if self._joining.is_ready else None

    def look(self, candidates: list[Entry], *, now: float) -> None:
        """Steps go on: look for a plan that is worth having."""
        revision, plan = self._revision, self._placement.plan
        steady = [entry for entry in candidates if self._is_steady(entry.hello.worker, now=now)]
        revision.placed(len(self._members.placed), num_wanted=self._num_wanted)
        if revision.wish is not None and self._joining.is_hopeless(now=now):
            revision.give_up("what it needs did not come")
            self._joining.over()
        if revision.wish is not None and plan is not None:
            self._joining.try_again(plan)
        if revision.wish is None and self._placement.awaited is None:
            restored = self._placement.restored(steady)
            if restored is not None:
                revision.restore(restored)
                self._prepare(now=now)
        if revision.wish is None:
            revision.consider(steady, now=now)

    def _is_steady(self, worker: WorkerId, *, now: float) -> bool:
        """Whether a worker has a place, or may be given one again."""
        losses = self._losses.get(worker)
        return losses is None or worker in self._members.placed or losses.may(now=now)

    def _prepare(self, *, now: float) -> None:
        """Have the workers that get a chunk under the chosen plan fetch it already."""
        present, chosen = self._placement.plan, self._placement.chosen
        if self._revision.wish is not None and present is not None and chosen is not None:
            self._joining.begin(present, chosen, now=now)
