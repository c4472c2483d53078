"""The gRPC server of a coordinator: which services, which checks, which limits."""

from dataclasses import dataclass
from typing import Protocol

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import Driver
from coordinator.service.calls import Calls, CountRefusal
from coordinator.service.checkpoint import Checkpoint
from coordinator.service.control import Control
from coordinator.service.jobs import Jobs
from coordinator.status import Roster
from skein.wire.channel import bind, join_address, server_options
from skein.wire.tokens import TokenCheck
from skein.wire.v1 import checkpoint_pb2_grpc, control_pb2_grpc, jobs_pb2_grpc

MAX_CALLS = 8192
"""Calls at once, control streams included; one more is told RESOURCE_EXHAUSTED."""
STOP_S = 2.0


SERVICES = ("Control", "Jobs", "Checkpoint")


class Health(Protocol):
    """What we use of grpc_health's asyncio servicer, which has no stubs."""

    async def set(self, service: str, status: int) -> None: ...

    async def enter_graceful_shutdown(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Service:
    """A server that listens."""

    server: aio.Server
    address: str
    _health: Health

    async def stop(self) -> None:
        """Take no more calls, and end those that go on."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(STOP_S)


async def serve(
    driver: Driver,
    store: CheckpointStore,
    roster: Roster,
    *,
    host: str,
    port: int,
    token: str | None,
    count_refusal: CountRefusal,
) -> Service:
    """Listen at host:port (0: any free one).

    Raises:
        UserError: the address cannot be listened on.
    """
    checks: list[aio.ServerInterceptor] = [Calls(count_refusal)]  # type: ignore[type-arg]
    if token is not None:
        checks.append(TokenCheck(token))
    server = aio.server(interceptors=checks, options=server_options(), maximum_concurrent_rpcs=MAX_CALLS)
    control_pb2_grpc.add_ControlServicer_to_server(Control(driver), server)
    jobs_pb2_grpc.add_JobsServicer_to_server(Jobs(driver, roster), server)
    checkpoint_pb2_grpc.add_CheckpointServicer_to_server(Checkpoint(driver, store), server)
    checker = health.aio.HealthServicer()  # type: ignore[attr-defined]  # no stubs
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    for name in SERVICES:
        await checker.set(f"skein.wire.v1.{name}", health_pb2.HealthCheckResponse.SERVING)
    bound = bind(server, host, port)
    await server.start()
    return Service(server=server, address=join_address(host, bound), _health=checker)
