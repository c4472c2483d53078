"""Asks peers for what they hold: a chunk's state, or what a step applied to it."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace
from typing import TypeVar

import grpc
from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.wire.calling import DialPeer, dialled
from skein.wire.channel import Lane
from skein.wire.codec import FETCH_STATE, STATE_PART
from skein.wire.extra import FetchStateRequest
from skein.wire.failures import describe_rpc_error
from skein.wire.v1 import peer_pb2_grpc
from worker.bundle import Limits, WireTensor
from worker.transport.fetching.state import StateAssembly
from worker.transport.outbox import FINAL
from worker.transport.statistics import Statistics

Message = TypeVar("Message")

MAX_FRUITLESS = 3
"""Attempts in a row that bring no new tensor before a donor is given up."""
_PAUSE_S = 0.1
_BUSY_PAUSE_S = 0.5


class AbsentError(RemoteError):
    """The peer does not have it, or not yet."""


class _DonorBusyError(Exception):
    """Refusal by a donor that gives to as many peers as it can already."""


class Fetcher:
    """Fetches from peers. `patience_s` bounds the wait for each part, not for the whole."""

    def __init__(self, *, dial: DialPeer, limits: Limits, statistics: Statistics, patience_s: float) -> None:
        self._dial = dial
        self._limits = limits
        self._statistics = statistics
        self._patience_s = patience_s

    async def state(self, member: Member, request: FetchStateRequest) -> dict[str, WireTensor]:
        """Tensors that `request` asks for, by name, each checked against its hash.

        A broken stream is resumed: what is complete is not asked for again (without names, only after the first
        stream that reached its end). A tensor that does not fit its hash is asked for again. A peer that gives to too
        many others is waited for, as long as it says so.

        Raises:
            AbsentError: the peer does not have it.
            RemoteError: the peer breaks the protocol, or brings nothing new several times.
        """
        missing: set[str] | None = set(request.names) or None
        tensors: dict[str, WireTensor] = {}
        num_fruitless = 0
        while missing is None or missing:
            wanted = tuple(sorted(missing or ()))
            assembly = StateAssembly(wanted, self._limits)
            try:
                reason = await self._receive_state(member, replace(request, names=wanted), assembly)
            except _DonorBusyError:
                await asyncio.sleep(_BUSY_PAUSE_S)
                continue
            has_new = not assembly.tensors.keys() <= tensors.keys()
            tensors |= assembly.tensors
            if assembly.is_complete:
                missing = set(assembly.spoilt)
            elif missing is not None:
                missing -= tensors.keys()
            if not assembly.is_complete or assembly.spoilt:
                num_fruitless = 0 if has_new else num_fruitless + 1
                await self._pause(member, num_fruitless, reason)
        return tensors

    async def _receive_state(
        self, member: Member, request: FetchStateRequest, assembly: StateAssembly
    ) -> str:
        """Fill `assembly` from one stream; gives why it is not complete."""
        try:
            async with dialled(self._dial(member.worker), member.address, Lane.STATE) as channel:
                call = peer_pb2_grpc.PeerStub(channel).FetchState(FETCH_STATE.encode(request))
                async for message in patiently(call, self._patience_s):
                    assembly.take(STATE_PART.decode(message))
                    self._statistics.state_parts += 1
        except aio.AioRpcError as error:
            reason = describe_rpc_error(error, member.address)
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise AbsentError(reason) from error
            if error.code() in FINAL:
                raise RemoteError(reason) from error
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _DonorBusyError from error
            return reason
        except TimeoutError:
            return f"{member.address}: silent for {self._patience_s} s"
        finally:
            self._statistics.received_bytes[member.worker] += sum(
                len(tensor.data) for tensor in assembly.tensors.values()
            )
            self._statistics.refusals["corrupt_state"] += len(assembly.spoilt)
        if assembly.spoilt:
            return f"{member.address}: {len(assembly.spoilt)} tensors do not fit their hash"
        return "" if assembly.is_complete else f"{member.address}: the state is not complete"

    async def _pause(self, member: Member, num_fruitless: int, reason: str) -> None:
        if num_fruitless >= MAX_FRUITLESS:
            raise RemoteError(f"gave up after {num_fruitless} attempts: {reason or member.address}")
        await asyncio.sleep(_PAUSE_S * num_fruitless)


async def patiently(messages: AsyncIterable[Message], patience_s: float) -> AsyncIterator[Message]:
    """The messages of a stream.

    Raises:
        TimeoutError: one did not come within `patience_s` of the one before.
    """
    iterator = aiter(messages)
    while True:
        async with asyncio.timeout(patience_s):
            try:
                message = await anext(iterator)
            except StopAsyncIteration:
                return
        yield message
