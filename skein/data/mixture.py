"""Several weighted sources as one sequence: which source a position draws from, and that source's how manieth.

The sources are the leaves of a binary tree. At each fork the first p draws are dealt by rounding: the left side
has received round(p * its share). What a fork sends down is again a gapless sequence, so every source advances
sample by sample through its own epochs, and a position is found by walking down once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_TOTAL = 2**32


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to `weights`, each at least 1, that sum to `_TOTAL` (largest remainders)."""
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total * (_TOTAL - len(weights)) for weight in weights]
    shares = [int(share) + 1 for share in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (int(exact[i]) - exact[i], i))
    for index in by_remainder[: _TOTAL - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A fixed way of dealing positions to sources; build it with `of`.

    Among the first p positions every source has been drawn p times its weight's share, give or take less than
    half the depth of the tree: at most 3 draws for 64 sources (and p * num_sources / 2**32 for rounding the weights).
    """

    shares: tuple[int, ...]

    @staticmethod
    def of(weights: Sequence[float]) -> "Mixture":
        """The mixture in which source i is drawn in proportion to `weights[i]`.

        Raises:
            ValueError: no weights, or one that is not positive and finite.
        """
        if not weights or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"weights must be positive and finite, and at least one: {list(weights)}")
        return Mixture(shares=_shares(weights))

    def locate(self, position: int) -> tuple[int, int]:
        """The source drawn at `position`, and how many times it had been drawn before.

        >>> [Mixture.of([3, 1]).locate(p) for p in range(4)]
        [(0, 0), (0, 1), (1, 0), (0, 2)]
        """
        first, stop, total = 0, len(self.shares), sum(self.shares)
        while stop - first > 1:
            middle = (first + stop) // 2
            left = sum(self.shares[first:middle])
            before = _dealt(position, left, total)
            if _dealt(position + 1, left, total) > before:
                position, stop, total = before, middle, left
            else:
                position, first, total = position - before, middle, total - left
        return first, position


def _dealt(draws: int, left: int, total: int) -> int:
    """Number of the first `draws` that go left: draws * left / total, rounded to nearest, halves up."""
    return (2 * draws * left + total) // (2 * total)
