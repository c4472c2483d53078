"""Which member is sent when, which answer counts, and that each solver answers slice by slice."""

import json
from functools import partial

from client.planning.case import case_of
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.bounds.bound import Bound, Effort, lower_bound
from skein.plan.route.portfolio import Portfolio, Role, Solver, Turn, improvements
from skein.plan.route.rounds import MoveSlice, slices
from skein.plan.route.search import Found, Search
from tests.plan.builders import fleet, job
from tests.support.instances import instance

PROBLEM = case_of(json.dumps(instance(sizes=(3, 2, 2), memory=2, waves=2)), origin="x").searched


def test_a_bound_is_sent_for_once_when_the_first_plan_is_known() -> None:
    portfolio: Portfolio[str] = Portfolio(seeds=(5, 6), wants_bound=True)
    searches = portfolio.turns()
    assert searches == (Turn(role=Role.PLAN, seed=5), Turn(role=Role.PLAN, seed=6))
    assert portfolio.turns() == ()
    portfolio.take(1, (2.0,), "a plan")
    assert portfolio.turns() == (Turn(role=Role.BOUND, seed=5),)
    portfolio.take(0, (1.0,), "a better plan")
    assert portfolio.turns() == ()


def test_the_least_cost_counts_and_of_equal_ones_the_first_members() -> None:
    portfolio: Portfolio[str] = Portfolio(seeds=(0, 1, 2))
    told = [(2, 3.0, "c", True), (1, 2.0, "b", True), (2, 2.0, "d", False), (0, 2.0, "a", True)]
    assert [portfolio.take(number, (cost,), name) for number, cost, name, _ in told] == [x[-1] for x in told]
    assert portfolio.best == "a"


def test_only_what_is_better_is_told_and_nothing_once_nothing_can_be_found() -> None:
    def solver(slice_: int) -> float | Infeasible:
        return Infeasible(reason="over") if slice_ == 0 else float(slice_)

    assert list(improvements(solver, [3, 5, 2, 2, 0, 1], lambda x: (x,))) == [3.0, 2.0]


def test_planner_search_and_bound_are_solvers() -> None:
    search = Search(PROBLEM, seed=0)
    annealer: Solver[MoveSlice, Found] = search.run
    balanced: Solver[int, Plan] = partial(make_balanced_plan, job(), fleet([1e9] * 4), None)

    def bound(effort: Effort) -> Bound:
        return lower_bound(PROBLEM, effort=effort)

    plans = list(improvements(balanced, range(3), lambda plan: (plan.predicted_step_s,)))
    assert len(plans) == 1, "it draws nothing"
    founds = list(
        improvements(annealer, slices(5_000, PROBLEM.num_ops), lambda found: (found.cost_s, found.step_s))
    )
    bounds = list(improvements(bound, Effort, lambda found: (-found.seconds,)))
    assert 0 < bounds[0].seconds <= bounds[-1].seconds <= founds[-1].step_s
