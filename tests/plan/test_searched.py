"""Laws of the searching planner over random jobs and fleets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import schedules
from skein.config.job import JobSpec, PlanSpec, SkipSpec
from skein.model.reduced import reduced_by_group
from skein.plan.balanced import balanced_step_s, make_balanced_plan, pool_of
from skein.plan.check import violations
from skein.plan.clock.timing import reduction_s
from skein.plan.order import left_undone
from skein.plan.plan import Plan
from skein.plan.replan.routing import always
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import pose, resized
from skein.plan.route.plan_routing import routing_of
from skein.plan.searched import make_searched_plan, searched_step_s
from skein.topology.fleet import Fleet
from skein.types import Layout, MicrobatchId, Tied, WorkerId
from tests.plan.builders import fleet, fleets, job, jobs, link, skipping_jobs, without
from tests.support.extent import examples, part


def brief(spec: JobSpec, *, budget_s: float = 0.02) -> JobSpec:
    return spec.model_copy(update={"plan": PlanSpec(budget_s=budget_s)})


def planned(spec: JobSpec, on: Fleet, *, may_go_on: Callable[[], bool] = always) -> Plan:
    plan = make_searched_plan(spec, on, None, 0, may_go_on=may_go_on)
    assert isinstance(plan, Plan), plan
    assert violations(plan, spec, on) == ()
    return plan


@settings(max_examples=examples(30))
@given(st.one_of(jobs(), skipping_jobs()), fleets(memory_bytes=st.integers(0, 2 * 10**6)))
def test_a_searched_plan_is_legal_and_there_is_one_wherever_there_is_a_balanced_one(
    spec: JobSpec, on: Fleet
) -> None:
    plan, balanced = make_searched_plan(brief(spec), on, None, 0), make_balanced_plan(spec, on, None, 0)
    assert type(plan) is type(balanced)
    if isinstance(plan, Plan):
        assert violations(plan, brief(spec), on) == ()
        assert left_undone(plan) == ()


@settings(max_examples=examples(10))
@given(skipping_jobs(), fleets(), st.integers(0, 3))
def test_equal_inputs_make_equal_plans(spec: JobSpec, on: Fleet, seed: int) -> None:
    assert make_searched_plan(brief(spec), on, None, seed) == make_searched_plan(brief(spec), on, None, seed)


def two_cities() -> Fleet:
    """Three workers in each of two cities; a link between the cities takes as long as many ops."""
    names = [f"w{i}" for i in range(6)]
    sites = ["a", "b"] * 3
    links = [
        link(x, y, 0.05 if sites[i] != sites[j] else 0.0001)
        for (i, x), (j, y) in product(enumerate(names), repeat=2)
        if x != y
    ]
    return fleet([1e9] * 6, sites=sites, links=links)


def test_chains_stay_inside_their_cities_where_links_between_these_are_slow() -> None:
    spec = job(stages=3, replicas=2, num_layers=6, num_microbatches=6)
    plan = planned(brief(spec, budget_s=0.1), two_cities())
    city = {f"w{i}": "ab"[i % 2] for i in range(6)}
    assert all(len({city[hop.worker] for hop in path.hops}) == 1 for path in plan.paths)


def two_offices() -> Fleet:
    """Two workers in each of two offices, a thousand times nearer to each other than to the others."""
    names, sites = [f"w{i}" for i in range(4)], ["a", "b", "a", "b"]
    links = [
        link(x, y, 1e-4, 1e9) if sites[i] == sites[j] else link(x, y, 1e-4, 1e6)
        for (i, x), (j, y) in product(enumerate(names), repeat=2)
        if x != y
    ]
    return fleet([1e10] * 4, sites=sites, links=links)


def test_the_ends_of_tied_embeddings_lie_where_summing_them_is_cheap_and_the_step_counts_it() -> None:
    spec = job(stages=4, replicas=1, num_layers=6, num_microbatches=4, vocab_size=20_000)
    on = two_offices()
    plan = planned(brief(spec, budget_s=0.1), on)
    [tied] = [group for group in plan.groups if str(group.group) == "tied"]
    assert len({worker[1:] in "13" for worker in tied.workers}) == 1
    # Apart, 20,000 x 64 numbers would cross at 1 MB/s: 5 MB there and 5 MB back, half of it each way by each.
    assert plan.predicted_step_s < 5.0
    pool = pool_of(spec, on)
    shared = reduced_by_group(spec.model, plan.stages)[Tied()].num_parameters * spec.word_bytes
    apart = replace(tied, members=(tied.members[0], replace(tied.members[1], worker=WorkerId("w1"))))
    assert reduction_s(tied, shared, pool) < 0.1 < 5.0 < reduction_s(apart, shared, pool)
    posed = pose(spec, on, plan, pool)
    assert posed.problem.reduction is not None
    found = routing_of(plan, posed)
    assert found is not None
    swapped = found.worker_of.copy()
    # Exchanging an end with a worker of the other office makes the step as much longer as the reduction.
    other = next(c for c in (1, 2) if (int(found.worker_of[c]) % 2) != (int(found.worker_of[0]) % 2))
    swapped[[0, other]] = swapped[[other, 0]]
    longer = timeline(posed.problem, replace(found, worker_of=swapped)).step_s
    assert longer - timeline(posed.problem, found).step_s > 5.0


@settings(max_examples=examples(60))
@given(st.one_of(jobs(), skipping_jobs()), fleets())
def test_both_planners_predict_the_same_of_one_plan(spec: JobSpec, on: Fleet) -> None:
    """Within 5 %: the search's mean under jitter is that much above the walk at most."""
    plan = make_searched_plan(brief(spec), on, None, 0)
    assert isinstance(plan, Plan)
    expected = pytest.approx(plan.predicted_step_s, rel=0.05)
    assert balanced_step_s(spec, on, plan) == expected
    assert searched_step_s(spec, on, plan) == expected


