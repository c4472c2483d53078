"""A plan's own order, reckoned for a fleet."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.config.job import JobSpec, PlanSpec
from skein.plan.balanced import make_balanced_plan, pool_of
from skein.plan.clock.timing import op_times
from skein.plan.cut import cut
from skein.plan.load import stage_loads
from skein.plan.ops import WEIGHT_SHARE, OpKind
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.evaluate import jittered_mean_s, timeline
from skein.plan.route.job_problem import Posed, pose
from skein.plan.route.plan_routing import routing_of
from skein.plan.searched import make_searched_plan
from skein.topology.fleet import Fleet, StageTime
from skein.types import StageIndex, StageSpec
from tests.plan.builders import fleet, fleets, job, jobs, skipping_jobs
from tests.support.extent import examples


def posed(spec: JobSpec, on: Fleet, plan: Plan) -> Posed:
    return pose(spec, on, plan, pool_of(spec, on))


@settings(max_examples=examples(40))
@given(st.one_of(jobs(), skipping_jobs()), fleets())
def test_each_worker_does_its_list_and_each_microbatch_its_way(spec: JobSpec, on: Fleet) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    assert isinstance(plan, Plan | Infeasible)
    if isinstance(plan, Infeasible):
        return
    problem = posed(spec, on, plan)
    routing = routing_of(plan, problem)
    assert routing is not None
    assert len(routing.sequence) == sum(len(schedule.ops) for schedule in plan.schedules)
    begin_s = timeline(problem.problem, routing).begin_s
    assert np.all(np.diff(begin_s, axis=1) >= 0)


def test_a_searched_plan_takes_what_it_promised() -> None:
    spec = job(stages=3, replicas=2, num_layers=6).model_copy(update={"plan": PlanSpec(budget_s=0.05)})
    on = fleet([1e9, 2e9, 1e9, 3e9, 1e9, 1e9])
    plan = make_searched_plan(spec, on, None, 0)
    assert isinstance(plan, Plan)
    routing = routing_of(plan, problem := posed(spec, on, plan))
    assert routing is not None
    reckoned_s = jittered_mean_s(problem.problem, routing, num_draws=24, seed=0)
    # Chunks may be numbered otherwise, so jitter is drawn for the same workers and links: only rounding differs.
    assert reckoned_s == pytest.approx(plan.predicted_step_s, rel=1e-9)


def test_lists_that_wait_for_each_other_are_no_order() -> None:
    spec = job(stages=2, replicas=1, num_layers=4, num_microbatches=2)
    plan = make_balanced_plan(spec, fleet([1e9] * 2), None, 0)
    assert isinstance(plan, Plan)
    turned = [
        replace(x, ops=tuple(sorted(x.ops, key=lambda op: op.kind is OpKind.FORWARD))) for x in plan.schedules
    ]
    stuck = replace(plan, schedules=tuple(turned))
    assert routing_of(stuck, posed(spec, fleet([1e9] * 2), plan)) is None


def test_a_worker_that_was_measured_at_looking_up_embeddings_alone_is_as_fast_as_its_profile() -> None:
    spec = job(stages=2, replicas=1, num_layers=2, is_tied=False)
    on = fleet([1e9, 1e9])
    stages = (
        StageSpec(index=StageIndex(0), first=0, stop=1),
        StageSpec(index=StageIndex(1), first=1, stop=4),
    )
    loads = stage_loads(spec, stages)
    assert loads[0].flops == 0
    lookup = StageTime(worker=on.workers[0].worker, stage=stages[0], forward_s=0.1, backward_s=0.1)
    measured = replace(on, stage_times=(lookup,))
    forward_s, *_ = op_times(measured, loads, pool_of(spec, measured))
    assert forward_s[0, 0] == 0.1
    assert forward_s[0, 1] == forward_s[1, 1]


def test_weights_take_the_share_of_a_backward_that_they_had_on_this_worker() -> None:
    spec = job(stages=3, replicas=1, num_layers=4)
    on = fleet([1e9, 1e9])
    stages = cut(spec.layers, 3, spec.parallel.layout)
    loads = stage_loads(spec, stages)
    times = [
        StageTime(worker=on.workers[0].worker, stage=stage, forward_s=1.0, backward_s=2.0, weight_s=weight_s)
        for stage, weight_s in zip(stages, (0.9, None), strict=False)
    ]
    measured = replace(on, stage_times=tuple(times))
    _, backward_s, weight_s = op_times(measured, loads, pool_of(spec, measured))
    assert weight_s[0].tolist() == pytest.approx([0.9, 0.9, 0.45 * backward_s[0, 2]])
    assert weight_s[1].tolist() == pytest.approx((WEIGHT_SHARE * backward_s[1]).tolist())
