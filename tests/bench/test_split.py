"""Whole and split backwards side by side: equal, as large as predicted, and judged by their seconds."""

import pytest

from bench.split import GOALS, Round, Sides, row_of
from skein.types import Precision


@pytest.mark.parametrize("is_whole_first", [True, False])
def test_a_round_takes_both_ways_from_equal_sums(is_whole_first: bool) -> None:
    took = Sides(1, Precision.FP32).round(is_whole_first=is_whole_first)
    assert min(took.whole_s, took.input_s, took.weight_s) > 0


@pytest.mark.parametrize(("weight_s", "holds"), [(0.4, True), (0.6, False)])
def test_a_row_holds_up_to_its_goal(weight_s: float, holds: bool) -> None:
    rounds = [Round(whole_s=1.0, input_s=0.6, weight_s=weight_s)] * 3
    for precision in GOALS:
        row = row_of(precision, rounds, num_blocks=1, held_bytes=1)
        assert row.holds is holds
        assert row.ratio == pytest.approx(0.6 + weight_s)
