"""The plan that runs, looked at again after each step: asks for others beside it, and has a better one put in place."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from skein.plan.changing.clauses import About, Clause
from skein.plan.changing.redundancy import num_missing
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Outbox, PlanMade
from skein.protocol.coordinator.runs.improving.replanning import Replanning, Seen
from skein.protocol.coordinator.runs.placing.placement import Placement
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.log.history import JobHistory
from skein.protocol.membership.membership import Entry


class Revision:
    """Carries out the policy of `Replanning` for a run: what it sees goes in, a wish to change comes out."""

    def __init__(self, job: JobHistory, placement: Placement, measured: Measured, outbox: Outbox) -> None:
        self.wish: str | None = None
        """Reason to put the chosen plan in place at the next boundary; None: it is not."""
        self._is_short = False
        """Fewer workers have a place than the job asks for: whoever could have one is worth it."""
        self.policy = Replanning(off_by=job.spec.plan.replan_if_off_by)
        self._job = job
        self._placement = placement
        self._measured = measured
        self._out = outbox
        self._why = ""
        self._began_s = -inf
        self._fenced_s: float | None = None

    def fenced(self, *, now: float) -> None:
        """A generation is opened: whatever was asked for beside the older one is void."""
        self.wish = None
        self._placement.forget_question()
        self.policy.overtaken()
        # Of several in a row the last: waiting for workers between them is no price of a change.
        self._fenced_s = now if self._job.version else None

    def placed(self, num_placed: int, *, num_wanted: int) -> None:
        """So many workers have a place of those that the job asks for."""
        self._is_short = num_placed < num_wanted

    def kept(self, plan: Plan) -> None:
        """A plan that was at hand is being put in place."""
        self.policy.kept(plan)

    def resumed(self, plan: Plan, *, now: float) -> None:
        """A step goes on by this plan, which nobody searched for; but who was lost may soon be back."""
        self.policy.adopted(plan, plan.workers, may_improve=True)
        self.policy.backoff.happened(now=now)

    def adopted(self, plan: Plan, candidates: Sequence[Entry], *, may_improve: bool) -> None:
        """A plan made for these candidates is being put in place."""
        workers = [entry.hello.worker for entry in candidates]
        self.policy.adopted(plan, workers, may_improve=may_improve)

    def step_begins(self, *, now: float) -> None:
        """Note that all workers are told to begin a step, or were by the last commit."""
        self._began_s = now
        if self._fenced_s is not None:
            self.policy.changed(seconds=now - self._fenced_s)
            self._fenced_s = None

    def step_ended(self, *, now: float) -> None:
        """A step is committed."""
        self._measured.step_took(now - self._began_s)

    def restore(self, plan: Plan) -> None:
        """A plan that needs no search gives the job back what it has lost."""
        self._placement.choose(plan)
        self.wish = str(plan.reason.all[-1])

    def give_up(self, why: str) -> None:
        """The chosen plan cannot be put in place."""
        self._out.log(f"keeps its plan ({self.wish}): {why}", job=self._job.job)
        self._placement.choose(None)
        self.wish = None

    def consider(self, candidates: Sequence[Entry], *, now: float) -> None:
        """Steps go on: ask for another plan if there is reason to and none is asked for yet."""
        plan = self._placement.plan
        is_open = self._placement.awaited is not None or self.wish is not None
        if plan is None or is_open or not self.policy.backoff.may(now=now):
            return
        seen = self._seen(plan, candidates)
        why = self.policy.reason(seen, now=now)
        if why is not None:
            self._why = why
            self.policy.asked(seen, now=now)
            self._measured.planned_with()
            self._placement.ask_beside(candidates)

    def _seen(self, plan: Plan, candidates: Sequence[Entry]) -> Seen:
        step_s, links = self._measured.step_s, self._placement.links
        off_by = self._job.spec.plan.replan_if_off_by
        return Seen(
            step_s=step_s,
            candidates=tuple(entry.hello.worker for entry in candidates),
            changed_links=()
            if step_s is None
            else self._measured.changed_links(plan, links, off_by=off_by, step_s=step_s),
            blamed=self._measured.blamed(plan, links),
            stragglers=self._measured.stragglers,
            measured_anew=tuple(sorted(self._measured.anew)),
        )

    def _is_safer(self, plan: Plan, present: Plan) -> bool:
        """Whether a plan gives stages holders that the job asks for and the present one lacks: that is worth it."""
        asked = self._job.spec.parallel.replicas
        is_wider = self._is_short and len(plan.workers) > len(present.workers)
        return is_wider or num_missing(plan, asked) < num_missing(present, asked)

    def answered(self, made: PlanMade) -> None:
        """The plan that was asked for beside the present one."""
        present = self._placement.plan
        assert present is not None
        steps_left = self._job.total_steps - self._job.version
        verdict = self.policy.verdict(made, present, steps_left=steps_left)
        if isinstance(made.result, Plan) and self._is_safer(made.result, present):
            verdict = None
        if verdict is not None or not isinstance(made.result, Plan):
            self._out.log(f"keeps its plan ({self._why}): {verdict}", job=self._job.job)
            return
        reason = made.result.reason.saying(Clause(self._why))
        if not reason.has(About.MOVES):
            reason = reason.then(Clause("nothing", About.MOVES))
        self._placement.choose(replace(made.result, reason=reason))
        self.wish = self._why
