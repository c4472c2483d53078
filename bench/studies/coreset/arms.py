"""Arms of a comparison: no figure of a coreset without those of its controls."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from bench.report import Row, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """One figure of every arm, by seed.

    Args:
        coreset: on weighted rows.
        random: on as many rows drawn by chance within classes, with fair weights, for as many gradients; drawn anew
            as often as `coreset` chooses.
        random_once: the same on one draw that stays.
        random_same_work: the same for as much work: forwards of selection count as a third of a gradient each.
        full_equal: on all rows, for as many gradients as `coreset`.
        full: on all rows, to the end: as many steps over all rows as `coreset` makes over its own.
    """

    coreset: tuple[float, ...]
    random: tuple[float, ...]
    random_once: tuple[float, ...]
    random_same_work: tuple[float, ...]
    full_equal: tuple[float, ...]
    full: tuple[float, ...]

    def row(self, what: str, unit: str, *, goal: str, holds: Callable[[float, float], bool]) -> Row:
        """Means over seeds beside those of all controls; `holds` is asked for the means of coreset and random."""
        mine, chance = fmean(self.coreset), fmean(self.random)
        against = (
            f"random {chance:.4g}; one draw {fmean(self.random_once):.4g}; "
            f"random for as much work {fmean(self.random_same_work):.4g}; "
            f"all rows for as many gradients {fmean(self.full_equal):.4g}, to the end {fmean(self.full):.4g}"
        )
        return Row(
            what=what,
            value=mine,
            unit=unit,
            against=against,
            ratio=mine / chance,
            goal=goal,
            holds=holds(mine, chance),
            spread=spread(self.coreset),
        )
