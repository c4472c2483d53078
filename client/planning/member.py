"""A process of a portfolio: reads the case from standard input, and writes what it finds line by line.

`python -m client.planning.member '{"role": ...}'`. It may be ended at any moment: whatever it has told counts.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from client.planning.case import KnownProblem, case_of
from client.planning.messages import (
    Bounded,
    Compiling,
    Errand,
    Message,
    MethodRefused,
    PlanFound,
    Progressed,
    Started,
    errand_of,
    line_of,
    plan_found,
)
from skein.plan.plan import Infeasible
from skein.plan.route.portfolio import Role, improvements
from skein.plan.route.problem import Problem
from skein.plan.route.rounds import counted_slices, slices_in_time

if TYPE_CHECKING:
    from skein.plan.route.search import Found

_JITTER = 0.03
"""Jitter that plans are ranked under."""
_NICENESS = 5
"""Niceness of members other than the search itself, where they share a core."""


def member_messages(
    text: str, errand: Errand, *, now: Callable[[], float] = time.monotonic
) -> Iterator[Message]:
    """Messages of a member with this errand about the case in `text`."""
    until_s = now() + errand.budget_s
    case = case_of(text, origin="instance", objective=errand.objective, budget_s=errand.settling_s)
    problem = case.searched
    match errand.role:
        case Role.BOUND:
            yield from _bounds(problem, errand.cutoff_s)
        case Role.PLAN:
            yield from _searched(case, errand, until_s, now)


def _bounds(problem: Problem, cutoff_s: float | None) -> Iterator[Bounded]:
    """Bounds of rising effort, each higher than the one before."""
    from skein.plan.route.bounds.bound import Effort, lower_bound

    def within(effort: Effort) -> Bounded:
        bound = lower_bound(problem, cutoff_s=cutoff_s, effort=effort)
        return Bounded(seconds=bound.seconds, binding=bound.binding, parts=bound.parts)

    return improvements(within, Effort, lambda bound: (-bound.seconds,))


# --- the search ---


def _searched(
    case: KnownProblem, errand: Errand, until_s: float, now: Callable[[], float]
) -> Iterator[Message]:
    """Plans, each better than the one before."""
    from client.planning.first import first_plan
    from skein.plan.route.orders import FIRST_COME, fitting_orders
    from skein.plan.route.search import Search

    problem = case.searched
    if problem.reduction is None and case.start is None and (first := first_plan(problem)) is not None:
        # Nothing takes more than 3 % longer under 3 % jitter, so no order does.
        routing, makespan_s = first
        yield plan_found(routing, seed=errand.seed, step_s=makespan_s, jittered_s=(1 + _JITTER) * makespan_s)
    if not _is_compiled():
        yield Compiling()
    search = Search(problem, seed=errand.seed, start=case.start)
    begun = search.begin() if search.best is None else search.best
    if isinstance(begun, Infeasible):
        yield MethodRefused(reason=begun.reason)
        return
    yield _news(begun, errand.seed)
    least_s = {FIRST_COME: begun.jittered_s}
    for name, routing in fitting_orders(problem, begun.routing.worker_of, begun.routing.path):
        considered = search.consider(routing)
        if considered is not None:
            least_s[name] = min(considered.jittered_s, least_s.get(name, considered.jittered_s))
    yield Started(orders=tuple(sorted(least_s.items(), key=lambda x: (x[1], x[0]))))
    told_s = begun.jittered_s
    if search.best is not None and search.best.jittered_s < told_s:
        told_s = search.best.jittered_s
        yield _news(search.best, errand.seed)
    if errand.num_rounds is None:
        slices = slices_in_time(problem.num_ops, search, until_s, now)
    else:
        slices = counted_slices(errand.num_rounds, problem.num_ops)
    for slice_ in slices:
        found = search.run(slice_)
        assert not isinstance(found, Infeasible), "it had a plan already"
        if found.jittered_s < told_s:
            told_s = found.jittered_s
            yield _news(found, errand.seed)
        yield Progressed(num_moves=search.num_moves)


def _is_compiled() -> bool:
    """Whether machine code of the longest loop is kept, or no loop's is: then nothing is gained by waiting for it."""
    from skein.plan.route.kernels.anneal import anneal

    kept_at = getattr(getattr(anneal, "stats", None), "cache_path", None)
    return not isinstance(kept_at, str) or any(Path(kept_at).glob("anneal.anneal-*.nbi"))


def _news(found: "Found", seed: int) -> PlanFound:
    return plan_found(found.routing, seed=seed, step_s=found.step_s, jittered_s=found.jittered_s)


# --- the process ---


def main() -> None:
    """Tells what it finds on standard output."""
    errand = errand_of(sys.argv[1])
    if errand.role is not Role.PLAN:
        os.nice(_NICENESS)
    for message in member_messages(sys.stdin.read(), errand):
        print(line_of(message), flush=True)


if __name__ == "__main__":
    main()
