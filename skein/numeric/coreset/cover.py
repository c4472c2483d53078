"""Rows picked so far, and how near the nearest pick is to each row."""

from math import frexp, ldexp

import numpy as np

from skein.numeric.coreset.features import BLOCK_NUMBERS, F64, Ids, Lattice

_EXACT_BITS = 52
"""Whole numbers below 2 to this power, and sums of them that stay below, are exact in float64."""
_WEIGHT_BITS = 8
"""Bits to which the least weight is rounded, if weights are not whole numbers."""


class Cover:
    """State of a greedy choice over one group's rows: F(S) = Σ w_i (D0 - min over S of d_ij), D0 above all distances.

    Distances and weights are rounded to whole numbers, so that gains are exact whatever the order of their sums: equal
    gains are equal on every processor. A small group's distances are made once and kept, if they fit in one block.

    Args:
        weights_N: how many rows each row stands for, above 0.
    """

    def __init__(self, rows: Lattice, weights_N: F64) -> None:
        num_rows = rows.num_rows
        self.num_rows = num_rows
        self.picks: list[int] = []
        self.is_picked_N = np.zeros(num_rows, np.bool_)
        self._rows = rows
        self._weights_N = weights_N
        self._whole_weights_N, self._weight_step = _whole_weights(weights_N)
        _, bits = frexp(rows.farthest * float(self._whole_weights_N.sum()))
        self._step = ldexp(1.0, bits - _EXACT_BITS)
        """Length to which distances are rounded: the largest gain is below 2^52 of it."""
        self._nearest_N = np.full(num_rows, np.ceil(rows.farthest / self._step))
        self._owners_N = np.full(num_rows, -1, np.int64)
        is_small = num_rows * num_rows <= BLOCK_NUMBERS
        self._kept = self._measured(np.arange(num_rows)) if is_small else None

    @property
    def block_rows(self) -> int:
        """Rows whose gains are asked for at a time, at most."""
        return self._rows.block_rows

    @property
    def error(self) -> float:
        """L(S): weighted distances of all rows to their picks, summed."""
        return float(self._whole_weights_N @ self._nearest_N) * self._step * self._weight_step

    @property
    def sizes(self) -> F64:
        """Weight of the rows nearest to each pick, in the order of picks; a pick is nearest to itself."""
        owners = self._owners_N.copy()
        owners[self.picks] = np.arange(len(self.picks))
        return np.bincount(owners, self._weights_N, len(self.picks)).astype(np.float64)

    def gains(self, ids: Ids) -> F64:
        """Decrease of L by each of `ids`, (len(ids),), in whole steps."""
        less = self._distances(ids)
        np.subtract(self._nearest_N, less, out=less)
        np.maximum(less, 0.0, out=less)
        return less @ self._whole_weights_N

    def pick(self, row: int) -> None:
        """Takes a row into the choice; rows as near to an earlier pick stay with that."""
        (far,) = self._distances(np.array([row]))
        # The first pick owns all, those at D0 from it too.
        is_nearer = far < self._nearest_N if self.picks else np.ones(self.num_rows, np.bool_)
        self._owners_N[is_nearer] = len(self.picks)
        self._nearest_N[is_nearer] = far[is_nearer]
        self.picks.append(row)
        self.is_picked_N[row] = True

    def best(self, ids: Ids, gains: F64) -> int:
        """Row with the highest of the gains; of equal ones the lowest id."""
        return int(ids[gains == gains.max()].min())

    def _distances(self, ids: Ids) -> F64:
        return self._measured(ids) if self._kept is None else self._kept[ids]

    def _measured(self, ids: Ids) -> F64:
        """Distances in whole steps."""
        found = self._rows.distances(ids)
        found /= self._step
        return np.rint(found, out=found)


def _whole_weights(weights_N: F64) -> tuple[F64, float]:
    """Weights in whole steps, at least one each, and the step; whole weights stay as they are."""
    if (weights_N == np.rint(weights_N)).all():
        return weights_N, 1.0
    _, least = frexp(float(weights_N.min()))
    _, most = frexp(float(weights_N.max()) * len(weights_N))
    step = ldexp(1.0, max(least - _WEIGHT_BITS, most - _EXACT_BITS // 2))
    return np.maximum(np.rint(weights_N / step), 1.0), step