def test_a_step_is_never_predicted_below_its_own_bound() -> None:
    spec = job(stages=1, replicas=1, num_layers=2, num_microbatches=4)
    for seed in part(range(20), every=10):
        on = fleet([1e9 * (1 + seed / 7)])
        plan = make_searched_plan(brief(spec), on, None, seed)
        assert isinstance(plan, Plan)
        assert plan.predicted_step_s >= plan.lower_bound_s


def test_leaving_stages_out_shortens_the_step() -> None:
    spec = job(stages=6, replicas=1, num_layers=6, num_microbatches=10, layout=Layout.LOOP)
    full = planned(brief(spec, budget_s=0.1), two_cities())
    update = {"plan": PlanSpec(budget_s=0.1), "skip": SkipSpec(ratio=0.34)}
    short = planned(spec.model_copy(update=update), two_cities())
    assert short.predicted_step_s < full.predicted_step_s
    assert {len(path.hops) for path in short.paths} == {5}  # four stages and the head


def test_every_worker_is_told_all_that_the_paths_need_of_it() -> None:
    spec = brief(job(stages=3, replicas=2, num_layers=6, num_microbatches=6))
    plan = planned(spec, two_cities())
    told = plan.microbatches_by_chunk()
    for chunk, microbatches in told.items():
        visitors = {MicrobatchId(i) for i, path in enumerate(plan.paths) if chunk in path.hops}
        assert set(microbatches) == visitors


def test_the_bound_is_below_the_prediction() -> None:
    plan = planned(brief(job(stages=2, replicas=2)), two_cities())
    assert 0 < plan.lower_bound_s <= plan.predicted_step_s


def test_a_search_that_may_not_go_on_gives_what_it_started_from() -> None:
    spec = job(stages=3, replicas=2, num_layers=6)
    stopped = planned(spec, two_cities(), may_go_on=lambda: False)
    balanced = make_balanced_plan(spec, two_cities(), None, 0)
    assert isinstance(balanced, Plan)
    assert stopped.paths == balanced.paths


def test_a_stage_on_a_slow_worker_gets_fewer_layers() -> None:
    spec = brief(job(stages=2, replicas=1, num_layers=10, layout=Layout.LOOP), budget_s=0.1)
    plan = planned(spec, fleet([2e9, 1e9]))
    first, second, _ = plan.stages
    num_layers = {plan.holders(stage.index)[0]: stage.stop - stage.first for stage in (first, second)}
    assert num_layers[WorkerId("w0")] > num_layers[WorkerId("w1")] + 1


def test_a_job_that_has_state_keeps_its_stages() -> None:
    on, spec = (
        fleet([4e9, 4e9, 1e9, 1e9]),
        brief(job(stages=2, replicas=2, num_layers=10, layout=Layout.LOOP)),
    )
    even = make_balanced_plan(spec, on, None, 0)
    assert isinstance(even, Plan)
    again = make_searched_plan(spec, on, even, 0)
    assert isinstance(again, Plan)
    assert again.stages == even.stages


def test_a_link_far_off_its_like_is_named_and_not_used() -> None:
    names = [f"w{i}" for i in range(6)]
    links = [link(x, y, 0.5 if (x, y) == ("w1", "w4") else 0.001) for x in names for y in names if x != y]
    on = fleet([1e9] * 6, links=links)
    plan = planned(brief(job(stages=3, replicas=2, num_layers=6, num_microbatches=6), budget_s=0.1), on)
    assert "measure w1 -> w4 again: " in str(plan.reason)
    hops = {(a.worker, b.worker) for path in plan.paths for a, b in path.links}
    assert not hops & {("w1", "w4"), ("w4", "w1")}


def test_a_plan_that_runs_is_reckoned_as_it_was_predicted() -> None:
    spec = brief(job(stages=3, replicas=2, num_layers=6, num_microbatches=6), budget_s=0.1)
    plan = planned(spec, two_cities())
    assert searched_step_s(spec, two_cities(), plan) == pytest.approx(plan.predicted_step_s, rel=1e-9)
    assert searched_step_s(spec, without(two_cities(), WorkerId("w0")), plan) is None


