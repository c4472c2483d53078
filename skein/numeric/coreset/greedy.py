"""Greedy facility location over one group: exact, by samples of candidates, in partitions.

Partitions hold rows that are near each other. Where each gets enough picks, it chooses for itself, and only rows at its
edges lose by that. Where picks are fewer, each partition proposes several times its share, and the choice is made among
all proposals, each by the weight of the rows that it stands for. Partitions that take just their share would each pick
the same middle of the data, which is worse than chance.

Source: Minoux 1978 (lazy), Mirzasoleiman et al. 2015, Lazier Than Lazy Greedy (stochastic), Mirzasoleiman et al. 2016,
Distributed Submodular Maximization (proposals).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log

import numpy as np

from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.cover import Cover
from skein.numeric.coreset.features import F64, Ids, Lattice

EXACT_ROWS = 5_000
STOCHASTIC_ROWS = 50_000
PARTITION_ROWS = 1_000
"""Rows of a partition, at most: of so many, all distances are kept."""
_OWN_PICKS = 20
"""Picks of a partition from which on it needs no choice among proposals."""
_PROPOSED_RATIO = 4
_LEAST_PROPOSED = 4_000
"""Proposals for each pick, and in all, at least."""
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

    In partitions a row's pick is that of its own partition, or that of the proposal which stands for the row, and
    `error` counts the way over that proposal: it is at least that of the picks.
    """

    picks: Ids
    sizes: F64
    error: float


def cluster(
    rows: Lattice, weights_N: F64, num_picks: int, *, form: Greedy, generator: np.random.Generator
) -> Clusters:
    """Picks `num_picks` rows, from 1 to N, that leave little distance from any row to its pick.

    Args:
        weights_N: how many rows each row stands for, above 0.
        generator: draws candidates; only `STOCHASTIC` needs it.
    """
    match form.of(rows.num_rows):
        case Greedy.PARTITIONED:
            return _in_partitions(rows, weights_N, num_picks)
        case Greedy.STOCHASTIC:
            cover = Cover(rows, weights_N)
            _pick_from_samples(cover, num_picks, generator)
            return _clusters_of(cover)
        case _:
            return _exactly(rows, weights_N, num_picks)


def _exactly(rows: Lattice, weights_N: F64, num_picks: int) -> Clusters:
    cover = Cover(rows, weights_N)
    _pick_lazily(cover, num_picks)
    return _clusters_of(cover)


def _clusters_of(cover: Cover) -> Clusters:
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
        ids = np.flatnonzero(~is_new_N & ~cover.is_picked_N & (bounds_N >= top))
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


def _in_partitions(rows: Lattice, weights_N: F64, num_picks: int) -> Clusters:
    parts = _partitions(rows, np.arange(rows.num_rows))
    if num_picks >= _OWN_PICKS * len(parts) or len(parts) == 1:
        return _of_parts(rows, weights_N, parts, num_picks)
    num_proposed = max(len(parts), min(rows.num_rows // 2, max(_PROPOSED_RATIO * num_picks, _LEAST_PROPOSED)))
    proposed = _of_parts(rows, weights_N, parts, num_proposed)
    among, sizes = rows.take(proposed.picks), proposed.sizes
    choose = _exactly if len(sizes) <= EXACT_ROWS else _in_partitions
    found = choose(among, sizes, num_picks)
    return Clusters(picks=proposed.picks[found.picks], sizes=found.sizes, error=proposed.error + found.error)


def _of_parts(rows: Lattice, weights_N: F64, parts: list[Ids], num_picks: int) -> Clusters:
    """Picks of all parts, ascending; parts share them by weight."""
    weights = [float(weights_N[part].sum()) for part in parts]
    shares = budgets(weights, num_picks, rows=[len(part) for part in parts])
    found = [
        _exactly(rows.take(part), weights_N[part], share) for part, share in zip(parts, shares, strict=True)
    ]
    picks = np.concatenate([part[x.picks] for part, x in zip(parts, found, strict=True)])
    order = np.argsort(picks)
    return Clusters(
        picks=picks[order],
        sizes=np.concatenate([x.sizes for x in found])[order],
        error=sum(x.error for x in found),
    )


def _partitions(rows: Lattice, ids: Ids) -> list[Ids]:
    """`ids`, ascending, in parts of at most `PARTITION_ROWS` rows, each half of a larger part.

    Halves are the rows nearer to one of two rows that are far apart, and those nearer to the other. Of equally near
    rows the lower ids go first.
    """
    if len(ids) <= PARTITION_ROWS:
        return [ids]
    own = rows.take(ids)
    (from_any,) = own.distances(np.array([0]))
    (from_one,) = own.distances(np.array([from_any.argmax()]))
    (from_other,) = own.distances(np.array([from_one.argmax()]))
    order = np.argsort(from_one - from_other, kind="stable")
    half = len(ids) // 2
    nearer, farther = np.sort(ids[order[:half]]), np.sort(ids[order[half:]])
    return [*_partitions(rows, nearer), *_partitions(rows, farther)]
