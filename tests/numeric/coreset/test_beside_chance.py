"""Every form of a choice beside random draws of as many rows, on rows of several shapes and for shares from 0.1 %."""

from collections.abc import Callable

import numpy as np
import pytest

from skein.numeric.coreset import greedy
from skein.numeric.coreset.choice import choose_by_chance, choose_coreset, cover_error
from skein.numeric.coreset.features import F64, vectors
from skein.numeric.coreset.greedy import PARTITION_ROWS, Greedy
from tests.support.extent import ENTIRE

NUM_DRAWS = 10
NUM_ROWS = 5 * PARTITION_ROWS // 2
"""Rows of a test that takes seconds: four partitions."""
MANY_ROWS = 51_000
"""Rows of a group for which `auto` takes partitions."""
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.1)


def clustered(generator: np.random.Generator, num_rows: int) -> F64:
    centers = 6 * generator.normal(size=(10, 4))
    return generator.normal(size=(num_rows, 4)) + centers[generator.integers(10, size=num_rows)]


def heavy_tailed(generator: np.random.Generator, num_rows: int) -> F64:
    return generator.standard_t(2, size=(num_rows, 6))


def uniform(generator: np.random.Generator, num_rows: int) -> F64:
    return generator.uniform(size=(num_rows, 5))


def sorted_clusters(generator: np.random.Generator, num_rows: int) -> F64:
    """Clusters of unequal sizes, one after the other, as in data that is sorted by what it shows."""
    sizes = np.sort(generator.pareto(1.0, size=num_rows).astype(int) % 40)
    return np.asarray(
        generator.normal(size=(num_rows, 8)) + 5 * generator.normal(size=(40, 8))[sizes], np.float64
    )


MADE = (clustered, heavy_tailed, uniform, sorted_clusters)
Made = Callable[[np.random.Generator, int], F64]


def median_of_draws(rows: F64, num_picks: int) -> float:
    groups = np.zeros(len(rows), np.int64)
    draws = (choose_by_chance(groups, num_picks, seed=seed).ids for seed in range(NUM_DRAWS))
    return float(np.median([cover_error(vectors(rows), groups, ids) for ids in draws]))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("made", MADE)
def test_no_form_is_worse_than_the_median_of_random_draws(made: Made, share: float) -> None:
    rows = made(np.random.default_rng(0), NUM_ROWS)
    groups, num_picks = np.zeros(NUM_ROWS, np.int64), round(share * NUM_ROWS)
    median = median_of_draws(rows, num_picks)
    for form in (Greedy.EXACT, Greedy.STOCHASTIC, Greedy.PARTITIONED):
        choice = choose_coreset(vectors(rows), groups, num_picks, form=form)
        error = cover_error(vectors(rows), groups, choice.ids)
        assert error <= median, form
        assert error <= choice.error * (1 + 1e-6), form
        assert len(choice.ids) == num_picks
        assert choice.sizes.sum(dtype=np.float64) == NUM_ROWS


@pytest.mark.parametrize("share", SHARES if ENTIRE else (0.002,))
@pytest.mark.parametrize("made", MADE if ENTIRE else (clustered,))
def test_partitions_of_many_rows_are_no_worse_than_the_median_of_random_draws(
    made: Made, share: float
) -> None:
    rows = made(np.random.default_rng(0), MANY_ROWS)
    groups, num_picks = np.zeros(MANY_ROWS, np.int64), round(share * MANY_ROWS)
    choice = choose_coreset(vectors(rows), groups, num_picks)
    assert Greedy.AUTO.of(MANY_ROWS) is Greedy.PARTITIONED
    assert cover_error(vectors(rows), groups, choice.ids) <= median_of_draws(rows, num_picks)


def test_proposals_that_are_too_many_for_an_exact_choice_are_chosen_of_in_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(greedy, "EXACT_ROWS", PARTITION_ROWS)
    rows = clustered(np.random.default_rng(1), NUM_ROWS)
    groups, num_picks = np.zeros(NUM_ROWS, np.int64), 75
    choice = choose_coreset(vectors(rows), groups, num_picks, form=Greedy.PARTITIONED)
    assert cover_error(vectors(rows), groups, choice.ids) <= 0.95 * median_of_draws(rows, num_picks)
    assert choice.sizes.sum(dtype=np.float64) == NUM_ROWS
