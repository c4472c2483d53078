from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest

from bench.scheduling.choice import Choice, choose
from bench.scheduling.depth import depth_options, kept_weights, latency_aware_depths
from bench.scheduling.pricing import Cut, Links, Sharing, StageCost, even_cut
from bench.scheduling.simulate import simulate
from skein import rng
from skein.plan.schedules.ops import Placement
from skein.plan.schedules.split import one_f_one_i
from skein.plan.schedules.table import make_schedule
from skein.plan.schedules.whole import one_f_one_b
from tests.plan.schedules.builders import UNIT_BYTES, cut_for, links, share


def all_cuts(shares: list[StageCost]) -> list[Cut]:
    return [
        even_cut(shares, num_chunks, placement)
        for num_chunks, placement in [(1, Placement.LOOP), (2, Placement.LOOP), (2, Placement.V)]
    ]


def seconds(choice: Choice) -> dict[str, float]:
    return {x.name: x.simulation.makespan_s for x in choice.ranking}


def drawn(number: int, sharing: Sharing) -> tuple[list[StageCost], Links, int]:
    """An unequal pipeline of 2 to 8 workers: speeds within four times, links within a microbatch's time."""
    generator = rng.stream(0, "pipeline", number)
    num_workers = int(generator.integers(2, 9))
    shares = [
        StageCost(
            forward_s=float(x),
            input_s=0.9 * float(x),
            weight_s=1.1 * float(x),
            activation_bytes=UNIT_BYTES,
            kept_bytes=UNIT_BYTES,
            output_bytes=1,
            gradient_bytes=1,
        )
        for x in generator.uniform(0.5, 2.0, num_workers)
    ]
    latency_s = generator.uniform(0.0, 1.0, (num_workers, num_workers))
    np.fill_diagonal(latency_s, 0.0)
    bytes_per_s = 1 / generator.uniform(0.1, 1.0, (num_workers, num_workers))
    between = Links(latency_s=latency_s, bytes_per_s=bytes_per_s, sharing=sharing)
    return shares, between, int(generator.integers(num_workers, 4 * num_workers + 1))


def bound_s(cut: Cut, between: Links, num_microbatches: int) -> float:
    """What whole backwards cannot beat: a worker's work, after the way to it and before the way back from it."""
    way_s, best_s = 0.0, 0.0
    for r, stage in enumerate(cut.stages):
        own_s = stage.forward_s + stage.backward_s
        best_s = max(best_s, way_s + num_microbatches * own_s)
        if r + 1 < cut.num_workers:
            way_s += own_s + between.seconds(r, r + 1, stage.output_bytes)
            way_s += between.seconds(r + 1, r, stage.gradient_bytes)
    return best_s


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize("number", range(12))
def test_chosen_is_no_slower_than_gpipe_and_latency_aware_1f1b_on_unequal_links(
    number: int, sharing: Sharing
) -> None:
    shares, between, num_microbatches = drawn(number, sharing)
    whole, *chunked = all_cuts(shares)
    choice = choose(num_microbatches, [whole, *chunked], between)
    depths = latency_aware_depths(whole, between, num_microbatches)
    shape = whole.shape(num_microbatches)
    for schedule in (make_schedule("gpipe", shape), one_f_one_b(shape, depths)):
        alone_s = simulate(schedule, whole.stages, between).makespan_s
        assert choice.ranking[0].simulation.makespan_s <= alone_s
    ranked = [x.simulation.makespan_s for x in choice.ranking]
    assert ranked == pytest.approx(sorted(ranked), rel=1e-9)


def test_latency_aware_depths_come_near_the_bound_on_unequal_pipelines() -> None:
    ratios = []
    for number in range(300):
        shares, between, num_microbatches = drawn(number, Sharing.NONE)
        cut = even_cut(shares, 1, Placement.LOOP)
        shape = cut.shape(num_microbatches)
        depths = latency_aware_depths(cut, between, num_microbatches)
        spare = latency_aware_depths(cut, between, num_microbatches, num_spare=1)
        orders = (
            one_f_one_b(shape, spare),
            one_f_one_b(shape, depths),
            make_schedule("gpipe", shape),
            one_f_one_b(shape),
        )
        bound = bound_s(cut, between, num_microbatches)
        ratios.append([simulate(order, cut.stages, between).makespan_s / bound for order in orders])
    with_spare, deep, gpipe, textbook = (float(x) for x in np.mean(ratios, axis=0))
    assert np.min(ratios) > 1 - 1e-9
    # Published: 1.04, of 300 pipelines drawn in a way not told; ours may be a hundredth harder or easier.
    assert deep == pytest.approx(1.04, abs=0.01)
    assert with_spare < deep < gpipe < textbook


