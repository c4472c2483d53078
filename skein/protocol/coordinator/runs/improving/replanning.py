"""Policy of replanning: when to ask for another plan though the present one works, and whether it is worth having.

Rules of this file
- No generation is fenced to ask: steps go on under the present plan until a better one is at hand, and a generation
  changes between two steps, so no work is lost.
- A plan is changed only for more than the change costs. A cause that was looked at once, and stayed, is looked at again
  only when it has changed again.
- Each asking, and each newcomer that is let in, doubles the time until the next one may come. Quiet makes it short
  again. So a worker that comes and goes, or times that swing, cause few plans however long they do.
- While a stage has fewer holders than the job asks for that time has a bound, and a plan that came to nothing is tried
  again: a death could cost steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import PlanMade
from skein.types import WorkerId

FIRST_PAUSE_S = 10.0
LAST_PAUSE_S = 3600.0
SHORT_PAUSE_S = 30.0
"""Longest pause between two tries to give a stage the holders that the job asks for and that it lacks."""
_QUIET = 8
"""After so many pauses without a wish for another plan, the next one is the first again."""
CHANGE_S = 2.0
"""Seconds that a change of generation is taken to last until it was measured: fence, build, start."""
LEAST_GAIN = 0.05
"""Share of a step as it is that a change must gain at least. Predictions that differ by less say nothing."""


class Backoff:
    """Lets something happen, and then not for a while, which doubles each time up to `last_pause_s`."""

    def __init__(self, first_pause_s: float = FIRST_PAUSE_S, last_pause_s: float = LAST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._last_pause_s = last_pause_s
        self._pause_s = first_pause_s
        self._last = -inf

    def may(self, *, now: float, longest_s: float = inf) -> bool:
        """Whether it may happen now; `longest_s` bounds the pause for this question alone."""
        return now >= self._last + min(self._pause_s, longest_s)

    def happened(self, *, now: float) -> None:
        """Note that it happened: the next pause is twice as long, or the first one again after quiet."""
        is_quiet = now - self._last > _QUIET * self._pause_s
        self._pause_s = self._first_pause_s if is_quiet else min(2 * self._pause_s, self._last_pause_s)
        self._last = now


def longest_pause_s(*, is_short: bool) -> float:
    """Bound of pauses between tries; `is_short`: a stage lacks holders that the job asks for."""
    return SHORT_PAUSE_S if is_short else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """State of a run at a step's end: its measured step (None: too few), who could work, which links changed.

    `stragglers` take so many times as long as they did, or as planned, while their peers do not.
    """

    step_s: float | None
    candidates: tuple[WorkerId, ...]
    changed_links: tuple[tuple[WorkerId, WorkerId], ...]
    blamed: str
    stragglers: tuple[tuple[WorkerId, float], ...] = ()
    measured_anew: tuple[WorkerId, ...] = ()
    """Without work so far, for they had measured another speed."""


class Replanning:
    """The policy of one run.

    Args:
        off_by: share by which the measured step may differ from the planned one.
    """

    def __init__(self, *, off_by: float) -> None:
        self.backoff = Backoff()
        self.change_s = CHANGE_S
        self._off_by = off_by
        self._expected_s = 0.0
        self._planned_s = 0.0
        self._workers: frozenset[WorkerId] = frozenset()
        self._workers_before: frozenset[WorkerId] | None = None
        self._links: frozenset[tuple[WorkerId, WorkerId]] = frozenset()
        self._stragglers: frozenset[WorkerId] = frozenset()
        self._may_improve = False

    def adopted(self, plan: Plan, candidates: Iterable[WorkerId], *, may_improve: bool) -> None:
        """Note that this plan is in place, made for these workers. `may_improve`: it was made without a search."""
        self._expected_s = self._planned_s = plan.predicted_step_s
        self._workers = frozenset(candidates) | frozenset(plan.workers)
        self._workers_before = None
        self._links = frozenset()
        self._may_improve = may_improve

    def kept(self, plan: Plan) -> None:
        """Note that this plan, which was at hand, is in place: other workers, and a search, may improve on it."""
        self.adopted(plan, self._workers, may_improve=self._may_improve)

    def changed(self, *, seconds: float) -> None:
        """A change of generation took so long, from the fence to the first step."""
        self.change_s = seconds

    def may_ask(self, *, is_short: bool, now: float) -> bool:
        """Whether another plan may be asked for now; `is_short`: a stage lacks holders."""
        return self.backoff.may(now=now, longest_s=longest_pause_s(is_short=is_short))

    def reason(self, seen: Seen, *, is_short: bool = False, now: float) -> str | None:
        """Reason to ask for another plan now; None if there is none."""
        return self._wish(seen) if self.may_ask(is_short=is_short, now=now) else None

    def _wish(self, seen: Seen) -> str | None:
        newcomers = sorted(set(seen.candidates) - self._workers)
        if newcomers:
            return f"{', '.join(newcomers)} could work too"
        if seen.measured_anew:
            return f"{', '.join(seen.measured_anew)} measured another speed"
        if seen.step_s is not None and abs(seen.step_s - self._expected_s) > self._off_by * self._expected_s:
            return (
                f"measured {seen.step_s:.2g} s, planned {self._planned_s:.2g} s: replanned for {seen.blamed}"
            )
        slow = [
            (ratio, worker)
            for worker, ratio in seen.stragglers
            if worker not in self._stragglers and ratio > 1 + self._off_by
        ]
        if slow:
            ratio, worker = max(slow)
            return f"{worker} takes {ratio:.1f} times as long as expected"
        links = sorted(set(seen.changed_links) - self._links)
        if links and seen.step_s is not None:
            sender, receiver = links[0]
            return f"the link {sender} -> {receiver} has changed"
        return "the search can be run by now" if self._may_improve else None

    def asked(self, seen: Seen, *, now: float) -> None:
        """A plan was asked for: what is seen now is no reason for a second one."""
        self.backoff.happened(now=now)
        self._workers_before = self._workers
        self._workers |= set(seen.candidates)
        self._links |= set(seen.changed_links)
        self._stragglers = frozenset(worker for worker, _ in seen.stragglers)
        if seen.step_s is not None:
            self._expected_s = seen.step_s

    def gave_up(self, present: Plan) -> None:
        """A plan could not be put in place: workers without a place may get one by another try."""
        self._workers = frozenset(present.workers)

    def overtaken(self) -> None:
        """Wait no longer for the plan that was asked for: the workers that it was asked for are as new as before."""
        if self._workers_before is not None:
            self._workers = self._workers_before

    def verdict(self, made: PlanMade, present: Plan, *, steps_left: int) -> str | None:
        """Reason why the plan that was made is not worth the change; None if it is."""
        self._may_improve = made.may_improve
        self._workers_before = None
        if isinstance(made.result, Infeasible):
            return made.result.reason
        plan = made.result
        if (plan.chunks, plan.paths, plan.schedules) == (present.chunks, present.paths, present.schedules):
            return "it is the best known"
        # What is reckoned may be wrong; nobody gains more than what a step takes.
        present_s = self._expected_s if made.current_s is None else min(made.current_s, self._expected_s)
        gain_s = present_s - plan.predicted_step_s
        cost_s = made.move_s + self.change_s
        if gain_s < LEAST_GAIN * self._expected_s or gain_s * steps_left <= cost_s:
            return f"another would gain {max(gain_s, 0.0):.2g} s in each of {steps_left} steps, and cost {cost_s:.2g} s"
        return None
