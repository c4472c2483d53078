"""Choices over rows that several workers hold, where some of them may fail: whose rows are whose, and the second stage.

Rules of this file
- A choice stands for every row but those set aside: where a worker's candidates are not here, or cannot be right, rows
  of its portion are drawn by chance, each standing for as many.
- Equal portions, candidates and seed make equal choices, whoever asks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.data.coreset import CoresetSpec
from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.choice import Choice
from skein.numeric.coreset.distributed import Candidates, choose_among, propose
from skein.numeric.coreset.features import Features, Ids, of_factors
from skein.numeric.coreset.greedy import Greedy
from skein.types import WorkerId

MOST_ODD = 0.01
"""Share of rows that may be set aside; above that their features say nothing of the data."""
_SLACK = 1e-3
"""Part by which sizes, which are float32, may sum to something else than the rows that they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Rows of one worker: those of its blocks, which go to all workers' ways in turn.

    Args:
        num_rows: of all workers.
        block_rows: rows of a block.
        num_ways: block number b is of way b modulo this.
        ways: those of the worker.
    """

    num_rows: int
    block_rows: int
    num_ways: int
    ways: tuple[int, ...]

    @property
    def ids(self) -> Ids:
        """Ids of the rows, ascending.

        >>> Portion(num_rows=7, block_rows=2, num_ways=2, ways=(1,)).ids.tolist()
        [2, 3, 6]
        """
        rows = np.arange(self.num_rows)
        return rows[np.isin(rows // self.block_rows % self.num_ways, self.ways)]

    @property
    def has_rows(self) -> bool:
        """Whether there are any: told at once, however many rows all have."""
        return min(self.ways) * self.block_rows < self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Picking:
    """Way in which candidates are picked and chosen among.

    Args:
        num_picks: rows of the whole choice.
        is_local: each worker's share of the picks is taken as it is; otherwise every worker picks as many, and the
            choice is made among all.
        seed: of what is drawn.
    """

    num_picks: int
    is_local: bool
    form: Greedy
    seed: int

    @staticmethod
    def at(spec: CoresetSpec, version: int, *, num_rows: int) -> "Picking":
        """Way that a job asks for, of so many rows, at a version of its parameters."""
        return Picking(
            num_picks=spec.num_picks(num_rows),
            is_local=spec.distributed == "local",
            form=Greedy(spec.greedy),
            seed=rng.key(spec.seed, "coreset", version),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice, and what became of the portions.

    Args:
        faults: by the portions that chance drew of, why.
        num_by_chance: rows of these portions.
    """

    choice: Choice
    faults: Mapping[WorkerId, str]
    num_by_chance: int


def pick_candidates(
    features: Features, groups_N: NDArray[np.integer], ids_N: Ids, picking: Picking, *, num_rows: int
) -> Candidates:
    """A worker's candidates, by groups as they are among its own rows, which come to workers in no order.

    Args:
        groups_N: group of each of its rows.
        ids_N: their ids, ascending.
        num_rows: of all workers.

    Raises:
        UserError: it has fewer picks than groups.
    """
    is_usable = features.are_finite
    names, counts = np.unique(groups_N[is_usable], return_counts=True)
    if not len(names):
        return propose(features, groups_N, ids_N, {}, form=picking.form, seed=picking.seed)
    wanted = picking.num_picks
    if picking.is_local:
        wanted = max(len(names), round(wanted * len(ids_N) / num_rows))
    shares = budgets(counts.tolist(), min(wanted, int(counts.sum())), rows=counts.tolist())
    budget = dict(zip(names.tolist(), shares, strict=True))
    return propose(features, groups_N, ids_N, budget, form=picking.form, seed=picking.seed)


