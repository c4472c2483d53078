"""The two sockets of a relayed TCP connection. Bytes go from one to the other as late as a link would carry them.

Rules of this file
- An `ArrivalTiming` says when bytes arrive; infinity is never, until `resume` asks it again. What TCP promises stays:
  nothing is lost or reordered, and the end of a connection travels like a byte.
- Who sends more than the window, or to one who does not read, is not read from.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol


class EventLoop(Protocol):
    """An event loop, as far as halves need one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> object: ...


class ArrivalTiming(Protocol):
    """Says when bytes arrive."""

    def arrival_s(self, sender: int, receiver: int, num_bytes: int, *, now: float) -> float:
        """Time at which the last of `num_bytes` is there, if all of them are to be sent at `now`."""
        ...


class Half(asyncio.Protocol):
    """A socket of a relayed connection. Its bytes go to `other`, when they would have arrived there.

    Args:
        timing: of the bytes received here, which go from `sender` to `receiver`.
        window_bytes: how many may be under way.
    """

    def __init__(
        self,
        timing: ArrivalTiming,
        sender: int,
        receiver: int,
        *,
        clock: EventLoop,
        window_bytes: float = inf,
    ) -> None:
        self.other: Half | None = None
        self.is_over = False
        self._timing = timing
        self._pair = sender, receiver
        self._clock = clock
        self._window_bytes = window_bytes
        self._transport: asyncio.Transport | None = None
        self._under_way: deque[tuple[float, bytes]] = deque()  # no bytes: the end
        self._num_under_way = 0
        self._is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._read_or_not()

    def join(self, other: "Half") -> None:
        """Let bytes go to `other`."""
        self.other = other
        self._read_or_not()

    def data_received(self, data: bytes) -> None:
        self._num_under_way += len(data)
        self._send(data)
        self._read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        if self.other is not None:
            self._send(b"")

    def pause_writing(self) -> None:
        self._fill(is_full=True)

    def resume_writing(self) -> None:
        self._fill(is_full=False)

    def _fill(self, *, is_full: bool) -> None:
        self._is_full = is_full
        if self.other is not None:
            self.other._read_or_not()

    def resume(self) -> None:
        """Ask again when what would never arrive does."""
        held = [data for at, data in self._under_way if at == inf]
        self._under_way = deque((at, data) for at, data in self._under_way if at < inf)
        for data in held:
            self._send(data)

    def write(self, data: bytes) -> None:
        """Hand on what has arrived; to nobody if the socket is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the socket, as nothing more will come."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, data: bytes) -> None:
        at = self._timing.arrival_s(*self._pair, len(data), now=self._clock.time())
        if self._under_way:
            at = max(at, self._under_way[-1][0])  # TCP never reorders
        self._under_way.append((at, data))
        if len(self._under_way) == 1:
            self._wake_at(at)

    def _arrived(self) -> None:
        assert self.other is not None
        now = self._clock.time()
        while self._under_way and self._under_way[0][0] <= now:
            _, data = self._under_way.popleft()
            self._num_under_way -= len(data)
            if data:
                self.other.write(data)
            else:
                self.other.close()
        if self._under_way:
            self._wake_at(self._under_way[0][0])
        self._read_or_not()

    def _wake_at(self, at: float) -> None:
        if at < inf:
            self._clock.call_at(at, self._arrived)

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self.other is not None and not self.other._is_full and self._num_under_way < self._window_bytes:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
