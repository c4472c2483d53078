"""Choices over rows that several workers hold: candidates of each, then a second choice among them (GreeDi).

Candidates that stand for no row are witnesses: rows drawn by chance of those that are no candidates, by which the error
of the second choice is measured. That choice knows no other rows.

Source: Mirzasoleiman et al., Distributed Submodular Maximization, 2016, Algorithm 2, with candidates weighted by the
rows that they stand for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.numeric.coreset.choice import Choice, choose_coreset, distances_to
from skein.numeric.coreset.features import Features, Ids, of_factors
from skein.numeric.coreset.greedy import EXACT_ROWS, Greedy, cluster

F32 = NDArray[np.float32]

_MOST_MEASURED = 256
"""Rows of a group whose distances to random draws a worker measures, at most."""


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
    chance_error: float = 0.0
    """L of as many rows as the whole choice takes, drawn by chance, for the rows of this worker: an estimate."""

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
    witness_ratio: float = 0.0,
) -> Candidates:
    """Candidates of a worker's rows, so many of each group, or all that it has.

    Args:
        groups_N: group of each of the worker's rows.
        ids_N: id of each row among the rows of all workers.
        budget_by_group: candidates of each group.
        witness_ratio: witnesses for each row that is no candidate.
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
        others = np.delete(rows, found.picks)
        witnesses = generator.permutation(others)[: ceil(witness_ratio * len(others))]
        counts[group] = count + len(witnesses)
        chosen += [rows[found.picks], witnesses]
        sizes += [found.sizes, np.zeros(len(witnesses))]
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


def of_all_parts(found: Sequence[Candidates]) -> Candidates:
    """Candidates of one worker that it has picked of several parts of its rows, at least one."""
    groups = np.concatenate([x.groups for x in found])
    order = np.argsort(groups, kind="stable")
    names, counts = np.unique(groups, return_counts=True)
    return Candidates(
        counts=dict(zip(names.tolist(), counts.tolist(), strict=True)),
        ids=np.concatenate([x.ids for x in found])[order],
        sizes=np.concatenate([x.sizes for x in found])[order],
        factors=tuple(np.concatenate(x)[order] for x in zip(*(x.factors for x in found), strict=True)),
        num_set_aside=sum(x.num_set_aside for x in found),
        error=sum(x.error for x in found),
    )


def error_of_draws(
    features: Features, groups_N: NDArray[np.integer], num_picks: int, *, num_rows: int, seed: int
) -> float:
    """L of rows that are drawn by chance, for the finite rows of one worker: an estimate.

    A worker draws of its own rows, which are like all, and measures some of those that it has not drawn.

    Args:
        num_picks: rows that are drawn of all workers' rows, `num_rows`.
    """
    total, share = 0.0, num_picks / num_rows
    names, counts = np.unique(groups_N[features.are_finite], return_counts=True)
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        wanted = max(1, round(num_picks * count / features.num_rows))
        num_measured = min(_MOST_MEASURED, -(-count // 4), count - 1)
        if not num_measured:
            continue
        rows = np.flatnonzero(features.are_finite & (groups_N == name))
        order = rng.stream(seed, "coreset", "draws", name).permutation(rows)
        drawn = min(wanted, count - num_measured)
        some = features.take(order[: drawn + num_measured])
        far = distances_to(some, np.zeros(some.num_rows, np.int64), np.arange(drawn))
        total += float(far[drawn:].mean()) * count * (1 - share)
    return total


def choose_among(proposed: Sequence[Candidates], num_picks: int, *, seed: int = 0) -> Choice:
    """The choice among all workers' candidates, each by its weight.

    `error` counts each candidate as one row, and witnesses as all other rows. Groups share the picks by the rows that
    candidates stand for. Where a group has more candidates than an exact choice takes, it is made in partitions.

    Raises:
        UserError: there are fewer picks than groups, or more than candidates.
    """
    ids = np.concatenate([x.ids for x in proposed]).astype(np.int64)
    order = np.argsort(ids)  # so that ties go to the lowest id, whoever proposed it
    groups = np.concatenate([x.groups for x in proposed])[order]
    sizes = np.concatenate([x.sizes for x in proposed])[order].astype(np.float64)
    pairs = zip(*(x.factors for x in proposed), strict=True)
    features = of_factors(tuple(np.concatenate(x)[order].astype(np.float64) for x in pairs))
    own = np.flatnonzero(sizes > 0)
    is_small = np.unique(groups[own], return_counts=True)[1].max(initial=0) <= EXACT_ROWS
    form = Greedy.EXACT if is_small else Greedy.PARTITIONED
    found = choose_coreset(
        features.take(own), groups[own], num_picks, form=form, seed=seed, weights_N=sizes[own]
    )
    picks = own[found.ids]
    far, is_witness = distances_to(features, groups, picks), sizes == 0
    num_others = float(sizes.sum()) - len(own)
    rows_of_witness = num_others / max(1, int(is_witness.sum()))
    return Choice(
        ids=ids[order][picks],
        sizes=found.sizes,
        error=float(far[own].sum() + rows_of_witness * far[is_witness].sum()),
        num_set_aside=sum(x.num_set_aside for x in proposed),
    )
