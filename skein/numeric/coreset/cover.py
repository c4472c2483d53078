"""Rows picked so far, and how near the nearest pick is to each row."""

import numpy as np

from skein.numeric.coreset.features import BLOCK_NUMBERS, F64, Features, Ids

_TIE = 1e-12
"""Part of the largest possible gain by which gains are equal: as much as sums of float64 differ by."""


class Cover:
    """State of a greedy choice over one group's rows: F(S) = Σ w_i (D0 - min over S of d_ij), D0 above all distances.

    Gains are float64. A small group's distances are made once and kept, if they fit in one block.

    Args:
        weights_N: how many rows each row stands for, above 0.
    """

    def __init__(self, features: Features, weights_N: F64) -> None:
        num_rows = features.num_rows
        self.num_rows = num_rows
        self.picks: list[int] = []
        self.is_picked_N = np.zeros(num_rows, np.bool_)
        self.margin = _TIE * features.farthest * float(weights_N.sum())
        self._features = features
        self._weights_N = weights_N
        self._nearest_N = np.full(num_rows, features.farthest)
        self._owners_N = np.full(num_rows, -1, np.int64)
        is_small = num_rows * num_rows <= BLOCK_NUMBERS
        self._kept = features.distances(np.arange(num_rows)) if is_small else None

    @property
    def block_rows(self) -> int:
        """Rows whose gains are asked for at a time, at most."""
        return self._features.block_rows

    @property
    def error(self) -> float:
        """L(S): weighted distances of all rows to their picks, summed."""
        return float(self._weights_N @ self._nearest_N)

    @property
    def sizes(self) -> F64:
        """Weight of the rows nearest to each pick, in the order of picks; a pick is nearest to itself."""
        owners = self._owners_N.copy()
        owners[self.picks] = np.arange(len(self.picks))
        return np.bincount(owners, self._weights_N, len(self.picks)).astype(np.float64)

    def gains(self, ids: Ids) -> F64:
        """Decrease of L by each of `ids`, (len(ids),)."""
        less = self._distances(ids)
        np.subtract(self._nearest_N, less, out=less)
        np.maximum(less, 0.0, out=less)
        return less @ self._weights_N

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
        return int(ids[gains >= gains.max() - self.margin].min())

    def _distances(self, ids: Ids) -> F64:
        return self._features.distances(ids) if self._kept is None else self._kept[ids]
