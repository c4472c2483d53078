"""The comparison of arrays: its separate runs are no arrays, and its rows hold as far as their goals say."""

import pytest

from bench import sweep
from bench.sweep import differing, furthest
from bench.sweeping import search
from bench.sweeping.trials import MLP, OPTIMIZERS, settings_of


def test_fused_rows_are_near_separate_runs() -> None:
    for spec in OPTIMIZERS:
        found = furthest(MLP, [settings_of(spec, row) for row in range(3)], range(3), num_steps=8)
        # Products of batches are summed in another order: not the same thing twice.
        assert 0 < found.loss <= sweep.EQUAL_LOSS
        assert 0 < found.parameter <= sweep.EQUAL_PARAMETER


def test_searches_by_arrays_and_one_by_one_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "UNIT_STEPS", 2)
    fused, alone = search.in_arrays(search.bracket()), search.one_by_one(search.bracket())
    assert fused.survivors == alone.survivors
    assert fused.values.keys() == alone.values.keys()
    for made, value in alone.values.items():
        assert fused.values[made] == pytest.approx(value, abs=search.SAME_VALUE)


@pytest.mark.parametrize(("worst", "holds"), [(0.9e-10, True), (1.1e-10, False)])
def test_a_row_holds_up_to_its_goal(worst: float, holds: bool) -> None:
    row = differing("any", worst, sweep.EQUAL_LOSS)
    assert row.holds is holds
    assert row.ratio == pytest.approx(worst / 1e-10)
