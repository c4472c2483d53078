"""What peers may ask of this worker. Everything they send is checked before it costs memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc

from skein.errors import RemoteError
from skein.types import Generation
from skein.wire.codec import FETCH_STATE, PART_REPLY, STATE_PART, TENSOR_PART
from skein.wire.extra import FetchStateRequest
from skein.wire.failures import refuse
from skein.wire.v1 import peer_pb2, peer_pb2_grpc
from worker.bundle import Limits, WireTensor
from worker.transport.framing import DELIVER, read_part
from worker.transport.intake import Accepts, Inbox, Intake, OnTensor
from worker.transport.links import answer_probe
from worker.transport.state import state_parts
from worker.transport.statistics import Statistics
from worker.transport.window import Window

StateOf = Callable[[FetchStateRequest], Awaitable[Mapping[str, WireTensor] | None]]
"""What is asked for, perhaps with more names; None if it is not here. Awaited, for only the executor copies a chunk."""
Context = aio.ServicerContext[object, object]

GIVES_WAY = 4.0
"""State waits for tensors of the running step up to so many times as long as it travels: raise it if joins slow steps
down, and they take longer."""
_LEAST_WAIT_S = 0.01
_LOOK_S = 0.002


class _Overload(Exception):
    """A limit of this worker is reached; the peer may come again."""


class _RawDeliver(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # no generic at run time
    """Deliver, its requests as bytes."""

    def __init__(self, service: "PeerService") -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(
            service.Deliver, response_serializer=peer_pb2.PartReply.SerializeToString
        )

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[object, object] | None":
        return self._handler if handler_call_details.method == DELIVER else None


class PeerService(peer_pb2_grpc.PeerServicer):
    """The receiving half of a worker's data plane."""

    def __init__(
        self,
        *,
        accepts: Accepts,
        on_tensor: OnTensor,
        state_of: StateOf,
        statistics: Statistics,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._statistics = statistics
        self._intake = Intake(
            accepts=accepts, on_tensor=on_tensor, limits=self._limits, statistics=statistics
        )
        self._state_of = state_of
        self._num_streams = 0
        self._is_closing = False
        self._num_transfers = 0
        self._is_training: Callable[[], bool] = lambda: False

    def attach(self, server: aio.Server) -> None:
        """Make `server`, not started yet, answer peers, and whoever asks for its health."""
        # Asked first, so that this method's messages come as they are.
        server.add_generic_rpc_handlers((_RawDeliver(self),))
        peer_pb2_grpc.add_PeerServicer_to_server(self, server)
        checker = health.aio.HealthServicer()  # type: ignore[attr-defined]  # no stubs
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)

    def close(self) -> None:
        """The server is about to stop: that ends streams without a word."""
        self._is_closing = True

    def give_way(self, is_training: Callable[[], bool]) -> None:
        """From here on state waits while `is_training` says that tensors of a step are on their way from here."""
        self._is_training = is_training

    def forget(self, generation: Generation) -> None:
        """Nothing of generations older than `generation` is accepted any more; forget what came of them."""
        self._intake.forget(generation)

    async def Deliver(
        self, request_iterator: AsyncIterator[peer_pb2.TensorPart], context: Context
    ) -> AsyncIterator[peer_pb2.PartReply]:
        """Takes tensors; see the proto. Where `attach` has made them come so, messages are bytes, not copied yet."""
        loop = asyncio.get_running_loop()
        messages: AsyncIterator[peer_pb2.TensorPart | bytes] = request_iterator
        try:
            with self._stream():
                inbox = Inbox(self._intake, Window())
                try:
                    yield PART_REPLY.encode(inbox.open(now=loop.time()))
                    async for message in messages:
                        if isinstance(message, bytes):
                            part = read_part(message)
                        else:
                            part = TENSOR_PART.decode(message)
                        for reply in inbox.take(part, now=loop.time()):
                            yield PART_REPLY.encode(reply)
                finally:
                    inbox.close()
        except (RemoteError, _Overload) as error:
            await self._refuse(context, error)
        except asyncio.CancelledError:
            # When the server stops, gRPC would print the cancellation of every stream that is open.
            if not self._is_closing:
                raise

    async def FetchState(
        self, request: peer_pb2.FetchStateRequest, context: Context
    ) -> AsyncIterator[peer_pb2.StatePart]:
        """Streams a copy of a chunk's state, or of a step's result; see the proto."""
        loop = asyncio.get_running_loop()
        try:
            with self._transfer():
                wanted = FETCH_STATE.decode(request)
                tensors = await self._state_of(wanted)
                if tensors is None or not tensors.keys() >= set(wanted.names):
                    held = f"{wanted.kind} of stage {wanted.stage} at version {wanted.version}"
                    await context.abort(grpc.StatusCode.NOT_FOUND, f"{held} is not here, or not all of it")
                for part in state_parts(tensors, sorted(set(wanted.names) or tensors)):
                    began_s = loop.time()
                    yield STATE_PART.encode(part)
                    await self._let_pass(loop.time() - began_s)
        except (RemoteError, _Overload) as error:
            await self._refuse(context, error)

    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: Context
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        """Answers measurements; see the proto."""
        try:
            with self._transfer():
                async for reply in answer_probe(request_iterator):
                    yield reply
        except (RemoteError, _Overload) as error:
            await self._refuse(context, error)

    async def _let_pass(self, travelled_s: float) -> None:
        """Wait while training needs the link, but not for ever: a newcomer must gain on the commits."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + max(_LEAST_WAIT_S, GIVES_WAY * travelled_s)
        while self._is_training() and loop.time() < until_s:  # noqa: ASYNC110 - a count of another object
            await asyncio.sleep(_LOOK_S)

    @contextmanager
    def _stream(self) -> Iterator[None]:
        if self._num_streams >= self._limits.max_streams:
            raise _Overload(f"{self._num_streams} streams are open already")
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        if self._num_transfers >= self._limits.max_transfers:
            raise _Overload(f"{self._num_transfers} transfers are running already")
        self._num_transfers += 1
        try:
            yield
        finally:
            self._num_transfers -= 1

    async def _refuse(self, context: Context, error: RemoteError | _Overload) -> None:
        if isinstance(error, RemoteError):
            self._statistics.refusals["malformed"] += 1
            await refuse(context, error)
        self._statistics.refusals["too_many"] += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
