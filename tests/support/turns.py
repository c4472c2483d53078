"""Loops that say when they have turned, so that a test waits for what holds without asking by the clock."""

import asyncio
import selectors
from collections.abc import Callable
from weakref import WeakKeyDictionary

Holds = Callable[[], bool]


class Turns(selectors.DefaultSelector):
    """What a loop asks, at each of its turns, for what has come; whoever waits here is told first."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[asyncio.Future[None], Holds] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of a selector; at once, if somebody's wait is over."""
        is_over = False
        for waits, holds in list(self._waiting.items()):
            if not waits.done() and holds():
                waits.set_result(None)
                is_over = True
        return super().select(0 if is_over else timeout)

    async def until(self, holds: Holds) -> None:
        """Wait for the turn after which `holds`."""
        waits = asyncio.get_running_loop().create_future()
        self._waiting[waits] = holds
        try:
            await waits
        finally:
            del self._waiting[waits]


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


class TurningPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes loops for `until`."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A loop whose turns are known."""
        turns = Turns()
        loop = asyncio.SelectorEventLoop(turns)
        _TURNS[loop] = turns
        return loop


async def until(holds: Holds) -> None:
    """Wait until `holds`, which is asked whenever the running loop has turned, and never else."""
    await _TURNS[asyncio.get_running_loop()].until(holds)
