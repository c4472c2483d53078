"""Features of samples, and how far samples are from each other.

Shape letters: N rows, D numbers of a row, H of a hidden state, C classes.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Ids = NDArray[np.int64]
"""Places of rows, from 0."""

BLOCK_NUMBERS = 2**21
"""Distances made at a time: bounds the memory to a few times 16 MiB."""
_EQUAL = 1e-13
"""Part of its squared length by which a squared distance is rounded: duplicates are to lie 0 apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Vectors of rows, each the outer product of its rows of `factors`; products themselves are never formed.

    Args:
        factors: (N, D) each, float64. One factor is the vectors themselves.
    """

    factors: tuple[F64, ...]
    squares_N: F64
    """Squared lengths."""

    @property
    def num_rows(self) -> int:
        return len(self.squares_N)

    @property
    def farthest(self) -> float:
        """Upper bound of all distances."""
        return 2 * float(np.sqrt(self.squares_N.max(initial=0.0)))

    @property
    def block_rows(self) -> int:
        """Rows whose distances to all fit in a block; at least one."""
        return max(1, BLOCK_NUMBERS // max(1, self.num_rows))

    @property
    def are_finite(self) -> NDArray[np.bool_]:
        """(N,): whether all that a row's distances are made of is finite."""
        return np.isfinite(self.squares_N)

    def take(self, rows: Ids | NDArray[np.bool_]) -> "Features":
        """Features of some of the rows, in the order given."""
        return Features(factors=tuple(x[rows] for x in self.factors), squares_N=self.squares_N[rows])

    def distances(self, ids: Ids) -> F64:
        """(len(ids), N), Euclidean. The caller keeps to `block_rows`.

        Gram matrices multiply element by element: <a ⊗ b, a' ⊗ b'> = <a, a'> <b, b'>.
        """
        found = reduce(np.multiply, (x[ids] @ x.T for x in self.factors))
        found *= -2
        found += self.squares_N * (1 - _EQUAL)
        found += (self.squares_N[ids] * (1 - _EQUAL))[:, None]
        np.maximum(found, 0.0, out=found)
        return np.sqrt(found, out=found)


def vectors(x_ND: NDArray[np.floating]) -> Features:
    """Rows as they are: inputs, logits. In float64, for a² + b² - 2ab cancels in float32.

    >>> vectors(np.array([[1.0, 5.0], [4.0, 9.0]])).distances(np.array([0])).round(6).tolist()
    [[0.0, 5.0]]
    """
    return of_factors((np.asarray(x_ND, np.float64),))


def last_layer(hidden_NH: NDArray[np.floating], error_NC: NDArray[np.floating]) -> Features:
    """Gradients of the last matrix and its bias, (hidden, 1) ⊗ error, as distances see them.

    Args:
        hidden_NH: what goes into the last layer.
        error_NC: gradient of a sample's loss by its logits; of cross entropy, probabilities less the label's 1.

    Source: Mirzasoleiman et al., Coresets for Data-efficient Training, Section 3.4.
    """
    ones = np.ones((len(hidden_NH), 1))
    wide = np.concatenate((np.asarray(hidden_NH, np.float64), ones), axis=1)
    return of_factors((wide, np.asarray(error_NC, np.float64)))


def of_factors(factors: tuple[F64, ...]) -> Features:
    """Features of factors (N, D) of equal N."""
    with np.errstate(over="ignore", invalid="ignore"):  # such rows are set aside, and counted
        squares = reduce(np.multiply, (np.einsum("nd,nd->n", x, x) for x in factors))
    return Features(factors=factors, squares_N=squares)
