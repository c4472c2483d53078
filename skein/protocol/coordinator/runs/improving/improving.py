"""While steps go on: a better plan is looked for, and put in place at a boundary once what it needs is there.

Rules of this file
- Nothing here stops a step: others are asked for, and fetched for, beside the plan that runs.
- What was lost is given back without a search: the plan as it was before, with whoever is here for it.
- Who comes and goes is let in less and less often, but within a bound while a stage lacks holders.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from skein.plan.changing.clauses import About, Clause
from skein.plan.changing.redundancy import num_missing
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import PlanMade
from skein.protocol.coordinator.runs.improving.joining import Joining
from skein.protocol.coordinator.runs.improving.replanning import (
    Backoff,
    Replanning,
    Seen,
    longest_pause_s,
)
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.placing.planning import num_wanted
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.membership.membership import Entry, Lost
from skein.protocol.messages.directives import StepRecord
from skein.types import WorkerId

FLAP_S = 2.0
"""After its first loss a worker is let in again at once, after the second within a short time not for so long."""


class Improving(RunPart):
    """Carries out the policy of `Replanning` for a run: what it sees goes in, a wish to change comes out."""

    def __init__(self, members: Members, placement: Placement, measured: Measured, joining: Joining) -> None:
        super().__init__(members)
        self._policy = Replanning(off_by=self._job.spec.plan.replan_if_off_by)
        self._placement = placement
        self._measured = measured
        self._joining = joining
        self._losses: dict[WorkerId, Backoff] = {}
        self._wish: str | None = None
        """Reason to put the chosen plan in place; None: it is not."""
        self._why = ""
        self._began_s = -inf
        self._fenced_s: float | None = None

    # --- what happens ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone; who had a place is not let in again at once each time."""
        if is_missed:
            self._losses.setdefault(change.worker, Backoff(FLAP_S)).happened(now=now)

    def fenced(self, *, now: float) -> None:
        """A generation is opened: whatever was asked for beside the older one is void."""
        self._wish = None
        self._placement.forget_question()
        self._policy.overtaken()
        # Of several in a row the last: waiting for workers between them is no price of a change.
        self._fenced_s = now if self._job.version else None

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """A step may go on by this plan, which nobody searched for; but who was lost may soon be back."""
        if adoption.resumed is not None:
            self._policy.adopted(adoption.plan, adoption.plan.workers, may_improve=True)
            self._policy.backoff.happened(now=now)

    def kept(self, plan: Plan) -> None:
        """A plan that was at hand is to be put in place."""
        self._policy.kept(plan)

    def chose(self, plan: Plan, candidates: Sequence[Entry], *, may_improve: bool) -> None:
        """A plan made for these candidates is to be put in place."""
        self._policy.adopted(plan, (x.hello.worker for x in candidates), may_improve=may_improve)

    def step_begins(self, *, now: float) -> None:
        """Note that all workers are told to begin a step, or were by the last commit."""
        self._began_s = now
        if self._fenced_s is not None:
            self._policy.changed(seconds=now - self._fenced_s)
            self._fenced_s = None

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """A step is: it took so long."""
        self._measured.step_took(now - self._began_s)

    # --- what is wanted ---

    @property
    def wish(self) -> str | None:
        """Reason to put another plan in place at the next boundary, all that it needs being there; else None."""
        return self._wish if self._joining.is_ready else None

    def look(self, candidates: Sequence[Entry], *, now: float) -> None:
        """Steps go on: look for a plan that is worth having."""
        plan = self._placement.plan
        assert plan is not None
        is_short = self._lacks_holders(plan)
        steady = [x for x in candidates if self._is_steady(x.hello.worker, is_short=is_short, now=now)]
        if self._wish is not None and self._joining.is_hopeless(now=now):
            self._log(f"keeps its plan ({self._wish}): what it needs did not come")
            self._placement.choose(None)
            self._policy.gave_up(plan)
            self._wish = None
            self._joining.over()
        if self._wish is not None:
            self._joining.try_again(plan)
        elif self._placement.awaited is None:
            restored = self._placement.restored(steady, now=now)
            if restored is not None:
                self._change_to(plan, restored, str(restored.reason.all[-1]), now=now)
            else:
                self._consider(plan, steady, is_short=is_short, now=now)

    def _is_steady(self, worker: WorkerId, *, is_short: bool, now: float) -> bool:
        """Whether a worker has a place, or may be given one again; `is_short`: a stage lacks holders."""
        losses = self._losses.get(worker)
        if losses is None or worker in self._members.placed:
            return True
        return losses.may(now=now, longest_s=longest_pause_s(is_short=is_short))

    def _change_to(self, present: Plan, coming: Plan, wish: str, *, now: float) -> None:
        """Have this plan put in place, and the workers that get a chunk under it fetch that already."""
        self._placement.choose(coming)
        self._wish = wish
        self._joining.begin(present, coming, now=now)

    def _consider(self, plan: Plan, candidates: Sequence[Entry], *, is_short: bool, now: float) -> None:
        """Ask for another plan if there is reason to."""
        if not self._policy.may_ask(is_short=is_short, now=now):
            return
        seen = self._seen(plan, candidates)
        why = self._policy.reason(seen, is_short=is_short, now=now)
        if why is not None:
            self._why = why
            self._policy.asked(seen, now=now)
            self._measured.planned_with()
            self._placement.ask_beside(candidates)

    def _seen(self, plan: Plan, candidates: Sequence[Entry]) -> Seen:
        measured, links = self._measured, self._placement.links
        step_s, off_by = measured.step_s, self._job.spec.plan.replan_if_off_by
        return Seen(
            step_s=step_s,
            candidates=tuple(entry.hello.worker for entry in candidates),
            changed_links=()
            if step_s is None
            else measured.changed_links(plan, links, off_by=off_by, step_s=step_s),
            blamed=measured.blamed(plan, links),
            stragglers=measured.stragglers,
            measured_anew=tuple(sorted(measured.anew)),
        )

    def answered(self, made: PlanMade, *, now: float) -> None:
        """The plan that was asked for beside the present one."""
        present, plan = self._placement.plan, made.result
        assert present is not None
        verdict = self._policy.verdict(made, present, steps_left=self._job.total_steps - self._job.version)
        if not isinstance(plan, Plan) or (verdict is not None and not self._is_safer(plan, present)):
            self._log(f"keeps its plan ({self._why}): {verdict}")
            return
        reason = plan.reason.saying(Clause(self._why))
        if not reason.has(About.MOVES):
            reason = reason.then(Clause("nothing", About.MOVES))
        self._change_to(present, replace(plan, reason=reason), self._why, now=now)

    def _is_safer(self, plan: Plan, present: Plan) -> bool:
        """Whether a plan gives stages holders that the job asks for and the present one lacks: that is worth it."""
        replicas = self._job.spec.parallel.replicas
        is_wider = self._lacks_workers() and len(plan.workers) > len(present.workers)
        return is_wider or num_missing(plan, replicas) < num_missing(present, replicas)

    def _lacks_holders(self, plan: Plan) -> bool:
        """Whether a stage of this plan has fewer holders, or the plan fewer workers, than the job asks for."""
        return self._lacks_workers() or num_missing(plan, self._job.spec.parallel.replicas) > 0

    def _lacks_workers(self) -> bool:
        return len(self._members.placed) < num_wanted(self._job.spec.parallel)
