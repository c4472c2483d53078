"""A weighted part of the rows: which are drawn, when, and by which weight."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource, TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mlp import MlpModel
from skein.numeric.coreset.choice import cover_error
from skein.numeric.coreset.features import vectors
from worker.data import Dataset, coreset, open_dataset

MODEL = MlpModel(family="mlp", num_features=3, num_classes=3)
NUM_ROWS = 200
CLASSES = np.repeat([0, 1, 2], [150, 40, 10])


def rows() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Numbers by which each row is known: its place, and two that lie in clusters."""
    generator = np.random.default_rng(1)
    x = np.concatenate([generator.normal(size=(NUM_ROWS, 2)), np.arange(NUM_ROWS)[:, None]], axis=1)
    return x * [1.0, 1.0, 1e-3]


@pytest.fixture
def source(tmp_path: Path) -> ArraysSource:
    np.savez(tmp_path / "rows.npz", x=rows(), y=CLASSES)
    return ArraysSource(format="arrays", path=str(tmp_path / "rows.npz"))


def opened(source: ArraysSource, *, ratio: float = 0.0, seed: int = 3, **settings: str | float) -> Dataset:
    spec = CoresetSpec.model_validate({"fraction": 0.1, "feature": "inputs", **settings})
    return open_dataset(DataSpec(sources=(source,), validation_ratio=ratio, coreset=spec), MODEL, seed=seed)


def drawn(dataset: Dataset, positions: range) -> list[tuple[int, float]]:
    """Row and weight at each position."""
    batch = dataset.train_batch(positions)
    assert batch.weights is not None
    numbers = np.rint(batch.inputs[:, 2] * 1e3).astype(int)
    assert np.array_equal(batch.labels, CLASSES[numbers])
    return list(zip(numbers.tolist(), batch.weights.tolist(), strict=True))


METHODS = pytest.mark.parametrize("method", ["craig", "random"])


@METHODS
def test_each_pass_draws_the_choice_once_in_another_order(source: ArraysSource, method: str) -> None:
    dataset = opened(source, method=method)
    first, second = drawn(dataset, range(20)), drawn(dataset, range(20, 40))
    assert sorted(first) == sorted(second)
    assert first != second
    assert len({row for row, _ in first}) == 20


@METHODS
def test_weights_are_sizes_scaled_to_a_mean_of_one(source: ArraysSource, method: str) -> None:
    dataset = opened(source, method=method)
    assert dataset.coreset is not None
    choice = dataset.coreset.first
    assert choice is not None
    assert choice.sizes.sum() == NUM_ROWS
    weights = [weight for _, weight in drawn(dataset, range(20))]
    assert np.mean(weights) == pytest.approx(1.0, rel=1e-6)
    sizes: defaultdict[int, float] = defaultdict(float)
    for row, weight in drawn(dataset, range(20)):
        sizes[int(CLASSES[row])] += round(weight * NUM_ROWS / 20, 3)
    # What the rows of a class weigh together is how many they are.
    assert dict(sizes) == pytest.approx({0: 150, 1: 40, 2: 10}, abs=0.02)


