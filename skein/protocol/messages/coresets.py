"""Choices of rows to train on, as they travel: a worker's candidates in parts, and the choice that was recorded.

Arrays are little-endian bytes: they may be long, and are looked at as wholes alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skein.errors import RemoteError
from skein.numeric.coreset.choice import Choice
from skein.numeric.coreset.distributed import Candidates
from skein.types import Generation, Step

PART_BYTES = 1 << 20
"""Bytes of a part of a worker's candidates, at most, unless a single one is larger."""
MOST_PICKS = 1 << 18
"""Rows of a choice, at most: it is told as one message."""
MOST_ROWS = (1 << 24) - 1
"""Rows that are chosen of along a run, at most: whoever chooses has arrays of all their ids."""
MOST_CANDIDATE_BYTES = 256 << 20
"""Bytes of all candidates of a choice, at most: they are together in the coordinator's memory."""
_IDS, _FLOATS = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatesPicked:
    """Part of what a worker has picked of its rows at `version`; or why it could not, as an `error`.

    `groups` are those of this part's rows, in order, `counts` how many rows each has. `ids` are int32; `sizes`, the
    rows that each stands for, and `factors`, one after the other, are float32. `farness` is L of all its candidates,
    `chance_farness` about that of as many rows as the whole choice takes, drawn by chance, for the worker's rows.
    """

    generation: Generation
    version: Step
    row: int = 0
    """Row of an array whose model has picked; of any other job 0."""
    part: int
    num_parts: int
    groups: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    ids: bytes = b""
    sizes: bytes = b""
    factors: tuple[bytes, ...] = ()
    num_set_aside: int = 0
    farness: float = 0.0
    chance_farness: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRow:
    """Row of an array that draws by a choice, from its own step `since` on."""

    row: int
    since: Step
    until: Step | None
    """Step of the row at which the next choice is due; None: it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldChoice:
    """The choice by which samples are drawn from `version` on: int32 ids of rows, float32 rows that each stands for.

    In an array, by those of its `rows` that are named alone.
    """

    version: Step
    ids: bytes
    sizes: bytes
    rows: tuple[DrawingRow, ...] = ()

    @staticmethod
    def of(choice: Choice, version: Step) -> "ToldChoice":
        """A choice as it is told."""
        ids, sizes = choice.ids.astype(_IDS), choice.sizes.astype(_FLOATS)
        return ToldChoice(version=version, ids=ids.tobytes(), sizes=sizes.tobytes())

    @property
    def num_picks(self) -> int:
        """Rows that are chosen."""
        return len(self.ids) // _IDS.itemsize

    def read(self) -> Choice:
        """The choice itself, without what is not told."""
        return Choice(
            ids=np.frombuffer(self.ids, _IDS).astype(np.int64),
            sizes=np.frombuffer(self.sizes, _FLOATS),
            error=float("nan"),
            num_set_aside=0,
        )


def parts_of(
    candidates: Candidates,
    generation: Generation,
    version: Step,
    *,
    row: int = 0,
    part_bytes: int = PART_BYTES,
) -> tuple[CandidatesPicked, ...]:
    """A worker's candidates as it tells of them: 4·(d + 2) bytes each, and a few for each part.

    `row`: of an array, whose model has picked.
    """
    groups = candidates.groups
    each = max(1, candidates.num_bytes // max(1, len(groups)))
    size = max(1, part_bytes // each)
    starts = range(0, max(1, len(groups)), size)
    parts = (
        _part(candidates, groups, slice(start, start + size), generation, version, number, len(starts))
        for number, start in enumerate(starts)
    )
    return tuple(replace(part, row=row) for part in parts)


def _part(
    candidates: Candidates,
    groups: NDArray[np.int64],
    rows: slice,
    generation: Generation,
    version: Step,
    number: int,
    num_parts: int,
) -> CandidatesPicked:
    names, counts = np.unique(groups[rows], return_counts=True)
    return CandidatesPicked(
        generation=generation,
        version=version,
        part=number,
        num_parts=num_parts,
        groups=tuple(names.tolist()),
        counts=tuple(counts.tolist()),
        ids=candidates.ids[rows].astype(_IDS).tobytes(),
        sizes=candidates.sizes[rows].astype(_FLOATS).tobytes(),
        factors=tuple(x[rows].astype(_FLOATS).tobytes() for x in candidates.factors),
        num_set_aside=candidates.num_set_aside,
        farness=candidates.error,
        chance_farness=candidates.chance_error,
    )


def fault_of_part(part: CandidatesPicked) -> str | None:
    """Reason for which a part is none, without a look at its arrays; None: it may be one."""
    num_rows = len(part.ids) // _IDS.itemsize
    if part.part >= part.num_parts:
        return f"part {part.part} of {part.num_parts}"
    if len(part.groups) != len(part.counts) or 0 in part.counts or sum(part.counts) != num_rows:
        return f"groups of {sum(part.counts)} candidates, with {num_rows} ids"
    return None


def candidates_of(parts: Sequence[CandidatesPicked]) -> Candidates:
    """The candidates that all parts of one worker, in order, are.

    Raises:
        RemoteError: they are no candidates.
    """
    if any(x.error for x in parts):
        raise RemoteError(next(x.error for x in parts if x.error))
    counts: dict[int, int] = {}
    for part in parts:
        for group, count in zip(part.groups, part.counts, strict=True):
            counts[group] = counts.get(group, 0) + count
    try:
        factors = tuple(np.concatenate(pieces) for pieces in zip(*map(_factors, parts), strict=True))
        return Candidates(
            counts=counts,
            ids=np.concatenate([np.frombuffer(x.ids, _IDS) for x in parts]),
            sizes=np.concatenate([np.frombuffer(x.sizes, _FLOATS) for x in parts]),
            factors=factors,
            num_set_aside=parts[0].num_set_aside,
            error=parts[0].farness,
            chance_error=parts[0].chance_farness,
        )
    except ValueError as error:
        raise RemoteError(f"candidates that are none: {error}") from error


def _factors(part: CandidatesPicked) -> tuple[NDArray[np.float32], ...]:
    num_rows = sum(part.counts)
    if not num_rows:
        return tuple(np.empty((0, 1), np.float32) for _ in part.factors)
    return tuple(np.frombuffer(x, _FLOATS).reshape(num_rows, -1) for x in part.factors)
