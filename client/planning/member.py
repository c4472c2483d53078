"""One process of a portfolio: reads the case from standard input, and writes what it finds line by line.

`python -m client.planning.member '{"role": ...}'`. It may be ended at any moment: whatever it has told counts.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from client.planning.case import Case, case_of
from client.planning.errand import SEARCH, Errand, Role, errand_of
from client.planning.messages import (
    Bounded,
    Compiling,
    Ended,
    Message,
    PlanFound,
    Progressed,
    Refused,
    bounded,
    line_of,
    plan_found,
)
from skein.plan.plan import Infeasible
from skein.plan.route.problem import Problem, Routing

if TYPE_CHECKING:
    from skein.plan.route.search import Search

_JITTER = 0.03
"""That plans are ranked under."""
_NICENESS = 5
"""Of what is not the search itself, where they share a core."""
_TRY_MOVES = 2_000
"""Of the round that measures how fast this machine is."""
_SHARES = {"quick": 0.08, "anneal": 0.62, "polish": 0.3}
"""Of the moves there is time for: a rough plan, annealings from starts of their own, and more of the best one."""
_MOVES_PER_OP = 8_000
"""Beyond this one annealing gains less than a second one does."""
_LEAST_ANNEALINGS = 2
_CAUTION = 0.85
"""Of the time left: the machine may be slower than it was, and a round that does not end is lost."""
_LEAST_ROUND_S = 0.15
_ROUND_MOVES_PER_OP = 200
"""Of a round where rounds are counted."""


def told(text: str, errand: Errand, *, now: Callable[[], float] = time.monotonic) -> Iterator[Message]:
    """What a member with this errand tells about the case in `text`, ending with `Ended`."""
    until_s = now() + errand.budget_s
    case = case_of(text, origin="instance", objective=errand.objective)
    problem = case.searched
    match errand.role:
        case Role.BOUND:
            yield from _bounds(problem, errand.cutoff_s)
        case Role.PLAN | Role.OTHERS:
            for method in errand.methods:
                if method == SEARCH:
                    yield from _searched(case, errand, until_s, now)
                else:
                    yield from _planned(problem, method, errand.seed, lambda: now() < until_s)
    yield Ended(cpu_s=time.process_time())


def _bounds(problem: Problem, cutoff_s: float | None) -> Iterator[Bounded]:
    """Bounds of rising effort, each at least as high as the one before."""
    from skein.plan.route.bound import Effort, lower_bound

    best = bounded(lower_bound(problem, cutoff_s=cutoff_s, effort=Effort.SIMPLE))
    yield best
    for effort in (Effort.ROUTES, Effort.FULL):
        found = bounded(lower_bound(problem, cutoff_s=cutoff_s, effort=effort))
        if found.seconds > best.seconds:
            best = found
            yield best


def _planned(problem: Problem, method: str, seed: int, may_go_on: Callable[[], bool]) -> Iterator[Message]:
    """The plan of a method that tells only at its end."""
    from skein.plan.methods.table import METHODS
    from skein.plan.route.evaluate import jittered_mean_s, timeline

    found = METHODS[method](problem, seed=seed, may_go_on=may_go_on)
    if isinstance(found, Infeasible):
        yield Refused(method=method, reason=found.reason)
        return
    solved, routing = found
    yield plan_found(
        routing,
        method=method,
        seed=seed,
        path_len=solved.path_len,
        step_s=timeline(solved, routing).step_s,
        jittered_s=jittered_mean_s(solved, routing),
    )


# --- our search ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A part of a search: `share` of the moves there is time for, from a start of its own or at the best plan."""

    share: float
    is_polish: bool


def _searched(case: Case, errand: Errand, until_s: float, now: Callable[[], float]) -> Iterator[Message]:
    """Plans, each better than the one before."""
    from client.planning.first import first_plan
    from skein.plan.route.search import Search

    problem = case.searched
    if problem.reduction is None and case.start is None and (first := first_plan(problem)) is not None:
        yield _at_once(problem, errand.seed, *first)
    if not _is_compiled():
        yield Compiling()
    search = Search(problem, seed=errand.seed, start=case.start)
    found = search.begin() if search.best is None else search.best
    if isinstance(found, Infeasible):
        yield Refused(method=SEARCH, reason=found.reason)
        return
    yield _news(search, errand.seed)
    if errand.num_rounds is None:
        rounds = rounds_in_time(problem, search, until_s, now)
    else:
        rounds = _counted_rounds(problem, errand.num_rounds)
    told_s = found.jittered_s
    for num_moves, is_polish in rounds:
        found = search.polish(num_moves) if is_polish else search.improve(num_moves)
        assert not isinstance(found, Infeasible), "it had a plan already"
        if found.jittered_s < told_s:
            told_s = found.jittered_s
            yield _news(search, errand.seed)
        yield Progressed(num_moves=search.num_moves)


