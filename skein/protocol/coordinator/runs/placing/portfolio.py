"""Answers to requests for plans: at once, or by searches of several seeds side by side, of which the best counts.

Rules of this file
- The plan with the least predicted step counts (with what moving costs, spread over the steps to come). Seeds
  differ in nothing else, and their effort is counted in moves; so equal requests on an equal cluster have equal answers
  while all searches live (`skein.plan.route.portfolio`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skein.config.job import JobSpec
from skein.plan.balanced import balanced_step_s, make_balanced_plan
from skein.plan.changing.moving import between_s
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.portfolio import Portfolio, improvements
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.rng import key
from skein.topology.fleet import Fleet

_MAX_SEEDS = 8
"""More searches of one problem find hardly more."""
_SLICES = (0.2, 0.8)
"""Shares of the budget: a short search first, for the case that the long one never ends."""

Planner = Callable[[JobSpec, Fleet, Plan | None, int], Plan | Infeasible]
"""A plan for a job on a fleet after the one so far, from a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """Plan that a search has found so far, and what a step costs with its share of moving."""

    made: PlanMade
    cost_s: float


def plan_here(asked: MakePlan, planner: Planner = make_balanced_plan) -> PlanMade:
    """A plan that holds, made by this process, if nothing else is asked for without a search."""
    job, fleet, previous = asked.job, asked.fleet, asked.previous
    current_s = None if previous is None else balanced_step_s(job, fleet, previous)
    result = _held(planner(job, fleet, previous, job.seed), asked)
    move_s = between_s(job, fleet, previous, result) if isinstance(result, Plan) else 0.0
    return answered(asked, result, current_s=current_s, move_s=move_s)


def answered(
    asked: MakePlan, result: Plan | Infeasible, *, current_s: float | None = None, move_s: float = 0.0
) -> PlanMade:
    """The answer to `asked`."""
    return PlanMade(request=asked.request, result=result, current_s=current_s, move_s=move_s)


def _held(plan: Plan | Infeasible, asked: MakePlan) -> Plan | Infeasible:
    if isinstance(plan, Infeasible):
        return plan
    wrong = violations(plan, asked.job, asked.fleet)
    return Infeasible(reason=f"the planner made a plan that {wrong[0]}") if wrong else plan


def search(asked: MakePlan, seed: int, *, now: Callable[[], float]) -> Iterator[FoundPlan]:
    """Plans that hold, each better than the one before; nothing if none exists."""
    # Only here: the coordinator's own process starts without numba.
    from skein.plan.searched import make_searched_plan
    from skein.plan.searched import searched_step_s as reckoned_by_search_s

    previous = asked.previous
    current_s = None if previous is None else reckoned_by_search_s(asked.job, asked.fleet, previous)

    def within(budget_s: float) -> FoundPlan | Infeasible:
        until_s = now() + budget_s
        plan = make_searched_plan(
            _with_budget(asked.job, budget_s),
            asked.fleet,
            previous,
            seed,
            may_go_on=lambda: now() < until_s,
            steps_left=asked.steps_left,
        )
        plan = _held(plan, asked)
        if isinstance(plan, Infeasible):
            return plan
        move_s = between_s(asked.job, asked.fleet, previous, plan)
        cost_s = plan.predicted_step_s + move_s / max(1, asked.steps_left)
        return FoundPlan(made=answered(asked, plan, current_s=current_s, move_s=move_s), cost_s=cost_s)

    budgets_s = [share * asked.job.plan.budget_s for share in _SLICES]
    yield from improvements(within, budgets_s, lambda found: (found.cost_s,))


def _with_budget(job: JobSpec, budget_s: float) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"budget_s": budget_s})})


def wants_search(job: JobSpec) -> bool:
    """Whether a job's plans are searched for at all."""
    return job.plan.method != "balanced" and job.plan.budget_s > 0


def portfolio_of(job: JobSpec, num_cpus: float) -> Portfolio[FoundPlan]:
    """Searches for a job, one for each CPU, up to what is of use; the first has the job's own seed."""
    others = range(1, max(1, min(_MAX_SEEDS, int(num_cpus))))
    return Portfolio(seeds=(job.seed, *(key(job.seed, "portfolio", number) for number in others)))
