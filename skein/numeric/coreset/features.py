"""Features of samples, and how far samples are from each other.

Rules of this file
- Distances are equal on every processor. BLAS sums products in an order that depends on the make of the processor and
  on the number of threads, and some processors round a product and a sum together. So coordinates are whole numbers,
  small enough that every sum of their products is exact in float64, whatever its order. What follows of these sums is
  element by element, which IEEE 754 rounds in one way only.

Shape letters: N rows, D numbers of a row, H of a hidden state, C classes.
"""

from dataclasses import dataclass
from functools import reduce
from math import frexp, ldexp

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Ids = NDArray[np.int64]
"""Places of rows, from 0."""

BLOCK_NUMBERS = 2**21
"""Distances made at a time: bounds the memory to a few times 16 MiB."""
_SQUARE_BITS = 50
"""Squared lengths of rows in steps of a lattice are below 2 to this power: four of them added stay exact."""
_LEAST_WIDTH = 2.0**-400
"""Coordinates below this are as good as 0: products of their steps stay above the least float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """Rows with whole coordinates: each is the outer product of its rows of `factors`, which are never multiplied out.

    Args:
        factors: (N, D) each, whole numbers as float64. One factor is the rows themselves.
        squares_N: squared lengths, in steps.
        step: length of a step, a power of 2.
    """

    factors: tuple[F64, ...]
    squares_N: F64
    step: float

    @property
    def num_rows(self) -> int:
        return len(self.squares_N)

    @property
    def farthest(self) -> float:
        """Upper bound of all distances."""
        return 2 * self.step * float(np.sqrt(self.squares_N.max(initial=0.0)))

    @property
    def block_rows(self) -> int:
        """Rows whose distances to all fit in a block; at least one."""
        return max(1, BLOCK_NUMBERS // max(1, self.num_rows))

    def take(self, rows: Ids) -> "Lattice":
        """Some of the rows, in the order given."""
        return Lattice(
            factors=tuple(x[rows] for x in self.factors), squares_N=self.squares_N[rows], step=self.step
        )

    def distances(self, ids: Ids) -> F64:
        """(len(ids), N), Euclidean. The caller keeps to `block_rows`.

        Gram matrices multiply element by element: <a ⊗ b, a' ⊗ b'> = <a, a'> <b, b'>.
        """
        found = reduce(np.multiply, (x[ids] @ x.T for x in self.factors))
        found *= -2
        found += self.squares_N
        found += self.squares_N[ids][:, None]
        np.maximum(found, 0.0, out=found)
        np.sqrt(found, out=found)
        found *= self.step
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Vectors of rows, each the outer product of its rows of `factors`; products themselves are never formed.

    Args:
        factors: (N, D) each, float64. One factor is the vectors themselves.
        are_finite: (N,), whether all that a row's distances are made of is finite.
    """

    factors: tuple[F64, ...]
    are_finite: NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        return len(self.are_finite)

    @property
    def num_numbers(self) -> int:
        """Numbers that a row's factors have together."""
        return sum(x.shape[1] for x in self.factors)

    def take(self, rows: Ids | NDArray[np.bool_]) -> "Features":
        """Features of some of the rows, in the order given."""
        return Features(factors=tuple(x[rows] for x in self.factors), are_finite=self.are_finite[rows])

    def lattice(self) -> Lattice:
        """Rows with coordinates rounded to 2^-25 of the longest row; all rows must be finite.

        A single factor is counted from its medians, which changes no distance and keeps rows that are far from the
        origin apart. Products of factors cannot be moved.
        """
        factors = self.factors
        if len(factors) == 1 and self.num_rows:
            factors = (factors[0] - np.median(factors[0], axis=0),)
        rounded = [_rounded(x) for x in factors]
        whole = tuple(x for x, _ in rounded)
        return Lattice(
            factors=whole,
            squares_N=reduce(np.multiply, map(_squares, whole)),
            step=reduce(float.__mul__, (step for _, step in rounded)),
        )


def _rounded(x_ND: F64) -> tuple[F64, float]:
    """Coordinates in steps, and the length of a step.

    How long the longest row is would depend on the order of a sum; so coordinates are rounded by the largest of them
    first, which sums exactly, and then by the length that this gives.
    """
    _, exponent = frexp(max(_LEAST_WIDTH, float(np.abs(x_ND).max(initial=0.0))))
    _, bits_of_width = frexp(float(max(1, x_ND.shape[1])))
    step = ldexp(1.0, exponent - (_SQUARE_BITS - bits_of_width) // 2)
    _, used_bits = frexp(float(_squares(np.rint(x_ND / step)).max(initial=1.0)))
    step = ldexp(step, -max(0, (_SQUARE_BITS - 1 - used_bits) // 2))
    return np.rint(x_ND / step), step


def _squares(x_ND: F64) -> F64:
    return np.asarray(np.einsum("nd,nd->n", x_ND, x_ND), np.float64)


def vectors(x_ND: NDArray[np.floating]) -> Features:
    """Rows as they are: inputs, logits.

    >>> vectors(np.array([[1.0, 5.0], [4.0, 9.0]])).lattice().distances(np.array([0])).round(6).tolist()
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
        squares = reduce(np.multiply, map(_squares, factors))
    return Features(factors=factors, are_finite=np.isfinite(squares))
