"""Usage of workers by a namespace, as the run log tells it: what is long ago counts less."""

from dataclasses import dataclass

HALF_LIFE_S = 86400.0
"""Seconds in which what a namespace has used comes to count half as much."""


@dataclass(slots=True)
class Usage:
    """Worker seconds of committed steps, each fading from its commit on.

    >>> usage = Usage()
    >>> usage.add(8.0, wall_s=0.0)
    >>> usage.add(2.0, wall_s=HALF_LIFE_S)
    >>> usage.at(HALF_LIFE_S), usage.at(2 * HALF_LIFE_S)
    (6.0, 3.0)
    """

    _worker_s: float = 0.0
    _wall_s: float = 0.0

    def add(self, worker_s: float, *, wall_s: float) -> None:
        """Count a step that ended at `wall_s`."""
        self._worker_s = self.at(wall_s) + worker_s
        self._wall_s = max(self._wall_s, wall_s)

    def at(self, wall_s: float) -> float:
        """Worker seconds that count at `wall_s`; a clock that went back makes none of them younger."""
        return float(self._worker_s * 0.5 ** (max(0.0, wall_s - self._wall_s) / HALF_LIFE_S))
