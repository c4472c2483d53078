"""Curves drawn with characters: each holds 2 x 4 dots of Braille."""

import math
from collections.abc import Iterable, Sequence

from skein.wire.shown.points import Point

_BLANK = 0x2800
# The bit of each dot in a character, by column and row.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_MARK = "o"
_MARGIN = 10


def plot(points: Sequence[Point], *, width: int, height: int) -> list[str]:
    """Lines of text: the loss as dots, validation losses as `o`, with numbers at both ends of both axes.

    Where steps are more than columns of dots, a dot is the mean of those that fall into its column. What is not finite
    is left out.

    Args:
        points: in order.
        width: characters of a line, at least 20.
        height: lines of the drawing itself, at least 2; one more names the steps.
    """
    losses = _finite((point.step, point.loss) for point in points)
    marks = _finite((point.step, point.validation_loss) for point in points)
    both = losses + marks
    if not both:
        return ["no losses yet"]
    first, last = min(step for step, _ in both), max(step for step, _ in both)
    low, high = min(value for _, value in both), max(value for _, value in both)
    num_columns = max(10, width - _MARGIN)
    canvas = _Canvas(num_columns, height)
    sums: dict[int, tuple[float, int]] = {}
    for step, value in losses:
        column = _place(step, first, last, 2 * num_columns)
        total, count = sums.get(column, (0.0, 0))
        sums[column] = total + value, count + 1
    for column, (total, count) in sums.items():
        canvas.dot(column, 4 * height - 1 - _place(total / count, low, high, 4 * height))
    for step, value in marks:
        row = height - 1 - _place(value, low, high, height)
        canvas.mark(_place(step, first, last, num_columns), row)
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    rows = [f"{labels.get(row, ''):>{_MARGIN - 2}} {line}" for row, line in enumerate(canvas.lines())]
    begin, end = f"step {first}", str(last)
    return [*rows, " " * (_MARGIN - 1) + begin + end.rjust(max(1, num_columns - len(begin)))]


class _Canvas:
    def __init__(self, num_columns: int, num_rows: int) -> None:
        self._bits = [[0] * num_columns for _ in range(num_rows)]
        self._marks: set[tuple[int, int]] = set()

    def dot(self, x: int, y: int) -> None:
        self._bits[y // 4][x // 2] |= _BITS[x % 2][y % 4]

    def mark(self, column: int, row: int) -> None:
        self._marks.add((column, row))

    def lines(self) -> list[str]:
        return [
            "".join(
                _MARK if (column, row) in self._marks else chr(_BLANK + bits) if bits else " "
                for column, bits in enumerate(line)
            ).rstrip()
            for row, line in enumerate(self._bits)
        ]


def _finite(values: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in values if value is not None and math.isfinite(value)]


def _place(value: float, low: float, high: float, size: int) -> int:
    """Place of a value among `size` between two ends; the middle one where the ends are equal."""
    if high <= low:
        return size // 2
    return min(size - 1, int((value - low) / (high - low) * size))