def test_planning_again_is_never_worse_and_moves_nothing_where_nothing_has_changed() -> None:
    spec = brief(job(stages=3, replicas=2, num_layers=6, num_microbatches=6), budget_s=0.1)
    plan = planned(spec, two_cities())
    again = make_searched_plan(spec, two_cities(), plan, 1, steps_left=10)
    assert isinstance(again, Plan)
    assert again.predicted_step_s <= plan.predicted_step_s
    assert {x.chunk for x in again.chunks} == {x.chunk for x in plan.chunks}
    assert "moves" not in str(again.reason)


@pytest.mark.parametrize(("steps_left", "is_moved"), [(1, False), (10**6, True)])
def test_a_slow_worker_is_left_for_an_idle_one_if_there_are_steps_enough_for_it(
    steps_left: int, is_moved: bool
) -> None:
    spec = brief(job(stages=2, replicas=1, num_layers=6, layout=Layout.LOOP), budget_s=0.1)
    even = make_balanced_plan(spec, fleet([1e9, 1e9]), None, 0)
    assert isinstance(even, Plan)
    links = [link(x, y, 0.01, 1e5) for x, y in product(("w0", "w1", "w2"), repeat=2) if x != y]
    plan = make_searched_plan(spec, fleet([1e9, 2e8, 1e9], links=links), even, 0, steps_left=steps_left)
    assert isinstance(plan, Plan)
    assert (WorkerId("w1") not in plan.workers) is is_moved
    assert ("moves" in str(plan.reason)) is is_moved
    # Whatever it follows was made for two workers.
    assert str(even.reason).startswith("2 of 2 workers: 2 stages x 1 replica; ")
    assert str(plan.reason).startswith("2 of 3 workers: 2 stages x 1 replica; ")


def test_stages_that_many_leave_out_are_offered_fewer_holders() -> None:
    spec = job(stages=6, replicas=3, num_layers=18, num_microbatches=15, layout=Layout.LOOP, skip_ratio=0.34)
    on = fleet([1e9] * 18)
    base = make_balanced_plan(spec, on, None, 0)
    assert isinstance(base, Plan)
    other = resized(pose(spec, on, base, pool_of(spec, on)))
    assert other is not None
    first, *rest = other.problem.stage_sizes
    # The first stage is visited by all 15 and computes the loss, each of the others by 12 of them.
    assert (first, sum(rest)) == (5, 13)
    assert set(rest) == {2, 3}
    assert other.problem.num_by_origin == (3,) * 5


def test_survivors_of_a_loss_stay_where_they_are() -> None:
    spec = brief(job(stages=3, replicas=3, num_layers=6, num_microbatches=9), budget_s=0.1)
    on = fleet([1e9] * 9)
    before = planned(spec, on)
    lost = before.holders(before.stages[1].index)[0]
    after = without(on, lost)
    plan = make_searched_plan(spec, after, before, 0, steps_left=100)
    assert isinstance(plan, Plan)
    assert violations(plan, spec, after) == ()
    held = {x.chunk for x in before.chunks}
    moved = [x.chunk for x in plan.chunks if x.chunk not in held]
    assert len(moved) <= 1, "one loss needs one move at most"


def test_a_stage_that_lost_all_its_holders_gets_one_that_is_spared_elsewhere() -> None:
    spec = brief(job(stages=3, replicas=2, num_layers=6, num_microbatches=6), budget_s=0.1)
    on = fleet([1e9] * 6)
    before = planned(spec, on)
    lost = before.holders(before.stages[2].index)
    after = without(on, *lost)
    plan = make_searched_plan(spec, after, before, 0, steps_left=100)
    assert isinstance(plan, Plan)
    assert violations(plan, spec, after) == ()
    held = {x.chunk for x in before.chunks}
    moved = [x.chunk for x in plan.chunks if x.chunk not in held]
    assert {chunk.stage for chunk in moved} == {2}


def test_v_half_is_reached_by_memory_alone_and_holds_three_quarters_of_1f1b_on_all_workers() -> None:
    spec = schedules.job(2, "split", budget_s=0.01)
    on, less = (
        schedules.fleet(schedules.NEAR_S, 1 / 2, memory_bytes=schedules.halves_bytes(halves))
        for halves in (schedules.HALVES, schedules.HALVES - 1)
    )
    plan = planned(spec, on)
    held = schedules.planned_bytes(plan)
    whole_bytes = 4 * max(load.slot_bytes for load in schedules.loads_of(1, "whole"))
    assert "before the search (v_half" in str(plan.reason)
    assert max(held) <= 0.80 * whole_bytes
    assert max(held) <= 1.10 * min(held)
    assert sorted(x.slots for x in plan.chunks) == [1, 2, 2, 3, 3, 4, 4, 5]
    assert left_undone(plan) == ()
    # Slots of its own are no reason to take it for another plan, or for one that cannot run.
    assert searched_step_s(spec, on, plan) == pytest.approx(plan.predicted_step_s)
    after = make_searched_plan(spec, on, plan, 0)
    assert isinstance(after, Plan)
    assert after.predicted_step_s <= 1.001 * plan.predicted_step_s
    # In less memory the next order leads, and the reason says what this one lacks.
    fallen = str(planned(spec, less).reason)
    assert "before the search (v_min" in fallen
    assert "no memory for v_half, in a V of 4 workers (needs 6 slots on w0, has 5)" in fallen
