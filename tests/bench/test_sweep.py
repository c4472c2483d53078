"""The comparison of arrays: its separate runs are no arrays, and its rows hold as far as their goals say."""

import pytest

from bench import sweep
from bench.sweep import MLP, OPTIMIZERS, differing, furthest, settings_of


def test_fused_rows_are_near_separate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "NUM_STEPS", 8)
    for spec in OPTIMIZERS:
        found = furthest(MLP, [settings_of(spec, row) for row in range(3)], range(3))
        # Products of batches are summed in another order: not the same thing twice.
        assert 0 < found.loss <= sweep.EQUAL_LOSS
        assert 0 < found.parameter <= sweep.EQUAL_PARAMETER


@pytest.mark.parametrize(("worst", "holds"), [(0.9e-10, True), (1.1e-10, False)])
def test_a_row_holds_up_to_its_goal(worst: float, holds: bool) -> None:
    row = differing("any", worst, sweep.EQUAL_LOSS)
    assert row.holds is holds
    assert row.ratio == pytest.approx(worst / 1e-10)
