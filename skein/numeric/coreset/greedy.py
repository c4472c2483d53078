"""Greedy facility location over one group: exact, by samples of candidates, in partitions.

Source: Minoux 1978 (lazy), Mirzasoleiman et al. 2015, Lazier Than Lazy Greedy (stochastic).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log

import numpy as np

from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.cover import Cover
from skein.numeric.coreset.features import F64, Features, Ids

EXACT_ROWS = 5_000
STOCHASTIC_ROWS = 50_000
PARTITION_ROWS = 500
_EPSILON = 0.01
_FIRST_WIDTH = 8
"""Candidates renewed at first; each further turn of the same pick takes twice as many."""


class Greedy(StrEnum):
    """Form of the greedy choice; `AUTO` goes by the rows of a group."""

    AUTO = "auto"
    EXACT = "exact"
    STOCHASTIC = "stochastic"
    PARTITIONED = "partitioned"

    def of(self, num_rows: int) -> "Greedy":
        """Form for a group of so many rows.

        >>> [Greedy.AUTO.of(n).value for n in (5_000, 50_000, 50_001)]
        ['exact', 'stochastic', 'partitioned']
        """
        if self is not Greedy.AUTO:
            return self
        if num_rows <= EXACT_ROWS:
            return Greedy.EXACT
        return Greedy.STOCHASTIC if num_rows <= STOCHASTIC_ROWS else Greedy.PARTITIONED


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Picks of one group and the weight of the rows that each stands for; `error` is L.

    In partitions a row's pick is the nearest of its own partition, so that `error` is at least that of the picks.
    """

    picks: Ids
    sizes: F64
    error: float


def cluster(
    features: Features, weights_N: F64, num_picks: int, *, form: Greedy, generator: np.random.Generator
) -> Clusters:
    """Picks `num_picks` rows, from 1 to N, that leave little distance from any row to its pick.

    Args:
        weights_N: how many rows each row stands for, above 0.
        generator: draws candidates and partitions; `EXACT` needs no luck.
    """
    form = form.of(features.num_rows)
    if form is Greedy.PARTITIONED:
        return _in_partitions(features, weights_N, num_picks, generator)
    cover = Cover(features, weights_N)
    if form is Greedy.EXACT:
        _pick_lazily(cover, num_picks)
    else:
        _pick_from_samples(cover, num_picks, generator)
    return Clusters(picks=np.array(cover.picks, np.int64), sizes=cover.sizes, error=cover.error)


def _pick_lazily(cover: Cover, num_picks: int) -> None:
    """Plain greedy's picks; a gain is computed again only while its old value, an upper bound, could be the best."""
    bounds_N = np.full(cover.num_rows, np.inf)
    for _ in range(num_picks):
        row = _renewed_best(cover, bounds_N)
        cover.pick(row)
        bounds_N[row] = -np.inf


def _renewed_best(cover: Cover, bounds_N: F64) -> int:
    is_new_N = np.zeros(cover.num_rows, np.bool_)
    top, width = -np.inf, _FIRST_WIDTH
    while True:
        ids = np.flatnonzero(~is_new_N & ~cover.is_picked_N & (bounds_N >= top - cover.margin))
        if not len(ids):
            break
        if len(ids) > width:
            ids = ids[np.argpartition(-bounds_N[ids], width)[:width]]
        bounds_N[ids] = gains = cover.gains(ids)
        is_new_N[ids] = True
        top = max(top, float(gains.max()))
        width = min(2 * width, cover.block_rows)
    renewed = np.flatnonzero(is_new_N)
    return cover.best(renewed, bounds_N[renewed])


def _pick_from_samples(cover: Cover, num_picks: int, generator: np.random.Generator) -> None:
    num_candidates = ceil(cover.num_rows / num_picks * log(1 / _EPSILON))
    for _ in range(num_picks):
        left = np.flatnonzero(~cover.is_picked_N)
        ids = np.sort(generator.choice(left, min(num_candidates, len(left)), replace=False))
        cover.pick(cover.best(ids, _in_blocks(cover.gains, ids, cover.block_rows)))


def _in_blocks(gains: Callable[[Ids], F64], ids: Ids, block_rows: int) -> F64:
    starts = range(0, len(ids), block_rows)
    return np.concatenate([gains(ids[start : start + block_rows]) for start in starts])


def _in_partitions(
    features: Features, weights_N: F64, num_picks: int, generator: np.random.Generator
) -> Clusters:
    num_parts = min(ceil(features.num_rows / PARTITION_ROWS), num_picks)
    parts = np.array_split(generator.permutation(features.num_rows), num_parts)
    shares = budgets([len(part) for part in parts], num_picks)
    found: list[Clusters] = []
    for part, share in zip(map(np.sort, parts), shares, strict=True):
        cover = Cover(features.take(part), weights_N[part])
        _pick_lazily(cover, share)
        found.append(Clusters(picks=part[cover.picks], sizes=cover.sizes, error=cover.error))
    return Clusters(
        picks=np.concatenate([x.picks for x in found]),
        sizes=np.concatenate([x.sizes for x in found]),
        error=sum(x.error for x in found),
    )
