"""Window of bytes that a receiver lets its peer have on the way, found by trying.

A window below the bandwidth-delay product leaves the link idle; one above it only makes queues, behind which an older
microbatch waits. The receiver knows neither bandwidth nor delay, but it sees the rate at which whole windows arrive. It
doubles the window, keeps the larger one if the rate grew by a quarter at least, else goes back and tries again later.

Source: the idea of TCP's dynamic right-sizing (Fisk and Feng 2001), as a hill climb on the receiver's clock alone.
"""

from skein.errors import RemoteError

INITIAL_BYTES = 4 << 20
MAX_BYTES = 64 << 20
_GAIN = 1.25
_REST = 16
"""Windows between two trials."""
_SIGN_S = 0.25
"""Between two grants while bytes arrive, however little it is: to the sender they are signs of life."""


class Window:
    """The credit of one stream. Never below two parts of the largest size, so that a sender can always go on."""

    def __init__(self, *, initial_bytes: int = INITIAL_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self.size = initial_bytes
        self._max_bytes = max_bytes
        self._granted = 0
        self._received = 0
        self._mark = 0
        self._mark_s = 0.0
        self._mark_received = 0
        self._rate_before: float | None = None
        self._rest = 0
        self._granted_s = 0.0

    def open(self, *, now: float) -> int:
        """Bytes to grant as the stream begins."""
        return self._grant(now=now, is_marked=True)

    def take(self, num_bytes: int, *, now: float) -> int:
        """Count bytes that arrived and are filed; gives the bytes to grant now, 0 while it is not worth a message.

        Raises:
            RemoteError: the sender had no credit for them.
        """
        self._received += num_bytes
        if self._received > self._granted:
            raise RemoteError(f"sent {self._received - self._granted} bytes more than it was granted")
        is_marked = self._received >= self._mark
        if is_marked:
            self._measure(now=now)
        return self._grant(now=now, is_marked=is_marked)

    def _grant(self, *, now: float, is_marked: bool) -> int:
        owed = self.size - (self._granted - self._received)
        is_due = 4 * owed >= self.size or now - self._granted_s >= _SIGN_S
        granted = owed if is_due and owed > 0 else 0
        self._granted += granted
        self._granted_s = now if granted else self._granted_s
        if is_marked:
            self._mark, self._mark_s, self._mark_received = self._granted, now, self._received
        return granted

    def _measure(self, *, now: float) -> None:
        """A window granted at the mark has arrived: one round trip if credit was short, else as long as it took."""
        rate = (self._received - self._mark_received) / max(now - self._mark_s, 1e-9)
        if self._rate_before is not None:
            is_better = rate >= _GAIN * self._rate_before
            self._rate_before = None
            if not is_better:
                self.size //= 2
                self._rest = _REST
        elif self._rest:
            self._rest -= 1
        if not self._rest and 2 * self.size <= self._max_bytes:
            self._rate_before = rate
            self.size *= 2
