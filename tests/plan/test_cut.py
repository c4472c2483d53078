import re
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.layers import LayerSpec
from skein.plan.balanced import make_balanced_plan, pool_of
from skein.plan.changing.recut import recut
from skein.plan.check import violations
from skein.plan.cut import FittingCut, check_job, cut, cut_under_memory
from skein.plan.load import stage_loads, together_bytes
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet
from skein.types import Layout, StageIndex, StageSpec
from tests.plan.builders import fleet, job, planned, whole_model_bytes
from tests.support.extent import examples

# Sums of a handful of floats, in another order than ours.
ROUNDING = 1e-12


def layers(flops: Sequence[int]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(name=f"{i}", num_parameters=1, forward_flops=x, activation_bytes=1, output_bytes=1)
        for i, x in enumerate(flops)
    )


def all_times(flops: Sequence[int], speeds: Sequence[float], layout: Layout) -> Iterator[list[float]]:
    """The stage times of every possible cut."""
    body = len(flops) - (layout is Layout.LOOP)
    for inner in combinations(range(1, body), len(speeds) - 1):
        costs = [3 * sum(flops[first:stop]) for first, stop in pairwise((0, *inner, body))]
        if layout is Layout.LOOP:
            costs[0] += 3 * flops[-1]
        yield [cost / speed for cost, speed in zip(costs, speeds, strict=True)]


@given(st.lists(st.integers(0, 20), min_size=3, max_size=8), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(flops: list[int], data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(Layout))
    num_stages = data.draw(st.integers(1, len(flops) - 1))
    speeds = data.draw(st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=num_stages, max_size=num_stages))
    stages = cut(layers(flops), num_stages, layout, speeds=speeds)
    costs = [3 * sum(flops[stage.first : stage.stop]) for stage in stages]
    if layout is Layout.LOOP:
        costs[0] += costs.pop()
    times = [cost / speed for cost, speed in zip(costs, speeds, strict=True)]
    best = min(
        (sorted(found, reverse=True) for found in all_times(flops, speeds, layout)), key=lambda x: x[0]
    )
    assert max(times) <= best[0] * (1 + ROUNDING)


@given(st.integers(1, 40), st.data(), st.sampled_from(Layout))
def test_stages_cover_all_layers_once_in_order(num_layers: int, data: st.DataObject, layout: Layout) -> None:
    num_stages = data.draw(st.integers(1, num_layers))
    stages = cut(layers([7] * (num_layers + (layout is Layout.LOOP))), num_stages, layout)
    assert [stage.index for stage in stages] == list(range(num_stages + (layout is Layout.LOOP)))
    assert [i for stage in stages for i in range(stage.first, stage.stop)] == list(range(stages[-1].stop))
    assert all(stage.stop > stage.first for stage in stages)


def test_the_head_of_loop_is_a_stage_of_its_own_and_counts_for_the_first() -> None:
    stages = cut(layers([0, 4, 4, 4, 4, 8]), 2, Layout.LOOP)
    assert [(stage.first, stage.stop) for stage in stages] == [(0, 2), (2, 5), (5, 6)]


def test_of_equally_slow_cuts_the_one_with_evener_stages_is_chosen() -> None:
    assert [stage.stop for stage in cut(layers([9, 1, 1, 1, 1]), 3, Layout.LINE)] == [1, 3, 5]


def test_layers_follow_the_speed_of_their_stage() -> None:
    stages = cut(layers([1] * 8), 2, Layout.LINE, speeds=[1e12, 3e12])
    assert [stage.stop for stage in stages] == [2, 8]


def test_a_thousand_ways_of_five_hundred_layers_are_cut_at_once() -> None:
    stages = cut(layers([10**12] * 514), 257, Layout.LINE)
    assert {stage.stop - stage.first for stage in stages} == {2}


# --- under memory ---