def _is_compiled() -> bool:
    """Whether machine code of the longest loop is kept, or no loop's is: then nothing is gained by waiting for it."""
    from skein.plan.route.anneal import anneal

    kept_at = getattr(getattr(anneal, "stats", None), "cache_path", None)
    return not isinstance(kept_at, str) or any(Path(kept_at).glob("anneal.anneal-*.nbi"))


def _at_once(problem: Problem, seed: int, routing: Routing, makespan_s: float) -> PlanFound:
    # Nothing takes more than 3 % longer under 3 % jitter, so no order does.
    jittered_s = (1 + _JITTER) * makespan_s
    return plan_found(
        routing,
        method=SEARCH,
        seed=seed,
        path_len=problem.path_len,
        step_s=makespan_s,
        jittered_s=jittered_s,
    )


def _news(search: "Search", seed: int) -> Message:
    assert search.best is not None
    return plan_found(
        search.best.routing,
        method=SEARCH,
        seed=seed,
        path_len=search.problem.path_len,
        step_s=search.best.step_s,
        jittered_s=search.best.jittered_s,
    )


def _counted_rounds(problem: Problem, num_rounds: int) -> Iterator[tuple[int, bool]]:
    """(moves, whether to polish): two annealings, then a polish, and so on."""
    for number in range(num_rounds):
        yield _ROUND_MOVES_PER_OP * _num_ops(problem), number % 3 == 2


class Counting(Protocol):
    """A search, as far as its pace goes."""

    num_moves: int


def rounds_in_time(
    problem: Problem, search: Counting, until_s: float, now: Callable[[], float]
) -> Iterator[tuple[int, bool]]:
    """(moves, whether to polish) for as long as there is time, sized by how fast the rounds before were."""
    most = _MOVES_PER_OP * _num_ops(problem)
    began_s, before = now(), search.num_moves
    yield _TRY_MOVES, False
    moves_per_s = (search.num_moves - before) / max(1e-6, now() - began_s)
    rounds = _shared_out(problem, moves_per_s * (until_s - now()))
    while (left_s := until_s - now()) > _LEAST_ROUND_S:
        share = rounds[0].share / sum(x.share for x in rounds) if rounds else 1.0
        is_polish = rounds[0].is_polish if rounds else True
        began_s, before = now(), search.num_moves
        yield min(most, max(1, int(_CAUTION * share * left_s * moves_per_s))), is_polish
        moves_per_s = (search.num_moves - before) / max(1e-6, now() - began_s)
        rounds = rounds[1:]


def _shared_out(problem: Problem, num_moves: float) -> tuple[_Round, ...]:
    """How to spend so many moves."""
    most = _MOVES_PER_OP * _num_ops(problem)
    num_annealings = max(_LEAST_ANNEALINGS, math.ceil(_SHARES["anneal"] * num_moves / most))
    num_polishes = max(1, math.ceil(_SHARES["polish"] * num_moves / most))
    return (
        _Round(share=_SHARES["quick"], is_polish=False),
        *[_Round(share=_SHARES["anneal"] / num_annealings, is_polish=False)] * num_annealings,
        *[_Round(share=_SHARES["polish"] / num_polishes, is_polish=True)] * num_polishes,
    )


def _num_ops(problem: Problem) -> int:
    return problem.num_microbatches * (2 * problem.num_hops + 1)


# --- the process ---


def main() -> None:
    """Tells what it finds on standard output."""
    errand = errand_of(sys.argv[1])
    if errand.role is not Role.PLAN:
        os.nice(_NICENESS)
    for message in told(sys.stdin.read(), errand):
        print(line_of(message), flush=True)


if __name__ == "__main__":
    main()
