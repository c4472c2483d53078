"""What one part of `bench.aggregation` gives back.

Each module beside this one has `measure(*, is_quick: bool) -> Measured`, or, without charts, `rows` in the same form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.plot import Chart
from bench.report import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures beside their goals, and charts by the name of their file, without `aggregation-` and `.svg`."""

    rows: tuple[Row, ...]
    charts: Mapping[str, Chart] = field(default_factory=dict)
