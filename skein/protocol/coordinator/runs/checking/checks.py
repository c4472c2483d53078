"""Checks of a run: which steps are computed again and why, who stands aside meanwhile, and who is convicted.

Rules of this file
- A job without `checks.fraction` has none of this.
- Suspects are drawn by chance that no worker can foresee, after all have contributed. A gradient that is not finite, or
  far longer than lately, makes suspects of all who have a part in it.
- A suspect stands aside for as long as its part is computed by others: it keeps what it holds. Whatever comes of it,
  the step is then computed once more, by all who are left, and that counts.
- A worker that is lost meanwhile ends the inquiry: the step begins anew, and nobody is convicted.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from math import isfinite, sqrt
from statistics import median

from skein.numeric.sketch import Sketch
from skein.plan.changing.reroute import rerouted, ways
from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.checking.inquiry import Again, Inquiry, StepOutcome, Verdict
from skein.protocol.coordinator.runs.part import Adoption, RunPart
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.membership.membership import Lost
from skein.protocol.messages.directives import StepRecord
from skein.protocol.messages.reports import Vote
from skein.types import GroupId, Step, WorkerId

NORM_LIMIT = 10.0
"""A gradient longer than so many times the median of the last ones makes suspects."""
_NUM_USUAL = 32
_LEAST_USUAL = 5


class Checks(RunPart):
    """The inquiry into a run's step, while there is one."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.aside: frozenset[WorkerId] = frozenset()
        """Workers without which the step is computed now. They keep what they hold."""
        self.anew: Plan | None = None
        """Plan by which the step begins anew, as far as others do not stand aside, until one is in place."""
        self._first: Plan | None = None
        self._inquiry: Inquiry | None = None
        self._settled: Step | None = None
        """The step that is not checked again."""
        self._norms: defaultdict[GroupId, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_USUAL))

    # --- what happens ---

    def lost(self, change: Lost, *, is_missed: bool, now: float) -> None:
        """A worker is gone, with what it would have computed."""
        if self._inquiry is not None and (is_missed or change.worker in self.aside):
            self._log(
                f"step={self._job.version}: the check ends without a verdict, for {change.worker} is gone"
            )
            self._end()

    def fenced(self, *, now: float) -> None:
        """A check without any result begins anew, for its seed was told: so no lie can be made that it does not see."""
        if self._first is None:
            self._inquiry = None

    def adopted(self, adoption: Adoption, *, now: float) -> None:
        """A plan is in place: the step begins anew by it, and may be resumed again."""
        self.anew = None

    def committed(self, record: StepRecord, plan: Plan, *, now: float) -> None:
        """The step is over; what was usual of it is remembered."""
        for result in record.results:
            if isfinite(result.squared_norm):
                self._norms[result.group].append(sqrt(result.squared_norm))

    # --- the inquiry ---

    def seed(
        self, votes: Sequence[Vote], plan: Plan, *, is_whole: bool, is_settled: bool = True
    ) -> int | None:
        """Seed of the sketches that the step's results are compared by; None: it is not checked.

        What is not whole, for lost contributions were given up, can be compared with nothing. Where not all is settled,
        for another plan is on its way, no suspect is drawn: the generation would void it, and who came had no place.
        """
        if not is_whole:
            self._end()
        if self._inquiry is None and self._settled != self._job.version and self._job.spec.checks.fraction:
            chance = self._out.chance("check", self._job.job, self._job.version, self._job.generation)
            suspects = self._at_gate(votes, plan)
            if suspects:
                chance.shuffle(suspects)
            elif (
                is_settled
                and chance.random() < self._job.spec.checks.fraction
                and (able := _replaceable(plan, plan.workers))
            ):
                suspects = [able[int(chance.integers(len(able)))]]
            if suspects:
                self._inquiry = Inquiry(suspects, int(chance.integers(2**63)), self._job.spec.precision)
        return None if self._inquiry is None else self._inquiry.seed

    @property
    def _has_choices(self) -> bool:
        """Whether routers choose, so that who computes a part of the step again has to know how the first one did."""
        return self._job.spec.model.choices_of(1) is not None

    def _at_gate(self, votes: Sequence[Vote], plan: Plan) -> list[WorkerId]:
        """Workers with a part in what is not finite or far too long, as far as others can stand in for them."""
        odd = {vote.group for vote in votes if self._is_odd(vote)}
        if not odd:
            return []
        holders = {worker for group in plan.groups if group.group in odd for worker in group.workers}
        self._log(
            f"step={self._job.version} gradient of {', '.join(sorted(map(str, odd)))} not finite or far too long"
        )
        return _replaceable(plan, sorted(holders))

    def _is_odd(self, vote: Vote) -> bool:
        usual = self._norms[vote.group]
        if not vote.is_finite or not isfinite(vote.squared_norm):
            return True
        return len(usual) >= _LEAST_USUAL and sqrt(vote.squared_norm) > NORM_LIMIT * median(usual)

    def judged(self, record: StepRecord, sketch: Sketch, plan: Plan) -> Verdict | None:
        """Verdict on the step as it came out now; None: that is to be committed."""
        if self._inquiry is None:
            return None
        self._first = self._first or plan
        if ways(plan) != ways(self._first) or (self._has_choices and _has_newcomers(plan, self._first)):
            # What was computed is another function: it says nothing of anybody.
            return self._take(self._inquiry.failed())
        return self._take(self._inquiry.came(StepOutcome(sketch=sketch, loss=record.loss, plan=plan)))

    def failed(self) -> Verdict | None:
        """Verdict of an inquiry for whose plan too few are left; None: there is none."""
        return None if self._inquiry is None else self._take(self._inquiry.failed())

    def _take(self, verdict: Verdict) -> Verdict:
        self.anew = self._first
        if isinstance(verdict, Again):
            self.aside = verdict.aside
        else:
            self._end()
        return verdict

    def _end(self) -> None:
        self._inquiry, self._first, self.aside, self._settled = None, None, frozenset(), self._job.version


def _has_newcomers(plan: Plan, first: Plan) -> bool:
    """Whether somebody computes a stage who did not hold it in the first plan, and has been told nothing of it."""
    known = {x.chunk for x in first.chunks}
    return not known.issuperset(hop for path in plan.paths for hop in path.hops)


def _replaceable(plan: Plan, workers: Sequence[WorkerId]) -> list[WorkerId]:
    """Workers among these for whom other holders of their stages can stand in."""
    chunks = [x.chunk for x in plan.chunks]
    visited = {hop.worker for path in plan.paths for hop in path.hops}
    return [
        worker
        for worker in workers
        if worker in visited and rerouted(plan, {x for x in chunks if x.worker != worker}, {}) is not None
    ]
