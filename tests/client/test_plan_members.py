"""What members of a portfolio tell, how it is ranked, and that a portfolio outlives each of them."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from client.cli.plan import best_so_far
from client.planning.case import case_of
from client.planning.first import first_plan
from client.planning.hunt import Order, hunt, taken_as_begun
from client.planning.member import member_messages
from client.planning.members import MemberProcesses, PortfolioStanding
from client.planning.messages import (
    Bounded,
    Compiling,
    Errand,
    Message,
    MethodRefused,
    NoPlan,
    Objective,
    PlanFound,
    Progressed,
    errand_of,
    line_of,
    message_of,
)
from skein.plan.route.evaluate import jittered_mean_s, timeline
from skein.plan.route.portfolio import Portfolio, Role
from skein.plan.route.rounds import slices_in_time
from skein.plan.route.search import Found, Search
from tests.support.instances import instance
from tests.support.routing_rules import violations

TEXT = json.dumps(instance(sizes=(3, 2, 2), memory=2, waves=2, has_reduction=True))
END_S = 30.0
"""Far above what members take; reached only when something hangs."""


def clock(tick_s: float) -> Callable[[], float]:
    """A clock that moves on by `tick_s` each time it is read."""
    times = iter(range(10**9))
    return lambda: next(times) * tick_s


def plan(*, seed: int = 0, step_s: float = 9.0, jittered_s: float = 10.0) -> PlanFound:
    return PlanFound(
        seed=seed,
        step_s=step_s,
        jittered_s=jittered_s,
        worker_of=(0, 1),
        path=((0, 1, 0),),
        sequence=(0,) * 5,
    )


def found(errand: Errand, now: Callable[[], float]) -> list[Message]:
    """What a member tells of the search itself."""
    return [x for x in member_messages(TEXT, errand, now=now) if not isinstance(x, Compiling)]


# --- one member ---


def test_a_search_tells_legal_plans_each_better_than_the_one_before() -> None:
    messages = list(member_messages(TEXT, Errand(role=Role.PLAN, objective=Objective.STEP, num_rounds=3)))
    plans = [x for x in messages if isinstance(x, PlanFound)]
    problem = case_of(TEXT, origin="x").problem
    assert len(plans) > 1
    assert [x.jittered_s for x in plans] == sorted((x.jittered_s for x in plans), reverse=True)
    for found in plans:
        assert violations(problem, found.routing) == ()
        assert timeline(problem, found.routing).step_s == found.step_s


def test_the_plan_at_once_is_legal_and_no_better_under_jitter_than_it_says() -> None:
    problem = case_of(TEXT, origin="x", objective=Objective.MAKESPAN).searched
    errand = Errand(role=Role.PLAN, objective=Objective.MAKESPAN, num_rounds=0)
    at_once = next(x for x in member_messages(TEXT, errand) if isinstance(x, PlanFound))
    assert violations(problem, at_once.routing) == ()
    assert timeline(problem, at_once.routing).step_s == at_once.step_s
    assert jittered_mean_s(problem, at_once.routing, jitter=0.03) <= at_once.jittered_s


@pytest.mark.parametrize("sizes", [(3, 2, 2), (1, 1, 1), (5, 3, 3, 3, 3, 3)])
def test_the_plan_at_once_is_what_the_search_begins_with(sizes: tuple[int, ...]) -> None:
    problem = case_of(json.dumps(instance(sizes=sizes, path_len=min(4, len(sizes)))), origin="x").searched
    first, begun = first_plan(problem), Search(problem, seed=0).begin()
    assert first is not None
    assert isinstance(begun, Found)
    assert (first[1], first[0].sequence.tolist()) == (begun.step_s, begun.routing.sequence.tolist())


def test_where_slots_deadlock_there_is_no_plan_at_once() -> None:
    problem = case_of(TEXT, origin="x").searched
    assert first_plan(replace(problem, slots=np.zeros_like(problem.slots))) is None


def test_the_makespan_leaves_aggregation_out() -> None:
    errand = Errand(role=Role.PLAN, objective=Objective.MAKESPAN, num_rounds=0)
    found = next(x for x in member_messages(TEXT, errand) if isinstance(x, PlanFound))
    assert timeline(case_of(TEXT, origin="x").problem, found.routing).makespan_s == found.step_s


def test_counted_rounds_repeat_exactly_whatever_the_clock() -> None:
    errand = Errand(role=Role.PLAN, objective=None, seed=4, num_rounds=4)
    first = found(errand, clock(1e-6))
    assert found(errand, clock(1e6)) == first
    assert found(replace(errand, seed=5), clock(1e-6)) != first


def test_a_search_ends_when_its_time_is_up_and_has_a_plan_even_then() -> None:
    late = list(member_messages(TEXT, Errand(role=Role.PLAN, objective=None, budget_s=0.0), now=clock(1.0)))
    assert [type(x) for x in late[:1]] == [PlanFound]
    assert sum(isinstance(x, Progressed) for x in late) <= 1


@dataclass
class Pace:
    """A search and a clock that moves on with it."""

    moves_per_s: float
    num_moves: int = 0
    now_s: float = 0.0

    def spend(self, num_moves: int) -> None:
        self.num_moves += num_moves
        self.now_s += num_moves / self.moves_per_s


@pytest.mark.parametrize("budget_s", [2.0, 10.0, 60.0])
@pytest.mark.parametrize("moves_per_s", [5e3, 1e5, 2e6])
def test_rounds_fill_the_time_without_passing_it(budget_s: float, moves_per_s: float) -> None:
    pace = Pace(moves_per_s)
    problem = case_of(TEXT, origin="x").problem
    kinds = []
    for slice_ in slices_in_time(problem.num_ops, pace, budget_s, lambda: pace.now_s):
        pace.spend(slice_.num_moves)
        kinds.append(slice_.warmth)
    # The first round, which measures the pace, is not sized to the budget.
    assert 0.7 * budget_s <= pace.now_s <= max(budget_s, 2_000 / moves_per_s)
    assert kinds[:5] == [None] * 5
    assert kinds[-1] is not None, "what is left at the end goes into the best plan"


def test_a_machine_that_slows_down_halfway_ends_soon_after_its_time() -> None:
    pace = Pace(1e5)
    problem = case_of(TEXT, origin="x").problem
    for slice_ in slices_in_time(problem.num_ops, pace, 10.0, lambda: pace.now_s):
        pace.moves_per_s = 1e5 if pace.now_s < 5.0 else 5e4
        pace.spend(slice_.num_moves)
    assert 8.0 < pace.now_s < 13.0


def test_bounds_rise_and_never_pass_a_plan() -> None:
    plans = member_messages(TEXT, Errand(role=Role.PLAN, objective=Objective.STEP, num_rounds=3))
    best_s = min(x.step_s for x in plans if isinstance(x, PlanFound))
    errand = Errand(role=Role.BOUND, objective=Objective.STEP, cutoff_s=best_s)
    bounds = [x.seconds for x in member_messages(TEXT, errand) if isinstance(x, Bounded)]
    assert bounds == sorted(bounds)
    assert 0 < bounds[-1] <= best_s


@pytest.mark.parametrize(
    "message",
    [
        plan(jittered_s=0.1 + 0.2),
        MethodRefused(reason="“no”\nway"),
        Compiling(),
        Progressed(num_moves=3),
        Bounded(seconds=1e-17, binding="trip", parts=(("trip", 1e-17), ("slots", 0.0))),
    ],
)
def test_a_message_survives_its_line(message: Message) -> None:
    line = line_of(message)
    assert "\n" not in line
    assert message_of(line) == message


def test_an_errand_survives_its_argument() -> None:
    errand = Errand(role=Role.BOUND, objective=Objective.STEP, seed=3, num_rounds=2, cutoff_s=1.5)
    assert errand_of(line_of(errand)) == errand


# --- ranking ---


def standing() -> PortfolioStanding:
    return PortfolioStanding(portfolio=Portfolio(seeds=(1, 2, 3, 4), wants_bound=True))


def test_the_plan_that_bears_jitter_best_leads_and_ties_go_to_the_lower_seed() -> None:
    told = standing()
    steps = [
        (1, plan(seed=2, step_s=8.0, jittered_s=12.0), True),
        (2, plan(seed=3, step_s=9.0, jittered_s=11.0), True),
        (0, plan(seed=1, step_s=9.0, jittered_s=11.0), True),
        (3, plan(seed=4, step_s=9.0, jittered_s=11.0), False),
    ]
    assert [told.take(number, found) for number, found, _ in steps] == [new for *_, new in steps]
    assert told.best is not None
    assert told.best.seed == 1


def test_a_search_that_compiles_is_waited_for_until_it_gets_somewhere() -> None:
    told, held_up = standing(), []
    for message in (plan(), Compiling(), Progressed(num_moves=1)):
        told.take(0, message)
        held_up.append(told.is_held_up)
    assert held_up == [False, True, False]


def test_a_bound_is_never_replaced_by_a_lower_one() -> None:
    told = standing()
    for seconds in (3.0, 5.0, 4.0):
        told.take(0, Bounded(seconds=seconds, binding="x", parts=()))
    assert told.bound is not None
    assert told.bound.seconds == 5.0


# --- processes ---


@pytest.fixture
def members() -> Iterator[MemberProcesses]:
    with MemberProcesses(TEXT, Portfolio(seeds=(0,))) as entered:
        yield entered


def test_a_member_that_breaks_costs_no_plan_and_is_told(members: MemberProcesses) -> None:
    good = Errand(role=Role.PLAN, objective=None, num_rounds=0)
    broken = Errand(role=Role.PLAN, objective=cast("Objective", "nonsense"), seed=7)
    members.send(broken)
    members.send(good)
    for _ in members.news(time.monotonic() + END_S):
        pass
    assert members.standing.best is not None
    [loss] = members.standing.losses
    assert loss == "plan (seed 7) broke: ValueError: 'nonsense' is not a valid Objective"


def test_leaving_ends_whoever_is_still_at_work() -> None:
    with MemberProcesses(TEXT, Portfolio(seeds=(0,))) as members:
        members.send(Errand(role=Role.PLAN, objective=None, budget_s=1e6))
        news = members.news(time.monotonic() + END_S)
        while members.standing.best is None:
            next(news)
        children = psutil.Process().children(recursive=True)
        assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_an_interrupted_hunt_keeps_the_best_plan_so_far() -> None:
    def interrupt(_case: object, standing: PortfolioStanding, _has_changed: bool) -> None:
        if standing.best is not None:
            raise KeyboardInterrupt

    order = Order(
        objective=None,
        seed=0,
        num_processes=2,
        budget_s=END_S,
        num_rounds=None,
        began_s=time.monotonic(),
    )
    hunted = hunt(TEXT, "x", order, on_news=interrupt)
    assert hunted.is_interrupted
    assert hunted.standing.best is not None


def test_a_hunt_that_found_nothing_in_time_says_what_starting_took() -> None:
    order = Order(objective=None, seed=0, num_processes=1, budget_s=4.0, num_rounds=None, began_s=0.0)
    standing = PortfolioStanding(portfolio=Portfolio(seeds=(0,)), started_s=3.25)
    with pytest.raises(NoPlan, match=r"3\.2 of 4 s went by before the search began: raise --budget-s"):
        best_so_far(standing, order)


def test_where_there_was_no_time_to_search_what_a_job_begins_with_is_the_plan_and_it_says_so() -> None:
    order = Order(objective=None, seed=0, num_processes=1, budget_s=4.0, num_rounds=None, began_s=0.0)
    standing = PortfolioStanding(portfolio=Portfolio(seeds=(0,)), started_s=3.25)
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    fleet = case_of(page.split("```yaml\n")[1].split("```")[0], origin="docs")
    has_only_begun = standing.has_only_begun
    told = taken_as_begun(fleet, standing, order)
    assert (has_only_begun, standing.has_only_begun) == (True, False)
    best = best_so_far(standing, order)
    assert timeline(fleet.searched, best.routing).step_s == best.step_s
    assert "nothing was searched for, 3.2 of 4 s went by before it could begin" in told.remarks[-1]
    # An instance knows no routing.
    empty = PortfolioStanding(portfolio=Portfolio(seeds=(0,)), started_s=3.25)
    assert (
        taken_as_begun(case_of(TEXT, origin="x"), empty, order).remarks == case_of(TEXT, origin="x").remarks
    )
    assert empty.has_only_begun
