"""Patience with devices: what never ends is told from what takes long by how long its kind took before."""

from collections import defaultdict, deque
from collections.abc import Hashable

LEAST_PATIENCE_S, PATIENCE_TIMES = 2.5, 2.0
"""Bounds beyond which an ask never ends: so long, and so many times the longest that its kind took lately.

With the end of the processes, and the way of the news, the coordinator knows within 3 s.
"""
NUM_KEPT = 16
"""Times of each kind that count: cold devices, and a machine that stood still, are forgotten."""
WARMING_S = 120.0
"""The same for what was not asked before: devices warm up, and processes start."""
SLOW_BYTES_PER_S = 100e6
"""Rate at which a busy machine still hands over what goes along then, such as all parameters of a large stage."""


class DevicePatience:
    """Bounds on how long a worker waits for the devices of its mesh, by kinds of what it asks.

    A kind is whatever takes about equally long each time; None: how long it takes has nothing to do with the last.

    Args:
        least_s: what was timed before is waited for at least so long.

    >>> patience = DevicePatience()
    >>> patience.took("backward", 2.0)
    >>> patience.bound_s("backward"), patience.bound_s("forward"), patience.bound_s(None)
    (4.0, 120.0, 120.0)
    """

    def __init__(self, *, least_s: float = LEAST_PATIENCE_S) -> None:
        self._least_s = least_s
        self._taken_s: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def bound_s(self, kind: Hashable, *, num_bytes: int = 0) -> float:
        """Seconds after which what was asked never ends, without those for which others had the processors.

        Args:
            num_bytes: what goes along to all devices.
        """
        usual_s = max(self._taken_s[kind], default=None)
        if usual_s is None:
            return WARMING_S + num_bytes / SLOW_BYTES_PER_S
        return max(self._least_s, PATIENCE_TIMES * usual_s)

    def is_hung(self, owed_s: float) -> bool:
        """Whether a device that has owed an answer for so long is why the coordinator turns its worker away.

        The coordinator has bounds of its own, on whole ops and by what it has heard of them: either may be over first.
        """
        return owed_s >= self._least_s

    def took(self, kind: Hashable, seconds: float) -> None:
        """All devices have answered after so long, without the time for which others had the processors."""
        if kind is not None:
            self._taken_s[kind].append(seconds)
