"""What coordinator and workers say to each other, and the headers of what workers send to peers.

Reports go up, directives down. Every directive of a run carries (epoch, generation): a lower epoch or generation is
refused, and all are idempotent. These classes are the domain side of protos/skein/wire/v1; `skein.wire.codec` maps
them field by field, so names here are names there.
"""

from dataclasses import dataclass
from enum import StrEnum

from skein.plan.plan import ChunkTime, Group, Path, Schedule, TransferTime
from skein.topology.fleet import Link, Profile
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    GroupId,
    Incarnation,
    JobId,
    MicrobatchId,
    SiteId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

# --- values that several messages share ---


class Phase(StrEnum):
    """What a microbatch travels for: a step's gradient, or the loss on validation data."""

    TRAIN = "train"
    EVALUATE = "evaluate"


class Decision(StrEnum):
    """What a commit does to parameters: apply the reduced gradient, or skip it as not finite."""

    APPLY = "apply"
    SKIP = "skip"


class SourceKind(StrEnum):
    """Where a chunk's state comes from: it is here already, drawn anew, a checkpoint, or a peer that holds it.

    NEIGHBOURS: nobody has it, and it is made of the stages beside it.
    """

    KEEP = "keep"
    INITIAL = "initial"
    CHECKPOINT = "checkpoint"
    PEER = "peer"
    NEIGHBOURS = "neighbours"


