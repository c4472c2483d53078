"""Greedy choices beside plain greedy, the optimum and chance: what is far, who stands for whom, what is refused."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from skein.errors import UserError
from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.choice import choose_by_chance, choose_coreset, cover_error
from skein.numeric.coreset.features import F64, Features, Ids, last_layer, vectors
from skein.numeric.coreset.greedy import Greedy


def gaussian(generator: np.random.Generator) -> Features:
    return vectors(generator.normal(size=(600, 12)))


def clustered(generator: np.random.Generator) -> Features:
    return vectors(generator.normal(size=(600, 8)) + 6 * generator.normal(size=(30, 8))[np.arange(600) % 30])


def heavy(generator: np.random.Generator) -> Features:
    return vectors(generator.standard_t(2, size=(600, 6)))


def far_from_origin(generator: np.random.Generator) -> Features:
    return vectors(1e4 + generator.normal(size=(600, 5)))


def gradients(generator: np.random.Generator) -> Features:
    error = generator.dirichlet(np.ones(6), size=600)
    error[:, 0] -= 1
    return last_layer(generator.normal(size=(600, 20)).clip(0), error)


MADE = (gaussian, clustered, heavy, far_from_origin, gradients)
ONE_GROUP = np.zeros(600, np.int64)


def all_distances(features: Features) -> F64:
    """The whole matrix, from the outer products themselves."""
    rows = features.factors[0]
    for factor in features.factors[1:]:
        rows = np.einsum("na,nb->nab", rows, factor).reshape(len(rows), -1)
    return np.asarray(np.linalg.norm(rows[:, None] - rows[None], axis=2), np.float64)


def plain_greedy(far: F64, num_picks: int, weights: F64) -> tuple[list[int], float]:
    """Every gain computed anew for every pick."""
    nearest, picks = np.full(len(far), far.max()), list[int]()
    for _ in range(num_picks):
        left = np.minimum(nearest[:, None], far).T @ weights
        left[picks] = np.inf
        picks.append(int(left.argmin()))
        nearest = np.minimum(nearest, far[:, picks[-1]])
    return picks, float(nearest @ weights)


@pytest.mark.parametrize("made", MADE)
def test_forms_come_as_near_as_plain_greedy(made: Callable[[np.random.Generator], Features]) -> None:
    """Errors are compared, not ids: of two rows with equal gains the reference takes the one that rounding favours."""
    features = made(np.random.default_rng(1))
    far = all_distances(features)
    _, least = plain_greedy(far, 60, np.ones(600))
    choices = {form: choose_coreset(features, ONE_GROUP, 60, form=form) for form in Greedy}
    error = {form: cover_error(features, ONE_GROUP, choice.ids) for form, choice in choices.items()}
    assert error[Greedy.EXACT] == pytest.approx(least, rel=1e-3)
    assert choices[Greedy.EXACT].error == pytest.approx(error[Greedy.EXACT], rel=1e-9)
    assert error[Greedy.STOCHASTIC] <= 1.06 * least
    chance = choose_by_chance(ONE_GROUP, 60, seed=1)
    assert cover_error(features, ONE_GROUP, chance.ids) > max(error.values())


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_near_the_optimum(seed: int) -> None:
    """1 - 1/e of the best F is promised, F counted from the largest distance; L of twelve rows is nearer than that."""
    features = vectors(np.random.default_rng(seed).normal(size=(12, 2)))
    far = all_distances(features)
    optimum = min(far[:, list(ids)].min(axis=1).sum() for ids in combinations(range(12), 4))
    assert optimum <= choose_coreset(features, np.zeros(12, int), 4).error + 1e-6 <= 1.2 * optimum


def test_one_pick_is_the_row_with_the_least_distance_to_all() -> None:
    features = gaussian(np.random.default_rng(2))
    choice = choose_coreset(features, ONE_GROUP, 1)
    assert choice.ids.tolist() == [int(all_distances(features).sum(axis=0).argmin())]
    assert choice.sizes.tolist() == [600.0]


@pytest.mark.parametrize("form", [Greedy.EXACT, Greedy.AUTO])
def test_duplicates_are_covered_by_one_row_each(form: Greedy) -> None:
    rows = 1e3 + np.random.default_rng(3).normal(size=(5, 7))
    choice = choose_coreset(vectors(np.tile(rows, (12, 1))), np.zeros(60, int), 5, form=form)
    assert choice.error == 0.0
    assert choice.ids.tolist() == [0, 1, 2, 3, 4]
    assert choice.sizes.tolist() == [12.0] * 5


def test_a_pick_stands_for_itself_where_nothing_is_left_to_gain() -> None:
    choice = choose_coreset(vectors(np.ones((6, 2))), np.zeros(6, int), 3)
    assert choice.ids.tolist() == [0, 1, 2]
    assert choice.sizes.tolist() == [4.0, 1.0, 1.0]


def test_a_weighted_row_counts_as_that_many_rows() -> None:
    generator = np.random.default_rng(4)
    rows, weights = generator.normal(size=(80, 3)), generator.integers(1, 6, size=80)
    weighed = choose_coreset(vectors(rows), np.zeros(80, int), 9, weights_N=weights.astype(float))
    repeated = np.repeat(np.arange(80), weights)
    plain = choose_coreset(vectors(rows[repeated]), np.zeros(len(repeated), int), 9)
    # Rows that are counted several times have other medians, from which coordinates are rounded.
    assert weighed.error == pytest.approx(plain.error, rel=1e-7)
    assert weighed.ids.tolist() == repeated[plain.ids].tolist()
    assert weighed.sizes.sum() == weights.sum()


def test_weights_are_sizes_of_clusters_within_groups() -> None:
    features = vectors(np.random.default_rng(5).normal(size=(400, 4)))
    groups = np.repeat([0, 1, 2], [380, 19, 1])
    choice = choose_coreset(features, groups, 40)
    assert np.bincount(groups[choice.ids]).tolist() == [37, 2, 1]
    assert np.bincount(groups[choice.ids], choice.sizes).tolist() == [380, 19, 1]
    far = np.where(groups[:, None] == groups[choice.ids], all_distances(features)[:, choice.ids], np.inf)
    assert np.bincount(far.argmin(axis=1)).tolist() == choice.sizes.tolist()
    assert choice.error == pytest.approx(cover_error(features, groups, choice.ids))
    assert choice.weights.mean() == pytest.approx(1.0)


def test_chance_gives_the_rows_of_a_group_equal_shares() -> None:
    groups = np.repeat([0, 1, 2], [380, 19, 1])
    choice = choose_by_chance(groups, 40, seed=6)
    assert np.bincount(groups[choice.ids], choice.sizes) == pytest.approx([380, 19, 1])
    assert set(choice.sizes.tolist()) == {np.float32(380 / 37), 9.5, 1.0}
    assert choice.ids.tolist() != choose_by_chance(groups, 40, seed=7).ids.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_rows_that_are_not_finite_are_set_aside(bad: float) -> None:
    rows = np.random.default_rng(8).normal(size=(200, 3))
    kept = np.delete(np.arange(200), [4, 9])
    rows[[4, 9], 1] = bad
    choice = choose_coreset(vectors(rows), np.zeros(200, int), 20)
    assert choice.num_set_aside == 2
    assert choice.sizes.sum() == 198
    assert (
        choice.ids.tolist() == kept[choose_coreset(vectors(rows[kept]), np.zeros(198, int), 20).ids].tolist()
    )


def test_a_digest_names_ids_and_weights() -> None:
    features = gaussian(np.random.default_rng(9))
    one, again = (choose_coreset(features, ONE_GROUP, 30, form=Greedy.STOCHASTIC, seed=1) for _ in range(2))
    other = choose_coreset(features, ONE_GROUP, 30, form=Greedy.STOCHASTIC, seed=2)
    assert one.digest == again.digest != other.digest


@pytest.mark.parametrize(
    ("num_picks", "hint"), [(2, "give at least 3, one for each group"), (10, "give at most 9, the rows that")]
)
def test_budgets_that_cannot_be_are_refused(num_picks: int, hint: str) -> None:
    groups = np.repeat([0, 1, 2], 3)
    features = vectors(np.eye(9))
    with pytest.raises(UserError, match=hint):
        choose_coreset(features, groups, num_picks)
    with pytest.raises(UserError, match=hint):
        choose_by_chance(groups, num_picks, seed=0)


@pytest.mark.parametrize("seed", range(20))
def test_budgets_fill_up_whatever_weights_groups_have(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.integers(1, 30, size=7)
    sizes = generator.pareto(0.5, size=7) + 0.01
    num_picks = int(generator.integers(7, rows.sum() + 1))
    shares = budgets(sizes.tolist(), num_picks, rows=rows.tolist())
    assert sum(shares) == num_picks
    assert all(1 <= share <= most for share, most in zip(shares, rows, strict=True))


def test_all_rows_may_be_chosen() -> None:
    ids: Ids = choose_coreset(vectors(np.eye(9)), np.repeat([0, 1, 2], 3), 9).ids
    assert ids.tolist() == list(range(9))
