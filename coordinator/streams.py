"""A worker's control stream as the driver sees it: directives wait here until the network takes them."""

import asyncio
from collections import deque

from skein.types import Incarnation, WorkerId
from skein.wire.extra import Downward

MAX_WAITING = 1024
"""A worker that lets so many directives wait does not read; its stream is closed and it may open another."""


class Stream:
    """Control stream of one worker. The driver offers, the servicer takes; both live on one event loop.

    Args:
        worker: that opened the stream.
        incarnation: process of that worker.
        secret: that it has shown; whoever shows another one is another process.
        max_waiting: directives that may wait before the stream is closed.
    """

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        *,
        secret: str = "",
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.secret = secret
        self.reason: str | None = None
        """Reason for which the stream was closed; None while it is open."""
        self._max_waiting = max_waiting
        self._waiting: deque[Downward] = deque()
        self._changed = asyncio.Event()

    @property
    def key(self) -> tuple[WorkerId, Incarnation]:
        """Worker and incarnation that opened the stream."""
        return self.worker, self.incarnation

    @property
    def num_waiting(self) -> int:
        """Directives that the network has not taken yet."""
        return len(self._waiting)

    def offer(self, directive: Downward) -> None:
        """Have a directive sent, in order. Lost on a closed stream; closes one that is full."""
        if self.reason is not None:
            return
        if len(self._waiting) >= self._max_waiting:
            self.close(f"{self._max_waiting} directives wait and none is taken")
            return
        self._waiting.append(directive)
        self._changed.set()

    def close(self, reason: str) -> None:
        """Say no more; what waits is dropped. Only the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._waiting.clear()
            self._changed.set()

    async def take(self) -> Downward | None:
        """The next directive; None once the stream is closed."""
        while not self._waiting and self.reason is None:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft() if self._waiting else None

    async def closed(self) -> str:
        """Waits for the end; gives the reason."""
        while self.reason is None:
            self._changed.clear()
            await self._changed.wait()
        return self.reason
