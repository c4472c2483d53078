"""Choices over rows that several workers hold: candidates of each, then a second choice among them (GreeDi).

Source: Mirzasoleiman et al., Distributed Submodular Maximization, 2016, Algorithm 2, with candidates weighted by the
rows that they stand for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.numeric.coreset.choice import Choice, choose_coreset
from skein.numeric.coreset.features import Features, Ids, of_factors
from skein.numeric.coreset.greedy import Greedy, cluster

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Rows that a worker proposes, as it sends them: for each its id, its factors and how many rows it stands for.

    Args:
        counts: candidates of each group, by group; rows follow each other in order of groups.
        factors: float32 (K, D) each; together d numbers a row, besides id (int32) and size (float32).
    """

    counts: Mapping[int, int]
    ids: NDArray[np.int32]
    sizes: F32
    factors: tuple[F32, ...]
    num_set_aside: int
    error: float = 0.0
    """L of these rows for those that they stand for."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, and 8 for a group's name and count."""
        arrays = (self.ids, self.sizes, *self.factors)
        return sum(x.nbytes for x in arrays) + 8 * len(self.counts) + 8

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a row in each of its factors."""
        return tuple(x.shape[1] for x in self.factors)

    @property
    def groups(self) -> Ids:
        """(K,): group of each candidate."""
        return np.repeat(np.array(list(self.counts), np.int64), list(self.counts.values()))


def propose(
    features: Features,
    groups_N: NDArray[np.integer],
    ids_N: Ids,
    budget_by_group: Mapping[int, int],
    *,
    form: Greedy = Greedy.AUTO,
    seed: int = 0,
) -> Candidates:
    """A worker's candidates: of its rows of each group as many as the whole choice takes of that, or all it has.

    Args:
        groups_N: group of each of the worker's rows.
        ids_N: id of each row among the rows of all workers.
        budget_by_group: `budgets` of the rows of all workers.
    """
    counts: dict[int, int] = {}
    chosen, sizes, error = [np.empty(0, np.int64)], [np.empty(0)], 0.0
    for group, budget in sorted(budget_by_group.items()):
        rows = np.flatnonzero(features.are_finite & (groups_N == group))
        if not len(rows):
            continue
        generator = rng.stream(seed, "coreset", "candidates", group)
        count = min(budget, len(rows))
        found = cluster(
            features.take(rows).lattice(), np.ones(len(rows)), count, form=form, generator=generator
        )
        counts[group] = count
        chosen.append(rows[found.picks])
        sizes.append(found.sizes)
        error += found.error
    own = np.concatenate(chosen)
    return Candidates(
        counts=counts,
        ids=ids_N[own].astype(np.int32),
        sizes=np.concatenate(sizes).astype(np.float32),
        factors=tuple(x[own].astype(np.float32) for x in features.factors),
        num_set_aside=int((~features.are_finite).sum()),
        error=error,
    )


def choose_among(proposed: Sequence[Candidates], num_picks: int, *, seed: int = 0) -> Choice:
    """The choice among all workers' candidates, each by its weight; `error` is that of candidates alone.

    Groups share the picks by the rows that candidates stand for, which is what `budget_by_group` did.

    Raises:
        UserError: there are fewer picks than groups, or more than candidates.
    """
    ids = np.concatenate([x.ids for x in proposed]).astype(np.int64)
    order = np.argsort(ids)  # so that ties go to the lowest id, whoever proposed it
    groups = np.concatenate([x.groups for x in proposed])[order]
    sizes = np.concatenate([x.sizes for x in proposed])[order].astype(np.float64)
    pairs = zip(*(x.factors for x in proposed), strict=True)
    features = of_factors(tuple(np.concatenate(x)[order].astype(np.float64) for x in pairs))
    found = choose_coreset(features, groups, num_picks, form=Greedy.EXACT, seed=seed, weights_N=sizes)
    return Choice(
        ids=ids[order][found.ids],
        sizes=found.sizes,
        error=found.error,
        num_set_aside=sum(x.num_set_aside for x in proposed),
    )
