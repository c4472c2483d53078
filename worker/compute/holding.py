"""Description of what a worker holds of a job."""

from collections.abc import Mapping
from dataclasses import dataclass

from skein.config.job import JobSpec
from skein.model.reduced import keepers_of
from skein.plan.changing.traffic import traffic_of
from skein.plan.plan import Group
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.directives import Resumption
from skein.types import JobId, StageIndex, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk
from worker.telling.aggregating import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Chunks, groups and data that a worker holds of a job in one generation."""

    job_id: JobId
    job: JobSpec
    worker: WorkerId
    chunks: Mapping[StageIndex, Chunk]
    groups: tuple[Group, ...]
    batches: BatchReader | None
    """None on workers where no path begins."""
    resumption: Resumption | None
    """Part of the step in progress that stays; None: nothing."""

    def draw_by(self, choice: ToldChoice) -> None:
        """Draw samples by this choice from now on, if any begin here."""
        if self.batches is not None:
            self.batches.draw_by(choice)

    @property
    def traffic(self) -> Traffic:
        """Kinds of the boundary tensors that the chunks send."""
        return {stage: traffic_of(self.job.model, chunk.stage) for stage, chunk in self.chunks.items()}


def share_among(chunks: Mapping[StageIndex, Chunk]) -> None:
    """Has the chunks of a worker hold each parameter once."""
    for stage, keepers in keepers_of({at: chunk.params for at, chunk in chunks.items()}).items():
        chunks[stage].share({name: chunks[keeper] for name, keeper in keepers.items()})
