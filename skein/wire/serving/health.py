"""gRPC's health service, which anybody may ask: so it is bounded by itself, and costs nobody else a call.

A call that says nothing is over soon, streams that watch are few, and whoever comes is answered: `room` beside this.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc
from grpc_health.v1 import health_pb2

from skein.wire.context import Context
from skein.wire.serving.hosts import host_of
from skein.wire.serving.room import Room

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
MAX_CALLS, MAX_CALLS_PER_ADDRESS = 256, 32
READ_S = 5.0
"""In which a caller has to say what it asks for."""
HEALTH_SERVICE = "/grpc.health.v1.Health"


class Health(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # no generic at run time
    """Statuses by service; "" is the whole server."""

    def __init__(self, statuses: Mapping[str, int] | None = None) -> None:
        self._statuses = {"": int(SERVING)} | dict(statuses or {})
        self._is_closing = False
        self._changed = asyncio.Event()
        self._room = Room(most=MAX_CALLS, per_address=MAX_CALLS_PER_ADDRESS)
        coded = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        self._methods: Mapping[str, grpc.RpcMethodHandler[object, object]] = {
            # On the wire the same as a unary question, which would be waited for however long it takes.
            f"{HEALTH_SERVICE}/Check": grpc.stream_unary_rpc_method_handler(self._check, *coded),
            f"{HEALTH_SERVICE}/Watch": grpc.stream_stream_rpc_method_handler(self._watch, *coded),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[object, object] | None":
        """Method that answers a call; None for methods of other services."""
        return self._methods.get(handler_call_details.method)

    def set(self, service: str, status: int) -> None:
        """Tell whoever asks or watches; after `close` nothing is serving any more."""
        self._statuses[service] = int(NOT_SERVING) if self._is_closing else status
        self._tell()

    def close(self) -> None:
        """The server is about to stop."""
        self._is_closing = True
        self._statuses = dict.fromkeys(self._statuses, int(NOT_SERVING))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(
        self, requests: AsyncIterator[health_pb2.HealthCheckRequest], context: Context
    ) -> health_pb2.HealthCheckResponse:
        try:
            async with self._room.enter(host_of(context.peer()), READ_S):
                service = await _asked(requests)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "asked for nothing, or others came")
        status = self._statuses.get(service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def _watch(self, requests: AsyncIterator[health_pb2.HealthCheckRequest], context: Context) -> None:
        try:
            async with self._room.enter(host_of(context.peer()), None):
                async with asyncio.timeout(READ_S):
                    service = await _asked(requests)
                told: int | None = None
                while True:
                    changed, status = self._changed, self._statuses.get(service, int(_UNKNOWN))
                    if status != told:
                        told = status
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                    await changed.wait()
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others came; watch again, or ask")


async def _asked(requests: AsyncIterator[health_pb2.HealthCheckRequest]) -> str:
    async for request in requests:
        return str(request.service)
    raise TimeoutError
