"""Laws of the balanced planner over random jobs and fleets, and what it does with particular ones."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.config.aggregation import AllReduce
from skein.config.job import JobSpec, SkipSpec
from skein.config.rule import PatternName
from skein.model.families.mixtral import MixtralModel
from skein.model.sparse.experts import ExpertPlacement
from skein.plan.agreeing.exchange import Direct, Pattern, Ring, Tree
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, Layout, StageIndex, WorkerId
from tests.plan.builders import (
    AMPLE_BYTES,
    fleet,
    fleets,
    job,
    jobs,
    link,
    planned,
    skipping_jobs,
    whole_model_bytes,
    without,
)


def chunks(plan: Plan) -> set[ChunkRef]:
    return {placed.chunk for placed in plan.chunks}


def stages_by_worker(plan: Plan) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for chunk in sorted(chunks(plan)):
        found.setdefault(chunk.worker, []).append(chunk.stage)
    return found


# --- laws ---


@given(jobs(), fleets(memory_bytes=st.integers(0, 2 * 10**6)))
def test_a_plan_is_valid_or_says_why_there_is_none(spec: JobSpec, on: Fleet) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    if isinstance(plan, Plan):
        assert violations(plan, spec, on) == ()
    else:
        assert "bytes" in plan.reason
        # Whatever could hold all at once could have been given all.
        assert all(worker.profile.memory_bytes < whole_model_bytes(spec) for worker in on.workers)


@given(jobs(), fleets(memory_bytes=st.integers(0, 2 * 10**6)))
def test_planning_again_with_nothing_changed_changes_nothing(spec: JobSpec, on: Fleet) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    assert make_balanced_plan(spec, on, None, 0) == plan
    if isinstance(plan, Plan):
        assert make_balanced_plan(spec, on, plan, 0) == plan


@given(jobs(), fleets(), fleets(memory_bytes=st.integers(0, 2 * 10**6)))
def test_a_plan_after_any_change_of_fleet_is_valid_and_stays(
    spec: JobSpec, first: Fleet, second: Fleet
) -> None:
    plan = make_balanced_plan(spec, second, planned(spec, first), 0)
    if isinstance(plan, Plan):
        assert violations(plan, spec, second) == ()
        again = planned(spec, second, plan)
        assert (again.chunks, again.paths) == (plan.chunks, plan.paths)


@given(jobs(), fleets(speed_ratio=2.0), st.data())
def test_losing_a_worker_moves_only_what_it_held(spec: JobSpec, on: Fleet, data: st.DataObject) -> None:
    before = planned(spec, on)
    lost = data.draw(st.sampled_from(before.workers))
    survivors = without(on, lost)
    after = make_balanced_plan(spec, survivors, before, 0)
    if not survivors.workers:
        assert after == Infeasible(reason="no worker is alive")
        return
    assert isinstance(after, Plan)
    held = {chunk.stage for chunk in chunks(before) if chunk.worker == lost}
    assert {chunk.stage for chunk in chunks(after) - chunks(before)} <= held


@given(jobs(), fleets(speed_ratio=2.0))
def test_with_memory_to_spare_stages_are_held_evenly_up_to_the_replicas_asked_for(
    spec: JobSpec, on: Fleet
) -> None:
    plan = planned(spec, on)
    num_body = spec.parallel.stages
    counts = [len(plan.holders(StageIndex(stage))) for stage in range(num_body)]
    assert max(counts) - min(counts) <= 1
    if len(on.workers) >= num_body * spec.parallel.replicas:
        assert set(counts) == {spec.parallel.replicas}


@given(jobs(), fleets())
def test_every_chunk_has_microbatches_or_is_held_by_a_worker_without_any(spec: JobSpec, on: Fleet) -> None:
    visits = planned(spec, on).microbatches_by_chunk()
    busy = {chunk.worker for chunk, microbatches in visits.items() if microbatches}
    assert all(microbatches or chunk.worker not in busy for chunk, microbatches in visits.items())


# --- skips, evaluation, alternates ---


@pytest.mark.parametrize("layout", Layout)
def test_a_skip_ratio_leaves_stages_out_in_rotation_and_every_chunk_its_part(layout: Layout) -> None:
    spec = job(stages=6, replicas=2, layout=layout, num_layers=6, num_microbatches=12, skip_ratio=1 / 3)
    plan = planned(spec, fleet([1e10] * 12))
    num_heads = int(layout is Layout.LOOP)
    assert {len(path.hops) for path in plan.paths} == {4 + num_heads}
    visits = Counter(hop.stage for path in plan.paths for hop in path.hops)
    skippable = range(1, 6) if layout is Layout.LOOP else range(1, 5)
    # Of 12 microbatches, 3 of 5 or 2 of 4 visits fall to each.
    assert [visits[StageIndex(s)] for s in skippable] == ([7, 7, 7, 7, 8] if num_heads else [6] * 4)
    assert all(plan.microbatches_by_chunk().values())
    assert all(path.hops[0].worker == path.hops[-1].worker for path in plan.paths) or not num_heads


@given(skipping_jobs(), fleets(memory_bytes=st.integers(0, 4 * 10**6)))
def test_a_plan_that_skips_is_valid_and_stays_or_says_why_there_is_none(spec: JobSpec, on: Fleet) -> None:
    plan = make_balanced_plan(spec, on, None, 0)
    if isinstance(plan, Plan):
        assert violations(plan, spec, on) == ()
        assert make_balanced_plan(spec, on, plan, 0) == plan
    else:
        assert "bytes" in plan.reason


def test_the_fastest_workers_hold_what_nobody_leaves_out() -> None:
    on = fleet([1e10, 1e10, 3e10, 3e10])
    skipping = planned(job(stages=4, num_layers=6, replicas=1, num_microbatches=6, skip_ratio=0.25), on)
    assert {skipping.holders(StageIndex(s))[0] for s in (0, 3)} == {"w2", "w3"}
    # Where all visit all, the stages between are the heavier ones.
    full = planned(job(stages=4, num_layers=6, replicas=1, num_microbatches=6), on)
    assert {full.holders(StageIndex(s))[0] for s in (1, 2)} == {"w2", "w3"}


def test_a_rotation_that_jumps_too_far_is_no_plan() -> None:
    spec = job(stages=6, replicas=1, num_layers=6, num_microbatches=8, skip_ratio=1 / 2)
    on = fleet([1e10] * 6)
    allowing = {
        most: spec.model_copy(update={"skip": SkipSpec(ratio=1 / 2, max_jump=most)}) for most in (3, 4)
    }
    assert make_balanced_plan(allowing[3], on, None, 0) == Infeasible(
        reason="leaving stages out in rotation jumps 4 at once: skip.max_jump is 3"
    )
    assert violations(planned(allowing[4], on), allowing[4], on) == ()


@given(skipping_jobs(), fleets(), fleets())
def test_a_microbatch_visits_the_same_stages_whatever_the_fleet(
    spec: JobSpec, one: Fleet, other: Fleet
) -> None:
    """Or the loss curve would depend on who is there."""
    first, second = (
        [[hop.stage for hop in path.hops] for path in planned(spec, on).paths] for on in (one, other)
    )
    assert first == second


@given(jobs(), fleets())
def test_evaluation_takes_each_full_path_once(spec: JobSpec, on: Fleet) -> None:
    plan = planned(spec, on)
    assert len(set(plan.evaluation_paths)) == len(plan.evaluation_paths)
    assert set(plan.evaluation_paths) == set(plan.paths)


def test_alternates_are_the_other_holders_nearest_first() -> None:
    links = [
        link(a, b, latency_s)
        for x, y, latency_s in (("w0", "w1", 0.3), ("w0", "w2", 0.1), ("w1", "w2", 0.2))
        for a, b in ((x, y), (y, x))
    ]
    plan = planned(job(stages=1, replicas=3), fleet([1e10] * 3, links=links))
    others = {str(x.chunk.worker): [str(other.worker) for other in x.others] for x in plan.alternates}
    assert others == {"w0": ["w2", "w1"], "w1": ["w2", "w0"], "w2": ["w0", "w1"]}
    assert [x.chunk for x in plan.alternates] == [x.chunk for x in plan.chunks]


def test_who_holds_a_stage_alone_has_no_alternates() -> None:
    plan = planned(job(stages=2, replicas=1), fleet([1e10] * 2))
    assert [x.others for x in plan.alternates] == [(), ()]


# --- how many workers ---


def test_four_workers_for_two_stages_and_two_replicas_hold_one_chunk_each() -> None:
    plan = planned(job(stages=2, replicas=2), fleet([1e10] * 4))
    assert sorted(stages_by_worker(plan).values()) == [[0], [0], [1], [1]]
    assert str(plan.reason) == "4 of 4 workers: 2 stages x 2 replicas; w0 computes longest (stage 1)"


def test_a_missing_worker_costs_a_replica_of_the_lighter_stage() -> None:
    plan = planned(job(stages=2, replicas=2), fleet([1e10] * 3))
    assert [len(plan.holders(StageIndex(stage))) for stage in (0, 1)] == [1, 2]


def test_fewer_workers_than_stages_hold_adjacent_ones() -> None:
    plan = planned(job(stages=4, replicas=2), fleet([1e10] * 2))
    assert stages_by_worker(plan) == {"w0": [0, 1], "w1": [2, 3]}


def test_one_worker_holds_everything() -> None:
    plan = planned(job(stages=4, replicas=2, layout=Layout.LOOP), fleet([1e10]))
    assert stages_by_worker(plan) == {"w0": [0, 1, 2, 3, 4]}


def test_the_fastest_workers_are_chosen_and_the_rest_are_spare() -> None:
    plan = planned(job(stages=2, replicas=1), fleet([1e10, 3e10, 2e10]))
    assert plan.workers == ("w1", "w2")
    # The heavier stage is the one with the head.
    assert plan.holders(StageIndex(1)) == ("w1",)


def test_a_worker_too_slow_for_one_microbatch_gets_none() -> None:
    plan = planned(job(stages=1, replicas=2, num_microbatches=4), fleet([1e12, 1e10]))
    assert {hop.worker for path in plan.paths for hop in path.hops} == {"w0"}


def test_one_fast_worker_takes_all_stages_rather_than_wait_for_a_slow_one() -> None:
    spec, unequal = job(stages=2, replicas=1), fleet([1e12, 1e10])
    assert planned(spec, unequal).workers == ("w0",)
    assert planned(spec, fleet([1.5e10, 1e10])).workers == ("w0", "w1")


def test_no_workers_is_infeasible() -> None:
    assert make_balanced_plan(job(), fleet([]), None, 0) == Infeasible(reason="no worker is alive")


def test_experts_over_a_mesh_want_one_to_begin_with_and_go_on_without() -> None:
    spec, single = job(), fleet([1e10, 1e10])
    spec = spec.model_copy(
        update={"model": MixtralModel(preset="mixtral-1m", placement=ExpertPlacement.MESH), "name": "sparse"}
    )
    refused = make_balanced_plan(spec, single, None, 0)
    assert isinstance(refused, Infeasible)
    assert refused.reason == (
        "model.placement: 'mesh': no worker has several devices: start one with --devices, or give stage"
    )
    first, second = single.workers
    meshed = replace(first, profile=replace(first.profile, device="cpu:2"))
    plan = make_balanced_plan(spec, replace(single, workers=(meshed, second)), None, 0)
    assert isinstance(plan, Plan)
    assert isinstance(make_balanced_plan(spec, single, plan, 0), Plan)


def test_a_job_that_was_never_checked_is_infeasible_with_the_field_named() -> None:
    plan = make_balanced_plan(job(stages=9, num_layers=4), fleet([1e10]), None, 0)
    assert isinstance(plan, Infeasible)
    assert plan.reason.startswith("parallel.stages: 9:")


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("num_workers", [4, 5, 6])
def test_chunks_leave_as_many_holders_for_each_stage_as_one_chunk_does(
    layout: Layout, num_workers: int
) -> None:
    on, plain = fleet([1e10] * num_workers), job(layout=layout, num_layers=8)
    fewest = min(len(planned(plain, on).holders(StageIndex(s))) for s in range(2))
    for chunks in (2, 4):
        parallel = plain.parallel.model_copy(update={"chunks": chunks})
        spec = plain.model_copy(update={"parallel": parallel})
        plan = planned(spec, on)
        assert violations(plan, spec, on) == ()
        assert min(len(plan.holders(stage.index)) for stage in plan.stages) == fewest == 2
        assert make_balanced_plan(spec, on, plan, 0) == plan


# --- shares and ways ---


def test_microbatches_follow_speed() -> None:
    plan = planned(job(stages=1, replicas=2, num_microbatches=8), fleet([3e10, 1e10]))
    assert Counter(path.hops[0].worker for path in plan.paths) == {"w0": 6, "w1": 2}
    # Evenly spread, not first all of one.
    assert [path.hops[0].worker for path in plan.paths].index(WorkerId("w1")) in (1, 2)


@pytest.mark.parametrize("layout", Layout)
def test_paths_stay_inside_their_site(layout: Layout) -> None:
    names = [f"w{i}" for i in range(8)]
    site = {name: "ab"[i % 2] for i, name in enumerate(names)}
    links = [link(a, b, 1e-4 if site[a] == site[b] else 0.1) for a in names for b in names if a != b]
    on = fleet([1e10] * 8, sites=[site[name] for name in names], links=links)
    plan = planned(job(stages=4, replicas=2, layout=layout), on)
    assert all(len({site[hop.worker] for hop in path.hops}) == 1 for path in plan.paths)
    assert {site[path.hops[0].worker] for path in plan.paths} == {"a", "b"}


def test_sites_alone_keep_pipelines_together_where_no_link_was_measured() -> None:
    plan = planned(job(stages=2, replicas=2), fleet([1e10] * 4, sites=["a", "b", "b", "a"]))
    assert {frozenset(hop.worker for hop in path.hops) for path in plan.paths} == {
        frozenset({"w0", "w3"}),
        frozenset({"w1", "w2"}),
    }


def test_loop_paths_end_where_they_began() -> None:
    plan = planned(job(stages=3, replicas=2, layout=Layout.LOOP), fleet([1e10] * 6))
    assert all(
        path.hops[-1] == ChunkRef(stage=StageIndex(3), worker=path.hops[0].worker) for path in plan.paths
    )


# --- memory ---


def test_slots_deepen_with_latency_and_shrink_with_memory() -> None:
    spec = job(stages=2, replicas=1, num_microbatches=12)
    slow = [link("w0", "w1", 0.01), link("w1", "w0", 0.01)]

    def slots_of_the_first_stage(on: Fleet) -> int:
        return planned(spec, on).chunks[0].slots

    near = slots_of_the_first_stage(fleet([1e10] * 2, links=[link("w0", "w1", 0.0), link("w1", "w0", 0.0)]))
    far = slots_of_the_first_stage(fleet([1e10] * 2, links=slow))
    tight = fleet([1e10] * 2, links=slow, memory_bytes=int(whole_model_bytes(spec) * 0.75))
    assert near < slots_of_the_first_stage(tight) < far
    assert "memory cuts the microbatches in flight" in str(planned(spec, tight).reason)


def test_too_little_memory_names_stage_need_and_what_there_is() -> None:
    plan = make_balanced_plan(job(stages=2), fleet([1e10] * 2, memory_bytes=1000), None, 0)
    assert isinstance(plan, Infeasible)
    assert re.fullmatch(
        r"stage 0 needs 3\.2 MiB \(3354112 bytes\) of memory and w0 has 1000 B \(1000 bytes\): "
        r"3\.2 MiB are missing in the cut that comes nearest, "
        r"and batch\.microbatch_samples: 1 frees most, 2\d\d\.\d KiB of it",
        plan.reason,
    )


def test_the_setting_that_is_named_as_the_cure_is_one() -> None:
    spec = job(stages=2, replicas=1, num_layers=8, is_tied=False)
    on = fleet([1e10] * 4, memory_bytes=int(whole_model_bytes(spec) * 0.4))
    plan = make_balanced_plan(spec, on, None, 0)
    assert isinstance(plan, Infeasible)
    assert plan.reason.endswith("and parallel.stages: 4 frees most, all of it")
    planned(job(stages=4, replicas=1, num_layers=8, is_tied=False), on)


def test_the_stage_that_needs_most_memory_goes_to_the_only_worker_with_room_for_it() -> None:
    # The head's stage computes most, so it chooses first; the fast worker must be left to the embedding's.
    spec = job(stages=2, replicas=1, num_layers=5, is_tied=False, vocab_size=4096)
    plan = planned(spec, fleet([2e10, 1e10], memory_bytes=[17_500_000, 11_000_000]))
    assert stages_by_worker(plan) == {"w0": [0], "w1": [1]}


def test_where_an_even_cut_does_not_fit_the_cut_follows_memory() -> None:
    spec = job(stages=2, replicas=1, num_layers=8)
    whole = whole_model_bytes(spec)
    on = fleet([1e10, 1e10], memory_bytes=[int(0.85 * whole), int(0.25 * whole)])
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    assert plan.stages[0].stop > len(plan.stages) + 3


# --- changes of the fleet ---


def test_a_spare_takes_the_place_of_a_lost_worker() -> None:
    spec, on = job(stages=2, replicas=1), fleet([1e10] * 3)
    before = planned(spec, on)
    after = planned(spec, without(on, WorkerId("w0")), before)
    assert chunks(before) - chunks(after) == {ChunkRef(stage=StageIndex(1), worker=WorkerId("w0"))}
    assert chunks(after) - chunks(before) == {ChunkRef(stage=StageIndex(1), worker=WorkerId("w2"))}
    assert "of state: stage 1 to w2" in str(after.reason)


def test_a_stage_that_lost_all_holders_gets_one_from_a_stage_with_two() -> None:
    spec, on = job(stages=2, replicas=2), fleet([1e10] * 4)
    before = planned(spec, on)
    after = planned(spec, without(on, *before.holders(StageIndex(1))), before)
    assert [len(after.holders(StageIndex(stage))) for stage in (0, 1)] == [1, 1]


def test_holders_are_evened_out_when_one_stage_lost_many() -> None:
    spec, on = job(stages=2, replicas=3), fleet([1e10] * 6)
    before = planned(spec, on)
    after = planned(spec, without(on, *before.holders(StageIndex(1))[:2]), before)
    assert [len(after.holders(StageIndex(stage))) for stage in (0, 1)] == [2, 2]
    assert len(chunks(after) - chunks(before)) == 1


def test_a_newcomer_relieves_a_worker_that_holds_several_stages() -> None:
    spec = job(stages=2, replicas=1)
    alone = planned(spec, fleet([1e10]))
    both = planned(spec, fleet([1e10] * 2), alone)
    assert sorted(stages_by_worker(both).values()) == [[0], [1]]
    assert len(chunks(both) - chunks(alone)) == 1


def test_a_newcomer_adds_a_replica_and_moves_nobody() -> None:
    spec = job(stages=2, replicas=2)
    before = planned(spec, fleet([1e10] * 3))
    after = planned(spec, fleet([1e10] * 4), before)
    assert chunks(before) < chunks(after)


def test_a_replan_keeps_the_cut() -> None:
    spec = job(stages=2, replicas=1, num_layers=8)
    whole = whole_model_bytes(spec)
    uneven = planned(spec, fleet([1e10] * 2, memory_bytes=[int(0.85 * whole), int(0.25 * whole)]))
    assert uneven.stages != planned(spec, fleet([1e10] * 2)).stages
    assert planned(spec, fleet([1e10] * 2, memory_bytes=AMPLE_BYTES), uneven).stages == uneven.stages


# --- groups ---


@pytest.mark.parametrize("layout", Layout)
def test_tied_embeddings_reduce_over_both_ends(layout: Layout) -> None:
    plan = planned(job(stages=2, replicas=2, layout=layout), fleet([1e10] * 4))
    last = plan.stages[-1].index
    tied = plan.groups[-1]
    assert str(tied.group) == "tied"
    assert tied.members == tuple(
        ChunkRef(stage=stage, worker=worker)
        for stage in (StageIndex(0), last)
        for worker in plan.holders(stage)
    )


def test_one_stage_or_untied_embeddings_need_no_shared_group() -> None:
    assert [str(x.group) for x in planned(job(stages=1, replicas=1), fleet([1e10])).groups] == ["s0"]
    assert [str(x.group) for x in planned(job(is_tied=False), fleet([1e10] * 4)).groups] == ["s0", "s1"]


def test_big_reductions_are_shared_out_and_small_ones_are_not() -> None:
    spec = job(stages=2, replicas=2, is_tied=False, vocab_size=16_384)
    plan = planned(spec, fleet([1e10] * 4))
    assert [group.num_shards for group in plan.groups] == [2, 2]
    assert [group.num_shards for group in planned(job(is_tied=False), fleet([1e10] * 4)).groups] == [1, 1]


# --- size ---


def test_a_thousand_workers_are_planned() -> None:
    spec = job(stages=20, replicas=50, num_layers=38, num_microbatches=100)
    on = fleet([1e10 + i * 1e7 for i in range(1000)], sites=["abcdefg"[i % 7] for i in range(1000)])
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    assert len(plan.workers) == 1000


@pytest.mark.parametrize(
    ("asked", "pattern"), [("direct", Direct()), ("ring", Ring()), ("tree", Tree()), ("auto", Direct())]
)
def test_shards_go_the_way_that_the_job_asks_for(asked: PatternName, pattern: Pattern) -> None:
    spec = job(stages=1, replicas=4).model_copy(update={"aggregation": AllReduce(pattern=asked)})
    assert {group.pattern for group in planned(spec, fleet([1e10] * 4)).groups} == {pattern}


def test_by_itself_a_small_stage_of_many_holders_over_slow_links_goes_up_a_tree() -> None:
    names = [f"w{i}" for i in range(8)]
    links = [link(a, b, 1e-3, 1e6) for a in names for b in names if a != b]
    plan = planned(job(stages=1, replicas=8, is_tied=False), fleet([1e10] * 8, links=links))
    assert [group.num_shards for group in plan.groups] == [1]
    assert [group.pattern for group in plan.groups] == [Tree()]


def test_what_is_rounded_on_the_wire_goes_straight_to_its_owner() -> None:
    names = [f"w{i}" for i in range(8)]
    links = [link(a, b, 1e-3, 1e6) for a in names for b in names if a != b]
    spec = job(stages=1, replicas=8, is_tied=False).model_copy(update={"aggregation": AllReduce(wire="int8")})
    assert [x.pattern for x in planned(spec, fleet([1e10] * 8, links=links)).groups] == [Direct()]
