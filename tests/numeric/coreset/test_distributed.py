"""Choices over rows of four workers beside the choice of one that has all rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.choice import choose_coreset, cover_error
from skein.numeric.coreset.distributed import Candidates, choose_among, propose
from skein.numeric.coreset.features import Features, last_layer, vectors

NUM_WORKERS, NUM_ROWS, NUM_PICKS, NUM_CLUSTERS = 4, 2_000, 200, 20
_GENERATOR = np.random.default_rng(0)
CLUSTER = np.arange(NUM_ROWS) % NUM_CLUSTERS
ROWS = _GENERATOR.normal(size=(NUM_ROWS, 16)) + 3 * _GENERATOR.normal(size=(NUM_CLUSTERS, 16))[CLUSTER]
GROUPS = CLUSTER % 4
SHARDS = {"random": _GENERATOR.integers(NUM_WORKERS, size=NUM_ROWS), "cluster": CLUSTER // 5}
BUDGETS = dict(enumerate(budgets(np.bincount(GROUPS).tolist(), NUM_PICKS)))


def candidates(features: Features, shard: NDArray[np.int64]) -> list[Candidates]:
    own = [np.flatnonzero(shard == worker) for worker in range(NUM_WORKERS)]
    return [propose(features.take(rows), GROUPS[rows], rows, BUDGETS) for rows in own]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", ["vectors", "last layer"])
def test_two_stages_come_near_one_worker_with_all_rows(shard: str, kind: str) -> None:
    error = np.random.default_rng(1).normal(size=(NUM_ROWS, 4))
    features = vectors(ROWS) if kind == "vectors" else last_layer(ROWS, error)
    central = choose_coreset(features, GROUPS, NUM_PICKS)
    proposed = candidates(features, SHARDS[shard])
    merged = choose_among(proposed, NUM_PICKS)
    assert cover_error(features, GROUPS, merged.ids) <= 1.06 * central.error
    assert np.bincount(GROUPS[merged.ids]).tolist() == list(BUDGETS.values())
    assert np.bincount(GROUPS[merged.ids], merged.sizes).tolist() == np.bincount(GROUPS).tolist()
    num_numbers = sum(x.shape[1] for x in features.factors) + 2
    assert all(x.num_bytes <= 4 * NUM_PICKS * num_numbers + 1024 for x in proposed)


@pytest.mark.parametrize("shard", SHARDS)
def test_workers_that_choose_alone_come_near(shard: str) -> None:
    features = vectors(ROWS)
    own = [np.flatnonzero(SHARDS[shard] == worker) for worker in range(NUM_WORKERS)]
    shares = budgets([len(rows) for rows in own], NUM_PICKS)
    ids = np.concatenate(
        [
            rows[choose_coreset(features.take(rows), GROUPS[rows], share).ids]
            for rows, share in zip(own, shares, strict=True)
        ]
    )
    central = choose_coreset(features, GROUPS, NUM_PICKS)
    assert cover_error(features, GROUPS, ids) <= 1.10 * central.error


def test_the_order_of_workers_and_rows_that_are_not_finite_change_no_choice() -> None:
    features = vectors(np.concatenate((ROWS[:-1], np.full((1, 16), np.nan))))
    proposed = candidates(features, SHARDS["random"])
    merged = choose_among(proposed, NUM_PICKS)
    assert merged.digest == choose_among(proposed[::-1], NUM_PICKS).digest
    assert (merged.num_set_aside, merged.sizes.sum()) == (1, NUM_ROWS - 1)
