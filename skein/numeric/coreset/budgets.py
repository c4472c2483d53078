"""Budgets of groups: how many rows of each a choice takes."""

from collections.abc import Sequence

import numpy as np

from skein.errors import UserError


def budgets(sizes: Sequence[float], num_picks: int, *, rows: Sequence[int] | None = None) -> tuple[int, ...]:
    """Picks of each group by largest remainder, at least one, at most its rows; they sum to `num_picks`.

    Args:
        sizes: weight of each group, above 0. Of equal remainders the first group's goes first.
        rows: rows of each group, at least 1 each; `sizes` if not given.

    Raises:
        UserError: there are fewer picks than groups, or more than rows.

    >>> budgets((380, 19, 1), 40)
    (37, 2, 1)
    """
    if num_picks < len(sizes):
        raise UserError("coreset.num_picks", num_picks, f"give at least {len(sizes)}, one for each group")
    most = np.asarray(sizes if rows is None else rows, np.int64)
    if num_picks > most.sum():
        raise UserError("coreset.num_picks", num_picks, f"give at most {most.sum()}, the rows that there are")
    share = np.clip(np.asarray(sizes, np.float64) * num_picks / max(1.0, sum(sizes)), 1, most)
    # Groups raised to one pick take theirs from the others; what full groups leave goes to those with room.
    for _ in range(len(sizes) + 1):
        over = share.sum() - num_picks
        if abs(over) < 1e-9:
            break
        free = share > 1 if over > 0 else share < most
        share[free] = np.clip(share[free] * (1 - over / share[free].sum()), 1, most[free])
    given = np.floor(share + 1e-9).astype(np.int64)
    by_remainder = np.argsort(-(share - given).round(9), kind="stable")
    for group in by_remainder:
        if given.sum() == num_picks:
            break
        given[group] += given[group] < most[group]
    return tuple(map(int, given))
