"""Sums of a few numbers that are the same in whatever order they come; without torch, for whoever decides."""

from collections.abc import Iterable
from math import fsum, isfinite


def exact_sum(values: Iterable[float]) -> float:
    """The sum rounded once, whatever the order; not finite where plain addition is not, and never an error.

    >>> exact_sum([0.1] * 10), exact_sum([1e308, 1e308]), exact_sum([float("inf"), float("-inf")])
    (1.0, inf, nan)
    """
    listed = list(values)
    total = sum(listed)
    return fsum(listed) if isfinite(total) else total
