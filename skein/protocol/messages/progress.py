"""Progress of a chunk in a step, as its worker tells of it, and as much of it as stays."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from skein.plan.ops import Kept
from skein.types import MicrobatchId, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedChunk:
    """Part of a chunk's progress that stays: its whole ledger or none, and some of what waits there for later ops."""

    stage: StageIndex
    ledger: tuple[MicrobatchId, ...]
    forwards: tuple[MicrobatchId, ...]
    pending: tuple[MicrobatchId, ...] = ()

    @property
    def held(self) -> frozenset[tuple[Kept, MicrobatchId]]:
        """Things that ops have left at the chunk: the kind and the microbatch of each."""
        pairs = ((Kept.GRAPH, self.forwards), (Kept.PENDING, self.pending))
        return frozenset((kept, microbatch) for kept, listed in pairs for microbatch in listed)

    def holding(self, held: Iterable[tuple[Kept, MicrobatchId]]) -> Self:
        """The same with this left at the chunk."""
        there = sorted(held)
        graphs, pending = (tuple(m for what, m in there if what is kept) for kept in Kept)
        return replace(self, forwards=graphs, pending=pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProgress(ResumedChunk):
    """Work that a chunk has done of the step that begins at its version, when a new generation stopped it.

    `ledger` is in the order of accumulation. `forwards` are microbatches whose activations wait for their gradient,
    `pending` those whose weight op is to come; `outputs` and `gradients` those whose activation for the next hop, and
    gradient for the hop before, the boundary log has.
    """

    outputs: tuple[MicrobatchId, ...]
    gradients: tuple[MicrobatchId, ...]
