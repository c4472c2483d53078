"""Measures the link to a peer, both directions, and answers those who measure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.topology.fleet import Link
from skein.types import Incarnation, WorkerId
from skein.wire.calling import Dial, dialled, reached
from skein.wire.channel import PART_BYTES, Lane
from skein.wire.codec import PROBE_PART, PROBE_REPLY
from skein.wire.extra import DialBack, ProbePart, ProbeReply
from skein.wire.v1 import peer_pb2, peer_pb2_grpc
from worker.transport.receiving.intake import MAX_PART_BYTES

_NUM_ROUND_TRIPS = 6
_FIRST_BYTES, _MOST_BYTES = 256 << 10, 8 << 20
_ENOUGH_S, _LONGEST_S = 0.05, 1.5
_GROWTH = 1.25
"""While twice the bytes make the rate grow by more, the connection is still finding its pace."""
_MAX_STREAM_BYTES = 64 << 20
"""A probe that asks for more, in both directions together, is refused."""
FULL_BYTES = 16 << 10
"""Bytes of a message that fills packets of any size, jumbo frames of 9,000 bytes too."""
FULL_S = 4.0
"""Seconds in which such a message and its reply arrive, with packets lost and sent again, unless all of them vanish."""
_STRANGER_PARTS, _STRANGER_BYTES = 16, 4 << 10
"""The same of whoever cannot show that it was told to probe: enough for a look, and for the time of a round trip. That
much is answered unseen, too, while the coordinator's word is still on its way to here."""

ProbeCall = aio.StreamStreamCall[peer_pb2.ProbePart, peer_pb2.ProbeReply]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Links to a peer and back, and whether it can dial whoever measured; None: it was not asked."""

    links: tuple[Link, Link]
    is_dialled: bool | None


async def measure_link(
    me: WorkerId,
    peer: Member,
    *,
    dial: Dial,
    patience_s: float,
    back_to: DialBack | None = None,
    via: WorkerId | None = None,
) -> MeasuredLinks:
    """The links from `me` to `peer` and back, by the way that `dial` takes: `via` that relay. The peer dials `back_to`.

    Latency is half the quickest of several round trips. Bandwidth is that of transfers of growing size, once it grows
    no more with them; at the latest that of 8 MiB, or of a transfer that takes a second and a half. A connection over a
    long link begins slowly, whatever the link can carry.

    Raises:
        RemoteError: the peer cannot be reached, or was silent for `patience_s`.
    """
    async with reached(dial, peer.address, Lane.STATE, patience_s=patience_s) as channel:
        probe = peer_pb2_grpc.PeerStub(channel).Probe(None)
        prober = _Prober(probe, patience_s, door=peer.door, incarnation=peer.incarnation)
        round_trip_s = min([await prober.exchange(1, b"", 0) for _ in range(_NUM_ROUND_TRIPS)])
        up = await bytes_per_s(prober, round_trip_s, is_up=True)
        down = await bytes_per_s(prober, round_trip_s, is_up=False)
        is_dialled = None if back_to is None else await prober.dialled_back(back_to)
    latency_s = round_trip_s / 2
    there = Link(sender=me, receiver=peer.worker, latency_s=latency_s, bytes_per_s=up, via=via)
    back = Link(sender=peer.worker, receiver=me, latency_s=latency_s, bytes_per_s=down, via=via)
    return MeasuredLinks(links=(there, back), is_dialled=is_dialled)


class FullPacketsVanishError(RemoteError):
    """A path passes small packets and drops full ones: connections open on it, and tensors never arrive."""


async def is_usable(peer: Member, *, dial: Dial, patience_s: float) -> bool:
    """Whether a process answers, and full packets pass in both directions.

    Args:
        patience_s: for the first answer.

    Raises:
        FullPacketsVanishError: small messages are answered, and one as large as several packets is not.
    """
    try:
        async with dialled(dial, peer.address, Lane.STATE) as channel:
            probe = peer_pb2_grpc.PeerStub(channel).Probe(None)
            prober = _Prober(probe, max(patience_s, FULL_S), door=peer.door, incarnation=peer.incarnation)
            async with asyncio.timeout(patience_s):
                await prober.exchange(1, b"", 0)
            try:
                async with asyncio.timeout(FULL_S):
                    await prober.exchange(1, bytes(FULL_BYTES), FULL_BYTES)
            except TimeoutError as error:
                text = f"{peer.address}: small messages are answered, one of {FULL_BYTES} bytes is not in {FULL_S} s"
                raise FullPacketsVanishError(text) from error
    except FullPacketsVanishError:
        raise
    except (aio.AioRpcError, RemoteError, TimeoutError):
        return False
    return True


class Sight(Enum):
    """Result of a look at a peer; SILENT says nothing of it."""

    REACHED = "reached"
    GONE = "gone"
    SILENT = "silent"


async def look_at(peer: Member, *, dial: Dial, patience_s: float) -> Sight:
    """Whether a process answers, or its machine says that nobody listens there; anything else is silence."""
    try:
        async with dialled(dial, peer.address, Lane.STATE) as channel:
            probe = peer_pb2_grpc.PeerStub(channel).Probe(None)
            prober = _Prober(probe, patience_s, door="", incarnation=peer.incarnation)
            await prober.exchange(1, b"", 0)
    except aio.AioRpcError as error:
        is_refused = (
            error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in (error.details() or "").lower()
        )
        return Sight.GONE if is_refused else Sight.SILENT
    except (RemoteError, TimeoutError):
        return Sight.SILENT
    return Sight.REACHED


class TimedTransfers(Protocol):
    """Timer of transfers; `_Prober` is one."""

    async def exchange(self, num_parts: int, data: bytes, reply_bytes: int) -> float: ...


async def bytes_per_s(prober: TimedTransfers, round_trip_s: float, *, is_up: bool) -> float:
    """Bandwidth of a link in one direction, by transfers of growing size."""
    size, rate = _FIRST_BYTES, 0.0
    while True:
        num_parts = -(-size // PART_BYTES)
        part_bytes = size // num_parts
        data, reply_bytes = (bytes(part_bytes), 0) if is_up else (b"", part_bytes)
        elapsed_s = await prober.exchange(num_parts, data, reply_bytes)
        # The round trip is not transfer time; on a quick link noise could leave nothing of the difference.
        before, rate = rate, size / max(elapsed_s - round_trip_s, elapsed_s / 10)
        is_enough = elapsed_s >= _ENOUGH_S + round_trip_s and rate < _GROWTH * before
        if is_enough or size >= _MOST_BYTES or elapsed_s >= _LONGEST_S + round_trip_s:
            return max(rate, before)
        size *= 2


class _Prober:
    """Caller's side of one Probe stream."""

    def __init__(self, call: ProbeCall, patience_s: float, *, door: str, incarnation: Incarnation) -> None:
        self._door = door
        self._incarnation = incarnation
        self._call = call
        self._replies = aiter(call)
        self._patience_s = patience_s
        self._sequence = 0

    async def exchange(self, num_parts: int, data: bytes, reply_bytes: int) -> float:
        """Seconds from the first part sent to the last reply received."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.timeout(self._patience_s):
            for i in range(num_parts):
                number = self._sequence + i
                door = "" if number else self._door
                part = ProbePart(sequence=number, data=data, reply_bytes=reply_bytes, door=door)
                await self._call.write(PROBE_PART.encode(part))
            for _ in range(num_parts):
                await self._take_reply(reply_bytes)
        return loop.time() - began_s

    async def dialled_back(self, me: DialBack) -> bool:
        """Whether the peer reaches this process at its address."""
        async with asyncio.timeout(self._patience_s):
            part = ProbePart(sequence=self._sequence, data=b"", reply_bytes=0, dial_back=me)
            await self._call.write(PROBE_PART.encode(part))
            return (await self._take_reply(0)).is_dialled

    async def _take_reply(self, reply_bytes: int) -> ProbeReply:
        try:
            reply = PROBE_REPLY.decode(await anext(self._replies))
        except StopAsyncIteration as error:
            raise RemoteError("the peer ended the probe") from error
        if reply.incarnation not in ("", self._incarnation):
            # Behind NAT an address may be another machine's, here.
            raise RemoteError("another process is at this address")
        if reply.sequence != self._sequence or len(reply.data) != reply_bytes:
            raise RemoteError(
                f"answered probe {self._sequence} with {len(reply.data)} bytes of {reply.sequence}"
            )
        self._sequence += 1
        return reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Process that answers probes, whom it lets measure, and how it dials back.

    Args:
        may_probe: whether the coordinator has told whoever shows this to measure.
        dial_back: whether a process answers at its address.
    """

    incarnation: Incarnation
    may_probe: Callable[[str], bool]
    dial_back: Callable[[DialBack], Awaitable[bool]]


