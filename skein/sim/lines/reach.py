"""Contact of processes with the coordinator in a simulated world, and since when: what a roll-back is judged by."""

from dataclasses import dataclass

from skein.protocol.coordinator.runs.placing.giving_up import LEAST_S
from skein.types import Incarnation

ASKED_S = 1.0
"""Seconds in reach after which a process was asked, or a fence still waits for its answer."""


@dataclass(frozen=True, slots=True)
class _Since:
    is_reached: bool
    at_s: float


class ReachTimes:
    """Remembers by process when it was reached, or was not any more. `now` is true time."""

    def __init__(self) -> None:
        self._by_process: dict[Incarnation, _Since] = {}
        self._served_at = 0.0

    def serves(self, *, now: float) -> None:
        """A coordinator began: nobody has been silent to it for longer than that."""
        self._served_at = now

    def note(self, incarnation: Incarnation, *, is_reached: bool, now: float) -> None:
        """Note whether this process and the coordinator hear each other."""
        known = self._by_process.get(incarnation)
        if known is None or known.is_reached != is_reached:
            self._by_process[incarnation] = _Since(is_reached, now)

    def counts(self, incarnation: Incarnation, *, now: float) -> bool:
        """Whether no step may be given up that this process holds: it could be asked, or was not waited for yet."""
        known = self._by_process.get(incarnation, _Since(False, self._served_at))
        if known.is_reached:
            return now - known.at_s >= ASKED_S
        return now - max(known.at_s, self._served_at) < LEAST_S
