"""The gRPC server of a coordinator: which services, which checks, which limits; and what it says while it stands by."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import grpc
from grpc import aio

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import Driver
from coordinator.identity.office import IdentityOffice
from coordinator.lead.addresses import CoordinatorAddress
from coordinator.lead.lease import Lead
from coordinator.page.board import Board
from coordinator.records.audit import AuditLog
from coordinator.service.audited import Audited
from coordinator.service.calls import Calls, CountRefusal
from coordinator.service.checkpoint import Checkpoint
from coordinator.service.control import Control
from coordinator.service.identity import Enrol, Identities, StrangersGate
from coordinator.service.jobs import Jobs
from coordinator.telling.status import Roster
from skein.wire.channel import bind, join_address, open_server, split_address
from skein.wire.context import Context
from skein.wire.credentials import NO_CREDENTIALS, Credentials
from skein.wire.leader import LEADER_KEY
from skein.wire.process.clear_text import clear_text_warning, keep_warning
from skein.wire.relay.switchboard import Switchboard
from skein.wire.serving.doorway import CALLED_BYTES, Doorway
from skein.wire.serving.health import NOT_SERVING, SERVING, Health
from skein.wire.v1 import checkpoint_pb2_grpc, identity_pb2_grpc, jobs_pb2_grpc

_IDLE_MS = 60_000
_log = logging.getLogger("coordinator")
STOP_S = 2.0


SERVICES = ("Control", "Jobs", "Checkpoint", "Relay")


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """All methods of a server: refused while it stands by, then those that it was given.

    `leader`: whom it names to those it refuses; "" while it knows nobody.
    """

    def __init__(self) -> None:
        self.leader = ""
        self._found: list[grpc.GenericRpcHandler[object, object]] = []
        self._is_open = False

    def open(self) -> None:
        """Refuse nobody from now on."""
        self._is_open = True

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[object, object] | None":
        """Method that answers a call; None where no service has it."""
        if not self._is_open:
            return cast(
                "grpc.RpcMethodHandler[object, object]", grpc.stream_stream_rpc_method_handler(self._refuse)
            )
        found = (known.service(handler_call_details) for known in self._found)
        return next((method for method in found if method is not None), None)

    # --- what generated code wants of a server ---

    def add_generic_rpc_handlers(self, handlers: Sequence["grpc.GenericRpcHandler[object, object]"]) -> None:
        """Take these methods."""
        self._found += handlers

    def add_registered_method_handlers(self, name: str, methods: object) -> None:
        """The same methods by name, which would be looked up before anybody could refuse."""

    async def _refuse(self, requests: object, context: Context) -> NoReturn:
        if not self.leader:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "standby; nobody leads yet")
        details = f"standby; the leader is {self.leader}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, details, ((LEADER_KEY, self.leader),))


@dataclass(slots=True, kw_only=True)
class Service:
    """A server that listens; it stands by until `admit`."""

    server: aio.Server
    address: str
    gate: Gate
    relay: Switchboard
    office: IdentityOffice | None
    _enrol: Enrol | None
    _strangers: aio.Server | None
    """The server of the port for those who have no certificate."""
    _enrol_port: int
    _health: Health
    _keeping: Sequence[asyncio.Task[NoReturn]]

    async def admit(
        self, driver: Driver, store: CheckpointStore, roster: Roster, lead: Lead, board: Board
    ) -> None:
        """Answer for this driver from now on."""
        server = cast(aio.Server, self.gate)
        Control(driver, lead).attach(server)
        jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(driver, roster, store.places, board), server)
        checkpoint_pb2_grpc.add_CheckpointServicer_to_server(Checkpoint(driver, store), server)
        if self.office is not None:
            self.office.lead()
            identity_pb2_grpc.add_IdentitiesServicer_to_server(Identities(self.office), server)
        self.relay.attach(server)
        self.gate.open()
        for name in SERVICES:
            self._health.set(f"skein.wire.v1.{name}", SERVING)

    def by(self, address: str) -> CoordinatorAddress:
        """Addresses of this coordinator, which others reach by `address`."""
        if self.office is None:
            return CoordinatorAddress(address=address)
        host, _ = split_address("advertise", address)
        return CoordinatorAddress(address=address, enrol_address=join_address(host, self._enrol_port))

    async def stop(self) -> None:
        """Take no more calls, and end those that go on."""
        self._health.close()
        for keeping in self._keeping:
            keeping.cancel()
        if self._strangers is not None:
            await self._strangers.stop(None)
        await self.server.stop(STOP_S)
        if self._enrol is not None:
            self._enrol.close()
        if self.office is not None:
            self.office.close()


async def listen(
    host: str,
    port: int,
    *,
    credentials: Credentials,
    count_refusal: CountRefusal,
    audit: AuditLog,
    office: IdentityOffice | None = None,
    enrol_port: int = 0,
) -> Service:
    """Listen at host:port (0: any free one), standing by; with an `office`, also where strangers come for certificates.

    Raises:
        UserError: an address cannot be listened on.
    """
    # Who has no call for so long dials again when it has one; nothing else shows on these connections.
    idle = ("grpc.max_connection_idle_ms", _IDLE_MS)
    named = None if office is None else office.named
    before = [Calls(count_refusal), Audited(audit)]
    server = open_server(credentials=credentials, before=before, options=[idle], named=named)
    gate, checker = Gate(), Health({f"skein.wire.v1.{name}": NOT_SERVING for name in SERVICES})
    server.add_generic_rpc_handlers((checker,))
    enrol = None if office is None else Enrol(office)
    if enrol is not None:
        # Whoever stands by can do this, too: authority and register are in the directory that they share.
        identity_pb2_grpc.add_EnrolServicer_to_server(enrol, server)
    server.add_generic_rpc_handlers((gate,))
    bound = bind(server, host, port, credentials=credentials)
    strangers, enrol_bound = None, 0
    if enrol is not None:
        strangers = open_server(credentials=NO_CREDENTIALS, before=before, options=[idle])
        identity_pb2_grpc.add_EnrolServicer_to_server(enrol, strangers)
        strangers.add_generic_rpc_handlers((Health(), StrangersGate()))
        enrol_bound = bind(strangers, host, enrol_port, credentials=credentials, is_for_strangers=True)
        await strangers.start()
    await server.start()
    keeping = [asyncio.create_task(Doorway(bound, least_bytes=CALLED_BYTES).keep())]
    if (warning := clear_text_warning(host, credentials)) is not None:
        keeping.append(asyncio.create_task(keep_warning(warning, _log)))
    if office is not None:
        keeping.append(asyncio.create_task(Doorway(enrol_bound, least_bytes=CALLED_BYTES).keep()))
        keeping.append(asyncio.create_task(office.keep()))
    return Service(
        server=server,
        address=join_address(host, bound),
        gate=gate,
        relay=Switchboard(is_offered=True),
        office=office,
        _enrol=enrol,
        _strangers=strangers,
        _enrol_port=enrol_bound,
        _health=checker,
        _keeping=keeping,
    )