def taken(
    spec: JobSpec, stages: Sequence[StageSpec], worker_by_stage: Sequence[int]
) -> list[tuple[int, int]]:
    """FLOPs and bytes of each run of stages with one worker; the head of LOOP is with the first."""
    loads = stage_loads(spec, stages)
    workers = [*worker_by_stage, *worker_by_stage[: len(stages) - len(worker_by_stage)]]
    runs = [
        [load for load, x in zip(loads, workers, strict=True) if x == one] for one in dict.fromkeys(workers)
    ]
    return [(sum(load.flops for load in run), together_bytes(run, [1] * len(run))) for run in runs]


def slowest_s(spec: JobSpec, on: Fleet, stages: Sequence[StageSpec], workers: Sequence[int]) -> float | None:
    """Seconds of the slowest worker; None if one has too little memory."""
    holders = [on.workers[worker].profile for worker, _ in groupby(workers)]
    runs = [*zip(holders, taken(spec, stages, workers), strict=True)]
    if any(num_bytes > holder.memory_bytes for holder, (_, num_bytes) in runs):
        return None
    return max(flops / holder.flops_per_s for holder, (flops, _) in runs)


def least_s(spec: JobSpec, on: Fleet) -> float | None:
    """Seconds of the slowest worker in the best of all cuts and placements, with one stage each where that fits."""
    num_stages, body = spec.parallel.stages, len(spec.layers) - spec.parallel.layout.num_head_stages
    found: dict[bool, list[float]] = {True: [], False: []}
    for inner, workers in product(
        combinations(range(1, body), num_stages - 1), product(range(len(on.workers)), repeat=num_stages)
    ):
        runs = [worker for worker, _ in groupby(workers)]
        if len(set(runs)) < len(runs):
            continue
        stops = (*inner, body, *range(body + 1, len(spec.layers) + 1))
        stages = [
            StageSpec(index=StageIndex(i), first=first, stop=stop)
            for i, (first, stop) in enumerate(pairwise((0, *stops)))
        ]
        seconds = slowest_s(spec, on, stages, workers)
        if seconds is not None:
            found[len(runs) == num_stages].append(seconds)
    return min(found[True] or found[False], default=None)


@st.composite
def tight(draw: st.DrawFn) -> tuple[JobSpec, Fleet]:
    """A small job, and workers with memory for about a stage each."""
    num_layers = draw(st.integers(2, 4))
    spec = job(
        stages=draw(st.integers(1, 3)),
        replicas=1,
        layout=draw(st.sampled_from(Layout)),
        num_layers=num_layers,
        is_tied=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([64, 2048])),
    )
    size = draw(st.integers(1, 3))
    speeds = draw(st.lists(st.sampled_from([1e9, 1.5e9, 4e9]), min_size=size, max_size=size))
    shares = draw(st.lists(st.floats(0.1, 1.1), min_size=size, max_size=size))
    return spec, fleet(speeds, memory_bytes=[int(x * whole_model_bytes(spec)) for x in shares])


@settings(max_examples=examples(300))
@given(tight())
def test_under_memory_no_other_cut_and_placement_has_a_faster_slowest_worker(
    case: tuple[JobSpec, Fleet],
) -> None:
    spec, on = case
    found, best_s = cut_under_memory(spec, pool_of(spec, on)), least_s(spec, on)
    if best_s is None:
        assert isinstance(found, Infeasible)
        assert "missing in the cut that comes nearest" in found.reason
    else:
        assert isinstance(found, FittingCut), found
        reached_s = slowest_s(spec, on, found.stages, found.worker_by_stage)
        assert reached_s == pytest.approx(best_s, rel=1e-9)


@settings(max_examples=examples(100))
@given(tight())
def test_there_is_a_plan_wherever_a_cut_fits(case: tuple[JobSpec, Fleet]) -> None:
    spec, on = case
    plan = make_balanced_plan(spec, on, None, 0)
    assert isinstance(plan, Plan) or isinstance(cut_under_memory(spec, pool_of(spec, on)), Infeasible)