@METHODS
def test_whoever_opens_the_data_draws_the_same_after_any_restart(source: ArraysSource, method: str) -> None:
    first, second = (opened(source, method=method, warmup_epochs=1) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    undisturbed = drawn(first, range(150, 290))
    parts = [drawn(second, range(start, start + 7)) for start in range(283, 149, -7)]
    assert [x for part in reversed(parts) for x in part] == undisturbed


def test_the_warm_up_is_that_of_all_rows(source: ArraysSource) -> None:
    whole, part = opened(source), opened(source, method="random", warmup_epochs=2)
    batch, plain = part.train_batch(range(2 * NUM_ROWS)), whole.train_batch(range(2 * NUM_ROWS))
    assert plain.weights is None
    assert batch.weights is not None
    assert np.array_equal(batch.inputs, plain.inputs)
    assert set(batch.weights.tolist()) == {1.0}
    assert len({row for row, _ in drawn(part, range(2 * NUM_ROWS, 3 * NUM_ROWS))}) == 20


def test_random_is_drawn_anew_after_so_many_passes(source: ArraysSource) -> None:
    dataset = opened(source, method="random", refresh_epochs=3)
    passes = [frozenset(row for row, _ in drawn(dataset, range(i * 20, i * 20 + 20))) for i in range(9)]
    assert [passes[0] == x for x in passes] == [True] * 3 + [False] * 6
    assert passes[3] == passes[4] == passes[5] != passes[6]
    assert passes[0] == frozenset(row for row, _ in drawn(dataset, range(20))), "an older choice comes again"


def test_a_pick_of_every_class_is_there_and_shares_are_those_of_rows(source: ArraysSource) -> None:
    for method in ("craig", "random"):
        chosen = Counter(int(CLASSES[row]) for row, _ in drawn(opened(source, method=method), range(20)))
        assert chosen == {0: 15, 1: 4, 2: 1}


def test_craig_leaves_less_distance_than_chance(source: ArraysSource) -> None:
    features = vectors(rows().astype(np.float32))
    errors = {
        (method, seed): cover_error(
            features,
            CLASSES,
            np.array([row for row, _ in drawn(opened(source, method=method, seed=seed), range(20))]),
        )
        for method, seed in (("craig", 0), *(("random", seed) for seed in range(5)))
    }
    assert errors["craig", 0] < 0.85 * np.mean([errors["random", seed] for seed in range(5)])


@METHODS
def test_no_row_that_validates_is_drawn(source: ArraysSource, method: str) -> None:
    dataset = opened(source, ratio=0.3, method=method, fraction=0.5)
    held_out = dataset.validation_batch(range(dataset.num_validation_samples))
    assert held_out.weights is None
    numbers = set(np.rint(held_out.inputs[:, 2] * 1e3).astype(int).tolist())
    assert len(numbers) == 60
    assert not numbers & {row for row, _ in drawn(dataset, range(70))}


def test_all_rows_chosen_are_all_rows_alike(source: ArraysSource) -> None:
    found = drawn(opened(source, method="craig", fraction=1), range(NUM_ROWS))
    assert sorted(found) == [(row, 1.0) for row in range(NUM_ROWS)]


def test_the_choice_is_in_the_fingerprint(source: ArraysSource) -> None:
    plain = open_dataset(DataSpec(sources=(source,), validation_ratio=0.0), MODEL, seed=3)
    assert opened(source).fingerprint == plain.fingerprint
    others = [
        opened(source, method="craig"),
        opened(source, method="random"),
        opened(source, method="random", seed=4),
        opened(source, method="random", refresh_epochs=2),
        opened(source, method="random", warmup_epochs=2),
    ]
    assert len({plain.fingerprint, *(x.fingerprint for x in others)}) == 6
    assert "; 20 of 200 rows by craig, weights " in others[0].shown


def test_fewer_picks_than_classes_or_than_rows_of_a_step_are_refused(source: ArraysSource) -> None:
    with pytest.raises(UserError, match=r"2 of 200 rows are fewer than 3 classes: give at least 0\.015"):
        opened(source, method="craig", fraction=0.01)
    data = DataSpec(sources=(source,), validation_ratio=0.0, coreset=CoresetSpec(method="random"))
    with pytest.raises(
        UserError, match=r"20 of 200 rows are fewer than the 32 rows of one step: give at"
    ) as caught:
        open_dataset(data, MODEL, seed=0, batch=BatchSpec(samples=32))
    assert caught.value.field == "data.coreset.fraction"


def test_more_rows_than_memory_may_compare_are_refused_and_drawn_all_the_same(
    source: ArraysSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coreset, "MOST_FEATURE_BYTES", 8 * 3 * NUM_ROWS - 1)
    with pytest.raises(UserError, match=r"rows take 4\.7 KiB in float64, more than 4\.7 KiB: give random"):
        opened(source, method="craig")
    assert opened(source, method="random").coreset is not None


@METHODS
@pytest.mark.parametrize("group_by", ["label", "source"])
def test_rows_of_several_sources_are_chosen_apart_and_weigh_what_their_source_does(
    source: ArraysSource, tmp_path: Path, method: str, group_by: str
) -> None:
    # 50 rows more, of two classes, that weigh three times as much as the 200.
    x, y = np.ones((50, 3)) * np.arange(50)[:, None], np.repeat([0, 2], [40, 10])
    np.savez(tmp_path / "others.npz", x=x, y=y)
    others = ArraysSource(format="arrays", path=str(tmp_path / "others.npz"), weight=3.0)
    spec = CoresetSpec.model_validate(
        {"fraction": 0.2, "feature": "inputs", "method": method, "group_by": group_by}
    )
    data = DataSpec(sources=(source, others), validation_ratio=0.0, coreset=spec)
    dataset = open_dataset(data, MODEL, seed=3)
    batch = dataset.train_batch(range(50))
    assert batch.weights is not None
    is_other = (batch.inputs[:, :1] == batch.inputs).all(axis=1)
    assert is_other.sum() == 10
    assert batch.weights[is_other].sum() == pytest.approx(0.75 * 50, rel=1e-6)
    assert batch.weights.sum() == pytest.approx(50, rel=1e-6)
    if group_by == "label":
        for own, of in ((is_other, y), (~is_other, CLASSES)):
            shares = np.bincount(batch.labels[own], batch.weights[own], 3) / batch.weights[own].sum()
            assert shares == pytest.approx(np.bincount(of, minlength=3) / len(of), rel=1e-6)
    # Rows by number are each the sample that its place in a batch has.
    everything = dataset.row_batch(range(250))
    assert Counter(everything.labels.tolist()) == Counter([*CLASSES.tolist(), *y.tolist()])
    assert len(np.unique(everything.inputs, axis=0)) == 250


def test_fewer_picks_than_classes_of_all_sources_are_refused(source: ArraysSource) -> None:
    spec = CoresetSpec(method="random", fraction=0.01)
    with pytest.raises(UserError, match="4 of 400 rows are fewer than 6 classes of 2 sources: give at least"):
        open_dataset(DataSpec(sources=(source, source), validation_ratio=0.0, coreset=spec), MODEL, seed=3)


def test_choices_by_the_model_are_of_one_source_and_none_is_of_language(source: ArraysSource) -> None:
    with pytest.raises(
        ValidationError, match=r"made of one source, here are 2: give inputs, or method: random"
    ):
        DataSpec(sources=(source, source), coreset=CoresetSpec(method="craig"))
    chosen = CoresetSpec(method="random")
    text = DataSpec(sources=(TextSource(path="/books"),), coreset=chosen)
    model = LlamaModel(shape=LlamaShape())
    with pytest.raises(
        ValidationError, match="nothing is measured of it for language models such as llama: give none"
    ):
        JobSpec(name="j", model=model, data=text, budget=BudgetSpec(steps=1))
