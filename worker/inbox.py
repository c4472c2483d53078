"""The worker's inbox: whatever the coordinator and peers say becomes an event, and tensors are filed on the way."""

import asyncio
import logging

from skein.protocol.messages.directives import Directive, Welcome
from skein.protocol.messages.tensors import Envelope, ShardTensor
from skein.protocol.worker.worker import Worker
from skein.protocol.worker.worker_io import (
    DirectiveArrived,
    SendFailed,
    StreamLost,
    StreamOpened,
    TensorArrived,
    TensorTaken,
    WorkerEvent,
)
from skein.types import Generation, WorkerId
from skein.wire.extra import Refusal
from worker.bundle import Bundle
from worker.compute.payload import PayloadStore, key_of
from worker.telling.metrics import WorkerMetrics
from worker.telling.moments import tell_directive

_log = logging.getLogger(__name__)

_MAX_FORGED, _MAX_NAME = 256, 64
"""Lines about what is forged, of which the metric counts all; characters of a name in them."""
_ANYBODY = WorkerId("")
"""Who asks for state gives no name."""


class WorkerInbox:
    """Where everything that happens becomes an event; what peers send is filed on the way.

    Args:
        memory_bytes: of payloads that came early, above which senders are asked to wait.
    """

    def __init__(self, machine: Worker, *, metrics: WorkerMetrics, memory_bytes: int) -> None:
        self.store = PayloadStore()
        self._machine = machine
        self._metrics = metrics
        self._memory_bytes = memory_bytes
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._last_reason = ""
        self._forged: set[tuple[WorkerId, Generation]] = set()

    def post(self, event: WorkerEvent) -> None:
        """Put an event in."""
        self._events.put_nowait(event)

    async def get(self) -> WorkerEvent:
        """The oldest event that nobody has taken."""
        return await self._events.get()

    # --- the control stream ---

    def opened(self) -> None:
        self.post(StreamOpened())

    def heard(self, directive: Directive) -> None:
        tell_directive(directive)
        if isinstance(directive, Welcome):
            self._last_reason = ""
            self._metrics.connected(is_connected=True)
        self.post(DirectiveArrived(directive=directive))

    def lost(self, reason: str) -> None:
        self._metrics.connected(is_connected=False)
        self._metrics.rpc_failed("control")
        if reason != self._last_reason:
            self._last_reason = reason
            _log.warning("no coordinator: %s; trying again", reason)
        self.post(StreamLost(reason=reason))

    # --- peers ---

    def accepts(self, envelope: Envelope) -> Refusal | None:
        """Whether a peer's tensor is wanted: not if it is old or forged, and not yet if it is early.

        Of a newer generation nobody can tell whose it is; nobody has work of one that not all have acknowledged.
        """
        machine = self._machine
        place = (envelope.epoch, envelope.generation)
        here = (machine.epoch, machine.generation)
        if place < here or (place == here and envelope.header.step < machine.version):
            return Refusal.STALE
        if place == here and envelope.job != machine.job:
            return Refusal.UNKNOWN_JOB
        if place > here:
            return Refusal.NOT_YET
        if not machine.is_authentic(envelope):
            self._tell_forged(envelope)
            return Refusal.FORGED
        header = envelope.header
        if isinstance(header, ShardTensor) and header.kind.is_own and header.member.worker != envelope.sender:
            return Refusal.UNEXPECTED
        is_early = envelope.header.step > machine.version
        return Refusal.NOT_YET if is_early and self.store.num_bytes > self._memory_bytes else None

    def may_fetch(self, door: str) -> bool:
        """Whether a peer that shows this may have state; one line in each generation where one may not."""
        machine = self._machine
        if machine.may_fetch(door):
            return True
        if self._is_told_first(_ANYBODY, machine.generation):
            line = "state is asked for and refused, generation=%d: %s"
            why = "who asks was not told to fetch it in this generation or the one before"
            _log.warning(line, machine.generation, why)
        return False

    def _tell_forged(self, envelope: Envelope) -> None:
        """One line for each name and generation, in the log of the job as well: somebody meddles."""
        if self._is_told_first(envelope.sender, envelope.generation):
            line = "incident: tensors in the name of worker=%s are forged and refused, generation=%d: %s"
            why = "who sends them has the token, and not the secret of that worker"
            _log.error(line, envelope.sender[:_MAX_NAME], envelope.generation, why)

    def _is_told_first(self, worker: WorkerId, generation: Generation) -> bool:
        """Whether nothing was told of this name in this generation, and there is room for a line; then it counts."""
        about = worker, generation
        if about in self._forged or len(self._forged) >= _MAX_FORGED:
            return False
        self._forged.add(about)
        return True

    def on_tensor(self, envelope: Envelope, bundle: Bundle) -> None:
        """A peer's tensor is here, whole and checked."""
        self.store.file(envelope.generation, key_of(envelope.header), bundle)
        self.post(TensorArrived(envelope=envelope))

    def on_taken(self, to: WorkerId, envelope: Envelope, num_bytes: int, seconds: float) -> None:
        """A peer has accepted a tensor."""
        self.post(TensorTaken(to=to, envelope=envelope, num_bytes=num_bytes, seconds=seconds))

    def on_send_failed(self, to: WorkerId, generation: Generation, reason: str) -> None:
        """A peer did not take what was sent to it."""
        self._metrics.rpc_failed("deliver")
        self.post(SendFailed(to=to, generation=generation, reason=reason))
