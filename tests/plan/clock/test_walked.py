"""The balanced planner's prediction beside the search's, of the same plan."""

from itertools import product

import pytest

from skein.plan import balanced, searched
from skein.plan.clock.walked import MOST_OPS
from skein.topology.fleet import Fleet
from skein.types import Layout
from tests.plan.builders import fleet, job, link, planned


def slow_lines(num_workers: int, bytes_per_s: float, speed: float = 1e9) -> Fleet:
    """Workers whose lines a boundary tensor takes for as long as an op, or longer."""
    names = [f"w{i}" for i in range(num_workers)]
    links = [
        link(a, b, 0.001 * (1 + i), bytes_per_s * (1 + j / 8))
        for (i, a), (j, b) in product(enumerate(names), repeat=2)
        if a != b
    ]
    return fleet([speed * (1 + i / 4) for i in range(num_workers)], links=links)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    ("stages", "replicas", "bytes_per_s"), [(2, 3, 2e5), (3, 2, 5e5), (2, 1, 1e5), (4, 2, 1e9)]
)
def test_both_predict_the_same_of_one_plan_where_lines_are_shared(
    stages: int, replicas: int, bytes_per_s: float, layout: Layout
) -> None:
    spec = job(stages=stages, replicas=replicas, layout=layout, num_layers=6, num_microbatches=12)
    on = slow_lines(stages * replicas, bytes_per_s)
    plan = planned(spec, on)
    reckoned_s = searched.reckoned_s(spec, on, plan)
    assert reckoned_s is not None
    assert plan.predicted_step_s == pytest.approx(reckoned_s, rel=0.05)
    assert balanced.reckoned_s(spec, on, plan) == plan.predicted_step_s


def test_a_line_that_several_share_is_counted() -> None:
    """Three senders to one receiver: what the closed form of one pipeline does not know."""
    spec = job(stages=2, replicas=3, num_microbatches=12)
    near, far = slow_lines(6, 1e9), slow_lines(6, 1e5)
    assert planned(spec, far).predicted_step_s > 2 * planned(spec, near).predicted_step_s


def test_what_is_too_long_to_walk_through_has_a_prediction_all_the_same() -> None:
    spec = job(stages=5, replicas=1, num_layers=6, num_microbatches=MOST_OPS // 8)
    plan = planned(spec, slow_lines(5, 1e9))
    assert sum(len(schedule.ops) for schedule in plan.schedules) > MOST_OPS
    assert plan.predicted_step_s > plan.lower_bound_s
