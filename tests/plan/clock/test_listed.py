"""Orders by the clock: nobody waits who could work, and weight ops fill what would be waiting."""

import pytest
from hypothesis import given, settings

from skein.config.job import JobSpec, PlanSpec
from skein.plan.balanced import Setting, make_balanced_plan, pool_of
from skein.plan.changing.silent import silent_chunks
from skein.plan.check import violations
from skein.plan.clock.listed import timed_schedules
from skein.plan.clock.walked import walked_s
from skein.plan.cut import cut_job
from skein.plan.load import stage_loads
from skein.plan.ops import OpKind
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan
from skein.topology.fleet import Fleet
from tests.plan.builders import fleet, fleets, job, link, planned, split, split_jobs
from tests.support.extent import examples

HOP_S = 0.05


def equal_line(hop_s: float) -> Fleet:
    """Four equal workers with lines that carry anything at once."""
    names = [f"w{i}" for i in range(4)]
    links = [link(a, b, hop_s, 1e15) for a in names for b in names if a != b]
    return fleet([1e9] * 4, links=links)


def even_job() -> JobSpec:
    """Four stages of one block each and a bit: the ends have the embedding and a head of 256 rows."""
    return job(stages=4, replicas=1, num_layers=8)


def timed_s(plan: Plan, spec: JobSpec, on: Fleet, *, depth: int) -> float:
    """Seconds of the plan's paths in orders by the clock, with so many microbatches in flight."""
    setting = Setting(job=spec, fleet=on, pool=pool_of(spec, on))
    pace = setting.pace(plan.stages)
    slots = {x.chunk: depth for x in plan.chunks}
    schedules = timed_schedules(plan.paths, slots, plan.workers, pace)
    found_s = walked_s(plan.paths, schedules, (), pace)
    assert found_s is not None
    return found_s


@pytest.mark.parametrize("hop_s", [0.0, 0.01, HOP_S])
def test_whole_backwards_take_the_least_that_a_line_can(hop_s: float) -> None:
    """(m + p - 1) T + 2 (p - 1) c where stages are equal; here the slowest one has its work and what lies around."""
    spec, on = even_job(), equal_line(hop_s)
    plan = planned(spec, on)
    setting = Setting(job=spec, fleet=on, pool=pool_of(spec, on))
    pace = setting.pace(plan.stages)
    visit_s = [float(pace.forward_s[i, i] + pace.backward_s[i, i]) for i in range(4)]
    m, slowest = spec.batch.num_microbatches, visit_s.index(max(visit_s))
    assert slowest == 3, "the stage of the head"
    expected_s = m * visit_s[3] + sum(visit_s[:3]) + 2 * 3 * hop_s
    assert timed_s(plan, spec, on, depth=m) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize("hop_s", [0.01, HOP_S])
def test_a_split_backward_lets_the_last_gradient_come_home_without_the_weights(hop_s: float) -> None:
    on = equal_line(hop_s)
    whole, halves = even_job(), split(even_job())
    before, after = planned(whole, on), planned(halves, on)
    m = whole.batch.num_microbatches
    setting = Setting(job=halves, fleet=on, pool=pool_of(halves, on))
    pace = setting.pace(after.stages)
    weight_s = [OpKind.WEIGHT.row.cost.seconds(0.0, float(pace.backward_s[i, i])) for i in range(4)]
    gained_s = timed_s(before, whole, on, depth=m) - timed_s(after, halves, on, depth=m)
    # The slowest stage does its weight ops when its last loss is on its way home; those on that way do theirs later.
    assert gained_s == pytest.approx(m * weight_s[3] + weight_s[1] + weight_s[2], rel=1e-6)


@settings(max_examples=examples(30))
@given(split_jobs(), fleets())
def test_a_plan_with_split_backwards_is_legal_and_predicted_by_its_own_orders(
    spec: JobSpec, on: Fleet
) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    if not isinstance(plan, Plan):
        return
    assert violations(plan, spec, on) == ()
    kinds = {op.kind for schedule in plan.schedules for op in schedule.ops}
    assert OpKind.WEIGHT in kinds
    assert OpKind.LOSS_INPUT in kinds or spec.parallel.layout.comes_back
    again = make_balanced_plan(spec, on, plan, 0)
    assert isinstance(again, Plan)
    assert again == plan
    if silent_chunks(plan):
        return
    setting = Setting(job=spec, fleet=on, pool=pool_of(spec, on))
    slots = {x.chunk: x.slots for x in plan.chunks}
    assert setting.schedules(plan.stages, plan.paths, slots) == plan.schedules


@pytest.mark.parametrize("hop_s", [0.0005, HOP_S])
def test_whole_backwards_are_planned_and_predicted_in_the_order_in_which_workers_take_them(
    hop_s: float,
) -> None:
    """Orders by microbatch, kept to strictly, took a third more than workers did: they take what is there."""
    spec, on = even_job(), equal_line(hop_s)
    fastest = fleet([job_speed(spec, forward_s=0.05)] * 4, links=on.links)
    plan = planned(spec, fastest)
    quick = spec.model_copy(update={"plan": PlanSpec(budget_s=0.2)})
    searched = make_searched_plan(quick, fastest, None, 0)
    assert isinstance(searched, Plan)
    assert plan.predicted_step_s <= 1.02 * searched.predicted_step_s


def job_speed(spec: JobSpec, *, forward_s: float) -> float:
    """FLOP/s at which the forward of a stage between the ends takes so long."""
    return stage_loads(spec, cut_job(spec))[1].forward_flops / forward_s
