"""Budgets of groups: how many rows of each a choice takes, and whether they are enough."""

from collections.abc import Sequence

import numpy as np

from skein.config.data.coreset import CoresetSpec
from skein.errors import UserError


def check_fraction(
    spec: CoresetSpec, num_rows: int, num_groups: int, *, num_sources: int, step_rows: int | None
) -> None:
    """Refuse a fraction of which too few rows are chosen.

    Args:
        step_rows: rows of one step, if a choice has to have as many.

    Raises:
        UserError: there are fewer picks than groups or than rows of a step.
    """
    num_picks, wanted = spec.num_picks(num_rows), max(num_groups, step_rows or 1)
    if num_picks >= wanted:
        return
    several = f" of {num_sources} sources" if num_sources > 1 else ""
    groups = f"{num_groups} classes{several}" if spec.group_by == "label" else f"{num_groups} sources"
    why = groups if wanted == num_groups else f"the {wanted} rows of one step"
    hint = f"{num_picks} of {num_rows} rows are fewer than {why}: give at least {wanted / num_rows:.3g}"
    raise UserError("data.coreset.fraction", spec.fraction, hint)


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
