"""Revocations as workers hear of them: the coordinator is asked again and again whom they are to refuse."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NoReturn

from skein.errors import RemoteError
from skein.wire.calling import Dial, reached
from skein.wire.channel import Lane
from skein.wire.identity.callers import NamedCallers
from skein.wire.identity.names import Caller, CallerRole
from skein.wire.v1 import identity_pb2, identity_pb2_grpc

LOOK_S = 30.0
_CALL_S = 20.0
_log = logging.getLogger(__name__)


class Revocations:
    """Callers whom this process refuses though their certificates count, and the check of calls that does so."""

    def __init__(self) -> None:
        self._revoked: frozenset[tuple[CallerRole, str]] = frozenset()
        self.named = NamedCallers(lambda caller: (caller.role, caller.name) in self._revoked)

    def take(self, callers: Iterable[Caller]) -> None:
        """Refuse these from now on, and nobody else; calls of theirs that go on end."""
        heard = {(caller.role, caller.name): caller for caller in callers}
        others, self._revoked = self._revoked, frozenset(heard)
        for key in self._revoked - others:
            self.named.end(heard[key])

    async def look(self, dial: Dial, address: str) -> None:
        """Ask the coordinator at `address`.

        Raises:
            RemoteError: it does not answer.
        """
        async with reached(dial, address, Lane.CONTROL, patience_s=_CALL_S) as channel:
            ask = identity_pb2_grpc.IdentitiesStub(channel).ListRevoked
            reply = await ask(identity_pb2.ListRevokedRequest(), timeout=_CALL_S)
        known = set(CallerRole)
        self.take(
            Caller(name=one.name, role=CallerRole(one.role), namespace=one.namespace)
            for one in reply.identities
            if one.role in known
        )

    async def keep(self, *, dial: Dial, at: Callable[[], str]) -> NoReturn:
        """Ask whoever leads as long as this runs; while nobody answers, what was heard last counts."""
        while True:
            try:
                await self.look(dial, at())
            except RemoteError as error:
                _log.debug("revocations not heard: %s", error)
            await asyncio.sleep(LOOK_S)
