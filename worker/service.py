"""Calls that peers may make to this worker. Everything they send is checked before it costs memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing

import grpc
from grpc import aio

from skein.errors import RemoteError
from skein.types import Generation, Incarnation
from skein.wire.codec import FETCH_STATE, PART_REPLY, STATE_PART
from skein.wire.context import Context
from skein.wire.extra import FetchStateRequest
from skein.wire.failures import refuse
from skein.wire.identity.names import LOCAL, caller_of
from skein.wire.serving.health import Health
from skein.wire.v1 import peer_pb2
from worker.bundle import Limits, WireTensor
from worker.transport.fetching.state import state_parts
from worker.transport.framing import SERVICE, read_part
from worker.transport.links import Probed, answer_probe, never_dialled
from worker.transport.receiving.intake import Accepts, Inbox, Intake, OnTensor
from worker.transport.receiving.slots import CrowdedError, IdleError, Slots, peer_of
from worker.transport.receiving.window import Window
from worker.transport.statistics import Statistics

StateOf = Callable[[FetchStateRequest], Awaitable[Mapping[str, WireTensor] | None]]
"""State for a request, perhaps with more names; None: it is not here. Awaited, as only the executor copies a chunk."""

GIVES_WAY = 4.0
"""State waits for tensors of the running step up to so many times as long as it travels: raise it if joins slow steps
down, and they take longer."""
_LEAST_WAIT_S = 0.01
_LOOK_S = 0.002
_NOT_TOLD = "state is for whom the coordinator has told to fetch it, in this generation or the one before"
_REFUSED = (RemoteError, CrowdedError, IdleError)


def _take_error(writing: "asyncio.Future[None]") -> None:
    """Look at how a write ended that nobody waits for any more: its call is over, and knows why."""
    if not writing.cancelled():
        writing.exception()


def _slots(most: int, silent_s: float) -> Slots:
    return Slots(most=most, most_of_one=max(1, most // 2), silent_s=silent_s)


def _place_of(context: Context) -> str:
    """Party whose place a call takes: whom the certificate names, or where there is none the address."""
    caller = caller_of(context)
    return peer_of(context.peer()) if caller in (None, LOCAL) else caller.uri


def anybody(_door: str) -> bool:
    """Anybody may, where no coordinator says who."""
    return True


class PeerService:
    """The receiving half of a worker's data plane.

    Args:
        may_fetch: whether whoever shows this was told to fetch state here.
        probed: who answers those that measure the link to here, and how.
    """

    def __init__(
        self,
        *,
        accepts: Accepts,
        on_tensor: OnTensor,
        state_of: StateOf,
        statistics: Statistics,
        limits: Limits | None = None,
        may_fetch: Callable[[str], bool] = anybody,
        probed: Probed | None = None,
    ) -> None:
        self._may_fetch = may_fetch
        nobody = Incarnation("")
        self._probed = probed or Probed(incarnation=nobody, may_probe=anybody, dial_back=never_dialled)
        self._limits = limits or Limits()
        self._statistics = statistics
        self._intake = Intake(
            accepts=accepts, on_tensor=on_tensor, limits=self._limits, statistics=statistics
        )
        self._state_of = state_of
        self._is_closing = False
        self._streams = _slots(self._limits.max_streams, self._limits.silent_s)
        self._transfers = _slots(self._limits.max_transfers, self._limits.silent_s)
        self._probes = _slots(self._limits.max_probes, self._limits.probe_silent_s)
        self._is_training: Callable[[], bool] = lambda: False

    def attach(self, server: aio.Server) -> None:
        """Make `server`, not started yet, answer peers, and whoever asks for its health."""
        # Not by the generated function: for it no message comes as the bytes that it is.
        handlers = {
            "Deliver": grpc.stream_stream_rpc_method_handler(
                self.Deliver, response_serializer=peer_pb2.PartReply.SerializeToString
            ),
            "FetchState": grpc.unary_stream_rpc_method_handler(
                self.give_state,
                request_deserializer=peer_pb2.FetchStateRequest.FromString,
                response_serializer=peer_pb2.StatePart.SerializeToString,
            ),
            "Probe": grpc.stream_stream_rpc_method_handler(
                self.Probe,
                request_deserializer=peer_pb2.ProbePart.FromString,
                response_serializer=peer_pb2.ProbeReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers), Health()))

    def close(self) -> None:
        """The server is about to stop: that ends streams without a word."""
        self._is_closing = True

    def give_way(self, is_training: Callable[[], bool]) -> None:
        """Let state wait from here on while `is_training` says that tensors of a step are on their way from here."""
        self._is_training = is_training

    def forget(self, generation: Generation) -> None:
        """Accept nothing of generations older than `generation` any more, and forget what came of them."""
        self._intake.forget(generation)

    async def Deliver(
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[peer_pb2.PartReply]:
        """Takes tensors; see the proto. Messages come as they are, not copied yet."""
        loop = asyncio.get_running_loop()
        try:
            with self._streams.take(_place_of(context)) as slot:
                inbox = Inbox(self._intake, Window(), caller_of(context))
                try:
                    yield PART_REPLY.encode(inbox.open(now=loop.time()))
                    async for message in slot.each(aiter(request_iterator)):
                        for reply in inbox.take(read_part(message), now=loop.time()):
                            yield PART_REPLY.encode(reply)
                finally:
                    inbox.close()
        except _REFUSED as error:
            await self._refuse(context, error)
        except asyncio.CancelledError:
            # When the server stops, gRPC would print the cancellation of every stream that is open.
            if not self._is_closing:
                raise

    async def FetchState(
        self, request: peer_pb2.FetchStateRequest, context: Context
    ) -> AsyncGenerator[peer_pb2.StatePart, None]:
        """Streams a copy of a chunk's state, or of a step's result; see the proto."""
        loop = asyncio.get_running_loop()
        try:
            wanted = FETCH_STATE.decode(request)
            if not self._may_fetch(wanted.door):
                # Before a place is taken: it is for those who are told to fetch.
                self._statistics.refusals["forged"] += 1
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, _NOT_TOLD)
            with self._transfers.take(_place_of(context)):
                tensors = await self._state_of(wanted)
                if tensors is None or not tensors.keys() >= set(wanted.names):
                    held = f"{wanted.kind} of stage {wanted.stage} at version {wanted.version}"
                    await context.abort(grpc.StatusCode.NOT_FOUND, f"{held} is not here, or not all of it")
                for part in state_parts(tensors, sorted(set(wanted.names) or tensors)):
                    began_s = loop.time()
                    yield STATE_PART.encode(part)
                    await self._let_pass(loop.time() - began_s)
        except _REFUSED as error:
            await self._refuse(context, error)

    async def give_state(self, request: peer_pb2.FetchStateRequest, context: Context) -> None:
        """FetchState for whoever reads; who does not is waited for no longer than who says nothing."""
        # Where the caller goes its place is free at once, and not when garbage is collected.
        async with aclosing(self.FetchState(request, context)) as parts:
            async for part in parts:
                # gRPC's write is deaf to cancellation while the peer has no room for it.
                writing = asyncio.ensure_future(context.write(part))
                writing.add_done_callback(_take_error)
                await asyncio.wait((writing,), timeout=self._limits.silent_s)
                if not writing.done():
                    await self._refuse(context, IdleError("read nothing for too long: ask again"))
                await writing

    async def Probe(
        self, request_iterator: AsyncIterator[peer_pb2.ProbePart], context: Context
    ) -> AsyncIterator[peer_pb2.ProbeReply]:
        """Answers measurements; see the proto."""
        try:
            with self._probes.take(_place_of(context)) as slot:
                async for reply in answer_probe(slot.each(aiter(request_iterator)), self._probed):
                    yield reply
        except _REFUSED as error:
            await self._refuse(context, error)

    async def _let_pass(self, travelled_s: float) -> None:
        """Wait while training needs the link, but not for ever: a newcomer must gain on the commits."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + max(_LEAST_WAIT_S, GIVES_WAY * travelled_s)
        while self._is_training() and loop.time() < until_s:  # noqa: ASYNC110 - a count of another object
            await asyncio.sleep(_LOOK_S)

    async def _refuse(self, context: Context, error: RemoteError | CrowdedError | IdleError) -> None:
        if isinstance(error, RemoteError):
            self._statistics.refusals["malformed"] += 1
            await refuse(context, error)
        self._statistics.refusals["too_many" if isinstance(error, CrowdedError) else "silent"] += 1
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
