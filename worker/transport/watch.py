"""Watches the way to one peer while nothing is sent, so that a link that leads nowhere is known before it is needed.

Rules of this file
- A call of its own, on which nothing is said after the first reply: the pings of its connection do the watching, and
  none of them queues behind bulk.
- Only silence is told, once until the peer is heard again. Who died is noticed by others, and who leaves is no news.
- What lanes hear is heard: while bulk arrives, a late ping means nothing.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from skein.protocol.messages.directives import Member
from skein.wire.calling import Dial, dialled
from skein.wire.channel import Lane
from worker.transport.pace import PeerPace, PeerPatience

_SILENCE = ("ping timeout", "keepalive", "timed out")
"""Words of gRPC and the system for connections on which nothing was answered."""
_PAUSE_S = 0.5
_CONFIRM_S = 0.4
"""For one more call, before silence is told: after a standstill of this process all its pings look unanswered."""


class Watch:
    """Watches `peer`, which `run` does until it is cancelled.

    Args:
        on_silent: told why the peer cannot be reached. Called on the event loop.
    """

    def __init__(
        self,
        peer: Member,
        *,
        dial: Dial,
        patience: PeerPatience,
        pace: PeerPace,
        on_silent: Callable[[str], None],
    ) -> None:
        self._peer = peer
        self._dial = dial
        self._patience = patience
        self._pace = pace
        self._on_silent = on_silent
        self._is_told = False
        self._was_reached = False

    async def run(self) -> NoReturn:
        """Watch for ever."""
        while True:
            reason = await self._until_broken()
            unheard_s = asyncio.get_running_loop().time() - self._pace.heard_at
            is_silent = reason is not None and unheard_s > self._bound_s() / 2
            if is_silent and not self._is_told and not await self._answers():
                self._is_told = True
                self._on_silent(f"{self._peer.address}: {reason}")
            await asyncio.sleep(_PAUSE_S)

    async def _until_broken(self) -> str | None:
        """Ask for the peer's health and wait for the end of the call; why that was silence, None if it was not."""
        bound_s = self._bound_s() if self._was_reached else self._patience.first_s
        try:
            async with dialled(self._dial, self._peer.address, Lane.WATCH) as channel:
                replies = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
                async with asyncio.timeout(bound_s):
                    await anext(replies)
                self._was_reached, self._is_told = True, False
                async for _ in replies:
                    pass
        except TimeoutError:
            return f"silent for {bound_s:.1f} s"
        except StopAsyncIteration:
            return None
        except aio.AioRpcError as error:
            details = (error.details() or "").lower()
            is_silence = error.code() is grpc.StatusCode.UNAVAILABLE and any(x in details for x in _SILENCE)
            return "no answer to pings" if is_silence else None
        return None

    async def _answers(self) -> bool:
        """Whether one more call is answered at once."""
        try:
            async with dialled(self._dial, self._peer.address, Lane.WATCH) as channel:
                async with asyncio.timeout(_CONFIRM_S):
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except (TimeoutError, aio.AioRpcError):
            return False
        return True

    def _bound_s(self) -> float:
        return self._patience.bound_s(self._pace.usual_s(0, now=asyncio.get_running_loop().time()))
