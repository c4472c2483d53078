"""Room for callers that have not proved who they are: few at once, fewer of one address, none for long.

Whoever comes gets in, and whoever has been in for longest goes for that. So a caller that says what it wants at once is
always answered, however many hold on to their places beside it, from its own address or from others.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Places for `most` at once, `per_address` of them for one address."""

    def __init__(self, *, most: int, per_address: int) -> None:
        self._most = most
        self._per_address = per_address
        self._inside: dict[asyncio.Timeout, str] = {}

    def __len__(self) -> int:
        return len(self._inside)

    @asynccontextmanager
    async def enter(self, address: str, seconds: float | None) -> AsyncIterator[None]:
        """A place for as long as the block takes.

        Raises:
            TimeoutError: it took longer than `seconds`, or the place was needed for another.
        """
        async with asyncio.timeout(seconds) as stay:
            self._make_room(address)
            self._inside[stay] = address
            try:
                yield
            finally:
                self._inside.pop(stay, None)

    def _make_room(self, address: str) -> None:
        counts = Counter(self._inside.values())
        if counts[address] >= self._per_address:
            self._put_out(address)
        elif len(self._inside) >= self._most:
            ((most, _),) = counts.most_common(1)
            self._put_out(most)

    def _put_out(self, address: str) -> None:
        """End the stay of the one of this address who has been in for longest."""
        oldest = next(stay for stay, where in self._inside.items() if where == address)
        del self._inside[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())
