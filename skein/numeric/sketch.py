"""Sketches of gradients: a few numbers by which two results are compared that no one machine has."""

from collections.abc import Iterable, Sequence
from math import hypot, isfinite

SKETCH_LENGTH = 16
"""Numbers in a sketch: of so many, a difference shows within about a third of its true size."""

Sketch = tuple[float, ...]


def added(sketches: Iterable[Sequence[float]]) -> Sketch:
    """Sketch of all that several are of: they are linear.

    >>> added([(1.0, 2.0), (0.5, -2.0)])
    (1.5, 0.0)
    """
    return tuple(sum(values) for values in zip(*sketches, strict=True))


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Norm of the difference of two sketches, as a share of the longer one; 0 of two that are not finite.

    >>> distance((3.0, 4.0), (3.0, 4.0)), distance((3.0, 4.0), (-3.0, -4.0)), distance((1.0, 0.0), (float("nan"), 0.0))
    (0.0, 2.0, inf)
    """
    norms = hypot(*one), hypot(*other)
    if not all(map(isfinite, norms)):
        return float("inf") if any(map(isfinite, norms)) else 0.0
    apart = hypot(*(a - b for a, b in zip(one, other, strict=True)))
    return apart / max(norms) if apart else 0.0
