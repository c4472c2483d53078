"""The order of samples: a permutation per epoch, the same for ever."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.data.order import permuted, shuffled_index, shuffled_indices

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 3000))


@given(num_samples=SIZES, seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_holds_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    positions = np.arange(num_samples) + epoch * num_samples
    order = shuffled_indices(positions, num_samples=num_samples, seed=seed)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(size=st.integers(1, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
def test_large_permutations_stay_in_range_and_never_collide(size: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=30))
    moved = permuted(places, size=size, key=key).tolist()
    assert len(set(moved)) == len(places)
    assert all(0 <= place < size for place in moved)


@given(num_samples=st.integers(1, 1000), seed=SEEDS, positions=st.lists(st.integers(0, 10**12), max_size=8))
def test_many_positions_at_once_are_those_one_by_one(
    num_samples: int, seed: int, positions: list[int]
) -> None:
    several = shuffled_indices(positions, num_samples=num_samples, seed=seed)
    assert several.tolist() == [shuffled_index(p, num_samples=num_samples, seed=seed) for p in positions]


@given(seed=SEEDS, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, epoch: int) -> None:
    orders = {
        tuple(shuffled_indices(np.arange(100) + e * 100, num_samples=100, seed=s).tolist())
        for s, e in ((seed, epoch), (seed, epoch + 1), (seed + 1, epoch))
    }
    assert len(orders) == 3


def test_permutations_of_a_few_samples_are_about_equally_frequent() -> None:
    orders = shuffled_indices(np.arange(4 * 4800), num_samples=4, seed=5).reshape(-1, 4)
    counts = Counter(map(tuple, orders.tolist()))
    # 200 expected of each of 24; 5 standard deviations of a binomial are 70.
    assert len(counts) == 24
    assert all(130 < count < 270 for count in counts.values())


def test_neighbours_are_scattered() -> None:
    order = shuffled_indices(np.arange(10_000), num_samples=10_000, seed=0)
    # The mean distance of two random points of [0, N) is N / 3, and 10,000 of them estimate it to 0.7 %.
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.03)


def test_order_is_the_one_that_earlier_releases_had() -> None:
    # A job that resumes under another release must go on with the same samples.
    first = shuffled_indices(np.arange(8), num_samples=1000, seed=0)
    assert first.tolist() == [251, 3, 448, 602, 268, 94, 148, 944]
    assert shuffled_index(10**12, num_samples=10**9 + 7, seed=2**63 - 1) == 872_649_235


@pytest.mark.parametrize("position", [-1, 10])
def test_places_outside_the_permutation_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match=r"do not lie in \[0, 10\)"):
        permuted([position], size=10, key=0)
