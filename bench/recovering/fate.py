"""Orders to a worker to end at a moment of its own course, and what carries them out there."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Orders(BaseModel):
    """Where to end: at the `nth` time of the last of these moments, after the others have come in turn, then how.

    `turns` of the event loop later, so that what was begun has partly left the process. `how`: SIGKILL, or SIGSTOP
    until somebody lets it go on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: tuple[str, ...]
    nth: int = 1
    turns: int = 0
    how: Literal["kill", "freeze"] = "kill"


class Fate:
    """Waits for orders in a file, counts moments from then on, and carries them out once."""

    def __init__(self, orders: Path) -> None:
        self._file = orders
        self._orders: Orders | None = None
        self._left: list[str] = []

    def moment(self, name: str) -> None:
        """It has come."""
        if self._orders is None and self._file.exists():
            self._orders = Orders.model_validate_json(self._file.read_bytes())
            self._left = [*self._orders.at[:-1], *[self._orders.at[-1]] * self._orders.nth]
            self._file.unlink()
        if self._orders is not None and self._left and name == self._left[0]:
            del self._left[0]
            if not self._left:
                self._end(self._orders, turns=self._orders.turns)

    def _end(self, orders: Orders, *, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(partial(self._end, orders, turns=turns - 1))
            return
        self._orders = None
        os.kill(os.getpid(), signal.SIGKILL if orders.how == "kill" else signal.SIGSTOP)