class Direction(StrEnum):
    """Which way a boundary tensor goes: an activation to the next hop, or a gradient to the one before."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTensor:
    """A boundary tensor of microbatch `microbatch`, input of hop `hop` (FORWARD) or gradient of its output (BACKWARD).

    The path travels along: routing is the source's. `step` is the version of the parameters it was computed with.
    """

    direction: Direction
    phase: Phase
    step: Step
    microbatch: MicrobatchId
    hop: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker of a generation and where peers reach it (host:port)."""

    worker: WorkerId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVersion:
    """A chunk held: after how many committed steps its parameters are."""

    stage: StageSpec
    version: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A stage beside a lost one, who gives its parameters, and its weight in their average."""

    stage: StageSpec
    peer: WorkerId
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSource:
    """Where a chunk's state at `version` comes from; `peer` names a worker, `url` a checkpoint.

    `was_averaged`: this version of the stage was made of its neighbours, so what was copied of it before is another.
    """

    kind: SourceKind
    version: Step
    peer: WorkerId | None = None
    url: str | None = None
    neighbours: tuple[Neighbour, ...] = ()
    was_averaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAssignment:
    """A chunk to hold: its slots, where its state comes from, and which of the plan's evaluation paths visit it."""

    stage: StageSpec
    slots: int
    source: StateSource
    evaluation_paths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A microbatch that starts here, and its way; for evaluation, the first of those that take this way."""

    microbatch: MicrobatchId
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Which microbatches' contributions one chunk has accumulated in this step, in that order."""

    stage: StageIndex
    worker: WorkerId
    microbatches: tuple[MicrobatchId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkProgress:
    """What a chunk has done of the step that begins at its version, when a new generation stopped it.

    `ledger` is in the order of accumulation. `forwards` are microbatches whose activations wait for their gradient;
    `outputs` and `gradients` those whose activation for the next hop, and gradient for the hop before, the boundary
    log has.
    """

    stage: StageIndex
    ledger: tuple[MicrobatchId, ...]
    forwards: tuple[MicrobatchId, ...]
    outputs: tuple[MicrobatchId, ...]
    gradients: tuple[MicrobatchId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedChunk:
    """What stays of a chunk's progress: its whole ledger or none of it, and some of its activations."""

    stage: StageIndex
    ledger: tuple[MicrobatchId, ...]
    forwards: tuple[MicrobatchId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a worker goes on with a step that an older generation began: what of it stays, and what is left to do.

    `schedule` names the ops that are left, `origins` the microbatches among them that start here. `repeats` are sent
    again from the boundary log when the step goes on, by the paths that they have now.
    """

    step: Step
    schedule: Schedule
    chunks: tuple[ResumedChunk, ...]
    origins: tuple[Origin, ...]
    repeats: tuple[HopTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The attempt whose result a commit applies, and what its holders voted.

    `weight` is 1 over the valid tokens of the microbatches that visited the group's stages, the factor on their summed
    gradient; 0 if there are none: then the step leaves these stages as they are.
    """

    group: GroupId
    attempt: Attempt
    digest: str
    squared_norm: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The durable decision on one step. Everybody computes with the numbers in here, never with its own.

    `loss` is nats per valid token (or per sample), `weight` 1 / `num_tokens` (groups have their own), `clip` the factor
    on all gradients, `gradient_norm` the global norm after weighting by group and before clipping.
    """

    step: Step
    decision: Decision
    reason: str
    results: tuple[GroupResult, ...]
    loss: float
    num_tokens: int
    weight: float
    gradient_norm: float
    clip: float
    learning_rate: float
    samples_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint: its name, size in bytes, hex SHA-256 and the tensors in it."""

    name: str
    num_bytes: int
    sha256: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """One labelled number of a worker's statistics, cumulative since its process started."""

    name: str
    label: str
    value: float


# --- reports: worker to coordinator ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First on every control stream: who this is, and what it holds from before."""

    worker: WorkerId
    incarnation: Incarnation
    protocol_version: int
    site: SiteId
    address: str
    profile: Profile
    epoch: Epoch
    """Highest epoch this worker has followed; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Renews the lease. `progress` advances only when an op ends, so a stuck executor shows.

    `running_s` is how long the running op has been at it; 0 if none is.
    """

    progress: int
    running_s: float
    statistics: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Adopted a generation: all that this worker holds. Nothing older will be acted on.

    `backups` are copies in memory that nobody computes with.
    """

    generation: Generation
    chunks: tuple[ChunkVersion, ...]
    progress: tuple[ChunkProgress, ...]
    backups: tuple[ChunkVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksReady:
    """All assigned chunks are here at the assigned version. Only an origin knows `num_train_samples` and the rest."""

    generation: Generation
    num_train_samples: int
    num_validation_samples: int
    data_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """A chunk's ledger covers what was assigned. Where paths end, it knows the loss.

    `loss_sum` is nats over all its microbatches, `tokens` the valid tokens of each, in the order of the ledger; 0 and
    nothing at any other chunk.
    """

    generation: Generation
    step: Step
    ledger: Ledger
    loss_sum: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A holder has the complete result of an attempt."""

    generation: Generation
    step: Step
    group: GroupId
    attempt: Attempt
    digest: str
    squared_norm: float
    is_finite: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """A head's share of an evaluation of `version`: summed loss in nats over so many tokens and microbatches."""

    generation: Generation
    version: Step
    microbatches: tuple[MicrobatchId, ...]
    loss_sum: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """A stage of a checkpoint is durable under the checkpoint's URL; `generation` is that of the Save, perhaps over."""

    generation: Generation
    version: Step
    stage: StageIndex
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksMeasured:
    """What probes of peers found, this worker sending."""

    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesMeasured:
    """What this worker's chunks take, medians of the last ops, and its tensors until peers have accepted them.

    `seconds` of a transfer are from the first byte offered to the acknowledgement, so they count the way back too.
    """

    generation: Generation
    chunks: tuple[ChunkTime, ...]
    transfers: tuple[TransferTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected:
    """A peer did not take a tensor or give its state; the coordinator decides what that means."""

    generation: Generation
    peer: WorkerId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """This worker cannot do its part. `is_fatal`: no other worker could either (the job fails with `reason`)."""

    generation: Generation
    is_fatal: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Wants to go: give it no more work, and say when nothing depends on it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """A copy of a stage's state is here whole, and at `version` by now; or, with an `error`, cannot be had."""

    job: JobId
    stage: StageSpec
    version: Step
    error: str


Report = (
    Hello
    | Beat
    | Ack
    | ChunksReady
    | StageDone
    | Vote
    | EvaluationDone
    | CheckpointWritten
    | LinksMeasured
    | TimesMeasured
    | Prefetched
    | Suspected
    | Trouble
    | Leaving
)

# --- directives: coordinator to worker ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Admitted: beat every `beat_s` seconds, or be lost after `lease_s`."""

    epoch: Epoch
    lease_s: float
    beat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not admitted, and trying again will not help."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """Stop what belongs to older generations, apply `last_commit` if it is new, and acknowledge."""

    epoch: Epoch
    generation: Generation
    job: JobId
    members: tuple[Member, ...]
    last_commit: StepRecord | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """What to hold, where it comes from, and in which order to work. Answered by `ChunksReady`.

    Evaluation microbatch e starts where `evaluation_origins` has e modulo `num_evaluation_paths`.
    """

    epoch: Epoch
    generation: Generation
    job: JobId
    job_spec: str
    """Canonical JSON of the `JobSpec`."""
    version: Step
    num_paths: int
    """Microbatches in a step."""
    chunks: tuple[ChunkAssignment, ...]
    schedule: Schedule
    origins: tuple[Origin, ...]
    num_evaluation_paths: int
    evaluation_origins: tuple[Origin, ...]
    groups: tuple[Group, ...]
    resumption: Resumption | None
    """None: nothing of a step in progress counts any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Everybody is ready: begin `step`."""

    epoch: Epoch
    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Forward `num_microbatches` of validation data through `version`, loss only."""

    epoch: Epoch
    generation: Generation
    version: Step
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Reduce `group`: its members' ledgers, disjoint and covering, are `parts`."""

    epoch: Epoch
    generation: Generation
    step: Step
    group: GroupId
    attempt: Attempt
    parts: tuple[Ledger, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The step is decided: apply it. `goes_on`: begin the next step at once, else wait for a directive."""

    epoch: Epoch
    generation: Generation
    record: StepRecord
    goes_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Copy these stages at `version` and write them under `url` (None: upload to the coordinator)."""

    epoch: Epoch
    generation: Generation
    version: Step
    stages: tuple[StageIndex, ...]
    url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copy these stages when they are at `version`, and give the copies to peers that ask.

    With `keeps_results`, keep what every step from then on applies too. Older copies may go.
    """

    epoch: Epoch
    generation: Generation
    version: Step
    stages: tuple[StageIndex, ...]
    keeps_results: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Fetch a stage's state at `version` from all of `donors`, beside whatever is running. Answered by `Prefetched`.

    A backup is kept for others as it is, until newer ones of all stages are complete; otherwise the receiver will hold
    the stage under a coming plan, and is told of every commit meanwhile.
    """

    epoch: Epoch
    job: JobId
    job_spec: str
    """Canonical JSON of the `JobSpec`."""
    stage: StageSpec
    version: Step
    donors: tuple[Member, ...]
    is_backup: bool
    drops_before: Step
    """Backups of older versions are of no more use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """A step is committed: bring what was prefetched up to date with its result. Answered by `Prefetched`."""

    epoch: Epoch
    job: JobId
    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measure the links to these peers."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """The job is over for this worker: drop all state of it. `may_exit` answers `Leaving`."""

    epoch: Epoch
    job: JobId | None
    may_exit: bool


Directive = (
    Welcome
    | Refused
    | NewGeneration
    | Assign
    | Start
    | Evaluate
    | Prepare
    | Commit
    | Save
    | Snapshot
    | Prefetch
    | Follow
    | Probe
    | Dismiss
)

# --- peer headers: worker to worker ---


class ShardKind(StrEnum):
    """A member's summand on its way to the shard's owner, or the sum on its way back."""

    PART = "part"
    RESULT = "result"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """One shard of one reduction; `member` is the contributing chunk (PART) or the shard's owner (RESULT)."""

    kind: ShardKind
    step: Step
    group: GroupId
    attempt: Attempt
    shard: int
    member: ChunkRef


TensorHeader = HopTensor | ShardTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What precedes a tensor's bytes on a peer stream: routing (who, which generation) and identity (`header`)."""

    job: JobId
    epoch: Epoch
    generation: Generation
    sender: WorkerId
    incarnation: Incarnation
    header: TensorHeader
