"""One clock for all plans: walked through in Python as the search's machine code has it; bounds stay below it."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skein.config.job import JobSpec
from skein.plan import balanced
from skein.plan.balanced import Setting, make_balanced_plan, pool_of
from skein.plan.changing.silent import silent_chunks
from skein.plan.clock.timing import estimate_s
from skein.plan.clock.walked import MOST_OPS
from skein.plan.plan import Infeasible, Plan
from skein.plan.route.bounds.bound import Effort, lower_bound
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import pose
from skein.plan.route.plan_routing import routing_of
from skein.topology.fleet import Fleet, StageTime
from tests.plan.builders import fleet, fleets, job, jobs, link, planned, skipping_jobs
from tests.support.extent import examples


def slow_lines(num_workers: int, bytes_per_s: float, speed: float = 1e9) -> Fleet:
    """Workers whose lines a boundary tensor takes for as long as an op, or longer."""
    names = [f"w{i}" for i in range(num_workers)]
    links = [
        link(a, b, 0.001 * (1 + i), bytes_per_s * (1 + j / 8))
        for (i, a), (j, b) in product(enumerate(names), repeat=2)
        if a != b
    ]
    return fleet([speed * (1 + i / 4) for i in range(num_workers)], links=links)


@st.composite
def measured(draw: st.DrawFn, spec: JobSpec, on: Fleet) -> Fleet:
    """The fleet once some of it has been measured at what the balanced plan gives it."""
    plan = make_balanced_plan(spec, on, None, 0)
    if isinstance(plan, Infeasible):
        return on
    seconds = st.floats(1e-5, 1.0)
    times = [
        StageTime(
            worker=placed.chunk.worker,
            stage=plan.stages[placed.chunk.stage],
            forward_s=draw(seconds),
            backward_s=draw(seconds),
        )
        for placed in plan.chunks
        if draw(st.booleans())
    ]
    return replace(on, stage_times=tuple(times))


@settings(max_examples=examples(30))
@given(spec=st.one_of(jobs(), skipping_jobs()), on=fleets(), data=st.data())
def test_the_walk_is_the_searchs_clock_and_no_closed_form_says_more_than_either(
    spec: JobSpec, on: Fleet, data: st.DataObject
) -> None:
    on = data.draw(measured(spec, on))
    plan = make_balanced_plan(spec, on, None, 0)
    assert isinstance(plan, Plan)
    assert balanced.balanced_step_s(spec, on, plan) == pytest.approx(plan.predicted_step_s, rel=1e-9)
    assume(not silent_chunks(plan))
    setting = Setting(job=spec, fleet=on, pool=pool_of(spec, on))
    posed = pose(spec, on, plan, setting.pool)
    routing = routing_of(plan, posed)
    assert routing is not None
    clock_s = timeline(posed.problem, routing).step_s
    assert plan.predicted_step_s == pytest.approx(clock_s, rel=1e-9)
    assert setting.lower_bound_s(plan.stages, plan.paths) <= clock_s * (1 + 1e-9)
    assert lower_bound(posed.problem, effort=Effort.SIMPLE).seconds <= clock_s
    # Below the clock or above it, an estimate keeps to the bound.
    slots = {placed.chunk: placed.slots for placed in plan.chunks}
    estimated_s = estimate_s(setting.timed(plan.stages, plan.paths), slots, [])
    assert setting.lower_bound_s(plan.stages, plan.paths) <= estimated_s * (1 + 1e-9)


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
