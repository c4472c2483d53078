"""Choices of weighted rows over groups: greedy, or by chance with fair weights."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.features import F64, Features, Ids
from skein.numeric.coreset.greedy import Clusters, Greedy, cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rows chosen, by id, and the weight of the rows that each stands for.

    Args:
        ids: (k,), ascending.
        sizes: (k,), float32; they sum to the weight of all rows but those set aside.
        error: L, the weighted distances of rows to their picks; NaN of a choice by chance, which measures none.
        num_set_aside: rows whose features were not finite, which nobody stands for.
    """

    ids: Ids
    sizes: NDArray[np.float32]
    error: float
    num_set_aside: int

    @property
    def weights(self) -> NDArray[np.float32]:
        """(k,): `sizes` scaled to a mean of 1, by which losses of samples are multiplied."""
        mean = float(self.sizes.mean(dtype=np.float64))
        return np.asarray(self.sizes / mean, np.float32)

    @property
    def digest(self) -> str:
        """SHA-256 of ids (int32) and sizes (float32), little-endian."""
        ids, sizes = self.ids.astype("<i4"), self.sizes.astype("<f4")
        return hashlib.sha256(ids.tobytes() + sizes.tobytes()).hexdigest()


def choose_coreset(
    features: Features,
    groups_N: NDArray[np.integer],
    num_picks: int,
    *,
    form: Greedy = Greedy.AUTO,
    seed: int = 0,
    weights_N: F64 | None = None,
) -> Choice:
    """Rows that cover each group by greedy facility location.

    Args:
        groups_N: group of each row, such as its class; a row is near to rows of its own group alone.
        num_picks: rows to choose, from one for each group to all; groups share them by weight.
        weights_N: how many rows each row stands for, above 0; 1 if not given.

    Raises:
        UserError: there are fewer picks than groups of finite rows, or more than such rows.
    """

    def pick(rows: Ids, weights: F64, count: int, generator: np.random.Generator) -> Clusters:
        return cluster(features.take(rows).lattice(), weights, count, form=form, generator=generator)

    return _by_group(pick, features.are_finite, groups_N, num_picks, seed=seed, weights_N=weights_N)


def choose_by_chance(
    groups_N: NDArray[np.integer], num_picks: int, *, seed: int, is_usable_N: NDArray[np.bool_] | None = None
) -> Choice:
    """Rows drawn evenly within each group, each standing for n_i / k_i rows of it: what a choice is compared with.

    Args:
        groups_N: group of each row.
        num_picks: rows to choose, from one for each group to all.
        is_usable_N: rows that may be drawn and stood for; all if not given.

    Raises:
        UserError: there are fewer picks than groups, or more than rows.
    """

    def pick(rows: Ids, weights: F64, count: int, generator: np.random.Generator) -> Clusters:
        sizes = np.full(count, weights.sum() / count)
        return Clusters(picks=generator.permutation(len(rows))[:count], sizes=sizes, error=float("nan"))

    is_usable = np.ones(len(groups_N), np.bool_) if is_usable_N is None else is_usable_N
    return _by_group(pick, is_usable, groups_N, num_picks, seed=seed, weights_N=None)


def _by_group(
    pick: Callable[[Ids, F64, int, np.random.Generator], Clusters],
    is_usable_N: NDArray[np.bool_],
    groups_N: NDArray[np.integer],
    num_picks: int,
    *,
    seed: int,
    weights_N: F64 | None,
) -> Choice:
    weights = np.ones(len(groups_N)) if weights_N is None else weights_N
    names, rows_of = np.unique(groups_N[is_usable_N], return_inverse=True)
    sizes, num_rows = np.bincount(rows_of, weights[is_usable_N]), np.bincount(rows_of)
    shares = budgets(sizes.tolist(), num_picks, rows=num_rows.tolist())
    ids, counts, error = [np.empty(0, np.int64)], [np.empty(0)], 0.0
    for name, count in zip(names.tolist(), shares, strict=True):
        rows = np.flatnonzero(is_usable_N & (groups_N == name))
        found = pick(rows, weights[rows], count, rng.stream(seed, "coreset", name))
        ids.append(rows[found.picks])
        counts.append(found.sizes)
        error += found.error
    chosen = np.concatenate(ids)
    order = np.argsort(chosen)
    return Choice(
        ids=chosen[order],
        sizes=np.concatenate(counts)[order].astype(np.float32),
        error=error,
        num_set_aside=int((~is_usable_N).sum()),
    )


def cover_error(features: Features, groups_N: NDArray[np.integer], ids: Ids) -> float:
    """L of any choice: distances of rows to the nearest of `ids` in their group, summed over finite rows.

    Raises:
        ValueError: a group has no row among `ids`.
    """
    return float(distances_to(features, groups_N, ids).sum())


def distances_to(features: Features, groups_N: NDArray[np.integer], ids: Ids) -> F64:
    """(N,): distance of each row to the nearest of `ids` in its group; 0 of rows that are not finite.

    Raises:
        ValueError: a group has no row among `ids`.
    """
    found = np.zeros(features.num_rows)
    for name in np.unique(groups_N[features.are_finite]):
        rows = np.flatnonzero(features.are_finite & (groups_N == name))
        own, group = np.flatnonzero(np.isin(rows, ids)), features.take(rows).lattice()
        nearest = np.full(len(rows), np.inf)
        for start in range(0, len(own), group.block_rows):
            far = group.distances(own[start : start + group.block_rows])
            np.minimum(nearest, far.min(axis=0), out=nearest)
        if not len(own):
            raise ValueError(f"no row of group {name} is chosen")
        found[rows] = nearest
    return found
