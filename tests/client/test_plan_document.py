"""Plan files: what others read in them, and that a routing comes back as it was."""

import json
from collections import Counter

import numpy as np
import pytest

from client.planning.files.document import plan_document
from client.planning.files.instance import problem_of
from skein.plan.route.evaluate import timeline
from skein.plan.route.problem import Problem, Routing
from skein.plan.route.search import Search
from tests.support.instances import instance
from tests.support.plan_files import routing_in
from tests.support.routing_rules import violations


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
