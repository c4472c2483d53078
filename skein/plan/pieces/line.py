"""Straight lines through measured times: so long for each call, and so long for each unit of size."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

LEAST_SIZES = 8
"""Different sizes that a line is put through at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """Seconds by size: `alpha_s` of each call and `beta_s` of each unit; `r_squared` of the times it was fitted to."""

    alpha_s: float
    beta_s: float
    r_squared: float = 1.0

    def seconds(self, size: float) -> float:
        """Seconds that one call of this size takes."""
        return self.alpha_s + self.beta_s * size

    def size_within(self, seconds: float, most: int) -> int:
        """Largest size, up to `most`, of a call that takes no longer; 0 where none does.

        >>> line = TimeLine(alpha_s=2.0, beta_s=0.5)
        >>> [line.size_within(seconds, 100) for seconds in (1.0, 3.2, 1000.0)]
        [0, 2, 100]
        """
        left_s = seconds - self.alpha_s
        if left_s < 0:
            return 0
        return int(left_s / self.beta_s) if left_s < self.beta_s * most else most


def fitted_line(sizes: Sequence[float], seconds: Sequence[float]) -> TimeLine:
    """TimeLine of least squares whose `alpha_s` and `beta_s` are no less than 0.

    Raises:
        ValueError: fewer than `LEAST_SIZES` different sizes.

    >>> fitted_line(range(1, 9), [2 + 3 * x for x in range(1, 9)])
    TimeLine(alpha_s=2.0, beta_s=3.0, r_squared=1.0)
    """
    if len(set(sizes)) < LEAST_SIZES:
        raise ValueError(f"{len(set(sizes))} sizes: measure {LEAST_SIZES} at least")
    num = len(sizes)
    size, second = fsum(sizes) / num, fsum(seconds) / num
    spread = fsum((x - size) ** 2 for x in sizes)
    beta_s = fsum((x - size) * (y - second) for x, y in zip(sizes, seconds, strict=True)) / spread
    alpha_s = second - beta_s * size
    if beta_s < 0:
        alpha_s, beta_s = second, 0.0
    elif alpha_s < 0:
        products = fsum(x * y for x, y in zip(sizes, seconds, strict=True))
        alpha_s, beta_s = 0.0, products / fsum(x * x for x in sizes)
    unexplained = fsum((y - alpha_s - beta_s * x) ** 2 for x, y in zip(sizes, seconds, strict=True))
    whole = fsum((y - second) ** 2 for y in seconds)
    return TimeLine(alpha_s=alpha_s, beta_s=beta_s, r_squared=1 - unexplained / whole if whole else 1.0)
