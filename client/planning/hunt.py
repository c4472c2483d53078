"""A portfolio run to its end: members sent, news passed on, and how things stood then, even if it was interrupted."""

import importlib.util
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from client.given import ended_by
from client.planning.members import MemberProcesses, PortfolioStanding
from client.planning.messages import Errand, Objective, PlanFound, plan_found
from skein.errors import UserError
from skein.own import install_hint
from skein.plan.route.portfolio import Portfolio

if TYPE_CHECKING:
    from client.planning.case import KnownProblem

_REPORT_S = 0.3
"""Kept for telling: a budget covers the command from its start to its end."""
_START_UP_S = 3.0
_SETTLING = 0.25
"""Share of the budget that is for settling what a job leaves open, loading and reading aside: each process does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings of a hunt.

    Args:
        objective: None: as the case implies.
        seed: of the first process; the n-th one after it has `seed + n`.
        num_processes: how many search at once.
        budget_s: seconds from `began_s` to the report.
        num_rounds: search so many rounds, however long that takes; None: until the budget is spent.
        began_s: when the command began, on the monotonic clock.
    """

    objective: Objective | None
    seed: int
    num_processes: int
    budget_s: float
    num_rounds: int | None
    began_s: float

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.seed + number for number in range(self.num_processes))

    @property
    def settling_s(self) -> float:
        """Seconds by whose work what a job leaves open is settled."""
        return _SETTLING * self.budget_s

    @property
    def until_s(self) -> float:
        return float("inf") if self.num_rounds is not None else self.began_s + self.budget_s - _REPORT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunted:
    """Outcome of a hunt."""

    case: "KnownProblem"
    standing: PortfolioStanding
    is_interrupted: bool


def hunt(
    text: str,
    origin: str,
    order: Order,
    *,
    on_news: "Callable[[KnownProblem, PortfolioStanding, bool], None]",
) -> Hunted:
    """The best plan that can be had for the case in `text`.

    Args:
        text: see `case_of`.
        origin: where it is from, for people.
        order: what is wanted.
        on_news: told now and then how things stand, and whether the best plan or the bound is another than before.

    Raises:
        UserError: the case makes no sense, or the planner is not installed.
        NoPlan: nothing fits.
    """
    _require_planner()
    is_interrupted = False
    portfolio: Portfolio[PlanFound] = Portfolio(seeds=order.seeds, wants_bound=True)
    with ended_by(signal.SIGTERM), MemberProcesses(text, portfolio) as members:
        _send(members, order)
        # Members read the case at the same time; a mistake in it is told here, once.
        from client.planning.case import case_of

        case = case_of(text, origin=origin, objective=order.objective, budget_s=order.settling_s)
        standing = members.standing
        standing.started_s = time.monotonic() - order.began_s
        try:
            for has_changed in members.news(order.until_s):
                if standing.best is not None and standing.first_plan_s is None:
                    standing.first_plan_s = time.monotonic() - order.began_s
                _send(members, order)
                on_news(case, standing, has_changed)
        except KeyboardInterrupt:
            is_interrupted = True
    if standing.has_only_begun and not is_interrupted:
        case = taken_as_begun(case, standing, order)
    return Hunted(case=case, standing=standing, is_interrupted=is_interrupted)


def taken_as_begun(case: "KnownProblem", standing: PortfolioStanding, order: Order) -> "KnownProblem":
    """The case with a remark that there was no time for a search, and the routing it begins with taken for the best.

    As it is where no routing is known.
    """
    from skein.plan.route.search import Search

    found = None if case.start is None else Search(case.searched, seed=order.seed, start=case.start).best
    if found is None:
        return case
    best = plan_found(found.routing, seed=order.seed, step_s=found.step_s, jittered_s=found.jittered_s)
    standing.portfolio.take(0, best.cost, best)
    went_by = f"{standing.started_s:.1f} of {order.budget_s:g} s went by before it could begin"
    remark = f"nothing was searched for, {went_by}: raise --budget-s, or ask again when less runs here"
    return replace(case, remarks=(*case.remarks, remark))


def _require_planner() -> None:
    """Refuses where the search's libraries are missing, which the rest of the client does without."""
    for library in ("numba", "scipy"):
        if importlib.util.find_spec(library) is None:
            raise UserError("plan", library, f"is not installed: {install_hint('planner')}")


def _send(members: MemberProcesses, order: Order) -> None:
    """Start the members that are wanted now."""
    best = members.standing.best
    for turn in members.standing.portfolio.turns():
        left_s = order.began_s + order.budget_s - _REPORT_S - time.monotonic()
        members.send(
            Errand(
                role=turn.role,
                objective=order.objective,
                seed=turn.seed,
                budget_s=max(0.0, left_s),
                settling_s=order.settling_s,
                num_rounds=order.num_rounds,
                cutoff_s=None if best is None else best.step_s,
            )
        )


def began_s() -> float:
    """Time when this process began, on the monotonic clock; now, if it has been doing other things before."""
    age_s = time.time() - psutil.Process(os.getpid()).create_time()
    return time.monotonic() - (age_s if 0 <= age_s <= _START_UP_S else 0.0)
