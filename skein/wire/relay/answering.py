"""The called side: streams kept open to relays, and each caller joined with this process's own server."""

import asyncio
import logging
from collections.abc import Iterable
from typing import NoReturn

from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.ways import RelayPlace
from skein.types import Incarnation, WorkerId
from skein.wire.calling import dialled
from skein.wire.channel import Lane
from skein.wire.codec import INCOMING, LISTEN_REQUEST
from skein.wire.extra import AnswerCall, ListenRequest
from skein.wire.relay.carrying import CHUNK_BYTES, DialRelay, carry
from skein.wire.relay.switchboard import MAX_OF_ONE
from skein.wire.v1 import relay_pb2_grpc

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


class Listening:
    """Relays at which a process is called.

    Args:
        host, port: where its own server listens, on this machine.
    """

    def __init__(
        self, worker: WorkerId, incarnation: Incarnation, *, dial: DialRelay, host: str, port: int
    ) -> None:
        self._request = LISTEN_REQUEST.encode(ListenRequest(worker=worker, incarnation=incarnation))
        self._dial = dial
        self._own = host, port
        self._keeping: dict[RelayPlace, asyncio.Task[NoReturn]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, relays: Iterable[RelayPlace]) -> None:
        """Listen at these relays, and no others; connections that are open go on."""
        wanted = set(relays)
        for relay in self._keeping.keys() - wanted:
            self._keeping.pop(relay).cancel()
        for relay in wanted - self._keeping.keys():
            self._keeping[relay] = asyncio.create_task(self._keep(relay))

    def close(self) -> None:
        """Listen nowhere, and end all connections."""
        self.take(())
        for answering in self._answering:
            answering.cancel()

    async def _keep(self, relay: RelayPlace) -> NoReturn:
        """Keep a stream to a relay open, for ever."""
        pause_s = _FIRST_PAUSE_S
        while True:
            was_heard = False
            try:
                async with dialled(lambda _, lane: self._dial(relay, lane), "", Lane.WATCH) as channel:
                    async for message in relay_pb2_grpc.RelayStub(channel).Listen(self._request):
                        was_heard = True
                        self._called(relay, INCOMING.decode(message).connection)
            except (aio.AioRpcError, RemoteError) as error:
                reason = error.details() if isinstance(error, aio.AioRpcError) else str(error)
                _log.debug("relay=%s: %s", relay.worker or "coordinator", reason)
            pause_s = _FIRST_PAUSE_S if was_heard else min(2 * pause_s, _LAST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _called(self, relay: RelayPlace, connection: str) -> None:
        if len(self._answering) < MAX_OF_ONE:
            answering = asyncio.create_task(self._answer(relay, connection))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)

    async def _answer(self, relay: RelayPlace, connection: str) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self._own, limit=CHUNK_BYTES)
        except OSError as error:
            _log.warning("cannot reach this worker's own server at %s:%d: %s", *self._own, error)
            return
        await carry(self._dial, relay, AnswerCall(connection=connection), reader, writer)
