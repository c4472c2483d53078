from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.errors import UserError
from skein.model.layers import LayerSpec
from skein.plan.cut import check_job, cut
from skein.types import Layout
from tests.plan.builders import job

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


@pytest.mark.parametrize(("layout", "most"), [(Layout.LINE, 6), (Layout.LOOP, 5)])
def test_more_stages_than_layers_are_refused_with_the_field(layout: Layout, most: int) -> None:
    check_job(job(stages=most, num_layers=4, layout=layout))
    with pytest.raises(UserError, match=f"at most {most}") as refused:
        check_job(job(stages=most + 1, num_layers=4, layout=layout))
    assert refused.value.field == "parallel.stages"


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
