"""Description of what a worker holds of a job."""

from collections.abc import Mapping
from dataclasses import dataclass

from skein.config.job import JobSpec
from skein.plan.plan import Group
from skein.protocol.messages.directives import Resumption
from skein.types import JobId, StageIndex, WorkerId
from worker.compute.batches import BatchReader
from worker.compute.chunk import Chunk


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