def test_across_a_wan_deep_orders_lead_and_chunked_ones_trail() -> None:
    found = seconds(choose(8, all_cuts([share()] * 4), links(4, 2.0)))
    assert found["gpipe"] == found["one_f_one_b_deep"] == 45.0
    assert found["zb_deep"] == 35.0
    published = ["gpipe", "looped_bfs v2", "zb_v v2", "one_f_one_b", "interleaved v2", "interleaved_zb v2"]
    assert [name for name in found if name in published] == published


def test_inside_a_site_the_ranking_is_roughly_the_reverse() -> None:
    choice = choose(8, all_cuts([share()] * 4), links(4))
    assert choice.ranking[0].simulation.makespan_s == 25.5
    assert {x.name for x in choice.ranking[:2]} == {"zb_v v2", "interleaved_zb v2"}
    assert [x.name for x in choice.ranking[-2:]] == ["one_f_one_b", "gpipe"]
    # Nothing is on its way for long, so there is nothing to be aware of.
    same = {"one_f_one_b_deep": "one_f_one_b", "zb_deep": "zb_h1"}
    assert {x.name: x.reason for x in choice.rejected} == {
        name: f"is the same as {other} here" for name, other in same.items()
    }


def test_of_equally_quick_schedules_the_simpler_goes_first() -> None:
    # Alone, a worker is as quick in any order: what is left is whole backwards, one chunk, and little memory.
    names = list(seconds(choose(4, all_cuts([share()]), links(1))))
    assert names[:4] == ["one_f_one_b", "gpipe", "interleaved v2", "looped_bfs v2"]


def test_what_does_not_fit_is_rejected_with_its_reason() -> None:
    choice = choose(8, all_cuts([share()] * 4), links(4), [4 * UNIT_BYTES] * 4)
    reasons = {x.name: x.reason for x in choice.rejected}
    assert reasons["zb_h2"].startswith("needs 7 slots on w0 (420 B), has 4 (240 B)")
    assert reasons["interleaved v2"].startswith("needs 11 slots on w0 (330 B), has 8 (240 B)")
    for candidate in choice.ranking:
        assert all(peak.num_bytes <= 4 * UNIT_BYTES for peak in candidate.simulation.peaks)
    assert {"one_f_one_b", "zb_h1", "zb_v v2"} <= set(seconds(choice))


def test_a_shape_that_is_impossible_is_rejected_with_its_reason() -> None:
    choice = choose(9, all_cuts([share()] * 4), links(4))
    reason = "num_microbatches: 9: give a multiple of 2, or of the 4 workers"
    assert {x.name for x in choice.rejected if x.reason == reason} == {"interleaved v2", "interleaved_zb v2"}


def test_without_split_backwards_the_best_whole_one_is_chosen() -> None:
    choice = choose(8, all_cuts([share()] * 4), links(4, 2.0), may_split=False)
    assert choice.ranking[0].simulation.makespan_s == 45.0
    reasons = {x.name: x.reason for x in choice.rejected}
    assert reasons["zb_h1"] == reasons["zb_v v2"] == "splits backwards, which the workers do not"


def test_two_cuts_of_the_same_kind_are_both_ranked() -> None:
    even, uneven = all_cuts([share()] * 2)[0], all_cuts([share(), share(2.0)])[0]
    ranking = choose(4, [uneven, even], links(2)).ranking
    assert [x.cut for x in ranking if x.name == "one_f_one_b"] == [even, uneven]


def test_without_memory_for_anything_every_schedule_is_rejected() -> None:
    choice = choose(4, all_cuts([share()] * 2), links(2), [UNIT_BYTES, 0])
    assert choice.ranking == ()
    assert len(choice.rejected) > 10


def test_one_forward_more_per_hop_is_tried() -> None:
    # By the times 29, 25, … 1 forwards come first, which takes 152 s; 32, 31, 26, … 1 shorten the end of the step.
    found = seconds(choose(32, [cut_for("zb_h1", 8, 1)], links(8, 4.0)))
    assert (found["zb_deep"], found["one_f_one_b_deep"]) == (135.0, 173.0)


