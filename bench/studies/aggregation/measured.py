"""What one part of `bench.studies.aggregation` gives back.

Each module beside this one has `measure(*, is_quick: bool) -> Measured`, or, without charts, `rows` in the same form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.report import Row
from bench.studies.plot import Chart, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures beside their goals, and charts by the name of their file, without `aggregation-` and `.svg`."""

    rows: tuple[Row, ...]
    charts: Mapping[str, Chart] = field(default_factory=dict)


def banded(courses_by_label: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> tuple[Line, ...]:
    """A line for each label: by step the median of its courses, which have the same steps, in a band of them all."""
    lines = []
    for look, (label, courses) in enumerate(courses_by_label.items()):
        columns = [[value for _, value in column] for column in zip(*courses, strict=True)]
        points = tuple((float(k), median(at)) for (k, _), at in zip(courses[0], columns, strict=True))
        low, high = tuple(map(min, columns)), tuple(map(max, columns))
        lines.append(Line(label=label, look=look, points=points, low=low, high=high))
    return tuple(lines)
