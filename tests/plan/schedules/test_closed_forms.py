"""Makespans against closed forms and published figures. Exact but for rounding: the tolerance is 1e-9 of the value."""

import pytest

from tests.plan.schedules.builders import cut_for, links, share, uniform
from tests.support.scheduling.depth import depth_options
from tests.support.scheduling.ops import PipelineSchedule, one_f_one_b
from tests.support.scheduling.pricing import Cut
from tests.support.scheduling.simulate import Simulation, simulate

EXACT = 1e-9
UNEQUAL = share(1.0, 1.3, 0.7)
PIPELINES = pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 8), (4, 16), (8, 32), (3, 12)])


def deep(p: int, m: int, latency_s: float) -> tuple[tuple[int, ...], Simulation]:
    """1F1B to the depths that the latency asks for; backward twice the forward."""
    cut: Cut = cut_for("one_f_one_b", p, 1)
    depths, *_ = depth_options(cut, links(p, latency_s), m)
    schedule: PipelineSchedule = one_f_one_b(cut.shape(m), depths)
    return depths, simulate(schedule, cut.stages, links(p, latency_s))


@PIPELINES
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_whole_backwards_cost_p_minus_1_microbatches(name: str, p: int, m: int) -> None:
    total_s = UNEQUAL.forward_s + UNEQUAL.backward_s
    ran = uniform(name, p, m, each=UNEQUAL)
    assert ran.makespan_s == pytest.approx((m + p - 1) * total_s, rel=EXACT)


@PIPELINES
@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_chunks_divide_the_bubble(name: str, p: int, m: int, v: int) -> None:
    assert uniform(name, p, m, v).makespan_s == pytest.approx(3 * m + 3 * (p - 1) / v, rel=EXACT)


@PIPELINES
def test_zb_h1_fills_a_weight_gradient_per_worker_into_the_bubble(p: int, m: int) -> None:
    assert uniform("zb_h1", p, m).makespan_s == pytest.approx(3 * m + (p - 1), rel=EXACT)


@PIPELINES
@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_zb_divides_the_bubble_of_zb_h1(p: int, m: int, v: int) -> None:
    assert uniform("interleaved_zb", p, m, v).makespan_s == pytest.approx(3 * m + (p - 1) / v, rel=EXACT)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (4, 8), (4, 16), (8, 32), (3, 12)])
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_workers_of_zb_h2_and_zb_v_are_never_idle_between_their_first_and_last_op(
    name: str, p: int, m: int
) -> None:
    ran = uniform(name, p, m, 2 if name == "zb_v" else 1)
    assert max(ran.spans_s) == pytest.approx(3 * m, rel=EXACT)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32), (3, 12), (8, 8)])
@pytest.mark.parametrize("latency_s", [0.0, 0.5, 2.0, 7.0])
def test_textbook_depths_pay_the_round_trip_for_every_microbatch(p: int, m: int, latency_s: float) -> None:
    formula_s = (m + p - 1) * 3 + latency_s * (2 * m * (p - 1) / p + 2 * (p - 2))
    ran = uniform("one_f_one_b", p, m, latency_s=latency_s)
    assert ran.makespan_s == pytest.approx(formula_s, rel=EXACT)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32), (3, 12), (8, 8), (5, 7)])
@pytest.mark.parametrize("latency_s", [0.0, 0.5, 2.0, 7.0])
def test_latency_aware_depths_pay_it_once(p: int, m: int, latency_s: float) -> None:
    _, ran = deep(p, m, latency_s)
    assert ran.makespan_s == pytest.approx((m + p - 1) * 3 + 2 * (p - 1) * latency_s, rel=EXACT)


def test_published_depths_and_makespans_across_a_wan() -> None:
    depths, ran = deep(4, 16, 2.0)
    assert depths == (10, 7, 4, 1)
    assert (ran.makespan_s, uniform("one_f_one_b", 4, 16, latency_s=2.0).makespan_s) == (69.0, 113.0)
    assert deep(8, 32, 4.0)[1].makespan_s == 173.0
    assert uniform("one_f_one_b", 8, 32, latency_s=4.0).makespan_s == 389.0


@pytest.mark.parametrize(
    ("name", "v", "near_s", "far_s"),
    [
        ("gpipe", 1, 33.0, 45.0),
        ("looped_bfs", 2, 28.5, 50.5),
        ("zb_v", 2, 25.5, 63.5),
        ("one_f_one_b", 1, 33.0, 65.0),
        ("interleaved", 2, 28.5, 70.0),
        ("interleaved_zb", 2, 25.5, 81.0),
        ("interleaved", 4, 26.25, 117.0),
    ],
)
def test_published_makespans_without_latency_and_with_two_thirds_of_a_microbatch(
    name: str, v: int, near_s: float, far_s: float
) -> None:
    assert uniform(name, 4, 8, v).makespan_s == near_s
    assert uniform(name, 4, 8, v, latency_s=2.0).makespan_s == far_s


def test_published_figures_of_the_zero_bubble_and_v_shaped_orders() -> None:
    zb_h1, zb_h2, zb_v = uniform("zb_h1", 4, 8), uniform("zb_h2", 4, 8), uniform("zb_v", 4, 8, 2)
    assert (zb_h1.makespan_s, max(zb_h2.spans_s), zb_v.makespan_s) == (27.0, 24.0, 25.5)
    assert {peak.num_activations for peak in zb_v.peaks} == {8}
    v_half = uniform("v_half", 4, 16, 2)
    assert v_half.makespan_s == 54.0
    assert {peak.num_activations for peak in v_half.peaks} == {6}  # half-stages: three stages
