"""Simulated time: a heap of what is due, and nothing else moves it."""

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Clock:
    """Runs actions in order of their time; at equal times, in order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> None:
        """Have `action` run at `time_s`, or now if that has passed."""
        self._count += 1
        heappush(self._heap, (time_s if time_s > self.now else self.now, self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Have `action` run `delay_s` from now."""
        self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._heap:
            return False
        self.now, _, action = heappop(self._heap)
        self.num_run += 1
        action()
        return True
