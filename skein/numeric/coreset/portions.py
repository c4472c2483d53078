"""Choices over rows that several workers hold, where some of them may fail: whose rows are whose, and the second stage.

Rules of this file
- Rows are in parts that do not depend on workers: each part's candidates are picked of its rows alone, and a worker has
  whole parts. So all candidates together, and the choice among them, are the same however many workers pick, and
  whichever of them die while others take over their parts. Only `local` choices, a share of each worker, are not.
- A choice stands for every row but those set aside: where a worker's candidates are not here, or cannot be right, rows
  of its portion are drawn by chance, each standing for as many.
- Equal portions, candidates and seed make equal choices, whoever asks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, isfinite

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.data.coreset import CoresetSpec
from skein.numeric.coreset.budgets import budgets
from skein.numeric.coreset.choice import Choice
from skein.numeric.coreset.distributed import (
    Candidates,
    choose_among,
    error_of_draws,
    of_all_parts,
    propose,
)
from skein.numeric.coreset.features import Features, Ids, of_factors
from skein.numeric.coreset.greedy import Greedy
from skein.types import WorkerId

MOST_ODD = 0.01
"""Share of rows that may be set aside; above that their features say nothing of the data."""
_LEAST_PARTS, _PART_ROWS = 64, 1_000
"""Parts of all rows at least, and rows of a part at most where blocks allow it."""
_PROPOSED_RATIO, _LEAST_PROPOSED = 4, 2_000
"""Candidates for each pick, and in all, at least."""
_MOST_PROPOSED_BYTES = 128 << 20
"""Bytes of all candidates from which on there are fewer for each pick."""
_NUM_WITNESSES = 1_024
_SLACK = 1e-3
"""Part by which sizes, which are float32, may sum to something else than the rows that they stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Rows of one worker: those of its parts, which go to all workers' ways in turn.

    Args:
        num_rows: of all workers.
        block_rows: rows of a block, which is in one part.
        num_ways: part number p is of way p modulo this.
        ways: those of the worker.
    """

    num_rows: int
    block_rows: int
    num_ways: int
    ways: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        """Parts of all rows."""
        return num_parts_of(-(-self.num_rows // self.block_rows), self.num_rows)

    @property
    def ids(self) -> Ids:
        """Ids of the rows, ascending.

        >>> Portion(num_rows=7, block_rows=2, num_ways=2, ways=(1,)).ids.tolist()
        [2, 3, 6]
        """
        rows = np.arange(self.num_rows)
        return rows[np.isin(rows // self.block_rows % self.num_parts % self.num_ways, self.ways)]

    @property
    def has_rows(self) -> bool:
        """Whether there are any: told at once, however many rows all have."""
        return min(self.ways) < self.num_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Picking:
    """Way in which candidates are picked and chosen among.

    Args:
        num_picks: rows of the whole choice.
        num_rows: of all workers.
        block_rows: rows of a block.
        is_local: each worker's share of the picks is taken as it is; otherwise parts propose several times as many, and
            the choice is made among all.
        seed: of what is drawn.
    """

    num_picks: int
    num_rows: int
    block_rows: int
    is_local: bool
    form: Greedy
    seed: int

    def part_of(self, ids: Ids) -> Ids:
        """Part that each row is in."""
        num_blocks = -(-self.num_rows // self.block_rows)
        return ids // self.block_rows % num_parts_of(num_blocks, self.num_rows)

    def num_proposed(self, num_numbers: int) -> int:
        """Candidates of all workers together, for rows of so many numbers."""
        most = _MOST_PROPOSED_BYTES // (4 * (num_numbers + 2))
        return max(self.num_picks, min(most, max(_PROPOSED_RATIO * self.num_picks, _LEAST_PROPOSED)))

    @staticmethod
    def at(spec: CoresetSpec, version: int, *, num_rows: int, block_rows: int) -> "Picking":
        """Way that a job asks for, of so many rows, at a version of its parameters."""
        return Picking(
            num_picks=spec.num_picks(num_rows),
            num_rows=num_rows,
            block_rows=block_rows,
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
        chance_error: L of as many rows drawn by chance for the rows of all other portions, about; None: unknown.
    """

    choice: Choice
    faults: Mapping[WorkerId, str]
    num_by_chance: int
    chance_error: float | None = None


