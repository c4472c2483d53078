"""Seconds of a processor and memory that a choice takes, and its L beside that of chance.

Not the wall's seconds: beside others that keep the cores full these say nothing of the choice.
"""

import resource
from collections.abc import Iterator
from time import process_time

import numpy as np

from bench.report import Row
from skein import rng
from skein.numeric.coreset.choice import choose_by_chance, choose_coreset, cover_error
from skein.numeric.coreset.features import vectors
from skein.numeric.coreset.greedy import Greedy

_CLASSES = 10
_MANY_ROWS = 51_000
"""Rows of one group that `auto` has in partitions."""
_MOST_BYTES = 10**9


def rows() -> Iterator[Row]:
    """Normal rows, on which greedy gains least: 50,000 of 64 numbers exactly, 1,000,000 of 10 in partitions."""
    yield from _rows(50_000, 64, Greedy.EXACT, most_s=45)
    yield from _rows(1_000_000, 10, Greedy.PARTITIONED, most_s=60)
    for share in (0.001, 0.002, 0.005, 0.01, 0.02, 0.1):
        yield _beside_draws(share)


def _beside_draws(share: float) -> Row:
    """A choice in partitions of 10 clusters beside the median of ten random draws."""
    generator, groups = rng.stream(0, "clusters"), np.zeros(_MANY_ROWS, np.int64)
    centers = 6 * generator.normal(size=(_CLASSES, 4))
    points = generator.normal(size=(_MANY_ROWS, 4)) + centers[generator.integers(_CLASSES, size=_MANY_ROWS)]
    features, num_picks = vectors(points), round(share * _MANY_ROWS)
    draws = [choose_by_chance(groups, num_picks, seed=seed).ids for seed in range(10)]
    median = float(np.median([cover_error(features, groups, ids) for ids in draws]))
    error = cover_error(features, groups, choose_coreset(features, groups, num_picks).ids)
    what = f"choice in partitions of {share:.1%} of {_MANY_ROWS:,} rows in {_CLASSES} clusters: L"
    return _row(what, error, "distance", median, "median of ten random draws")


def _rows(num_rows: int, num_numbers: int, form: Greedy, *, most_s: float) -> Iterator[Row]:
    features = vectors(rng.stream(0, "picking").normal(size=(num_rows, num_numbers)))
    groups, num_picks = np.arange(num_rows) % _CLASSES, num_rows // 10
    began = process_time()
    choice = choose_coreset(features, groups, num_picks, form=form)
    took_s = process_time() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    what = f"{form.value} choice of 10 % of {num_rows:,} rows of {num_numbers} numbers, 10 classes"
    yield _row(what, took_s, "s", most_s, "seconds of the goal")
    yield _row(f"{what}: most memory of the process", float(peak_bytes), "bytes", _MOST_BYTES, "the goal")
    if form is Greedy.EXACT:
        chance = cover_error(features, groups, choose_by_chance(groups, num_picks, seed=0).ids)
        yield _row(f"{what}: L", choice.error, "distance", chance, "random's L")


def _row(what: str, value: float, unit: str, limit: float, name: str) -> Row:
    return Row(
        what=what,
        value=value,
        unit=unit,
        against=f"{name}: {limit:.6g}",
        ratio=value / limit,
        goal="ratio ≤ 1",
        holds=value <= limit,
        spread=0.0,
    )
