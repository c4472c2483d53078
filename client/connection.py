"""The wire to a coordinator: calls that are repeated through its restarts, streams that go on where they broke.

Rules: the first call finds out whether the two speak the same protocol. Before any call has succeeded a failure is
told at once, for then the address is probably wrong; afterwards it is probably a restart, and calls are made again
until `patience_s` is over. That is safe because every call of ours may be made twice. Where there are several
addresses, or a standby names another one, calls go to the one that leads.

Modules that take long to import are imported where they are used: a command that lists jobs waits for each of them.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc
from grpc import aio

from client.errors import check_version, explain_call
from skein.errors import UserError
from skein.wire import codec
from skein.wire.channel import Lane, open_channel
from skein.wire.credentials import Credentials
from skein.wire.greeting import Coordinators, VersionReply
from skein.wire.leader import find_leader, named_leader, split_addresses, with_addresses
from skein.wire.v1 import checkpoint_pb2, checkpoint_pb2_grpc, identity_pb2_grpc, jobs_pb2, jobs_pb2_grpc

if TYPE_CHECKING:
    from skein.wire.extra import GetRequest
    from skein.wire.views import JobEvent, Key

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Method: TypeAlias = "Callable[[Connection], aio.UnaryUnaryMultiCallable[Request, Reply]]"

DEFAULT_TARGET = "127.0.0.1:7411"
PATIENCE_S = 60.0
"""A coordinator is back within 10 s of its death, on a busy machine within a minute."""
MAX_MOVES = 8
"""Most moves of one call after the leader without any progress."""
_RENEW_AGAIN_S = 60.0
_ASK_AGAIN_S = 60.0
"""Seconds after which a client that watches asks the coordinator again for the addresses of all coordinators."""
_PAUSE_S = 0.25
_MAX_PAUSE_S = 2.0
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Codes of calls whose server goes away; CANCELLED on streams that it ended while stopping."""


