"""Times of a mesh's collectives, as predicted beside as measured, by kind."""

from collections import Counter
from enum import StrEnum


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

    def add(self, kind: LaneKind, num: int, *, predicted_s: float, measured_s: float) -> None:
        """Count so many more, which took so long together."""
        self.num[kind] += num
        self.predicted_s[kind] += predicted_s
        self.measured_s[kind] += measured_s
