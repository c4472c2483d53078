"""Sends tensors to one peer in one lane, over one stream at a time, until the peer has taken them or is given up.

Rules of this file
- A tensor is kept until it is accepted or refused. What a broken stream leaves unanswered is offered again on the next.
- Bytes on the way never exceed the credit that the receiver granted on this stream.
- The oldest microbatch goes first, among what has not begun, and a selection's after any other; a tensor that has begun
  is finished.
- Whoever waits for a peer waits for a sign of life: a reply. Two thirds of the patience without one cost the
  connection, all of it the peer.
- A peer whose machine says at once that nobody is there is given up much sooner: what listened there has died.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NoReturn, assert_never

import grpc
from grpc import aio

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.protocol.messages.tensors import Envelope, HopTensor, Refusal
from skein.types import Generation, WorkerId
from skein.wire.calling import Dial, dialled
from skein.wire.channel import Lane
from skein.wire.codec import PART_REPLY, TENSOR_PART
from skein.wire.extra import CreditGranted, PartReply, TensorAccepted, TensorRefused
from skein.wire.failures import describe_rpc_error
from skein.wire.v1 import peer_pb2
from worker.bundle import Bundle, bundle_bytes
from worker.transport.framing import DELIVER
from worker.transport.pace import PeerPace, PeerPatience
from worker.transport.parts import announce, outgoing
from worker.transport.statistics import Statistics

OnFailed = Callable[[WorkerId, Generation, str], None]
"""Told that a peer did not take tensors of a generation, and why. Called on the event loop."""
OnTaken = Callable[[WorkerId, Envelope, int, float], None]
"""Told that a peer has accepted a tensor of so many bytes, and the seconds since its first was offered."""
DeliverCall = aio.StreamStreamCall[bytes, peer_pb2.PartReply]


def ignore_taken(to: WorkerId, envelope: Envelope, num_bytes: int, seconds: float) -> None:
    """For whoever does not measure."""


FINAL = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""A second try would end the same way."""
_MAX_CORRUPT = 4
_MAX_BARREN = 4
"""Streams in a row on which the peer gave signs of life, but no answer to any tensor."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0
_LATE_S = 0.5
_LEAST_REFUSED = 2
"""Dials in vain, at least, before a peer counts as gone."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Parcel:
    envelope: Envelope
    bundle: Bundle
    total_bytes: int
    num_corrupt: int = 0
    began_s: float = 0.0
    num_bytes: int = 0
    """Written on the present stream."""
    sent_s: float | None = None

    @property
    def age(self) -> tuple[int, ...]:
        header = self.envelope.header
        microbatch = header.microbatch if isinstance(header, HopTensor) else 0
        return self.envelope.generation, header.outlasts_steps, header.step, microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Break:
    """End of a stream: its reason, and whether a second try would end the same way."""

    reason: str
    is_final: bool
    is_unavailable: bool = False
    """Refused, reset or cut off: with no sign of life before, nobody may be there."""


@dataclass(slots=True, kw_only=True)
class _Absence:
    """Dials in a row at which nobody was there, and since when."""

    since_s: float = 0.0
    num_refused: int = 0

    def ended(self, end: _Break, *, was_heard: bool, now: float) -> None:
        """A stream ended like this."""
        if was_heard or not end.is_unavailable:
            self.since_s, self.num_refused = now, 0
        else:
            self.since_s = self.since_s or now
            self.num_refused += 1

    def is_over(self, gone_s: float, *, now: float) -> bool:
        """Whether it has lasted long enough to be a death."""
        return self.num_refused >= _LEAST_REFUSED and now - self.since_s >= gone_s

    def cut(self, pause_s: float, gone_s: float, *, now: float) -> float:
        """The pause, no longer than until it would be over."""
        return min(pause_s, max(self.since_s + gone_s - now, _FIRST_PAUSE_S)) if self.since_s else pause_s


