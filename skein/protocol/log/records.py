"""Entries of the run log: the hard state. Appended durably before any effect is sent; replay rebuilds the coordinator.

What is not here (leases, ledgers, votes) is soft: a restarted coordinator learns it again from reports.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from skein.plan.plan import Plan
from skein.protocol.messages.array_rounds import RowScore
from skein.protocol.messages.coresets import DrawingRow, ToldChoice
from skein.protocol.messages.directives import Beginning, CheckpointFile, StepRecord
from skein.types import (
    Epoch,
    Generation,
    Incarnation,
    JobId,
    JobState,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

_PREFIX = re.compile(r"walker([1-9]\d{0,8})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened:
    """A coordinator took the log. Everything after is stamped with this epoch."""

    epoch: Epoch
    wall_s: float
    accepts_loss: bool = False
    """An operator goes on with a log that has lost its end: what was written after is known to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted:
    """A job exists. Submitting the same `key` again in its namespace gives the same job.

    No `begins`: its seed draws the parameters.
    """

    job: JobId
    key: str
    spec: str
    wall_s: float
    begins: Beginning | None = None
    namespace: str = ""
    """Owner; empty for the default one, and in older logs."""
    sweep: JobId | None = None
    """Sweep that the job is an array of, and no client's; `trials` are its rows, in order."""
    trials: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationMember:
    """A worker of a generation, by incarnation. `proof`: what a process that takes its name shows; "" for none.

    `address` is where peers reach it; older logs have none.
    """

    worker: WorkerId
    incarnation: Incarnation
    proof: str = ""
    address: str = field(default="", compare=False)


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
    """Mean loss (nats per token) of `version` on validation data; of an array over all rows, and each row's own."""

    job: JobId
    version: Step
    loss: float
    num_tokens: int
    wall_s: float
    rows: tuple[RowScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresetChosen:
    """The rows that samples are drawn from, from `version` on: int32 ids, float32 rows that each stands for.

    `farness` is about L over `num_rows` less those set aside for features that are not finite, `chance_farness` that of
    as many rows drawn by chance; None: unknown.
    `num_by_chance` are rows of the `num_faults` workers whose candidates were wanting: what stands for these was drawn.
    Training stood still for `seconds`.
    """

    job: JobId
    version: Step
    ids: bytes
    sizes: bytes
    digest: str
    farness: float | None
    num_rows: int
    num_set_aside: int
    num_by_chance: int
    num_faults: int
    passes: int
    """Times that the choice is seen until another is made; 0: it stays."""
    seconds: float
    overhead: float | None
    """Seconds of the selection over those of the training since the choice before; None: there was none."""
    wall_s: float
    rows: tuple[DrawingRow, ...] = ()
    """Rows of an array that draw by the choice; none of any other job."""
    num_steps_beside: int = 0
    """Steps that were made meanwhile: rows were compared by parameters so many versions older."""
    chance_farness: float | None = None

    @property
    def told(self) -> ToldChoice:
        """The choice as workers are told."""
        return ToldChoice(version=self.version, ids=self.ids, sizes=self.sizes, rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFiles:
    """The files of one stage of a checkpoint: those of all walkers, in their order."""

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
    data_fingerprint: str = ""
    """Fingerprint of the data that it was trained on; "": nobody had read any, or the log is older than that."""
    keeps: tuple[Step, ...] = ()
    """Versions of the checkpoints that are kept from here on, this one included; older releases wrote none."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.num_bytes for stage in self.stages for file in stage.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChecked:
    """A checkpoint that was thought whole is damaged, or one that was set aside is whole again; `reason`: in words."""

    job: JobId
    version: Step
    is_whole: bool
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDeleted:
    """A checkpoint of a job that has ended is no more, as a client wants it; its files go after this."""

    job: JobId
    version: Step
    wall_s: float


def checkpoint_folder(version: Step) -> str:
    """Name of a checkpoint's folder inside its job's, wherever checkpoints lie.

    >>> checkpoint_folder(Step(1200))
    'v00001200'
    """
    return f"v{version:08d}"


def walker_prefix(walker: int) -> str:
    """Prefix of the names of a walker's tensors in a checkpoint.

    >>> walker_prefix(0), walker_prefix(2)
    ('', 'walker2/')
    """
    return f"walker{walker}/" if walker else ""


def walker_of(tensor: str) -> int:
    """The walker whose tensor has this name in a checkpoint.

    >>> walker_of("model.norm.weight"), walker_of("walker2/model.norm.weight")
    (0, 2)
    """
    found = _PREFIX.match(tensor)
    return int(found[1]) if found else 0


def num_walkers(stages: Iterable[StageFiles]) -> int:
    """Number of walkers that a checkpoint is of."""
    names = (name for stage in stages for file in stage.files for name in file.tensors)
    return 1 + max(map(walker_of, names), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The job goes on from `to_version`, at a stated cost in steps: no holder of some stage had the newest version.

    `learning_rate_ratio`: or training had diverged, and is tried again with this share of the learning rate.
    """

    job: JobId
    from_version: Step
    to_version: Step
    reason: str
    wall_s: float
    learning_rate_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """Training learns nothing any more since `step`; `last_good` is the newest version whose loss was as it should be.

    What is done about it is the job's to say.
    """

    job: JobId
    step: Step
    last_good: Step
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """Stages without a holder at `version` any more: from here on they are averages of their neighbours there.

    Workers that were away when it was decided may hold them as they were before, which does not count any more.
    """

    job: JobId
    version: Step
    stages: tuple[StageSpec, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """An operator asked that this process be given no more work. It does not know that itself."""

    worker: WorkerId
    incarnation: Incarnation
    wall_s: float


class IncidentKind(StrEnum):
    """Kind of failure: of a process, a link between two, an op, progress, the coordinator, training, or storage."""

    WORKER_LOST = "worker_lost"
    LINK_FAILED = "link_failed"
    WORKER_FAILED = "worker_failed"
    STALLED = "stalled"
    COORDINATOR_LOST = "coordinator_lost"
    DIVERGED = "diverged"
    STORAGE_FAILED = "storage_failed"


class Remedy(StrEnum):
    """Outcome of an incident for the step in progress.

    RESUMED: it went on, only what was lost was computed again. RETRIED: it began anew. ROLLED_BACK: committed steps
    were lost with the last holder of a stage, or given up because training had diverged. AVERAGED: it began anew, on
    a stage that was made of its neighbours because its last holder was lost. UNTOUCHED: no step was in progress.
    """

    RESUMED = "resumed"
    RETRIED = "retried"
    ROLLED_BACK = "rolled_back"
    AVERAGED = "averaged"
    UNTOUCHED = "untouched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Contributions of one stage to the step in progress that were lost and are computed again."""

    stage: StageIndex
    microbatches: tuple[MicrobatchId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure that is over, and what it cost. Recorded when work goes on.

    `silent_s` is the time from the last sign of life to the notice, 0 where the failure was told; `fenced_s` from the
    notice to the last acknowledgement, `seconds` to the moment when work went on. `rerouted` counts hops that have
    another worker than before, `retried` microbatches that begin the step anew.
    """

    job: JobId
    generation: Generation
    step: Step
    kind: IncidentKind
    workers: tuple[WorkerId, ...]
    reason: str
    remedy: Remedy
    silent_s: float
    fenced_s: float
    seconds: float
    num_rerouted: int
    replayed: tuple[Replayed, ...]
    num_retried: int
    num_steps_lost: int
    num_samples_repeated: int
    wall_s: float
    """Wall-clock time when the incident was noticed."""
    num_dropped: int = 0
    """Contributions that were lost and are not made again, as the job allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCounted:
    """Data of the job when workers opened them first; `num_steps`: of its epochs, if its budget has some.

    The newest record of a job counts: another one follows where the job takes other data.
    """

    job: JobId
    num_train_samples: int
    num_steps: int | None
    wall_s: float
    fingerprint: str = ""
    """Hash over all that was read and over the split, to which later readers are held; "" in older logs."""
    num_validation_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HaltAsked:
    """Request that a job be held, or cancelled, once what it has come to is saved."""

    job: JobId
    state: JobState
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHeld:
    """A held job: no worker works on it, and no other job waits for it, until somebody has it go on."""

    job: JobId
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed:
    """A job goes on that was held or had ended, or was to; `steps`: its budget from here on, if that is another."""

    job: JobId
    steps: int | None
    wall_s: float
    takes_new_data: bool = False
    """Whether it goes on with the data that its workers have now, though it was trained on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A worker gets no more work of a job, under whichever process: others have shown that it contributed wrongly."""

    job: JobId
    worker: WorkerId
    step: Step
    reason: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """Final, until somebody has it go on: finished, failed or cancelled, and why."""

    job: JobId
    state: JobState
    reason: str
    wall_s: float


JobRecord = (
    GenerationOpened
    | PlanAdopted
    | StepCommitted
    | Evaluated
    | CoresetChosen
    | CheckpointCommitted
    | CheckpointChecked
    | CheckpointDeleted
    | RolledBack
    | Diverged
    | Averaged
    | Incident
    | DataCounted
    | Quarantined
    | HaltAsked
    | JobHeld
    | JobResumed
    | JobEnded
)
"""Any record of a job that exists."""

Record = EpochOpened | JobSubmitted | JobRecord | Drained


def job_of_record(record: Record) -> JobId | None:
    """Job that a record is of; None for a record of the coordinator itself."""
    return None if isinstance(record, EpochOpened | Drained) else record.job