def test_depths_count_the_way_there_and_the_way_back() -> None:
    stages = [StageCost(forward_s=1, input_s=1, weight_s=1, output_bytes=6, gradient_bytes=30)] * 2
    latency_s, bytes_per_s = np.array([[0.0, 1.0], [2.0, 0.0]]), np.array([[np.inf, 2.0], [5.0, np.inf]])
    between = Links(latency_s=latency_s, bytes_per_s=bytes_per_s)
    # 3 s of ops, 1 + 3 s there, 2 + 6 s back: 15 s away, five microbatches.
    assert latency_aware_depths(Cut(stages=tuple(stages)), between, 100) == (6, 1)


def memory(slots: int, num_workers: int) -> list[int]:
    return [slots * UNIT_BYTES] * num_workers


def test_depths_go_down_together_where_memory_is_short() -> None:
    cut, between = cut_for("one_f_one_b", 4, 1), links(4, 2.0)
    assert depth_options(cut, between, 16)[0] == (10, 7, 4, 1)
    # Only cut off, the later workers would wait for microbatches that cannot come: 98 s with 12 microbatches.
    assert {(6, 6, 4, 1), (6, 5, 3, 1)} < set(depth_options(cut, between, 16, memory(6, 4)))
    found = {x.name: x for x in choose(12, [cut], between, memory(6, 4), may_split=False).ranking}
    deep = found["one_f_one_b_deep"]
    assert deep.simulation.makespan_s == 71.0
    assert [peak.num_activations for peak in deep.simulation.peaks] == [6, 5, 3, 1]


def test_depths_respect_the_memory_of_each_worker() -> None:
    cut, slots = cut_for("one_f_one_b", 4, 1), [16, 5, 6, 1]
    for depths in depth_options(cut, links(4, 2.0), 16, [x * UNIT_BYTES for x in slots]):
        assert all(depth <= most for depth, most in zip(depths, slots, strict=True))
        assert list(depths) == sorted(depths, reverse=True)


def best_of_all_depths(cut: Cut, between: Links, num_microbatches: int, slots: int) -> float:
    """The least makespan of any depths within the slots, by trying them all."""
    shape = cut.shape(num_microbatches)
    rising = combinations_with_replacement(range(1, slots + 1), cut.num_workers)
    orders = (one_f_one_b(shape, depths[::-1]) for depths in rising)
    return min(simulate(order, cut.stages, between).makespan_s for order in orders)


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_depths_for_little_memory_come_near_the_best_of_all(slots: int) -> None:
    ratios = []
    for number in range(60):
        shares, between, num_microbatches = drawn(number, Sharing.NONE)
        if len(shares) <= 4:
            cut = even_cut(shares, 1, Placement.LOOP)
            held = memory(slots, cut.num_workers)
            found = choose(num_microbatches, [cut], between, held, may_split=False).ranking[0]
            best_s = best_of_all_depths(cut, between, num_microbatches, slots)
            ratios.append(found.simulation.makespan_s / best_s)
    assert len(ratios) > 20
    assert min(ratios) > 1 - 1e-9
    # What a heuristic may lose; merely cutting off costs up to 15 % on average and 56 % at worst.
    assert float(np.mean(ratios)) < 1.04
    assert max(ratios) < 1.2


def test_weight_gradients_are_kept_where_memory_is_left() -> None:
    cut = cut_for("zb_h1", 4, 1)
    assert kept_weights(cut, (4, 3, 2, 1), 8) == (0, 1, 2, 3)  # as ZB-H1
    assert kept_weights(cut, (7, 5, 3, 1), 8) == (0, 2, 4, 6)  # as ZB-H2
    assert kept_weights(cut, (7, 5, 3, 1), 8, [7 * UNIT_BYTES, 5 * UNIT_BYTES, 5 * UNIT_BYTES, 0]) == (
        0,
        0,
        2,
        0,
    )
    assert one_f_one_i(cut.shape(8), (4, 3, 2, 1), (0, 1, 2, 3)) == make_schedule("zb_h1", cut.shape(8))


def test_an_even_cut_keeps_the_work_and_gives_each_worker_its_own() -> None:
    shares = [share(float(i + 1)) for i in range(3)]
    cut = even_cut(shares, 2, Placement.V)
    assert [stage.forward_s for stage in cut.stages] == [0.5, 1.0, 1.5, 1.5, 1.0, 0.5]
    assert [stage.activation_bytes for stage in cut.stages] == [30] * 6


def test_an_even_cut_sends_whole_tensors_over_every_boundary() -> None:
    first = replace(share(), output_bytes=100, gradient_bytes=50)
    cut = even_cut([first, share()], 2, Placement.LOOP)
    assert [(stage.output_bytes, stage.gradient_bytes) for stage in cut.stages] == [(100, 50)] * 4