class LaneOutbox:
    """Tensors on their way to `to` in `lane`. `run` does the sending and is cancelled to end it. Lanes share `pace`."""

    def __init__(
        self,
        to: Member,
        lane: Lane,
        *,
        dial: Dial,
        patience: PeerPatience,
        pace: PeerPace,
        statistics: Statistics,
        on_failed: OnFailed,
        on_taken: OnTaken = ignore_taken,
        has_checksums: bool = True,
    ) -> None:
        self.to = to
        self.lane = lane
        self._pace = pace
        self._dial = dial
        self._patience = patience
        self._statistics = statistics
        self._on_failed = on_failed
        self._on_taken = on_taken
        self._has_checksums = has_checksums
        self._waiting: list[tuple[tuple[int, ...], int, _Parcel]] = []
        self._unanswered: dict[int, _Parcel] = {}
        self._resting: dict[_Parcel, asyncio.TimerHandle] = {}
        self._next_number = 0
        self._credit = 0
        self._was_granted = False
        self._news = asyncio.Event()
        self._silence: asyncio.Timeout | None = None
        self._began_s = 0.0
        self._answered_s = 0.0
        self._heard_s = 0.0
        """Time of the peer's last sign of life, or at which it first owed one."""

    @property
    def depth(self) -> int:
        """Tensors that are not accepted yet."""
        return len(self._waiting) + len(self._unanswered) + len(self._resting)

    def put(self, envelope: Envelope, bundle: Bundle) -> None:
        """Send `bundle`, soon. Its bytes must not change until then."""
        self._put(_Parcel(envelope=envelope, bundle=bundle, total_bytes=bundle_bytes(bundle)))

    def forget(self, generation: Generation) -> None:
        """Send nothing more of older generations."""

        def is_old(parcel: _Parcel) -> bool:
            return parcel.envelope.generation < generation

        self._waiting = [entry for entry in self._waiting if not is_old(entry[2])]
        heapify(self._waiting)
        self._unanswered = {n: parcel for n, parcel in self._unanswered.items() if not is_old(parcel)}
        for parcel in [parcel for parcel in self._resting if is_old(parcel)]:
            self._resting.pop(parcel).cancel()
        self._news.set()
        self._rearm()

    async def run(self) -> NoReturn:
        """Send what is put in, for ever."""
        try:
            while True:
                while not self._waiting:
                    await self._wait()
                await self._persist()
        finally:
            for timer in self._resting.values():
                timer.cancel()

    # --- connections ---

    async def _persist(self) -> None:
        """Connect, and again, until a stream ends with nothing left to send."""
        pause_s, num_barren, absence = _FIRST_PAUSE_S, 0, _Absence()
        while True:
            self._began_s = self._now()
            end = await self._converse()
            bound_s = self._bound_s()
            self._take_back()
            if not self._waiting:
                return
            now_s = self._now()
            was_heard = self._heard_s > self._began_s
            if self._answered_s > self._began_s:
                pause_s, num_barren = _FIRST_PAUSE_S, 0
            num_barren += was_heard
            absence.ended(end, was_heard=was_heard, now=now_s)
            is_silent = now_s - self._heard_s >= bound_s or absence.is_over(self._patience.gone_s, now=now_s)
            if end.is_final or is_silent or num_barren > _MAX_BARREN:
                self._give_up(end.reason)
                return
            await asyncio.sleep(absence.cut(pause_s, self._patience.gone_s, now=now_s))
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _converse(self) -> _Break:
        """Send over one stream until it ends."""
        self._credit = 0
        self._was_granted = False
        try:
            async with (
                asyncio.timeout(None) as self._silence,
                dialled(self._dial, self.to.address, self.lane) as channel,
            ):
                self._rearm()
                deliver: aio.StreamStreamMultiCallable[bytes, peer_pb2.PartReply] = channel.stream_stream(
                    DELIVER, None, peer_pb2.PartReply.FromString
                )
                call = deliver(None)
                async with asyncio.TaskGroup() as group:
                    writing = group.create_task(self._write(call))
                    try:
                        return await self._read(call)
                    finally:
                        writing.cancel()
        except TimeoutError:
            self._forgive_own_stall()
            silent_s = self._now() - self._heard_s
            return _Break(reason=f"{self.to.address}: silent for {silent_s:.1f} s", is_final=False)
        finally:
            self._silence = None

    def _take_back(self) -> None:
        """Put back what a broken stream leaves unanswered: it waits for the next one."""
        for parcel in self._unanswered.values():
            self._put(parcel, is_again=True)
        self._unanswered.clear()

    def _give_up(self, reason: str) -> None:
        parcels = [parcel for _, _, parcel in self._waiting]
        self._waiting.clear()
        for generation in sorted({parcel.envelope.generation for parcel in parcels}):
            self._on_failed(self.to.worker, generation, reason)
        self._statistics.failed[self.to.worker] += len(parcels)

    # --- sending ---

    def _put(self, parcel: _Parcel, *, is_again: bool = False) -> None:
        self._statistics.resent[self.lane] += is_again
        if not self._waiting and not self._unanswered:
            self._heard_s = self._now()
        heappush(self._waiting, (parcel.age, self._take_number(), parcel))
        self._news.set()

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number

    async def _write(self, call: DeliverCall) -> None:
        """Offer what waits, oldest first. A broken stream ends this quietly: the reader learns why."""
        try:
            while True:
                while not self._waiting:
                    await self._wait()
                _, _, parcel = heappop(self._waiting)
                await self._write_parcel(call, self._take_number(), parcel)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _write_parcel(self, call: DeliverCall, number: int, parcel: _Parcel) -> None:
        self._unanswered[number] = parcel
        parcel.sent_s, parcel.began_s, parcel.num_bytes = None, self._now(), 0
        self._rearm()
        start = TENSOR_PART.encode(announce(number, parcel.envelope, parcel.bundle))
        await call.write(start.SerializeToString())
        for part in outgoing(parcel.bundle, lambda: self._pace.part_bytes):
            while self._credit < part.num_bytes and number in self._unanswered:
                await self._wait()
            if number not in self._unanswered:
                return
            self._credit -= part.num_bytes
            await call.write(part.message(number, has_checksum=self._has_checksums))
            self._statistics.sent(self.to.worker, parcel.envelope, part.num_bytes)
            parcel.num_bytes += part.num_bytes
        parcel.sent_s = self._now()

    # --- replies ---

    async def _read(self, call: DeliverCall) -> _Break:
        try:
            async for message in call:
                now_s = self._now()
                silent_s = now_s - max(self._heard_s, self._began_s)
                self._heard_s = now_s
                reply = PART_REPLY.decode(message)
                self._pace.heard(silent_s, self._arrived_bytes(reply), now=now_s)
                self._reply(reply)
                self._rearm()
                self._news.set()
        except aio.AioRpcError as error:
            return _Break(
                reason=describe_rpc_error(error, self.to.address),
                is_final=error.code() in FINAL,
                is_unavailable=error.code() is grpc.StatusCode.UNAVAILABLE,
            )
        except RemoteError as error:
            return _Break(reason=f"{self.to.address}: {error}", is_final=True)
        return _Break(reason=f"{self.to.address}: the peer ended the stream", is_final=False)

    def _arrived_bytes(self, reply: PartReply) -> int:
        """Bytes that have arrived, by this reply, since the one before; the first credit comes before any."""
        match reply:
            case CreditGranted():
                was_granted, self._was_granted = self._was_granted, True
                return reply.num_bytes if was_granted else 0
            case TensorAccepted() if reply.tensor in self._unanswered:
                return self._unanswered[reply.tensor].num_bytes
            case _:
                return 0

    def _reply(self, reply: PartReply) -> None:
        match reply:
            case CreditGranted():
                self._credit += reply.num_bytes
            case TensorAccepted():
                self._answered_s = self._heard_s
                parcel = self._unanswered.pop(reply.tensor, None)
                if parcel is not None:
                    self._statistics.accepted[self.lane] += 1
                    self._answered(parcel)
            case TensorRefused():
                self._answered_s = self._heard_s
                parcel = self._unanswered.pop(reply.tensor, None)
                if parcel is not None:
                    self._statistics.refused[reply.reason] += 1
                    self._refused(parcel, reply)
            case _:
                assert_never(reply)

    def _answered(self, parcel: _Parcel) -> None:
        if parcel.sent_s is not None:
            now_s = self._now()
            self._pace.answered(now_s - parcel.sent_s)
            self._on_taken(self.to.worker, parcel.envelope, parcel.num_bytes, now_s - parcel.began_s)

    def _refused(self, parcel: _Parcel, refused: TensorRefused) -> None:
        match refused.reason:
            case Refusal.STALE:
                pass
            case Refusal.NOT_YET:
                pause_s = min(max(2 * self._pace.answer_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
                timer = asyncio.get_running_loop().call_later(pause_s, self._rested, parcel)
                self._resting[parcel] = timer
            case Refusal.CORRUPT if parcel.num_corrupt + 1 < _MAX_CORRUPT:
                parcel.num_corrupt += 1
                self._put(parcel, is_again=True)
            case (
                Refusal.CORRUPT
                | Refusal.TOO_LARGE
                | Refusal.UNKNOWN_JOB
                | Refusal.UNEXPECTED
                | Refusal.FORGED
            ):
                reason = f"{self.to.address}: refused as {refused.reason}: {refused.text}"
                self._statistics.failed[self.to.worker] += 1
                self._on_failed(self.to.worker, parcel.envelope.generation, reason)
            case _:
                assert_never(refused.reason)

    def _rested(self, parcel: _Parcel) -> None:
        del self._resting[parcel]
        self._put(parcel, is_again=True)

    # --- waiting ---

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _wait(self) -> None:
        """Return when something has changed since the last call."""
        await self._news.wait()
        self._news.clear()

    def _rearm(self) -> None:
        """Let silence end the stream if answers are due: a later one of a peer that is silent has what is left."""
        if self._silence is None or self._silence.expired():
            return
        bound_s = self._bound_s()
        silent_before_s = max(self._began_s - self._heard_s, 0.0)
        left_s = max(bound_s - silent_before_s, bound_s / 3)
        last_s = max(self._heard_s, self._began_s)
        self._silence.reschedule(last_s + min(2 * bound_s / 3, left_s) if self._unanswered else None)

    def _forgive_own_stall(self) -> None:
        """A timer that fires long after its time means that this process stood still: the peer may have answered."""
        due_s = None if self._silence is None else self._silence.when()
        if due_s is not None and self._now() - due_s > _LATE_S:
            self._heard_s = self._now()

    def _bound_s(self) -> float:
        """Seconds that the peer may be silent now."""
        under_way = max((parcel.total_bytes for parcel in self._unanswered.values()), default=0)
        return self._patience.bound_s(self._pace.usual_s(under_way, now=self._now()))
