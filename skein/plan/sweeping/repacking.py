"""Arrays of a sweep whose rows are worth being packed anew, in the midst of their steps.

Rules of this file
- Packing anew costs about a round of each array that it is about, so only arrays with some rounds left are.
- Arrays are parted where workers have none, those with most rows first. They are joined where some wait for a worker,
  and never so many that a worker would be left without one.
- Joining is for rows that go through their models together: rows in turn gain nothing by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from skein.types import JobId

LEAST_ROUNDS = 4
"""Rounds that an array must have left: fewer are over before what packing costs is made up for."""
SMALL_SHARE = 0.5
"""Share of the rows that it began with, of an array that has become small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStand:
    """An array that has not come to its end.

    `key`: equal for those whose rows may be in one array. `num_begun`: rows that it began with, of which `num_rows`
    make steps. `gains`: whether they go through their models together. `waits`: whether no worker has it.
    """

    job: JobId
    key: int
    num_begun: int
    num_rows: int
    num_rounds_left: int
    gains: bool
    waits: bool

    @property
    def is_small(self) -> bool:
        """Whether so few of its rows are left that its device has room for others."""
        is_worth_it = self.gains and self.num_rounds_left >= LEAST_ROUNDS
        return not self.waits and is_worth_it and self.num_rows <= SMALL_SHARE * self.num_begun


def to_part(arrays: Sequence[ArrayStand], *, num_idle: int) -> tuple[JobId, ...]:
    """Arrays that are to be parted, so that workers without one have their share of the rows.

    Args:
        arrays: of one sweep.
        num_idle: workers for which there is no array.

    >>> one = ArrayStand(job=JobId("a"), key=0, num_begun=8, num_rows=8, num_rounds_left=9, gains=True, waits=False)
    >>> to_part([one], num_idle=1), to_part([one], num_idle=0)
    (('a',), ())
    """
    chosen: list[ArrayStand] = []
    num_rows = 0
    for array in sorted(arrays, key=lambda x: (-x.num_rows, x.job)):
        share = ceil((num_rows + array.num_rows) / (len(chosen) + 1 + num_idle))
        if array.num_rounds_left >= LEAST_ROUNDS and array.num_rows > share:
            chosen.append(array)
            num_rows += array.num_rows
    return tuple(x.job for x in chosen) if num_idle > 0 else ()


def to_join(
    arrays: Sequence[ArrayStand], due_by_key: Mapping[int, int], *, num_excess: int, most_rows: int
) -> tuple[JobId, ...]:
    """Arrays whose rows are to be in one, with trials that have not begun if there is room.

    Args:
        arrays: of one sweep.
        due_by_key: number of trials that wait to begin, of those whose key is some array's.
        num_excess: arrays for which there is no worker.
        most_rows: of an array.

    >>> small = ArrayStand(job=JobId("a"), key=0, num_begun=8, num_rows=2, num_rounds_left=9, gains=True, waits=False)
    >>> waiting = ArrayStand(job=JobId("b"), key=0, num_begun=4, num_rows=4, num_rounds_left=9, gains=False, waits=True)
    >>> [to_join([small, waiting], {}, num_excess=1, most_rows=most) for most in (16, 5)]
    [('a', 'b'), ()]
    """
    for key in sorted({array.key for array in arrays if array.is_small}):
        own = [array for array in arrays if array.key == key]
        group = _group(own, most_rows=most_rows, most_arrays=num_excess + 1)
        num_rows = sum(array.num_rows for array in group)
        if len(group) > 1 or (group and due_by_key.get(key, 0) and num_rows < most_rows):
            return tuple(array.job for array in group)
    return ()


def _group(arrays: Sequence[ArrayStand], *, most_rows: int, most_arrays: int) -> list[ArrayStand]:
    """Arrays of one key that fit into one: a small one first, then what is small or waits, fewest rows first."""
    candidates = [array for array in arrays if array.is_small or array.waits]
    group: list[ArrayStand] = []
    for array in sorted(candidates, key=lambda x: (not x.is_small, x.num_rows, x.job)):
        fits = sum(x.num_rows for x in group) + array.num_rows <= most_rows
        if fits and len(group) < most_arrays:
            group.append(array)
    return group
