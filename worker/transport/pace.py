"""Pace of one peer's signs of life: how long its silence may last, and how large parts may be.

A sign comes with each part that arrives, or four times a second. So on a slow link parts must be small, or the time
that one takes looks like a failure; and until a link has shown what it does, more is borne.
"""

from dataclasses import dataclass
from math import exp2, inf

from skein.wire.channel import PART_BYTES

LEAST_PART_BYTES = 64 << 10
"""Bytes that arrive in a moment on any link that is worth training over."""
_QUICK_S, _SLOW_S = 0.1, 0.5
"""Between two signs: below the one parts may be larger, above the other they must be smaller."""
_HALF_LIFE_S = 10.0
"""Half-life of the longest silence. A stall is expected again for a while, and forgotten if it was the only one."""
_MARGIN = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPatience:
    """Bounds on a peer's silence while something is expected of it: three times the longest of late, within limits.

    Raise `least_s` on machines so busy that a process may stand still for longer. `first_s` holds for bulk over a link
    that has carried none yet, `gone_s` for a peer whose machine says at once that nobody is there.
    """

    least_s: float = 2.2
    most_s: float = 30.0
    first_s: float = 8.0
    gone_s: float = 0.2

    def bound_s(self, usual_s: float | None) -> float:
        """The bound, given how long silence may last when all is well (None: not known)."""
        wanted_s = self.first_s if usual_s is None else _MARGIN * usual_s
        return min(max(wanted_s, self.least_s), self.most_s)


class PeerPace:
    """Pace of one peer, as all lanes to it know it together."""

    def __init__(self) -> None:
        self.answer_s = 0.0
        """Smoothed seconds from the last byte of a tensor to its acceptance; what a probe predicts, until one is."""
        self.part_bytes = PART_BYTES
        self.heard_at = -inf
        """Time at which a lane last heard of the peer."""
        self._silence_s = 0.0
        self._silence_at = 0.0
        self._known_bytes = LEAST_PART_BYTES

    def probed(self, round_trip_s: float, bytes_per_s: float, *, now: float) -> None:
        """The link there was measured, by a probe that had it for itself; bulk has to share it."""
        self.answer_s = round_trip_s + PART_BYTES / bytes_per_s
        self._remember(self.answer_s, now=now)

    def heard(self, silent_s: float, num_bytes: int, *, now: float) -> None:
        """A sign of life came `silent_s` after the one before it, or after it was due; it tells that bytes arrived."""
        self.heard_at = now
        self._remember(silent_s, now=now)
        self._known_bytes = max(self._known_bytes, num_bytes)
        if silent_s > _SLOW_S:
            self.part_bytes = max(self.part_bytes // 2, LEAST_PART_BYTES)
        elif silent_s < _QUICK_S:
            self.part_bytes = min(2 * self.part_bytes, PART_BYTES)

    def answered(self, seconds: float) -> None:
        """A tensor was accepted so long after its last byte was sent."""
        self.answer_s += (seconds - self.answer_s) / 8 if self.answer_s else seconds

    def usual_s(self, num_bytes: int, *, now: float) -> float | None:
        """Usual seconds of silence while so many bytes are under way; None: nothing like it was carried yet."""
        if min(num_bytes, self.part_bytes) > self._known_bytes:
            return None
        return max(self._faded(now=now), self.answer_s)

    def _remember(self, silent_s: float, *, now: float) -> None:
        self._silence_s = max(silent_s, self._faded(now=now))
        self._silence_at = now

    def _faded(self, *, now: float) -> float:
        return self._silence_s * exp2((self._silence_at - now) / _HALF_LIFE_S)
