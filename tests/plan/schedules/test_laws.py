"""What holds for every schedule, and what each holds at most: one row per generator."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from skein.errors import UserError
from skein.plan.route.depths import cut_depths
from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.schedules.shape import PipelinePlacement, Shape
from tests.plan.schedules.builders import cut_for, links, shapes
from tests.support.scheduling.legality import peaks, violations
from tests.support.scheduling.ops import PipelineOpKind, one_f_one_b
from tests.support.scheduling.simulate import simulate
from tests.support.scheduling.table import make_schedule

EACH = pytest.mark.parametrize("name", NAMED_ORDERS)


def group(shape: Shape) -> int:
    return shape.num_microbatches // max(1, shape.num_microbatches // shape.num_workers)


# Activations of a chunk that worker r holds at most, before the cap of all there are. Where workers differ by one for
# want of a closed form, that of the worker that holds most.
HELD: Mapping[str, Callable[[Shape, int], int]] = {
    "one_f_one_b": lambda s, r: s.num_workers - r,
    "gpipe": lambda s, _: s.num_microbatches,
    "zb_h1": lambda s, _: s.num_workers,
    "zb_h2": lambda s, _: 2 * s.num_workers - 1,
    "interleaved": lambda s, r: (s.num_chunks - 1) * group(s) + 2 * (s.num_workers - 1 - r) + 1,
    "looped_bfs": lambda s, _: s.num_microbatches * s.num_chunks,
    "interleaved_zb": lambda s, _: (s.num_chunks - 1) * group(s) + s.num_workers,
    "zb_v": lambda s, _: 2 * s.num_workers,
    "v_half": lambda s, _: 2 * ((s.num_workers + 2) // 2),
    "v_min": lambda s, _: 2 * ((s.num_workers + 4) // 3),
}
V_SHAPED = {"zb_v", "v_half", "v_min"}


@EACH
def test_schedule_violates_nothing(name: str) -> None:
    for shape in shapes(name):
        assert violations(make_schedule(name, shape)) == (), shape


@EACH
def test_every_stage_sees_every_microbatch_once_each_way(name: str) -> None:
    for shape in shapes(name):
        schedule = make_schedule(name, shape)
        ops = Counter(op for listed in schedule.ops_by_worker for op in listed)
        visits = shape.num_stages * shape.num_microbatches
        kinds = Counter(op.kind for op in ops.elements())
        assert set(ops.values()) == {1}, shape
        assert kinds[PipelineOpKind.FORWARD] == visits, shape
        assert kinds[PipelineOpKind.BACKWARD] + kinds[PipelineOpKind.BACKWARD_INPUT] == visits, shape
        assert kinds[PipelineOpKind.BACKWARD_WEIGHT] == kinds[PipelineOpKind.BACKWARD_INPUT], shape


@EACH
def test_workers_hold_what_the_closed_form_says(name: str) -> None:
    for shape in shapes(name):
        cut = cut_for(name, shape.num_workers, shape.num_chunks)
        held = [peak.num_activations for peak in peaks(make_schedule(name, shape), cut.stages)]
        all_there_are = shape.num_microbatches * shape.num_chunks
        expected = [min(all_there_are, HELD[name](shape, r)) for r in range(shape.num_workers)]
        if name not in V_SHAPED:
            assert held == expected, shape
        elif shape.num_microbatches >= 2 * shape.num_workers:
            assert max(held) == expected[0], shape
        else:
            assert max(held) <= expected[0], shape


@EACH
def test_worker_is_busy_for_its_share_and_no_two_ops_overlap(name: str) -> None:
    for shape in shapes(name):
        cut = cut_for(name, shape.num_workers, shape.num_chunks)
        ran = simulate(make_schedule(name, shape), cut.stages, links(shape.num_workers, 0.5))
        assert ran.busy_s == pytest.approx([3.0 * shape.num_microbatches] * shape.num_workers), shape
        for starts, ends in zip(ran.starts_s, ran.ends_s, strict=True):
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), shape


@EACH
def test_equal_shapes_give_equal_schedules(name: str) -> None:
    for shape in shapes(name):
        assert make_schedule(name, shape) == make_schedule(name, shape)


def test_the_law_table_has_every_generator() -> None:
    assert set(HELD) == set(NAMED_ORDERS)


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb"])
def test_unequal_groups_are_refused_with_a_hint(name: str) -> None:
    with pytest.raises(UserError, match=r"num_microbatches: 9: give a multiple of 2, or of the 4 workers"):
        make_schedule(name, Shape(num_workers=4, num_microbatches=9, num_chunks=2))


def test_a_shape_that_a_schedule_is_not_for_is_refused_with_a_hint() -> None:
    with pytest.raises(UserError, match="zb_v is for 2 chunks per worker placed as a v"):
        make_schedule("zb_v", Shape(num_workers=4, num_microbatches=8, num_chunks=2))
    with pytest.raises(UserError, match="interleaved is for at least 2 chunks per worker placed as a loop"):
        make_schedule("interleaved", Shape(num_workers=4, num_microbatches=8))


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="give one of one_f_one_b, gpipe"):
        make_schedule("2f2b", Shape(num_workers=4, num_microbatches=8))


@pytest.mark.parametrize("depths", [(4, 3, 2), (4, 3, 2, 0), (4, 2, 3, 1)])
def test_depths_that_cannot_run_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="give 4 depths of at least 1, none above the last"):
        one_f_one_b(Shape(num_workers=4, num_microbatches=8), depths)


def test_depths_cut_anywhere_can_still_run() -> None:
    for slots in ([1, 9, 9, 9], [9, 1, 9, 9], [9, 9, 2, 9], [3, 2, 2, 5]):
        schedule = one_f_one_b(Shape(num_workers=4, num_microbatches=8), cut_depths([10, 7, 4, 1], slots))
        held = [peak.num_activations for peak in peaks(schedule, cut_for("one_f_one_b", 4, 1).stages)]
        assert violations(schedule) == ()
        assert all(a <= b for a, b in zip(held, slots, strict=True))


def test_v_places_first_and_last_stage_on_one_worker() -> None:
    shape = Shape(num_workers=4, num_microbatches=1, num_chunks=2, placement=PipelinePlacement.V)
    assert shape.worker_by_stage == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [shape.stage(1, chunk) for chunk in range(2)] == [1, 6]


def test_the_third_chunk_of_a_v_goes_down_again() -> None:
    shape = Shape(num_workers=3, num_microbatches=1, num_chunks=3, placement=PipelinePlacement.V)
    assert shape.worker_by_stage == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert [shape.stage(2, chunk) for chunk in range(3)] == [2, 3, 8]