class Connection:
    """Calls to the coordinator at `target`. Lives on one event loop; connects at the first call.

    Args:
        target: host:port, or several with commas between: of a coordinator and its standbys.
        credentials: what the coordinator wants to see.
        timeout_s: for one try of one call.
        patience_s: how long a coordinator that has answered before may be gone.

    Raises:
        UserError: `target` is no address.
    """

    def __init__(
        self, target: str, *, credentials: Credentials, timeout_s: float, patience_s: float = PATIENCE_S
    ) -> None:
        self._addresses = split_addresses("coordinator", target)
        if not timeout_s > 0:
            raise UserError("timeout", timeout_s, "give a number of seconds above 0")
        self.target = target
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._version: VersionReply | None = None
        self._asked_s = 0.0
        """Monotonic time of the last answer to `version`."""
        self._renewed_s = 0.0
        """Unix time of the last try."""
        self._is_sought = len(self._addresses) == 1
        self._dial_all(self._addresses[0])

    def _dial_all(self, address: str) -> None:
        self._at = address
        self._control = self._dial(address, Lane.CONTROL)
        self._bulk = self._dial(address, Lane.STATE)
        self.jobs = jobs_pb2_grpc.JobsStub(self._control)
        self.identities = identity_pb2_grpc.IdentitiesStub(self._control)
        self.checkpoint = checkpoint_pb2_grpc.CheckpointStub(self._bulk)

    def _dial(self, address: str, lane: Lane) -> aio.Channel:
        return open_channel(address, lane, credentials=self._credentials)

    async def seek(self, named: str | None = None) -> bool:
        """Whether another address leads now than calls went to; from then on they go there.

        Args:
            named: whom a standby has named.
        """
        self._is_sought = True
        candidates = {*self._addresses, self._at, *(() if named is None else (named,))}
        if len(candidates) == 1:
            return False
        found = await find_leader(sorted(candidates), dial=self._dial)
        if found is None or found == self._at:
            return False
        await self._redial(found)
        return True

    async def _redial(self, address: str) -> None:
        before = (self._control, self._bulk)
        self._dial_all(address)
        for channel in before:
            # What still waits there is called off, and made again here.
            await channel.close(None)

    async def freshen(self) -> None:
        """Renew the identity that is shown, if that is due, and go on by it: who watches outlives a certificate.

        Raises:
            UserError: it is not made out any more; the text says what to do.
            RemoteError: it has ended, and no coordinator can be reached.
        """
        wallet, now_s = self._credentials.wallet, time.time()
        if wallet is None or not wallet.passport.enrol_addresses:
            return
        if now_s < max(wallet.passport.renewal_s(), self._renewed_s + _RENEW_AGAIN_S):
            return
        self._renewed_s = now_s
        from skein.wire.identity.enrolling import renewed_if_due

        fresh = await renewed_if_due(wallet.passport, clock=time.time)
        if fresh != wallet.passport:
            wallet.take(fresh)
            await self._redial(self._at)

    @property
    def at(self) -> str:
        """host:port that calls go to at the moment."""
        return self._at

    async def close(self) -> None:
        """Ends all calls."""
        await self._control.close(None)
        await self._bulk.close(None)

    async def version(self) -> VersionReply:
        """Version of the coordinator at the other end.

        Raises:
            NotReachable | VersionMismatch: none answers, or one of another protocol.
        """
        if not self._is_sought:
            _ = await self.seek()
        answer = await self._attempts(lambda at: at.jobs.Version, jobs_pb2.VersionRequest(), self._timeout_s)
        reply = codec.VERSION_REPLY.decode(answer)
        check_version(self.target, reply.protocol_version, reply.release)
        self._version = reply
        self._asked_s = time.monotonic()
        if reply.coordinators is not None:
            self._learn(reply.coordinators)
        return reply

    def _learn(self, coordinators: Coordinators) -> None:
        """Know all coordinators from now on, and have the identity's file name them: one of them may lead next."""
        self._addresses = with_addresses(self._addresses, coordinators.addresses)
        if (wallet := self._credentials.wallet) is not None:
            from skein.wire.identity.enrolling import learn_coordinators

            learn_coordinators(wallet, coordinators)

    async def call(
        self, method: "Method[Request, Reply]", request: Request, *, is_long: bool = False
    ) -> Reply:
        """The reply to `request`.

        Args:
            method: gives the method, as this connection has it at the moment.
            request: what it is called with.
            is_long: however long it takes.

        Raises:
            NotReachable | NotFound | Refused | VersionMismatch | RemoteError: see `client.errors`.
        """
        await self.freshen()
        if self._version is None:
            _ = await self.version()
        return await self._attempts(method, request, None if is_long else self._timeout_s)

    async def _attempts(
        self, method: "Method[Request, Reply]", request: Request, timeout_s: float | None
    ) -> Reply:
        patience = self.patience()
        while True:
            try:
                return await method(self)(request, timeout=timeout_s)
            except aio.AioRpcError as error:
                await patience.endure(error)

    def patience(self) -> "CallPatience":
        """Patience of one call; renewed whenever there is progress."""
        return CallPatience(self, self._patience_s if self._version is not None else 0.0)

    async def watch(
        self, job: str, *, since: "Key" = (0, 0), is_following: bool = True
    ) -> "AsyncGenerator[JobEvent, None]":
        """Events of `job` after the one with key `since`, each once and in order.

        New events follow until the job ends; without `is_following`, there are only those known now.

        Raises:
            NotReachable | NotFound | RemoteError: see `client.errors`.
        """
        if self._version is None:
            _ = await self.version()
        patience = self.patience()
        while True:
            await self.freshen()
            request = jobs_pb2.WatchRequest(
                job=job, since=since[0], since_line=since[1], until_now=not is_following
            )
            try:
                async with aclosing(_messages(self.jobs.Watch, request)) as messages:
                    async for message in messages:
                        event = codec.JOB_EVENT.decode(message)
                        patience.renew()
                        if time.monotonic() - self._asked_s > _ASK_AGAIN_S:
                            _ = await self.version()  # A standby may have come since.
                        if event.key > since:
                            since = event.key
                            yield event
                return
            except aio.AioRpcError as error:
                await patience.endure(error)

    async def file_parts(self, request: "GetRequest") -> AsyncGenerator[checkpoint_pb2.GetPart, None]:
        """The parts of a checkpoint's file, in one try.

        Raises:
            AioRpcError: it broke; ask again from where it did.
        """
        async with aclosing(_messages(self.checkpoint.Get, codec.GET_REQUEST.encode(request))) as parts:
            async for part in parts:
                yield part


class CallPatience:
    """Time that a broken call may take to work again."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """There was progress: all of the time is left again."""
        self._until = time.monotonic() + self._seconds
        self._pause_s = _PAUSE_S
        self._num_moves = 0

    async def endure(self, error: aio.AioRpcError) -> None:
        """Returns when the call that broke with `error` may be tried again.

        Raises:
            SkeinError: it is not worth it, or the time is over.
        """
        named = named_leader(error)
        is_worth_it = named is not None or self._seconds > 0
        if error.code() in _BROKEN and is_worth_it and self._num_moves < MAX_MOVES:
            self._num_moves += 1
            if await self._connection.seek(named):
                return
        if error.code() not in _BROKEN or time.monotonic() + self._pause_s > self._until:
            raise explain_call(error, self._connection.target) from error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


async def _messages(
    method: "aio.UnaryStreamMultiCallable[Request, Reply]", request: Request
) -> AsyncGenerator[Reply, None]:
    call = method(request)
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()
