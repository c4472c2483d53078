"""Snapshots of chunks: how long they are kept, and what steps apply to them from there on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from skein.protocol.messages.directives import Decision, StepRecord
from skein.protocol.worker.ops import SnapshotOp
from skein.types import Generation, Own, StageIndex, StageSpec, Step

NUM_SNAPSHOTS = 2
"""Snapshots kept of one stage with results, and as many without: a job that goes back needs the older until the
newer is elsewhere too, and who follows from the older is not thrown out by who begins at the newer."""
MAX_RESULTS_AFTER = 20
"""Results that are still kept after the generation has changed in which they were asked for: whoever follows has its
chunk by then, or asks anew."""


@dataclass(slots=True, kw_only=True)
class SnapshotTerm:
    """Snapshot of one stage at one version; `keeps_results`: what steps from there on apply is kept with it."""

    stage: StageSpec
    version: Step
    generation: Generation
    """Generation that asked for it last."""
    keeps_results: bool
    num_after: int = 0
    """Steps since that generation."""

    def asked_again(self, op: SnapshotOp) -> None:
        """Note that a snapshot which is here already is wanted for more."""
        self.keeps_results |= op.keeps_results
        self.generation = max(self.generation, op.generation)

    def stepped(self, generation: Generation) -> None:
        """A step of `generation` has been applied to the chunk."""
        self.num_after += self.generation < generation
        self.keeps_results &= self.num_after <= MAX_RESULTS_AFTER

    def adopted(self, generation: Generation) -> None:
        """Results are kept till the generation after that in which they were asked for is over."""
        self.keeps_results &= generation <= self.generation + 1


T = TypeVar("T", bound=SnapshotTerm)


def outlived(kept: Iterable[T], stage: StageSpec) -> list[T]:
    """Snapshots of a stage, in the order of taking, that newer ones have made of no use."""
    here = [x for x in kept if x.stage == stage]
    return [
        x
        for keeps_results in (False, True)
        for x in [x for x in here if x.keeps_results is keeps_results][:-NUM_SNAPSHOTS]
    ]


def changes(record: StepRecord, stage: StageIndex) -> bool:
    """Whether a step changes `stage`: if not, its version grows and nothing else, and there is no result to fetch.

    What is tied is held at the ends of every path, so a stage's groups have equal weights.
    """
    own = Own(stage)
    return record.decision is Decision.APPLY and any(x.group == own and x.weight for x in record.results)
