"""Entries of the run log: the hard state. Appended durably before any effect is sent; replay rebuilds the coordinator.

What is not here (leases, ledgers, votes) is soft: a restarted coordinator learns it again from reports.
"""

from dataclasses import dataclass

from skein.plan.plan import Plan
from skein.protocol.messages import CheckpointFile, StepRecord
from skein.types import Epoch, Generation, Incarnation, JobId, JobState, StageIndex, Step, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened:
    """A coordinator took the log. Everything after is stamped with this epoch."""

    epoch: Epoch
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job exists. Submitting the same `key` again gives the same job."""

    job: JobId
    key: str
    spec: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMember:
    """A worker of a generation, by incarnation."""

    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOpened:
    """Older generations' messages are refused from here on; `reason` says why a new one was needed."""

    job: JobId
    generation: Generation
    members: tuple[GenerationMember, ...]
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAdopted:
    """The plan of a generation. A restarted coordinator takes it up again if its workers come back."""

    job: JobId
    generation: Generation
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The decision on a step. Nothing of the step is replayed after this is durable."""

    job: JobId
    record: StepRecord
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Mean loss (nats per token) of `version` on validation data."""

    job: JobId
    version: Step
    loss: float
    num_tokens: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFiles:
    """The files of one stage of a checkpoint."""

    stage: StageIndex
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """A checkpoint exists: all stages' files, then its manifest, are durable. No `url`: in the coordinator's store."""

    job: JobId
    version: Step
    url: str | None
    stages: tuple[StageFiles, ...]
    wall_s: float


def checkpoint_folder(version: Step) -> str:
    """Name of a checkpoint's folder inside its job's, wherever checkpoints lie.

    >>> checkpoint_folder(Step(1200))
    'v00001200'
    """
    return f"v{version:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """No holder of some stage had the newest version: the job goes on from `to_version`, at a stated cost in steps."""

    job: JobId
    from_version: Step
    to_version: Step
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """Final: finished, failed or cancelled, and why."""

    job: JobId
    state: JobState
    reason: str
    wall_s: float


Record = (
    EpochOpened
    | JobSubmitted
    | GenerationOpened
    | PlanAdopted
    | StepCommitted
    | Evaluated
    | CheckpointCommitted
    | RolledBack
    | JobEnded
)
