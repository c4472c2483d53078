"""One process of a portfolio: reads the case from standard input, and writes what it finds line by line.

`python -m client.planning.member '{"role": ...}'`. It may be ended at any moment: whatever it has told counts.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from client.planning.case import KnownProblem, case_of
from client.planning.errand import Errand, Role, errand_of
from client.planning.messages import (
    Bounded,
    Compiling,
    MemberEnded,
    Message,
    MethodRefused,
    PlanFound,
    Progressed,
    bound_message,
    line_of,
    plan_found,
)
from skein.plan.plan import Infeasible
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.rounds import MOVES_PER_OP, AnnealingRound, rounds

if TYPE_CHECKING:
    from skein.plan.route.search import Search

_JITTER = 0.03
"""That plans are ranked under."""
_NICENESS = 5
"""Of what is not the search itself, where they share a core."""
_TRY_MOVES = 2_000
"""Of the round that measures how fast this machine is."""
_CAUTION = 0.85
"""Of the time left: the machine may be slower than it was, and a round that does not end is lost."""
_LEAST_ROUND_S = 0.15
_ROUND_MOVES_PER_OP = 200
"""Of a round where rounds are counted."""


def member_messages(
    text: str, errand: Errand, *, now: Callable[[], float] = time.monotonic
) -> Iterator[Message]:
    """What a member with this errand tells about the case in `text`, ending with `MemberEnded`."""
    until_s = now() + errand.budget_s
    case = case_of(text, origin="instance", objective=errand.objective)
    problem = case.searched
    match errand.role:
        case Role.BOUND:
            yield from _bounds(problem, errand.cutoff_s)
        case Role.PLAN:
            yield from _searched(case, errand, until_s, now)
    yield MemberEnded(cpu_s=time.process_time())


def _bounds(problem: Problem, cutoff_s: float | None) -> Iterator[Bounded]:
    """Bounds of rising effort, each at least as high as the one before."""
    from skein.plan.route.bounds.bound import Effort, lower_bound

    best = bound_message(lower_bound(problem, cutoff_s=cutoff_s, effort=Effort.SIMPLE))
    yield best
    for effort in (Effort.ROUTES, Effort.FULL):
        found = bound_message(lower_bound(problem, cutoff_s=cutoff_s, effort=effort))
        if found.seconds > best.seconds:
            best = found
            yield best


# --- the search ---


def _searched(
    case: KnownProblem, errand: Errand, until_s: float, now: Callable[[], float]
) -> Iterator[Message]:
    """Plans, each better than the one before."""
    from client.planning.first import first_plan
    from skein.plan.route.search import Search

    problem = case.searched
    if problem.reduction is None and case.start is None and (first := first_plan(problem)) is not None:
        yield _at_once(errand.seed, *first)
    if not _is_compiled():
        yield Compiling()
    search = Search(problem, seed=errand.seed, start=case.start)
    found = search.begin() if search.best is None else search.best
    if isinstance(found, Infeasible):
        yield MethodRefused(reason=found.reason)
        return
    yield _news(search, errand.seed)
    if errand.num_rounds is None:
        todo = rounds_in_time(problem, search, until_s, now)
    else:
        todo = _counted_rounds(problem, errand.num_rounds)
    told_s = found.jittered_s
    for num_moves, round_ in todo:
        found = search.run(round_, num_moves)
        assert not isinstance(found, Infeasible), "it had a plan already"
        if found.jittered_s < told_s:
            told_s = found.jittered_s
            yield _news(search, errand.seed)
        yield Progressed(num_moves=search.num_moves)


def _is_compiled() -> bool:
    """Whether machine code of the longest loop is kept, or no loop's is: then nothing is gained by waiting for it."""
    from skein.plan.route.kernels.anneal import anneal

    kept_at = getattr(getattr(anneal, "stats", None), "cache_path", None)
    return not isinstance(kept_at, str) or any(Path(kept_at).glob("anneal.anneal-*.nbi"))


def _at_once(seed: int, routing: Routing, makespan_s: float) -> PlanFound:
    # Nothing takes more than 3 % longer under 3 % jitter, so no order does.
    jittered_s = (1 + _JITTER) * makespan_s
    return plan_found(
        routing,
        seed=seed,
        step_s=makespan_s,
        jittered_s=jittered_s,
    )


def _news(search: "Search", seed: int) -> Message:
    assert search.best is not None
    return plan_found(
        search.best.routing,
        seed=seed,
        step_s=search.best.step_s,
        jittered_s=search.best.jittered_s,
    )


def _counted_rounds(problem: Problem, num_rounds: int) -> Iterator[tuple[int, AnnealingRound]]:
    """Rounds of equal size, (moves, what to do)."""
    once = rounds(1, problem.num_ops)
    for number in range(num_rounds):
        yield _ROUND_MOVES_PER_OP * problem.num_ops, once[number % len(once)]


class Counting(Protocol):
    """A search, as far as its pace goes."""

    num_moves: int


def rounds_in_time(
    problem: Problem, search: Counting, until_s: float, now: Callable[[], float]
) -> Iterator[tuple[int, AnnealingRound]]:
    """(moves, what to do) for as long as there is time, sized by how fast the rounds before were."""
    most = MOVES_PER_OP * problem.num_ops
    began_s, before = now(), search.num_moves
    yield _TRY_MOVES, AnnealingRound(share=0.0, warmth=None)
    moves_per_s = (search.num_moves - before) / max(1e-6, now() - began_s)
    todo = list(rounds(moves_per_s * (until_s - now()), problem.num_ops))
    while (left_s := until_s - now()) > _LEAST_ROUND_S:
        share = todo[0].share / sum(x.share for x in todo)
        began_s, before = now(), search.num_moves
        yield min(most, max(1, int(_CAUTION * share * left_s * moves_per_s))), todo[0]
        moves_per_s = (search.num_moves - before) / max(1e-6, now() - began_s)
        todo = todo[1:] or todo[-1:]


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
