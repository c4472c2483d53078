"""The worker's inbox: whatever the coordinator and peers say becomes an event, and tensors are filed on the way."""

import asyncio
import logging

from skein.protocol.messages.directives import Directive, Welcome
from skein.protocol.messages.tensors import Envelope, Refusal
from skein.protocol.worker.keeping.desk import Desk, key_of
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
from worker.bundle import Bundle
from worker.compute.payload import Payload
from worker.telling.metrics import WorkerMetrics
from worker.telling.moments import tell_directive

_log = logging.getLogger(__name__)

_MAX_NAME = 64
"""Characters of a name in a line."""
_ANYBODY = WorkerId("")
"""Name for any peer that asks for state: its request gives none."""


class WorkerInbox:
    """Inbox that turns everything that happens into events; what peers send is filed on the way.

    Args:
        memory_bytes: of payloads that came early, above which senders are asked to wait.
    """

    def __init__(
        self, machine: Worker, *, desk: Desk[Payload], metrics: WorkerMetrics, memory_bytes: int
    ) -> None:
        self.desk = desk
        self._machine = machine
        self._gate = machine.gate
        self._metrics = metrics
        self._memory_bytes = memory_bytes
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._last_reason = ""

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
        """Reason to refuse a peer's tensor, or None; one line per forged name, in the log of the job as well."""
        is_full = self.desk.num_bytes > self._memory_bytes
        refusal = self._gate.refusal_of(envelope, is_full=is_full)
        if refusal is Refusal.FORGED and self._gate.is_news(envelope.sender):
            line = "incident: tensors in the name of worker=%s are forged and refused, generation=%d: %s"
            why = "who sends them is let in here, and has not the secret of that worker"
            _log.error(line, envelope.sender[:_MAX_NAME], envelope.generation, why)
        return refusal

    def may_fetch(self, door: str) -> bool:
        """Whether a peer that shows this may have state; one line in each generation where one may not."""
        may = self._gate.may_fetch(door)
        if not may and self._gate.is_news(_ANYBODY):
            line = "state is asked for and refused, generation=%d: %s"
            why = "who asks was not told to fetch it in this generation or the one before"
            _log.warning(line, self._machine.generation, why)
        return may

    def on_tensor(self, envelope: Envelope, bundle: Bundle) -> None:
        """A peer's tensor is here, whole and checked."""
        self.desk.file(envelope.generation, key_of(envelope.header), bundle)
        self.post(TensorArrived(envelope=envelope))

    def on_taken(self, to: WorkerId, envelope: Envelope, num_bytes: int, seconds: float) -> None:
        """A peer has accepted a tensor."""
        self.post(TensorTaken(to=to, envelope=envelope, num_bytes=num_bytes, seconds=seconds))

    def on_send_failed(self, to: WorkerId, generation: Generation, reason: str) -> None:
        """A peer did not take what was sent to it."""
        self._metrics.rpc_failed("deliver")
        self.post(SendFailed(to=to, generation=generation, reason=reason))
