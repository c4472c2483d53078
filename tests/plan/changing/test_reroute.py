"""A plan without workers that are gone: what stays as it was, where the rest goes, and when there is no way on."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.config.job import JobSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.clauses import parse_clauses
from skein.plan.changing.reroute import rerouted
from skein.plan.check import violations
from skein.plan.order import left_undone
from skein.plan.plan import ChunkTime, Plan
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, WorkerId
from tests.plan.builders import fleet, fleets, job, jobs, planned, skipping_jobs, without
from tests.support.drawn import random_plan
from tests.support.extent import part
from tests.support.plans import chunk, grid_plan, path, plan_of


def survivors(plan: Plan, lost: set[WorkerId]) -> set[ChunkRef]:
    return {x.chunk for x in plan.chunks if x.chunk.worker not in lost}


def has_every_stage(plan: Plan, alive: set[ChunkRef]) -> bool:
    return {at.stage for at in alive} == {stage.index for stage in plan.stages}


@given(st.one_of(jobs(), skipping_jobs()), fleets(), st.data())
def test_a_plan_without_some_workers_may_be_adopted_iff_every_stage_is_held(
    spec: JobSpec, on: Fleet, data: st.DataObject
) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    if not isinstance(plan, Plan):
        return
    lost = data.draw(st.sets(st.sampled_from(plan.workers), max_size=len(plan.workers) - 1))
    alive = survivors(plan, lost)
    after = rerouted(plan, alive, {})
    assert (after is not None) is has_every_stage(plan, alive)
    if after is not None:
        assert violations(after, spec, without(on, *lost)) == ()
        assert set(after.workers) == set(plan.workers) - lost
        assert after.predicted_step_s >= plan.predicted_step_s


@pytest.mark.parametrize("seed", part(range(150), every=4))
def test_stages_stay_and_so_does_everything_whose_worker_is_alive(seed: int) -> None:
    luck = random.Random(seed)
    plan = random_plan(luck)
    lost = set(luck.sample(plan.workers, luck.randint(0, len(plan.workers) - 1)))
    alive = survivors(plan, lost)
    after = rerouted(plan, alive, {})
    if after is None:
        assert not has_every_stage(plan, alive)
        return
    assert [x.chunk for x in after.chunks] == [x.chunk for x in plan.chunks if x.chunk in alive]
    for before, now in zip(
        (*plan.paths, *plan.evaluation_paths), (*after.paths, *after.evaluation_paths), strict=True
    ):
        for old, new in zip(before.hops, now.hops, strict=True):
            assert new.stage == old.stage
            assert new in alive
            assert new == old or old not in alive
        if plan.layout is Layout.LOOP:
            assert now.hops[0].worker == now.hops[-1].worker
    assert [x.chunk for x in after.alternates] == [x.chunk for x in after.chunks]
    assert all(
        set(x.others) == {y for y in alive if y.stage == x.chunk.stage} - {x.chunk} for x in after.alternates
    )
    for old_group, group in zip(plan.groups, after.groups, strict=True):
        assert group.members == tuple(member for member in old_group.members if member in alive)
        assert 1 <= group.num_shards <= len(group.workers)
    assert [x.worker for x in after.schedules] == list(after.workers)
    assert left_undone(after) == ()


@pytest.mark.parametrize("layout", Layout)
def test_with_everybody_alive_nothing_changes(layout: Layout) -> None:
    plan = grid_plan(stages=3, replicas=2, layout=layout, is_tied=True)
    assert rerouted(plan, survivors(plan, set()), {}) == plan


def test_a_plan_without_some_workers_says_how_many_it_has_and_what_it_was() -> None:
    plan = replace(grid_plan(stages=2, replicas=2), reason=parse_clauses("the best of all; and quick"))
    after = rerouted(plan, survivors(plan, {plan.workers[0]}), {})
    assert after is not None
    assert "3 workers" in str(after.reason)
    assert f"{after.predicted_step_s:.3g} s" in str(after.reason)
    assert str(after.reason).endswith("before: the best of all; and quick")


def test_what_a_lost_worker_did_goes_where_there_is_least_to_do() -> None:
    a, b, c = (chunk(0, name) for name in "abc")
    last = chunk(1, "z")
    plan = plan_of([a, b, c, last], [path(x, last) for x in (a, a, a, b, b, c)])
    after = rerouted(plan, survivors(plan, {WorkerId("a")}), {})
    assert after is not None
    # c has one visit and b two: c, then, ties by name, b, then c.
    assert [x.hops[0].worker for x in after.paths] == ["c", "b", "c", "b", "b", "c"]


def test_a_slow_worker_gets_less_of_what_was_lost() -> None:
    a, b, c = (chunk(0, name) for name in "abc")
    last = chunk(1, "z")
    times = tuple(
        ChunkTime(chunk=at, forward_s=seconds, backward_s=0.0, loss_s=0.0)
        for at, seconds in ((a, 1.0), (b, 1.0), (c, 5.0), (last, 0.1))
    )
    plan = replace(plan_of([a, b, c, last], [path(x, last) for x in (a, a, b, c)]), chunk_times=times)
    after = rerouted(plan, survivors(plan, {WorkerId("a")}), {})
    assert after is not None
    assert [x.hops[0].worker for x in after.paths] == ["b", "b", "b", "c"]
    assert after.chunk_times == times[1:]
    # c's one visit takes as long as all others did before: no step is longer for it.
    assert after.predicted_step_s == plan.predicted_step_s


def test_a_step_takes_longer_as_the_busiest_worker_has_more_to_do() -> None:
    plan = grid_plan(stages=2, replicas=2, num_microbatches=4)
    after = rerouted(plan, survivors(plan, {WorkerId("w0a")}), {})
    assert after is not None
    assert after.predicted_step_s == 2 * plan.predicted_step_s


def test_who_has_accumulated_a_contribution_keeps_its_visit_wherever_it_was_planned() -> None:
    plan = grid_plan(stages=2, replicas=2)
    owners = {
        (MicrobatchId(0), StageIndex(0)): WorkerId("w0b"),
        (MicrobatchId(1), StageIndex(1)): WorkerId("w1b"),
    }
    after = rerouted(plan, survivors(plan, set()), owners)
    assert after is not None
    assert after.paths[0].hops == (chunk(0, "w0b"), plan.paths[0].hops[1])
    assert after.paths[1].hops == (plan.paths[1].hops[0], chunk(1, "w1b"))
    assert after.paths[2:] == plan.paths[2:]
    assert after.evaluation_paths == plan.evaluation_paths


@pytest.mark.parametrize("stage", [0, 2])
def test_whoever_did_one_end_of_a_loop_has_the_other_too(stage: int) -> None:
    plan = grid_plan(stages=2, replicas=2, layout=Layout.LOOP)
    assert plan.paths[0].hops[0].worker == "w0a"
    owners = {(MicrobatchId(0), StageIndex(stage)): WorkerId("w0b")}
    after = rerouted(plan, survivors(plan, set()), owners)
    assert after is not None
    assert (after.paths[0].hops[0], after.paths[0].hops[-1]) == (chunk(0, "w0b"), chunk(2, "w0b"))


def test_who_lost_one_end_of_a_loop_holds_neither() -> None:
    plan = grid_plan(stages=2, replicas=2, layout=Layout.LOOP)
    after = rerouted(plan, survivors(plan, set()) - {chunk(2, "w0a")}, {})
    assert after is not None
    assert after.holders(StageIndex(0)) == after.holders(StageIndex(2)) == ("w0b",)
    assert rerouted(plan, survivors(plan, set()) - {chunk(2, "w0a"), chunk(0, "w0b")}, {}) is None


def test_who_comes_back_gets_nothing_that_another_does_by_now() -> None:
    """Losing one after the other, and one that returned with nothing: a plan has only who is given."""
    spec, on = job(stages=2, replicas=3), fleet([1e9] * 6)
    plan = planned(spec, on)
    first, second = plan.holders(StageIndex(0))[:2]
    once = rerouted(plan, survivors(plan, {first}), {})
    assert once is not None
    twice = rerouted(once, survivors(once, {second}), {})
    assert twice is not None
    assert violations(twice, spec, without(on, first, second)) == ()
    assert rerouted(once, survivors(plan, set()), {}) == once
