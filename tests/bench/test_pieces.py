"""Comparison of pieces with what lanes predict: waits are those of the lanes, and goals are held to."""

import pytest

from bench.pieces import LAYERS, NUM_PIECES, Case, measured_s, published_rows, rounds, rows_of, summed_rows
from skein.plan.pieces.lanes import best_pieces, idle_s


@pytest.mark.parametrize("num_pieces", NUM_PIECES)
def test_all_rows_wait_for_both_lanes(num_pieces: int) -> None:
    case = Case(name="both alike", layer=LAYERS["both alike"], num_pieces=num_pieces)
    # Whatever else the machine does, nothing that waits is quicker than it waits.
    assert measured_s(case, factor=0.01) >= 0.01 * case.predicted_s * (1 - 1e-3)


def test_sums_in_the_idle_lane_wait_for_it() -> None:
    case = Case(name="slow experts, back", layer=LAYERS["slow experts, back"], num_pieces=1).with_sums()
    assert case.sums_s == idle_s(case.layer, 1) > 0
    assert measured_s(case, factor=0.01) >= 0.01 * case.predicted_s * (1 - 1e-3)


def test_one_round_has_every_case_and_the_best_with_sums_too() -> None:
    found = set(rounds(0))
    assert {case for case in found if not case.sums_s} == {
        Case(name=name, layer=layer, num_pieces=num) for name, layer in LAYERS.items() for num in NUM_PIECES
    }
    assert {case.name for case in found if case.sums_s} == {"slow experts, back", "far away"}


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.1, True), (1.2, False), (0.8, False)])
def test_what_is_off_by_more_than_its_goal_does_not_hold(factor: float, holds: bool) -> None:
    found = {case: [factor * case.predicted_s] * 3 for case in rounds(0)}
    assert {row.holds for row in (*rows_of(found)[::2], *summed_rows(found))} == {holds}
    assert all(row.holds for row in rows_of(found)[1::2])


def test_chosen_numbers_lose_little_on_published_times() -> None:
    rows = published_rows()
    assert len(rows) == 5
    assert all(row.holds for row in rows)


def test_layers_want_one_piece_and_several() -> None:
    numbers = [best_pieces(layer) for layer in LAYERS.values()]
    assert min(numbers) == 1
    assert max(numbers) > 3
