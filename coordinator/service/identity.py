"""Calls about identities: certificates for whoever has a token, and what admins do."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, cast

import grpc

from coordinator.identity.office import IdentityOffice
from coordinator.identity.register import Registered
from coordinator.service.calls import BusyError
from skein.errors import UserError
from skein.wire.context import Context
from skein.wire.identity.callers import NAMELESS
from skein.wire.identity.enrolling import check_clock
from skein.wire.identity.names import CallerRole
from skein.wire.serving.hosts import host_of
from skein.wire.serving.reading import Method
from skein.wire.v1 import identity_pb2, identity_pb2_grpc

MAX_COMING, MAX_OF_HOST = 1024, 128
"""Calls for certificates that wait at once, in all and of one host; each takes a few milliseconds."""


class Enrol(identity_pb2_grpc.EnrolServicer):
    """Makes certificates out, one after the other, on a thread of its own: strangers keep nobody from the others."""

    def __init__(self, office: IdentityOffice) -> None:
        self._office = office
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enrol")
        self._coming: Counter[str] = Counter()

    def close(self) -> None:
        """Make out no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def Enrol(self, request: identity_pb2.EnrolRequest, context: Context) -> identity_pb2.EnrolReply:
        if request.wall_s:
            # Before the token is used, which would be lost on somebody who cannot use the certificate.
            check_clock(theirs_s=time.time(), ours_s=request.wall_s)
        enrol = partial(self._office.enrol, request.token, request.secret, request.name, request.request)
        return await self._reply(enrol, context)

    async def Renew(self, request: identity_pb2.RenewRequest, context: Context) -> identity_pb2.EnrolReply:
        return await self._reply(partial(self._office.renew, request.certificate, request.request), context)

    async def _reply(self, make: Callable[[], str], context: Context) -> identity_pb2.EnrolReply:
        def made() -> identity_pb2.EnrolReply:
            certificate, (addresses, enrol_addresses) = make(), self._office.addresses()
            return identity_pb2.EnrolReply(
                certificate=certificate, addresses=addresses, enrol_addresses=enrol_addresses
            )

        with self._place(host_of(context.peer())):
            reply = await asyncio.get_running_loop().run_in_executor(self._thread, made)
        reply.wall_s = time.time()
        return reply

    @contextmanager
    def _place(self, host: str) -> Iterator[None]:
        if self._coming.total() >= MAX_COMING or self._coming[host] >= MAX_OF_HOST:
            raise BusyError("host", host, "so many come for certificates already: try again in a moment")
        self._coming[host] += 1
        try:
            yield
        finally:
            self._coming[host] -= 1
            if not self._coming[host]:
                del self._coming[host]


class Identities(identity_pb2_grpc.IdentitiesServicer):
    """Answers admins."""

    def __init__(self, office: IdentityOffice) -> None:
        self._office = office

    async def CreateToken(
        self, request: identity_pb2.CreateTokenRequest, context: Context
    ) -> identity_pb2.CreateTokenReply:
        role = _role(request.role)
        line, ends_s = await asyncio.to_thread(
            self._office.new_line, role, request.namespace, life_s=request.life_s, uses=request.uses
        )
        return identity_pb2.CreateTokenReply(line=line.text(), ends_s=ends_s, token=line.token)

    async def ListIdentities(
        self, request: identity_pb2.ListIdentitiesRequest, context: Context
    ) -> identity_pb2.ListIdentitiesReply:
        found = await asyncio.to_thread(self._office.register.identities)
        return identity_pb2.ListIdentitiesReply(identities=map(_message, found))

    async def Revoke(
        self, request: identity_pb2.RevokeRequest, context: Context
    ) -> identity_pb2.KnownIdentity:
        revoked = await asyncio.to_thread(self._office.revoke, _role(request.role), request.name)
        self._office.named.end(revoked.caller)
        return _message(revoked)

    async def ListRevoked(
        self, request: identity_pb2.ListRevokedRequest, context: Context
    ) -> identity_pb2.ListIdentitiesReply:
        found = await asyncio.to_thread(self._office.revoked)
        return identity_pb2.ListIdentitiesReply(identities=map(_message, found))


class StrangersGate(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Last of the services on the port for strangers: whatever else they ask for needs a certificate."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Method:
        return cast("Method", grpc.stream_stream_rpc_method_handler(_refuse))


async def _refuse(_requests: object, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, NAMELESS)


def _role(text: str) -> CallerRole:
    if text not in set(CallerRole):
        raise UserError("role", text[:64], "give worker, submitter, viewer or admin")
    return CallerRole(text)


def _message(registered: Registered) -> identity_pb2.KnownIdentity:
    caller = registered.caller
    return identity_pb2.KnownIdentity(
        role=caller.role.value,
        name=caller.name,
        namespace=caller.namespace,
        since_s=registered.since_s,
        ends_s=registered.ends_s,
        revoked_s=registered.revoked_s,
    )
