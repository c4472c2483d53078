"""Plan files: what others read in them, and that a routing comes back as it was."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from client.planning.files.document import plan_document, routing_in
from client.planning.files.instance import problem_of
from skein.errors import UserError
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.search import Search
from tests.support.instances import instance
from tests.support.routing_rules import violations

FOUR_WAYS = ((0, [0, 1], 1), (1, [0, 2], 2), (2, [1, 3], 3), (3, [1, 0], 1))
"""Microbatch, its workers, and the second of its stages; the first is 0."""


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(instance(sizes=(3, 2, 2), memory=2, waves=2))


@pytest.fixture(scope="module")
def routing(problem: Problem) -> Routing:
    search = Search(problem, seed=3)
    search.begin()
    search.improve(3000)
    assert search.best is not None
    return search.best.routing


@pytest.fixture
def document(problem: Problem, routing: Routing) -> dict[str, object]:
    made: dict[str, object] = json.loads(
        json.dumps(plan_document(problem, routing, predicted_s=9.0, lower_bound_s=None))
    )
    return made


def test_a_plan_file_brings_back_the_same_step(
    problem: Problem, routing: Routing, document: dict[str, object]
) -> None:
    again = routing_in(problem, document)
    assert violations(problem, again) == ()
    assert np.array_equal(again.worker_of, routing.worker_of)
    assert np.array_equal(again.path, routing.path)
    assert np.array_equal(timeline(problem, again).begin_s, timeline(problem, routing).begin_s)


def test_microbatches_ascend_and_start_at_their_origin(problem: Problem, document: dict[str, object]) -> None:
    placement, paths = document["placement"], document["paths"]
    assert isinstance(placement, list)
    assert isinstance(paths, list)
    assert [path["microbatch"] for path in paths] == list(range(12))
    assert sorted(worker for stage in placement for worker in stage) == list(range(7))
    assert Counter(path["hops"][0] for path in paths) == dict.fromkeys(placement[0], 4)


def test_order_lists_each_op_once_on_the_worker_that_runs_it(
    problem: Problem, document: dict[str, object]
) -> None:
    order, paths = document["order"], document["paths"]
    assert isinstance(order, dict)
    assert isinstance(paths, list)
    expected: Counter[tuple[str, str, int]] = Counter()
    for path in paths:
        for worker in path["hops"]:
            expected.update([(str(worker), "F", path["microbatch"]), (str(worker), "B", path["microbatch"])])
        expected[str(path["hops"][0]), "L", path["microbatch"]] += 1
    assert Counter((worker, *op) for worker, ops in order.items() for op in ops) == expected


def test_without_an_order_workers_take_what_comes_first(
    problem: Problem, document: dict[str, object]
) -> None:
    del document["order"]
    for path in document["paths"]:  # type: ignore[attr-defined]
        del path["stages"]
    assert violations(problem, routing_in(problem, document)) == ()


def test_who_holds_two_stages_needs_stages_in_the_paths() -> None:
    problem = problem_of(instance(sizes=(1, 1, 1, 1), path_len=2, memory=1))
    problem = replace(problem, stage_sizes=(2, 2, 2, 2), num_by_origin=(2, 2))
    two_each = [[0, 1], [0, 1], [2, 3], [2, 3]]
    paths = [{"microbatch": m, "hops": hops, "stages": [0, stage]} for m, hops, stage in FOUR_WAYS]
    document: dict[str, object] = {"placement": two_each, "paths": paths}
    path = routing_in(problem, document).path
    assert path.tolist() == [[0, 3, 0], [0, 4, 0], [1, 7, 1], [1, 2, 1]]
    document["paths"] = [{"microbatch": m, "hops": hops} for m, hops, _ in FOUR_WAYS]
    with pytest.raises(UserError, match="holds several stages: give stages too"):
        routing_in(problem, document)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("placement", [[0, 1, 2]], "placement: other sizes: give lists of"),
        ("placement", [[0, 1, 2], [3, 4], [5, 7]], "placement: 7: give workers from 0 to 6"),
        ("paths", [], "paths: 0 paths: give a list of 12"),
        ("order", {}, "order: 0 ops can run: list every op"),
        ("order", {"9": []}, "order: '9': give lists of ops for workers from 0 to 6"),
        ("order", {"0": [["X", 0]]}, "order.0[0]: no op: give"),
        ("order", {"0": [["F", 12]]}, "order.0[0]: 12: give a microbatch from 0 to 11"),
    ],
)
def test_a_file_that_does_not_fit_the_problem_is_refused(
    problem: Problem, document: dict[str, object], field: str, value: object, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        routing_in(problem, document | {field: value})
    assert str(caught.value).startswith(message)


def test_an_order_in_a_circle_is_refused(problem: Problem, document: dict[str, object]) -> None:
    order = document["order"]
    assert isinstance(order, dict)
    longest = max(order, key=lambda worker: len(order[worker]))
    order[longest].reverse()
    with pytest.raises(UserError, match="ops can run: list every op"):
        routing_in(problem, document)