def choose_of_portions(
    portions: Mapping[WorkerId, Portion], proposed: Mapping[WorkerId, Candidates | str], picking: Picking
) -> Chosen:
    """The choice among all portions.

    Args:
        portions: by worker; disjoint, together all rows.
        proposed: candidates of each that has any, or why it has none.
    """
    good: dict[WorkerId, Candidates] = {}
    faults: dict[WorkerId, str] = {}
    told = [x.widths for x in proposed.values() if isinstance(x, Candidates) and len(x.ids)]
    widths = Counter(told).most_common(1)[0][0] if told else ()
    for name, portion in portions.items():
        found = proposed.get(name, "it did not pick")
        fault = found if isinstance(found, str) else fault_of_candidates(found, portion.ids, widths, picking)
        if isinstance(found, str) or fault is not None:
            faults[name] = fault or ""
        else:
            good[name] = found
    while good and len({group for x in good.values() for group in x.counts}) > picking.num_picks:
        name = max(good, key=lambda name: (len(good[name].counts), name))
        faults[name] = f"candidates of {len(good.pop(name).counts)} groups, and {picking.num_picks} picks"
    if not told:
        faults |= dict.fromkeys(good, "no row has features that are finite")
        good = {}
    drawn = [_by_chance(portions[name].ids, name, picking, portions[name].num_rows) for name in faults]
    left = picking.num_picks - sum(len(x.ids) for x in drawn)
    among = [_among(tuple(good.values()), left, picking)] if good else []
    return Chosen(
        choice=_merged([*among, *drawn]),
        faults=faults,
        num_by_chance=sum(len(portions[name].ids) for name in faults),
    )


def fault_of_candidates(
    candidates: Candidates, ids: Ids, widths: tuple[int, ...], picking: Picking
) -> str | None:
    """Reason for which a worker cannot have picked these of its rows; None: it may have.

    Args:
        ids: of its rows.
        widths: numbers of each factor of a row, as most workers have them.
    """
    arrays, num_candidates = (candidates.sizes, *candidates.factors), len(candidates.ids)
    # Counts are added first: an array of the groups is as long as these say.
    if any(len(x) != num_candidates for x in arrays) or sum(candidates.counts.values()) != num_candidates:
        return "candidates without groups, sizes or features"
    if num_candidates > picking.num_picks:
        return f"{num_candidates} candidates, and {picking.num_picks} picks"
    if len(candidates.ids) and (not widths or candidates.widths != widths):
        return f"features of {candidates.widths} numbers, others have {widths}"
    if len(np.unique(candidates.ids)) != len(candidates.ids) or not np.isin(candidates.ids, ids).all():
        return "candidates twice, or of rows that are not its own"
    if not all(np.isfinite(x).all() for x in arrays) or (candidates.sizes <= 0).any():
        return "sizes or features that are not finite"
    if widths and not of_factors(tuple(x.astype(np.float64) for x in candidates.factors)).are_finite.all():
        return "features too long to be compared"
    stands_for = float(candidates.sizes.sum(dtype=np.float64)) + candidates.num_set_aside
    if abs(stands_for - len(ids)) > _SLACK * len(ids):
        return f"candidates that stand for {stands_for:.0f} rows of {len(ids)}"
    return None


def _among(good: Sequence[Candidates], num_picks: int, picking: Picking) -> Choice:
    if picking.is_local:
        return _merged([_as_choice(x) for x in good])
    some = [x for x in good if len(x.ids)]
    num_groups = len({group for x in some for group in x.counts})
    picks = min(max(num_picks, num_groups), sum(len(x.ids) for x in some))
    choice = choose_among(some, picks, seed=picking.seed)
    # From a row to its pick it is at most as far as to its candidate, and on from there.
    return replace(
        choice,
        error=choice.error + sum(x.error for x in some),
        num_set_aside=sum(x.num_set_aside for x in good),
    )


def _as_choice(x: Candidates) -> Choice:
    return Choice(ids=x.ids.astype(np.int64), sizes=x.sizes, error=x.error, num_set_aside=x.num_set_aside)


def _by_chance(ids: Ids, name: WorkerId, picking: Picking, num_rows: int) -> Choice:
    """Rows of a portion, as many as its share, whatever their groups are: only those who read them know."""
    count = min(len(ids), max(1, round(picking.num_picks * len(ids) / num_rows)))
    picks = rng.stream(picking.seed, "coreset", "portion", name).permutation(len(ids))[:count]
    sizes = np.full(count, len(ids) / max(1, count), np.float32)
    return Choice(ids=np.sort(ids[picks]), sizes=sizes, error=float("nan"), num_set_aside=0)


def _merged(choices: Sequence[Choice]) -> Choice:
    ids = np.concatenate([x.ids for x in choices])
    order = np.argsort(ids, kind="stable")
    known = [x.error for x in choices if not np.isnan(x.error)]
    return Choice(
        ids=ids[order],
        sizes=np.concatenate([x.sizes for x in choices])[order],
        error=sum(known) if known else float("nan"),
        num_set_aside=sum(x.num_set_aside for x in choices),
    )
