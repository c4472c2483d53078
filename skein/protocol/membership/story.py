"""Story of each id: the last few lines about it, for errors and for people who ask."""

from collections import OrderedDict, deque


class Story:
    """Remembers at most `num_lines` lines for each of at most `num_ids` ids, forgetting the longest untouched."""

    def __init__(self, *, num_lines: int = 32, num_ids: int = 4096) -> None:
        self._num_lines = num_lines
        self._num_ids = num_ids
        self._lines: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()

    def tell(self, about: str, line: str, *, now: float) -> None:
        """Add a line about an id."""
        lines = self._lines.setdefault(about, deque(maxlen=self._num_lines))
        self._lines.move_to_end(about)
        lines.append((now, line))
        if len(self._lines) > self._num_ids:
            self._lines.popitem(last=False)

    def of(self, about: str) -> tuple[str, ...]:
        """Lines about an id, oldest first, each with the time it was told at."""
        return tuple(f"{at:.3f} {line}" for at, line in self._lines.get(about, ()))
