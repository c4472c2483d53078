"""Times of a worker's ops and transfers: the last so many of each, and their medians.

Rules of this file
- Only training counts: evaluation computes other things and does not wait for them.
- What is told is bounded by what is held and by `MAX_PEERS`, however long a generation lasts.
"""

from collections import deque
from statistics import median

from skein.plan.ops import Cost, OpKind, kinds_at
from skein.plan.plan import ChunkTime, TransferTime
from skein.protocol.messages.reports import TimesMeasured
from skein.protocol.messages.tensors import HopTensor, TensorHeader
from skein.protocol.worker.ops import ComputeOp, Op
from skein.types import ChunkRef, Generation, WorkerId

NUM_KEPT = 64
"""Measurements kept of each kind. Raise it if single ops vary so much that their median does."""
MAX_PEERS = 64
"""Peers whose transfers are told, the first by name."""

LEAST_KEPT = 3
"""Measurements of each kind, before it is told: the first op of a kind, and the first tensor to a peer, take longer."""

_OF_COST = tuple(
    tuple(kind for kind in OpKind if kind.row.cost.whole is cost)
    for cost in (Cost.FORWARD, Cost.BACKWARD, Cost.LOSS)
)
_VISITS = tuple(
    frozenset(kinds_at(is_last=is_last, is_split=is_split))
    for is_last in (True, False)
    for is_split in (False, True)
)
"""Kinds of op that a visit is made of, of the last chunk of a path and of another."""


class Timing:
    """Collects one generation's measurements of one worker."""

    def __init__(self, worker: WorkerId) -> None:
        self._me = worker
        self._has_news = False
        self._ops: dict[ChunkRef, dict[OpKind, deque[float]]] = {}
        self._transfers: dict[WorkerId, deque[tuple[int, float]]] = {}

    def clear(self) -> None:
        """Forget all measurements: another generation has other chunks and other peers."""
        self._has_news = False
        self._ops.clear()
        self._transfers.clear()

    def op_ended(self, op: Op, seconds: float) -> None:
        """An op took so long."""
        if not isinstance(op, ComputeOp) or not op.phase.trains:
            return
        self._has_news = True
        self._ops.setdefault(op.chunk, {}).setdefault(op.kind, deque(maxlen=NUM_KEPT)).append(seconds)

    def tensor_taken(self, to: WorkerId, header: TensorHeader, num_bytes: int, seconds: float) -> None:
        """A peer has accepted a tensor, so long after it was offered."""
        if isinstance(header, HopTensor) and header.phase.trains:
            self._has_news = True
            self._transfers.setdefault(to, deque(maxlen=NUM_KEPT)).append((num_bytes, seconds))

    def report(self, generation: Generation) -> TimesMeasured | None:
        """All that was measured often enough; None if that is nothing, or nothing new since the last report."""
        if not self._has_news:
            return None
        chunks = sorted(chunk for chunk in self._ops if self._is_known(chunk))
        peers = sorted(peer for peer, taken in self._transfers.items() if len(taken) >= LEAST_KEPT)[
            :MAX_PEERS
        ]
        if not (chunks or peers):
            return None
        self._has_news = False
        return TimesMeasured(
            generation=generation,
            chunks=tuple(self._chunk_time(chunk) for chunk in chunks),
            transfers=tuple(self._transfer_time(peer) for peer in peers),
        )

    def _is_known(self, chunk: ChunkRef) -> bool:
        """Whether all that a visit is made of was measured."""
        known = {kind for kind, kept in self._ops[chunk].items() if len(kept) >= LEAST_KEPT}
        return any(known >= visit for visit in _VISITS)

    def _chunk_time(self, chunk: ChunkRef) -> ChunkTime:
        kept = self._ops[chunk]
        forward_s, backward_s, loss_s = (
            sum(median(kept[kind]) for kind in kinds if kind in kept) for kinds in _OF_COST
        )
        weight_s = median(kept[OpKind.WEIGHT]) if OpKind.WEIGHT in kept else 0.0
        if loss_s > 0:
            # The weight op of a loss is a part of it.
            backward_s, loss_s = 0.0, loss_s + backward_s
        return ChunkTime(
            chunk=chunk, forward_s=forward_s, backward_s=backward_s, loss_s=loss_s, weight_s=weight_s
        )

    def _transfer_time(self, peer: WorkerId) -> TransferTime:
        """Lower quartile of the times of the largest tensors: one that waits for others says little of its link."""
        taken = self._transfers[peer]
        largest = max([num_bytes for num_bytes, _ in taken])
        return TransferTime(
            sender=self._me,
            receiver=peer,
            num_bytes=largest,
            seconds=_lower_quartile([seconds for num_bytes, seconds in taken if num_bytes == largest]),
        )


def _lower_quartile(values: list[float]) -> float:
    """The first of `statistics.quantiles(values, n=4, method="inclusive")`, without the others.

    >>> _lower_quartile([3.0]), _lower_quartile([1.0, 2.0, 3.0, 4.0, 5.0])
    (3.0, 2.0)
    """
    ascending = sorted(values)
    place, quarters = divmod(len(values) - 1, 4)
    if not quarters:
        return ascending[place]
    return (ascending[place] * (4 - quarters) + ascending[place + 1] * quarters) / 4