def test_the_bytes_that_are_missing_are_those_with_which_it_fits() -> None:
    spec = job(stages=3, replicas=1, num_layers=6, vocab_size=2048)
    speeds, sizes = [1e9, 2e9, 1e9], [3_000_000, 2_100_000, 500_000]
    reason = make_balanced_plan(spec, fleet(speeds, memory_bytes=sizes), None, 0)
    assert isinstance(reason, Infeasible)
    told = re.fullmatch(
        r"stage (\d) needs .* \((\d+) bytes\) of memory and w(\d) has .* \((\d+) bytes\): .* are missing .*",
        reason.reason,
    )
    assert told is not None
    # Of the cut that comes nearest all are short by the same share, within a layer.
    short = int(told[2]) / int(told[4])
    plan = planned(spec, fleet(speeds, memory_bytes=[int(size * short * 1.0001) + 1 for size in sizes]))
    assert [x.chunk.worker for x in plan.chunks if x.chunk.stage == int(told[1])] == [f"w{told[3]}"]


def test_a_hundred_unequal_workers_are_cut_for_in_a_moment() -> None:
    spec = job(stages=16, replicas=1, num_layers=62)
    whole = whole_model_bytes(spec)
    on = fleet(
        [1e9 * (1 + i % 7) for i in range(100)], memory_bytes=[whole // (12 + i % 9) for i in range(100)]
    )
    found = cut_under_memory(spec, pool_of(spec, on))
    assert isinstance(found, FittingCut)
    assert slowest_s(spec, on, found.stages, found.worker_by_stage) is not None


def test_stages_cut_by_speed_keep_to_memory() -> None:
    spec = job(stages=2, replicas=1, num_layers=14)
    whole = whole_model_bytes(spec)
    on = fleet([1e9, 5e9], memory_bytes=[whole, int(0.6 * whole)])
    fast = recut(spec, on, planned(spec, on))
    assert fast is not None
    assert violations(fast, spec, on) == ()
    # Speeds of 1 to 5 ask for 13 of the 16 layers.
    assert [x.stop - x.first for x in fast.stages if fast.holders(x.index) == ("w1",)] == [9]


# --- what no fleet could run ---


@pytest.mark.parametrize(("layout", "most"), [(Layout.LINE, 6), (Layout.LOOP, 5)])
def test_more_stages_than_layers_are_refused_with_the_field(layout: Layout, most: int) -> None:
    check_job(job(stages=most, num_layers=4, layout=layout))
    with pytest.raises(UserError, match=f"at most {most}") as refused:
        check_job(job(stages=most + 1, num_layers=4, layout=layout))
    assert refused.value.field == "parallel.stages"


@pytest.mark.parametrize(("layout", "most"), [(Layout.LINE, 3), (Layout.LOOP, 2)])
def test_more_chunks_than_layers_are_refused_with_the_field(layout: Layout, most: int) -> None:
    spec = job(stages=2, num_layers=4, layout=layout)
    parallel = spec.parallel.model_copy(update={"chunks": most})
    check_job(spec.model_copy(update={"parallel": parallel}))
    more = spec.parallel.model_copy(update={"chunks": most + 1})
    with pytest.raises(UserError, match=f"give at most {most}") as refused:
        check_job(spec.model_copy(update={"parallel": more}))
    assert refused.value.field == "parallel.chunks"


def test_more_replicas_than_microbatches_are_refused_with_the_field() -> None:
    check_job(job(replicas=3, num_microbatches=3))
    with pytest.raises(UserError, match="a step has 3 microbatches") as refused:
        check_job(job(replicas=4, num_microbatches=3))
    assert refused.value.field == "parallel.replicas"


def test_samples_longer_than_the_model_are_refused_with_the_field() -> None:
    short = job()
    long = short.model_copy(update={"data": short.data.model_copy(update={"sequence_tokens": 4096})})
    with pytest.raises(UserError, match="2048 positions") as refused:
        check_job(long)
    assert refused.value.field == "data.sequence_tokens"