async def never_dialled(_back_to: DialBack) -> bool:
    """For whoever dials nobody back."""
    return False


async def answer_probe(
    requests: AsyncIterator[peer_pb2.ProbePart], probed: Probed
) -> AsyncIterator[peer_pb2.ProbeReply]:
    """A reply to each part, at once; but to the one that asks to be dialled back, after that.

    Raises:
        RemoteError: the prober asks for more than a measurement needs.
    """
    loop = asyncio.get_running_loop()
    began_s: float | None = None
    num_parts = num_bytes = num_reply_bytes = 0
    door, is_known, was_dialled = "", False, False
    async for request in requests:
        now = loop.time()
        began_s = now if began_s is None else began_s
        part = PROBE_PART.decode(request)
        door = door or part.door
        num_parts += 1
        num_bytes += len(part.data)
        num_reply_bytes += part.reply_bytes
        is_large = max(len(part.data), part.reply_bytes) > MAX_PART_BYTES
        if is_large or num_bytes + num_reply_bytes > _MAX_STREAM_BYTES:
            raise RemoteError(f"a probe of {num_bytes + num_reply_bytes} bytes is too large")
        is_long = num_parts > _STRANGER_PARTS or num_bytes + num_reply_bytes > _STRANGER_BYTES
        if is_long or part.dial_back is not None:
            is_known = is_known or probed.may_probe(door)
            if not is_known:
                raise RemoteError(
                    "a probe that long is for whom the coordinator has told to measure this link"
                )
        is_dialled = False
        if part.dial_back is not None and not was_dialled:
            # Once: a probe must not make this worker knock at many doors.
            was_dialled, is_dialled = True, await probed.dial_back(part.dial_back)
        reply = ProbeReply(
            sequence=part.sequence,
            num_bytes=num_bytes,
            elapsed_s=now - began_s,
            data=bytes(part.reply_bytes),
            incarnation=probed.incarnation,
            is_dialled=is_dialled,
        )
        yield PROBE_REPLY.encode(reply)
