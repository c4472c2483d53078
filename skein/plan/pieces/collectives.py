"""Times of a mesh's collectives, as predicted beside as measured, by kind."""

from collections import Counter
from enum import StrEnum

from skein.plan.pieces.line import TimeLine


class LaneKind(StrEnum):
    """Kind of what devices of a mesh wait for: `TP` sums and gathers of blocks in parts, `A2A` rows of experts."""

    TP = "tp"
    A2A = "a2a"


class CollectiveTimes:
    """Number of collectives so far, and their seconds, by kind: of those alone that are predicted."""

    def __init__(self) -> None:
        self.num: Counter[LaneKind] = Counter()
        self.predicted_s: dict[LaneKind, float] = dict.fromkeys(LaneKind, 0.0)
        self.measured_s: dict[LaneKind, float] = dict.fromkeys(LaneKind, 0.0)
        self.num_fits: Counter[LaneKind] = Counter()
        """Number of fits of the lines that predict them: more than one where predictions were off."""
        self.r_squared: dict[LaneKind, float] = {}
        """Least R² of the lines that were fitted last."""

    def add(self, kind: LaneKind, num: int, *, predicted_s: float, measured_s: float) -> None:
        """Count so many more, which took so long together."""
        self.num[kind] += num
        self.predicted_s[kind] += predicted_s
        self.measured_s[kind] += measured_s

    def fitted(self, kind: LaneKind, *lines: TimeLine) -> None:
        """Predictions are made by these lines from now on."""
        self.num_fits[kind] += 1
        self.r_squared[kind] = min(line.r_squared for line in lines)
