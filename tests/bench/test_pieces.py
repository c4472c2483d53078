"""Comparison of pieces with what lanes predict: waits are those of the lanes, and goals are held to."""

import pytest

from bench.pieces import LAYERS, NUM_PIECES, Case, measured_s, rounds, rows_of
from skein.plan.pieces.lanes import best_pieces


@pytest.mark.parametrize("num_pieces", NUM_PIECES)
def test_all_rows_wait_for_both_lanes(num_pieces: int) -> None:
    case = Case(name="both alike", layer=LAYERS["both alike"], num_pieces=num_pieces)
    # Whatever else the machine does, nothing that waits is quicker than it waits.
    assert measured_s(case, factor=0.01) >= 0.01 * case.predicted_s * (1 - 1e-3)


def test_one_round_has_every_case() -> None:
    assert set(rounds(0)) == {
        Case(name=name, layer=layer, num_pieces=num) for name, layer in LAYERS.items() for num in NUM_PIECES
    }


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (1.1, True), (1.2, False), (0.8, False)])
def test_what_is_off_by_more_than_its_goal_does_not_hold(factor: float, holds: bool) -> None:
    found = {case: [factor * case.predicted_s] * 3 for case in rounds(0)}
    assert {row.holds for row in rows_of(found)[::2]} == {holds}
    assert all(row.holds for row in rows_of(found)[1::2])


def test_layers_want_one_piece_and_several() -> None:
    numbers = [best_pieces(layer) for layer in LAYERS.values()]
    assert min(numbers) == 1
    assert max(numbers) > 3
