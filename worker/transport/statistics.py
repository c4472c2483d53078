"""Counts of the transport, for beats and metrics."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from skein.plan.changing.traffic import TrafficKind
from skein.plan.ops import Direction
from skein.protocol.messages.tensors import Envelope, ShardTensor
from skein.types import JobId, StageIndex, WorkerId
from skein.wire.channel import Lane


def _edge(_job: JobId, _stage: StageIndex, _direction: Direction) -> TrafficKind:
    return TrafficKind.EDGE


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Cumulative since the process started, shared by the sending and the receiving half.

    Peers are counted by name only after the worker has accepted their messages, so that labels stay bounded.
    """

    sent_bytes: Counter[WorkerId] = field(default_factory=Counter)
    received_bytes: Counter[WorkerId] = field(default_factory=Counter)
    shard_bytes: Counter[tuple[JobId, WorkerId]] = field(default_factory=Counter)
    """Bytes of aggregation among `sent_bytes`, by job and peer."""
    tensor_bytes: Counter[TrafficKind] = field(default_factory=Counter)
    """Bytes of training and aggregation among `sent_bytes`, by kind."""
    traffic_of: Callable[[JobId, StageIndex, Direction], TrafficKind] = _edge
    """Kind of what a stage that is held here sends; asked on the event loop."""
    state_parts: int = 0
    """Parts that came of state and results that were asked for."""
    accepted: Counter[Lane] = field(default_factory=Counter)
    """Tensors that peers took."""
    resent: Counter[Lane] = field(default_factory=Counter)
    """Tensors offered once more: after a broken stream, a checksum that did not fit, or a "not yet"."""
    refused: Counter[str] = field(default_factory=Counter)
    """Tensors that peers did not take, by reason."""
    failed: Counter[WorkerId] = field(default_factory=Counter)
    """Tensors given up, by peer."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Tensors, calls and streams that this worker did not take, by reason."""
    duplicates: int = 0
    """Tensors that came once more and were not delivered again."""

    def sent(self, to: WorkerId, envelope: Envelope, num_bytes: int) -> None:
        """So many bytes of a tensor have left for a peer."""
        self.sent_bytes[to] += num_bytes
        header = envelope.header
        if isinstance(header, ShardTensor):
            self.shard_bytes[envelope.job, to] += num_bytes
            self.tensor_bytes[TrafficKind.REDUCTION] += num_bytes
        else:
            sender = header.path.hops[header.path.makers(header.direction, header.hop)[0]]
            kind = self.traffic_of(envelope.job, sender.stage, header.direction)
            self.tensor_bytes[kind] += num_bytes
