"""Orders by name: each is what its generator says, and the best start is found by simulating them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from skein.plan.route.evaluate import timeline
from skein.plan.route.orders import DEEP, FIRST_COME, fitting_orders
from skein.plan.route.problem import Problem
from skein.types import Layout


def pipeline(
    num_workers: int,
    num_microbatches: int,
    *,
    hop_s: float,
    slots: int,
    chunks: int = 1,
    layout: Layout = Layout.LINE,
    is_split: bool = False,
) -> Problem:
    """One chain of equal workers, 1 s forward and 2 s backward a stage; `chunks` stages on each, in a loop.

    Weight gradients are half of a backward.
    """
    num_stages = num_workers * chunks
    times = np.ones((num_workers, num_stages)) / chunks
    links = np.full((num_workers, num_workers), hop_s)
    np.fill_diagonal(links, 0.0)
    return Problem(
        name="pipeline",
        layout=layout,
        stage_sizes=(1,) * num_stages,
        path_len=num_stages,
        num_by_origin=(num_microbatches,),
        max_swaps=0,
        max_jump=num_stages,
        forward_s=times,
        backward_s=2 * times,
        loss_s=np.full(num_workers, 3.0 / chunks if layout is Layout.LINE else 0.0),
        transfer_s=links,
        wire_s=np.zeros_like(links),
        slots=np.full((num_workers, num_stages), slots),
        weight_s=times,
        is_split=is_split,
    )


def steps(problem: Problem) -> dict[str, float]:
    worker_of = np.arange(problem.num_chunks) % problem.num_workers
    row = [*range(problem.num_stages), *([0] if problem.layout is Layout.LOOP else [])]
    path = np.array([row] * problem.num_microbatches)
    found: dict[str, float] = {}
    for name, routing in fitting_orders(problem, worker_of, path):
        found[name] = min(found.get(name, math.inf), timeline(problem, routing).step_s)
    return found


def test_one_f_one_b_and_gpipe_take_what_their_closed_form_says() -> None:
    taken = steps(pipeline(4, 8, hop_s=0.0, slots=8))
    assert taken["one_f_one_b"] == taken["gpipe"] == pytest.approx((8 + 3) * 3.0)


def test_slots_for_all_microbatches_are_no_want_of_memory() -> None:
    few, many = (pipeline(4, 8, hop_s=1.0, slots=slots) for slots in (8, 1000))
    far = few.transfer_s.copy()
    # Behind this hop as much is under way as eight microbatches do not last for.
    far[0, 1] = far[1, 0] = 40.0
    few, many = replace(few, transfer_s=far), replace(many, transfer_s=far)
    assert steps(few)[DEEP] == steps(many)[DEEP]


def test_depth_by_latency_beats_the_textbook_over_slow_links() -> None:
    # (m + p - 1) T + 2 (p - 1) c against (m + p - 1) T + c (2 m (p - 1) / p + 2 (p - 2)), T = 3, c = 2.
    taken = steps(pipeline(4, 16, hop_s=2.0, slots=16))
    assert taken[DEEP] == pytest.approx(19 * 3 + 6 * 2)
    assert taken["one_f_one_b"] == pytest.approx(19 * 3 + 2 * (24 + 4))


def test_interleaving_shortens_the_bubble_where_workers_hold_two_stages_each() -> None:
    taken = steps(pipeline(4, 8, hop_s=0.0, slots=16, chunks=2))
    assert taken["interleaved"] == pytest.approx(8 * 3 + 3 * 3 / 2)
    assert "one_f_one_b" not in taken


def test_split_backwards_take_what_their_closed_forms_say() -> None:
    one, two = (pipeline(4, 8, hop_s=0.0, slots=16, chunks=chunks, is_split=True) for chunks in (1, 2))
    # m T with a bubble of (p - 1) (f + i - w); none, but spans shifted by (p - 1) f; the same of half stages.
    assert steps(one)["zb_h1"] == pytest.approx(8 * 3 + 3)
    assert steps(one)["zb_h2"] == pytest.approx(8 * 3 + 3)
    assert steps(two)["zb_v, in a V of 4 workers"] == pytest.approx(8 * 3 + 3 / 2)
    assert "zb_h1" not in steps(replace(one, is_split=False))


def test_whole_backwards_are_no_slower_as_two_ops() -> None:
    whole, split = (
        steps(pipeline(4, 8, hop_s=0.5, slots=8, is_split=is_split)) for is_split in (False, True)
    )
    assert all(split[name] <= whole[name] for name in ("one_f_one_b", "gpipe", DEEP))


def test_less_memory_leaves_orders_that_hold_less() -> None:
    few, fewer = (steps(pipeline(4, 8, hop_s=0.0, slots=slots, is_split=True)) for slots in (4, 2))
    assert "zb_h1" in few
    assert not {"zb_h2", "gpipe"} & set(few)
    assert min(few, key=lambda name: few[name]) == "zb_deep"
    assert "zb_h1" not in fewer
    assert fewer["zb_deep"] < fewer[DEEP]
    halves = steps(pipeline(4, 8, hop_s=0.0, slots=3, chunks=2, is_split=True))
    assert min(halves, key=lambda name: halves[name]) == "v_min, in a V of 4 workers"


def test_paths_that_skip_have_no_order_by_name_but_first_come() -> None:
    problem = pipeline(4, 4, hop_s=0.0, slots=4, layout=Layout.LOOP)
    worker_of, path = np.arange(4), np.array([[0, 1, 2, 0], [0, 2, 3, 0], [0, 1, 3, 0], [0, 1, 2, 0]])
    short = replace(problem, path_len=3)
    assert [name for name, _ in fitting_orders(short, worker_of, path)] == [FIRST_COME]


def test_a_loop_has_the_same_orders_with_its_losses_in_between() -> None:
    taken = steps(pipeline(3, 6, hop_s=0.5, slots=6, layout=Layout.LOOP))
    assert {FIRST_COME, DEEP, "one_f_one_b", "gpipe"} <= set(taken)
