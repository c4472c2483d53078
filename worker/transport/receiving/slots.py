"""Places for streams of peers: so many at once, of one peer and of all, and none for who says nothing.

Rules of this file
- A stream that is silent for too long loses its place. An honest peer that is idle dials again when it has something.
- Where all places are taken, the stream that has been silent for longest gives way to a newcomer: so many streams that
  say nothing block nobody. One that speaks never does.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from skein.wire.serving.hosts import host_of, is_from_here

GIVES_WAY_S = 1.0
"""Silence after which a stream may lose its place to another."""

T = TypeVar("T")


class CrowdedError(Exception):
    """All places are taken by streams that speak; the peer may come again."""


class IdleError(Exception):
    """A stream said nothing for too long, or for longest of all where there was no room; the peer may come again."""


class StreamSlot:
    """The place of one stream."""

    def __init__(self, peer: str, silent_s: float) -> None:
        self.peer = peer
        self.heard_s = asyncio.get_running_loop().time()
        self._silent_s = silent_s
        self._wait: asyncio.Timeout | None = None

    @property
    def may_give_way(self) -> bool:
        """Whether it has been waiting for its peer for a while."""
        return self._wait is not None and self._now() - self.heard_s >= GIVES_WAY_S

    def give_way(self) -> None:
        """End the stream: another one takes its place."""
        assert self._wait is not None
        # Its own silence may be ending it at this moment.
        if not self._wait.expired():
            self._wait.reschedule(self._now())

    @contextmanager
    def awaited(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Within this the peer is waited for."""
        self._wait = wait
        try:
            yield
            self.heard_s = self._now()
        finally:
            self._wait = None

    async def each(self, messages: AsyncIterator[T]) -> AsyncIterator[T]:
        """The messages of a stream, until it ends.

        Raises:
            IdleError: it was silent for too long, or longest of all where there was no room.
        """
        while True:
            try:
                async with asyncio.timeout(self._silent_s) as wait:
                    with self.awaited(wait):
                        message = await anext(messages, None)
            except TimeoutError as error:
                raise IdleError(f"silent for {self._now() - self.heard_s:.1f} s: dial again") from error
            if message is None:
                return
            yield message

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class Slots:
    """Places for streams of one kind.

    Args:
        most: of all peers together.
        most_of_one: of one peer, so that it leaves room for others.
        silent_s: silence after which a stream ends.
    """

    def __init__(self, *, most: int, most_of_one: int, silent_s: float) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._silent_s = silent_s
        self._taken: list[StreamSlot] = []

    @contextmanager
    def take(self, peer: str) -> Iterator[StreamSlot]:
        """A place for a stream of `peer`.

        Raises:
            CrowdedError: there is none.
        """
        self._make_room(peer)
        slot = StreamSlot(peer, self._silent_s)
        self._taken.append(slot)
        try:
            yield slot
        finally:
            if slot in self._taken:
                self._taken.remove(slot)

    def _make_room(self, peer: str) -> None:
        own = [slot for slot in self._taken if slot.peer == peer]
        crowd = own if len(own) >= self._most_of_one else self._taken
        if len(own) < self._most_of_one and len(self._taken) < self._most:
            return
        silent = [slot for slot in crowd if slot.may_give_way]
        if not silent:
            raise CrowdedError(f"{len(crowd)} streams are open already")
        oldest = min(silent, key=lambda slot: slot.heard_s)
        self._taken.remove(oldest)
        oldest.give_way()


def peer_of(address: str) -> str:
    """Peer that a call comes from, by gRPC's name of the connection: its host, or on this machine the very connection.

    >>> peer_of("ipv4:10.0.0.7:4711"), peer_of("ipv4:127.0.0.1:4711")
    ('10.0.0.7', 'ipv4:127.0.0.1:4711')
    """
    return address if is_from_here(address) else host_of(address)
