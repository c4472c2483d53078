"""Each rule, broken by itself in a routing that keeps all others."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from client.planning.first import first_plan
from skein.plan.route.problem import Problem, Routing
from skein.types import Layout
from tests.plan.route.drawn import drawn_problem
from tests.support.routing_rules import violations


def routed(problem: Problem) -> Routing:
    answer = first_plan(problem)
    assert answer is not None
    return answer[0]


LOOP = drawn_problem(sizes=(2, 2, 2, 2), path_len=3)
LINE = drawn_problem(sizes=(2, 2, 2, 2), path_len=3, layout=Layout.LINE)


@pytest.mark.parametrize("problem", [LOOP, LINE], ids=["loop", "line"])
def test_a_legal_routing_breaks_nothing(problem: Problem) -> None:
    assert violations(problem, routed(problem)) == ()


def with_hop(routing: Routing, microbatch: int, hop: int, chunk: int) -> Routing:
    path = routing.path.copy()
    path[microbatch, hop] = chunk
    return replace(routing, path=path)


BREAKS: dict[str, tuple[Problem, Callable[[Routing], Routing]]] = {
    "worker_of has shape (7,), expected (8,)": (LOOP, lambda x: replace(x, worker_of=x.worker_of[:7])),
    "sequence has values outside 0 ... 55": (LOOP, lambda x: replace(x, sequence=x.sequence + 1)),
    "worker 0 holds stage 0 2 times": (
        LOOP,
        lambda x: replace(x, worker_of=np.array([0, 0, 2, 3, 4, 5, 6, 7])),
    ),
    "worker 2 holds 2 chunks, may hold 1": (
        LOOP,
        lambda x: replace(x, worker_of=np.array([0, 2, 2, 3, 4, 5, 6, 7])),
    ),
    "microbatch 0 has its loss at chunk 1, not at its origin": (LOOP, lambda x: with_hop(x, 0, 3, 1)),
    "microbatch 0 begins at stage 1": (LOOP, lambda x: with_hop(x, 0, 0, 2)),
    "microbatch 0 ends at stage 2": (LINE, lambda x: with_hop(x, 0, 2, 4)),
    "microbatch 0 visits a stage twice: [0, 1, 1]": (LOOP, lambda x: with_hop(x, 0, 2, 3)),
    "origin 0 sends 3 microbatches, expected 4": (LOOP, lambda x: with_hop(with_hop(x, 0, 0, 1), 0, 3, 1)),
    "stages are visited unequally: [8, 6, 4, 6]": (LOOP, lambda x: with_hop(x, 0, 2, 6)),
    "the sequence does not have 7 ops of each microbatch": (
        LOOP,
        lambda x: replace(x, sequence=np.zeros_like(x.sequence)),
    ),
    "chunk 0 holds 3 microbatches, has 2 slots": (
        LOOP,
        lambda x: replace(x, sequence=np.arange(56).reshape(8, 7).T.ravel()),
    ),
    "op 1 of microbatch 0 comes before what it waits for": (
        LOOP,
        lambda x: replace(x, sequence=np.arange(56)[np.r_[1, 0, 2:56]]),
    ),
}


@pytest.mark.parametrize("message", BREAKS)
def test_a_broken_rule_is_named(message: str) -> None:
    problem, broken = BREAKS[message]
    assert message in violations(problem, broken(routed(problem)))


@pytest.mark.parametrize(
    ("limits", "stages", "message"),
    [
        ({"max_swaps": 1}, (0, 2, 1), ()),
        ({"max_swaps": 0}, (0, 2, 1), ("microbatch 0 swaps 1 times",)),
        ({"max_swaps": 2}, (0, 3, 1), ("microbatch 0 goes back to stage 1 from 3",)),
        ({"max_jump": 2}, (0, 1, 3), ()),
        ({"max_jump": 1}, (0, 1, 3), ("microbatch 0 jumps from stage 1 to 3",)),
    ],
)
def test_limits_on_swaps_and_jumps_are_kept(
    limits: dict[str, int], stages: tuple[int, ...], message: tuple[str, ...]
) -> None:
    problem = drawn_problem(sizes=(1, 1, 1, 1), path_len=3, num_slots=1, num_waves=1)
    problem = replace(
        problem,
        max_swaps=limits.get("max_swaps", problem.max_swaps),
        max_jump=limits.get("max_jump", problem.max_jump),
    )
    routing = Routing(
        worker_of=np.arange(4),
        path=np.array([[*stages, 0]]),
        sequence=np.arange(7),
    )
    unequal = "stages are visited unequally"
    assert tuple(x for x in violations(problem, routing) if not x.startswith(unequal)) == message
