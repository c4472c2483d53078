"""Weighted sources: fair at every prefix and gapless per source."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.data.mixture import Mixture

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


@given(weights=WEIGHTS)
def test_counts_follow_the_weights_at_every_prefix(weights: list[float]) -> None:
    mixture, drawn = Mixture.of(weights), Counter[int]()
    # Half a draw of rounding per fork above a source; 1e-4 for weights rounded to 2**-32, over 300 draws.
    bound = math.ceil(math.log2(len(weights))) / 2 + 1e-4
    for position in range(300):
        source, before = mixture.locate(position)
        assert before == drawn[source]
        drawn[source] += 1
        for index, weight in enumerate(weights):
            assert abs(drawn[index] - (position + 1) * weight / sum(weights)) <= bound


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=20), position=st.integers(0, 2**50))
def test_a_far_position_is_found_and_its_neighbours_fit(weights: list[float], position: int) -> None:
    mixture = Mixture.of(weights)
    source, drawn = mixture.locate(position)
    later = next(p for p in range(position + 1, position + 10**4) if mixture.locate(p)[0] == source)
    assert mixture.locate(later) == (source, drawn + 1)


def test_a_tiny_weight_is_still_drawn_some_day() -> None:
    assert min(Mixture.of([1e-30, 1.0]).shares) == 1


def test_a_single_source_gets_every_position() -> None:
    assert [Mixture.of([7.0]).locate(p) for p in range(3)] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf")]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        Mixture.of(weights)
