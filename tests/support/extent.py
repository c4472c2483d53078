"""How much of a long matrix is tried: `make test` tries a part that covers every row and column, `make matrix` all."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ENTIRE = os.environ.get("SKEIN_MATRIX") == "entire"


def examples(entirely: int) -> int:
    """How many examples Hypothesis draws for a law of which so many are the matrix."""
    return entirely if ENTIRE else -(-entirely // 6)


def part(cases: Sequence[T], *, every: int, start: int = 0) -> Sequence[T]:
    """One in so many, or all of them if the matrix is to be tried entirely.

    Args:
        cases: in the order of the matrix.
        every: how many cases there are for one that is tried.
        start: another one for each row, so that the parts of all rows together are most columns.
    """
    return cases if ENTIRE else cases[start % every :: every]