def num_parts_of(num_blocks: int, num_rows: int) -> int:
    """Parts of rows that are in so many blocks: block number b is in part b modulo this.

    There are enough for many workers to have about as many each, and no more of them than blocks.

    >>> num_parts_of(5, 40), num_parts_of(1_000, 8_000), num_parts_of(100_000, 1_000_000)
    (5, 64, 1000)
    """
    return min(num_blocks, max(_LEAST_PARTS, -(-num_rows // _PART_ROWS)))


def pick_candidates(
    features: Features, groups_N: NDArray[np.integer], ids_N: Ids, picking: Picking
) -> Candidates:
    """A worker's candidates: of each of its parts what that proposes, or its share of a local choice.

    Args:
        groups_N: group of each of its rows.
        ids_N: their ids, ascending.
    """
    if picking.is_local:
        found = _proposed_of(features, groups_N, ids_N, picking, picking.num_picks, seed=picking.seed)
    else:
        parts, num_proposed = picking.part_of(ids_N), picking.num_proposed(features.num_numbers)
        found = of_all_parts(
            [
                _proposed_of(
                    features.take(rows),
                    groups_N[rows],
                    ids_N[rows],
                    picking,
                    num_proposed,
                    seed=rng.key(picking.seed, "coreset", "part", int(part)),
                )
                for part in np.unique(parts)
                for rows in [np.flatnonzero(parts == part)]
            ]
        )
    chance_error = error_of_draws(
        features, groups_N, picking.num_picks, num_rows=picking.num_rows, seed=picking.seed
    )
    return replace(found, chance_error=chance_error)


def _proposed_of(
    features: Features,
    groups_N: NDArray[np.integer],
    ids_N: Ids,
    picking: Picking,
    num_proposed: int,
    *,
    seed: int,
) -> Candidates:
    """Share that these rows have of `num_proposed` candidates, by the groups as they are among them, one of each."""
    names, counts = np.unique(groups_N[features.are_finite], return_counts=True)
    wanted = max(len(names), round(num_proposed * len(ids_N) / picking.num_rows))
    shares = (
        budgets(counts.tolist(), min(wanted, int(counts.sum())), rows=counts.tolist()) if len(names) else ()
    )
    ratio = 0.0 if picking.is_local else min(1.0, _NUM_WITNESSES / picking.num_rows)
    budget = dict(zip(names.tolist(), shares, strict=True))
    return propose(features, groups_N, ids_N, budget, form=picking.form, seed=seed, witness_ratio=ratio)


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
    chance_error = fsum(x.chance_error for x in good.values())
    return Chosen(
        chance_error=chance_error if good and isfinite(chance_error) else None,
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
    if picking.is_local and num_candidates > picking.num_picks:
        return f"{num_candidates} candidates, and {picking.num_picks} picks"
    if len(candidates.ids) and (not widths or candidates.widths != widths):
        return f"features of {candidates.widths} numbers, others have {widths}"
    if len(np.unique(candidates.ids)) != len(candidates.ids) or not np.isin(candidates.ids, ids).all():
        return "candidates twice, or of rows that are not its own"
    if not all(np.isfinite(x).all() for x in arrays) or (candidates.sizes < 0).any():
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
    picks = min(max(num_picks, num_groups), sum(int((x.sizes > 0).sum()) for x in some))
    choice = choose_among(some, picks, seed=picking.seed)
    return replace(choice, num_set_aside=sum(x.num_set_aside for x in good))


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
