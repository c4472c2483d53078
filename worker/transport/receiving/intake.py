"""Takes the tensors of Deliver streams: checks, assembles, delivers once. No I/O: parts go in, replies come out.

Rules of this file
- Nothing is allocated for a tensor before its announcement is checked, accepted and within the memory budget.
- A tensor refused is not an error of the stream: its parts still arrive, are counted for credit and dropped.
- What no honest peer sends (unknown enums, parts out of the blue, bytes beyond the credit) is `RemoteError`: the end of
  the stream.
- Delivered means: `on_tensor` has returned. Only then is a tensor accepted, and from then on it is a duplicate.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import assert_never

from skein.errors import RemoteError
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.protocol.worker.keeping.desk import key_of
from skein.protocol.worker.ops import TensorKey
from skein.types import Epoch, Generation
from skein.wire.extra import (
    CreditGranted,
    PartReply,
    TensorAccepted,
    TensorData,
    TensorPart,
    TensorRefused,
    TensorStart,
)
from skein.wire.identity.names import LOCAL, Caller, is_worker
from worker.bundle import Bundle, BundleFault, Limits, allocate, fault_of, split_tensors
from worker.transport.checksum import checksum
from worker.transport.framing import FramedPart
from worker.transport.receiving.window import Window
from worker.transport.statistics import Statistics

Accepts = Callable[[Envelope], Refusal | None]
"""Says why a tensor is not wanted, None if it is. Asked before its bytes and again when they are complete."""
OnTensor = Callable[[Envelope, Bundle], None]
"""Takes a complete tensor. Called on the event loop, so it only files and returns."""

MAX_PART_BYTES = 2 << 20
_MAX_KNOWN = 1 << 16

Identity = tuple[Epoch, Generation, TensorKey]


def identity_of(envelope: Envelope) -> Identity:
    """Equal for two sends of one tensor."""
    return envelope.epoch, envelope.generation, key_of(envelope.header)


class Intake:
    """State that all streams of one worker share: whom it listens to, what is here already, how much memory is left."""

    def __init__(
        self, *, accepts: Accepts, on_tensor: OnTensor, limits: Limits, statistics: Statistics
    ) -> None:
        self.limits = limits
        self.statistics = statistics
        self.pending_bytes = 0
        self._accepts = accepts
        self._on_tensor = on_tensor
        self._known: OrderedDict[Identity, None] = OrderedDict()

    def fault_of(self, start: TensorStart) -> BundleFault | None:
        """Fault for which the announced tensor is not taken; None if its bytes may come."""
        fault = fault_of(start.tensors, start.num_bytes, self.limits) or self._unwanted(start.envelope)
        if fault is None and self.pending_bytes + start.num_bytes > self.limits.max_pending_bytes:
            fault = BundleFault(reason=Refusal.NOT_YET, text="no memory left for tensors that are arriving")
        return fault

    def is_known(self, envelope: Envelope) -> bool:
        """Whether the tensor has been delivered already."""
        is_known = identity_of(envelope) in self._known
        self.statistics.duplicates += is_known
        return is_known

    def deliver(self, envelope: Envelope, bundle: Bundle) -> BundleFault | None:
        """Hand a complete tensor over, unless it is unwanted by now."""
        fault = self._unwanted(envelope)
        if fault is None and not self.is_known(envelope):
            self._on_tensor(envelope, bundle)
            self._known[identity_of(envelope)] = None
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return fault

    def forget(self, generation: Generation) -> None:
        """Tensors of older generations will not come again: nobody accepts them."""
        for known in [known for known in self._known if known[1] < generation]:
            del self._known[known]

    def _unwanted(self, envelope: Envelope) -> BundleFault | None:
        reason = self._accepts(envelope)
        return (
            None if reason is None else BundleFault(reason=reason, text=f"generation {envelope.generation}")
        )


class Inbox:
    """Deliver stream as its receiver sees it. Tensors come one at a time; a new one abandons the unfinished.

    `caller`: who has opened it; tensors of anybody else are refused.
    """

    def __init__(self, intake: Intake, window: Window, caller: Caller | None = LOCAL) -> None:
        self._caller = caller
        # Between certificates TLS has refused what was changed on its way.
        self._has_checksums = caller == LOCAL
        self._intake = intake
        self._window = window
        self._start: TensorStart | None = None
        self._last_number = -1
        self._buffer = memoryview(b"")
        self._filled = 0

    def open(self, *, now: float) -> PartReply:
        """The first reply: credit to begin with."""
        return CreditGranted(num_bytes=self._window.open(now=now))

    def take(self, part: TensorPart | FramedPart, *, now: float) -> list[PartReply]:
        """Take the next part.

        Raises:
            RemoteError: the peer breaks the protocol.
        """
        match part:
            case TensorStart():
                return self._announced(part)
            case TensorData() | FramedPart():
                replies = self._filed(part)
                granted = self._window.take(len(part.data), now=now)
                return [*replies, CreditGranted(num_bytes=granted)] if granted else replies
            case _:
                assert_never(part)

    def close(self) -> None:
        """The stream is over: give the memory of an unfinished tensor back."""
        if self._start is not None:
            self._intake.pending_bytes -= self._start.num_bytes
        self._start = None
        self._buffer = memoryview(b"")

    def _announced(self, start: TensorStart) -> list[PartReply]:
        if start.tensor <= self._last_number:
            raise RemoteError(f"announced tensor {start.tensor} after {self._last_number}")
        self.close()
        self._last_number = start.tensor
        if (fault := self._forgery_in(start) or self._intake.fault_of(start)) is not None:
            return [self._refused(start.tensor, fault)]
        if self._intake.is_known(start.envelope):
            return [TensorAccepted(tensor=start.tensor)]
        self._start = start
        self._intake.pending_bytes += start.num_bytes
        self._buffer = allocate(start.num_bytes)
        self._filled = 0
        return self._completed() if not start.num_bytes else []

    def _forgery_in(self, start: TensorStart) -> BundleFault | None:
        """Fault of a tensor that names another sender than the certificate on its connection does."""
        sender = start.envelope.sender
        caller = self._caller
        if is_worker(caller, sender):
            return None
        whose = "nobody" if caller is None else f"{caller.role} {caller.name}"
        text = f"the certificate is that of {whose}, not of worker {sender}"
        return BundleFault(reason=Refusal.FORGED, text=text)

    def _filed(self, part: TensorData | FramedPart) -> list[PartReply]:
        if part.tensor > self._last_number:
            raise RemoteError(f"sent bytes of tensor {part.tensor}, which was not announced")
        if not 0 < len(part.data) <= MAX_PART_BYTES:
            raise RemoteError(f"sent a part of {len(part.data)} bytes, 1 to {MAX_PART_BYTES} are allowed")
        start = self._start
        if start is None or start.tensor != part.tensor:
            return []
        end = self._filled + len(part.data)
        self._intake.statistics.received_bytes[start.envelope.sender] += len(part.data)
        text = ""
        if part.offset != self._filled or end > start.num_bytes:
            text = f"bytes {part.offset} to {part.offset + len(part.data)} after {self._filled}"
        else:
            # Where they are to be, and aligned: what does not fit is overwritten or dropped.
            self._buffer[self._filled : end] = part.data
            if self._has_checksums and checksum(self._buffer[self._filled : end]) != part.checksum:
                text = f"checksum of bytes {part.offset} to {end} does not fit"
        if text:
            self.close()
            return [self._refused(part.tensor, BundleFault(reason=Refusal.CORRUPT, text=text))]
        self._filled = end
        return self._completed() if end == start.num_bytes else []

    def _completed(self) -> list[PartReply]:
        start, buffer = self._start, self._buffer
        assert start is not None
        self.close()
        fault = self._intake.deliver(start.envelope, split_tensors(start.tensors, buffer))
        if fault is not None:
            return [self._refused(start.tensor, fault)]
        return [TensorAccepted(tensor=start.tensor)]

    def _refused(self, number: int, fault: BundleFault) -> PartReply:
        self._intake.statistics.refusals[fault.reason] += 1
        return TensorRefused(tensor=number, reason=fault.reason, text=fault.text)
