"""This checkout beside an earlier one: what is compared, and what is said of it."""

from contextlib import ExitStack

import pytest

from bench.before import checkout, pairs_row, plans_row
from skein.errors import UserError


def test_pairs_of_turns_are_compared_and_not_medians_of_either() -> None:
    # The machine is half as fast in the last pair.
    row = pairs_row([98.0, 101.0, 50.0], [100.0, 100.0, 50.5], "abc")
    assert row.ratio == pytest.approx(50 / 50.5)
    assert row.holds
    assert not pairs_row([97.0] * 3, [100.0] * 3, "abc").holds


def test_plans_that_only_one_makes_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    row = plans_row({"a": "1", "b": "2", "new": "3"}, {"a": "1", "b": "2"}, "abc")
    assert (row.value, row.ratio, row.holds) == (2.0, 1.0, True)
    other = plans_row({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "abc")
    assert (other.ratio, other.holds) == (0.5, False)
    assert capsys.readouterr().err == "differs: b\n"
    assert not plans_row({}, {"a": "1"}, "abc").holds


def test_a_commit_that_is_none_is_refused() -> None:
    with ExitStack() as stack, pytest.raises(UserError) as caught:
        stack.enter_context(checkout("no-such-commit"))
    assert "no-such-commit" in str(caught.value)
    assert str(caught.value).endswith("name one of this repository")
