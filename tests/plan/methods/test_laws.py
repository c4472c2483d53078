"""What holds for every method on every problem: it keeps all rules or says why it cannot, and always answers alike."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from skein.plan.methods.table import METHODS
from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing
from skein.types import Layout
from tests.plan.methods.builders import always, drawn_problem, never, with_busy_links
from tests.support.routing_rules import violations

WAVES = {
    "a third skipped": drawn_problem(sizes=(3, 2, 2, 2), path_len=3, num_slots=3),
    "half skipped": drawn_problem(sizes=(4, 2, 2), path_len=2, seed=1),
    "nothing skipped": drawn_problem(sizes=(2, 2, 2), path_len=3, seed=2),
    "one slot, one wave": drawn_problem(sizes=(3, 2, 2, 2), path_len=3, num_slots=1, num_waves=1, seed=3),
    "busy links": with_busy_links(drawn_problem(sizes=(3, 2, 2, 2), path_len=3, seed=4)),
    "idle workers": drawn_problem(sizes=(3, 2, 2, 2), path_len=3, num_workers=12, seed=5),
    "no swaps, short jumps": drawn_problem(sizes=(3, 2, 2, 2), path_len=3, max_swaps=0, max_jump=2, seed=6),
    "no aggregation": replace(drawn_problem(sizes=(3, 2, 2, 2), path_len=3, seed=7), reduction=None),
}
"""What all methods can do."""

CHAINS = {
    "line": drawn_problem(sizes=(3, 2, 2, 3), path_len=3, layout=Layout.LINE, seed=8),
    "line of unequal stages": drawn_problem(sizes=(2, 3, 1, 2, 4), path_len=4, layout=Layout.LINE, seed=9),
    "slack": drawn_problem(sizes=(2, 3, 3, 3), path_len=3, seed=10),
    "unequal stages": drawn_problem(sizes=(3, 1, 4, 2), path_len=3, seed=11),
    "more origins than places": drawn_problem(sizes=(5, 2, 2), path_len=2, seed=12),
    "unequal origins": replace(drawn_problem(sizes=(3, 2, 2), path_len=2, seed=13), num_by_origin=(5, 0, 2)),
    "unequal slots": replace(
        drawn_problem(sizes=(3, 2, 2), path_len=2, seed=14),
        slots=np.random.default_rng(14).integers(1, 4, (7, 3)),
    ),
    "one stage": drawn_problem(sizes=(3,), path_len=1, seed=15),
}
"""What SkipPipe's waves do not fit, and chains and turns do."""

SHARED = {
    "two chunks each": drawn_problem(sizes=(4, 2, 2), path_len=2, num_workers=4, seed=16),
    "one worker": drawn_problem(sizes=(1, 1, 1), path_len=2, num_workers=1, seed=17),
    "line on two workers": drawn_problem(
        sizes=(2, 2, 2), path_len=3, num_workers=2, layout=Layout.LINE, seed=18
    ),
}
"""Several chunks per worker, which only round robin does."""

WAVE_METHODS = ("skip-blind", "skippipe")


def answer(method: str, problem: Problem, seed: int = 0) -> tuple[Problem, Routing] | Infeasible:
    return METHODS[method](problem, seed=seed, may_go_on=always)


def routed(method: str, problem: Problem) -> tuple[Problem, Routing]:
    found = answer(method, problem)
    assert isinstance(found, tuple), found
    return found


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_keeps_the_rules(method: str, name: str) -> None:
    assert violations(*routed(method, WAVES[name])) == ()


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("method", [x for x in METHODS if x not in WAVE_METHODS])
def test_chains_and_turns_fit_any_shape(method: str, name: str) -> None:
    assert violations(*routed(method, CHAINS[name])) == ()


@pytest.mark.parametrize("name", SHARED)
def test_round_robin_shares_workers_among_chunks(name: str) -> None:
    assert violations(*routed("round-robin", SHARED[name])) == ()


@pytest.mark.parametrize("method", WAVE_METHODS)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("line", "layout loop"),
        ("slack", "4 visits for each slot of the origins meet 9 workers"),
        ("unequal stages", "stages after the first have [1, 2, 4] holders"),
        ("unequal origins", "origins send (5, 0, 2) microbatches, not equally many full waves of 2"),
        ("unequal slots", "chunks have 1 to 3 slots"),
        ("one stage", "stages after the first have no holders"),
    ],
)
def test_waves_say_what_does_not_fit(method: str, name: str, reason: str) -> None:
    refused = answer(method, CHAINS[name])
    assert isinstance(refused, Infeasible)
    assert reason in refused.reason


@pytest.mark.parametrize("method", [x for x in METHODS if x != "round-robin"])
def test_placements_of_one_chunk_each_say_so(method: str) -> None:
    refused = answer(method, SHARED["two chunks each"])
    assert isinstance(refused, Infeasible)
    assert "4 workers for 8 chunks" in refused.reason


@pytest.mark.parametrize("method", ["round-robin", "dt-fm"])
def test_jumps_that_no_rotation_avoids_are_named(method: str) -> None:
    refused = answer(method, drawn_problem(sizes=(1,) * 6, path_len=2, max_jump=4))
    assert isinstance(refused, Infeasible)
    assert refused.reason == "2 of 6 stages, all used equally, need jumps of 5, allowed are 4"


@pytest.mark.parametrize("method", METHODS)
def test_equal_inputs_give_an_equal_routing(method: str) -> None:
    problem = WAVES["a third skipped"]
    (_, first), (_, second) = routed(method, problem), routed(method, problem)
    assert np.array_equal(first.worker_of, second.worker_of)
    assert np.array_equal(first.path, second.path)
    assert np.array_equal(first.sequence, second.sequence)


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize("method", METHODS)
def test_without_time_the_answer_is_legal_or_says_so(method: str, name: str) -> None:
    found = METHODS[method](WAVES[name], seed=0, may_go_on=never)
    if isinstance(found, Infeasible):
        assert method in WAVE_METHODS
        assert found.reason == "no plan that keeps within all slots was found in the time given"
    else:
        assert violations(*found) == ()


@pytest.mark.parametrize("method", ["full", "full-matched"])
def test_a_full_pipeline_visits_every_stage_in_order(method: str) -> None:
    asked = WAVES["half skipped"]
    problem, routing = routed(method, asked)
    assert (problem.path_len, problem.num_microbatches) == (3, asked.num_microbatches)
    assert problem.stage_of[routing.path].tolist() == [[0, 1, 2, 0]] * asked.num_microbatches


@pytest.mark.parametrize("may_go_on", [always, never])
@pytest.mark.parametrize("seed", range(4))
def test_matched_chains_are_never_slower_than_chains_from_place_to_place(
    seed: int, may_go_on: Callable[[], bool]
) -> None:
    problem = drawn_problem(sizes=(3, 2, 2, 2), path_len=3, seed=seed)
    plain = METHODS["full"](problem, seed=0, may_go_on=may_go_on)
    matched = METHODS["full-matched"](problem, seed=0, may_go_on=may_go_on)
    assert isinstance(plain, tuple)
    assert isinstance(matched, tuple)
    assert timeline(*matched).step_s <= timeline(*plain).step_s
