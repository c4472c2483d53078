"""Split, mixture and order together."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.data.selection import Pick, Selection, Split

SEEDS = st.integers(0, 2**63 - 1)
RATIOS = st.floats(0, 0.5)
SOURCES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4)


def select(sources: list[tuple[int, float]], *, ratio: float, seed: int) -> Selection:
    return Selection.of([n for n, _ in sources], [w for _, w in sources], validation_ratio=ratio, seed=seed)


@given(num_samples=st.integers(1, 500), ratio=RATIOS, seed=SEEDS)
def test_a_split_is_disjoint_and_complete(num_samples: int, ratio: float, seed: int) -> None:
    split = Split.of(num_samples, validation_ratio=ratio, seed=seed)
    held_out = split.validation(range(split.num_validation)).tolist()
    trained_on = split.train(range(split.num_train)).tolist()
    assert sorted(held_out + trained_on) == list(range(num_samples))


@given(num_samples=st.integers(2, 10**9), ratio=st.floats(1e-3, 0.5))
def test_a_split_keeps_its_ratio_and_both_sides_alive(num_samples: int, ratio: float) -> None:
    split = Split.of(num_samples, validation_ratio=ratio, seed=0)
    assert split.num_train >= 1
    assert split.num_validation >= 1
    assert abs(split.num_validation - num_samples * ratio) <= 1


def test_no_ratio_means_no_validation_set() -> None:
    selection = select([(10, 1.0)], ratio=0.0, seed=0)
    assert (selection.num_train, selection.num_validation) == (10, 0)
    with pytest.raises(ValueError, match="validation set is empty"):
        selection.validation(0)


@given(sources=SOURCES, ratio=RATIOS, seed=SEEDS)
def test_each_source_is_read_once_per_epoch_of_its_own(
    sources: list[tuple[int, float]], ratio: float, seed: int
) -> None:
    selection = select(sources, ratio=ratio, seed=seed)
    held_out = (
        {selection.validation(p) for p in range(selection.num_validation)}
        if selection.num_validation
        else set()
    )
    read = [Counter[int]() for _ in sources]
    for position in range(120):
        pick = selection.train(position)
        assert pick not in held_out
        read[pick.source][pick.sample] += 1
    for split, samples in zip(selection.splits, read, strict=True):
        epochs, rest = divmod(samples.total(), split.num_train)
        # Whole epochs cover every sample; the epoch under way has covered `rest` of them once more.
        assert Counter(samples.values()) == +Counter(
            {epochs + 1: rest, epochs: split.num_train - rest if epochs else 0}
        )


@given(num_samples=st.integers(2, 300), ratio=st.floats(0.01, 0.5), seed=SEEDS)
def test_validation_positions_enumerate_the_validation_set_and_start_again(
    num_samples: int, ratio: float, seed: int
) -> None:
    selection = select([(num_samples, 1.0)], ratio=ratio, seed=seed)
    size = selection.num_validation
    picks = [selection.validation(position) for position in range(2 * size)]
    assert len(set(picks[:size])) == size
    assert picks[:size] == picks[size:]


def test_sources_too_small_to_hold_anything_out_are_left_out_of_validation() -> None:
    selection = select([(1, 1.0), (50, 1.0)], ratio=0.1, seed=3)
    assert {selection.validation(position).source for position in range(20)} == {1}


def test_what_a_position_means_is_what_earlier_releases_meant() -> None:
    # A job that resumes under another release must go on with the same samples.
    selection = select([(1000, 3.0), (50, 1.0)], ratio=0.1, seed=7)
    picks = [selection.train(position) for position in range(4)]
    assert [(pick.source, pick.sample) for pick in picks] == [(0, 753), (0, 849), (1, 15), (0, 363)]
    assert selection.validation(0) == Pick(source=0, sample=170)


def test_a_source_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="every source needs a sample"):
        select([(0, 1.0)], ratio=0.0, seed=0)


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0, 0.5]])
def test_many_positions_have_the_samples_that_each_has(weights: list[float]) -> None:
    sizes = [11, 7, 5][: len(weights)]
    selection = Selection.of(sizes, weights, validation_ratio=0.2, seed=3)
    positions = [*range(40), 7, 3]
    assert selection.train_many(positions) == [selection.train(position) for position in positions]
