"""Directives of the coordinator to workers, and the values that several messages share.

Every directive of a run carries (epoch, generation): a lower epoch or generation is refused, and all are idempotent.
`skein.wire.codec` maps these classes to protos/skein/wire/v1 field by field, so names here are names there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from skein.config.rule import Reach
from skein.numeric.coreset.portions import num_parts_of
from skein.plan.plan import Group, Path, Schedule
from skein.protocol.messages.array_rounds import ArrayRound, RowNumbers
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.positions import LogPosition
from skein.protocol.messages.progress import ResumedChunk
from skein.protocol.messages.stamps import NO_GENERATION, EpochDirective, GenerationDirective
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.messages.ways import Ways
from skein.types import (
    Attempt,
    Generation,
    GroupId,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

# --- values that several messages share ---


class Decision(StrEnum):
    """Effect of a commit on parameters: apply the reduced gradient, or skip it as not finite."""

    APPLY = "apply"
    SKIP = "skip"


class SourceKind(StrEnum):
    """Source of a chunk's state: it is here already, drawn anew, a checkpoint, or a peer that holds it.

    NEIGHBOURS: nobody has it, and it is made of the stages beside it.
    """

    KEEP = "keep"
    INITIAL = "initial"
    CHECKPOINT = "checkpoint"
    PEER = "peer"
    NEIGHBOURS = "neighbours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Worker of a generation, and the address at which peers reach it (host:port).

    `door` is a secret that the worker wants to be shown: by peers that fetch state, where a directive names donors, and
    by peers that measure the link, where it names peers to probe. Peers in an Assign have none: members of a generation
    derive what they show each other from its key (`skein.protocol.messages.passes`).
    """

    worker: WorkerId
    incarnation: Incarnation
    address: str
    door: str = field(default="", repr=False, compare=False)


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
    """Source of a chunk's state at `version`; `peer` names a worker, `url` a checkpoint.

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
    """A chunk to hold: its slots, where its state comes from, and which of the plan's evaluation paths visit it.

    `walker`: which one the chunk is of, where its source is a checkpoint of many walkers.
    """

    stage: StageSpec
    slots: int
    source: StateSource
    evaluation_paths: tuple[int, ...]
    walker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Checkpoint of another job, whose parameters a job begins with, at a step 0 of its own."""

    job: JobId
    version: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A microbatch that starts here, and its way; for evaluation, the first of those that take this way."""

    microbatch: MicrobatchId
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Microbatches whose contributions one chunk has accumulated in this step, in that order."""

    stage: StageIndex
    worker: WorkerId
    microbatches: tuple[MicrobatchId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Rest of a step that an older generation began, at one worker: what of it stays, and what is left to do.

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

    `weight` is the factor on their summed gradient: 1 over `num_tokens`, the valid tokens of the microbatches that
    visited the group's stages; 0 if there are none: then the step leaves these stages as they are. Where walkers are
    clipped apart, the clip is in it.
    """

    group: GroupId
    attempt: Attempt
    digest: str
    squared_norm: float
    weight: float
    num_tokens: int


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
    num_late_samples: int = 0
    """Samples of this step that are left out: their walkers were not waited for, and give them up."""
    balance_loss: float | None = None
    """Mean over sparse layers and their valid tokens, 1 where experts are used evenly; None: the model has none."""
    drop_ratio: float | None = None
    """Share of the choices of experts that found theirs full; None: the model has none."""
    array: ArrayRound | None = None
    """Round that the step was, of an array; its loss and tokens are above, its norms and clips are its rows' alone."""

    @property
    def rows(self) -> tuple[RowNumbers, ...]:
        """Numbers of each row; a job that is no array has one, with the step's own."""
        if self.array is not None:
            return self.array.rows
        row = RowNumbers(
            loss=self.loss,
            num_tokens=self.num_tokens,
            gradient_norm=self.gradient_norm,
            clip=self.clip,
            learning_rate=self.learning_rate,
            num_updates=self.step + 1,
        )
        return (row,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """File of a checkpoint: its name, size in bytes, hex SHA-256 and the tensors in it."""

    name: str
    num_bytes: int
    sha256: str
    tensors: tuple[str, ...]


# --- directives: coordinator to worker ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(EpochDirective):
    """Admitted: beat every `beat_s` seconds, or be lost after `lease_s`. The log is at `position`.

    `door` is what those show who are told to probe this worker.
    """

    lease_s: float
    beat_s: float
    position: LogPosition | None = None
    door: str = field(default="", repr=False)


class OtherLog(StrEnum):
    """Relation between a coordinator's run log and the run log that a refused worker knows."""

    UNKNOWN = "unknown"
    """The worker's run log is not here; its coordinator may come back with it."""
    GIVEN_UP = "given_up"
    """An operator has accepted the loss of the entries that the worker knows: its state counts no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not admitted. Trying again will not help, unless `log` says why a run log is in the way."""

    reason: str
    log: OtherLog | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration(GenerationDirective):
    """Stop what belongs to older generations, apply `last_commit` if it is new, and acknowledge.

    `key` is given to all members of the generation and to no other worker. `last_commit` is None before the first step,
    and for a worker whose reports show that it has the commit.
    """

    job: JobId
    key: bytes = field(repr=False)
    last_commit: StepRecord | None
    position: LogPosition | None = None
    """Position of the run log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign(GenerationDirective):
    """Chunks to hold, where their state comes from, and in which order to work. Answered by `ChunksReady`.

    Evaluation microbatch e starts where `evaluation_origins` has e modulo `num_evaluation_paths`.

    An Assign with `since` is the difference to the one of that generation, which the worker has acknowledged that it
    has: `job_spec` is empty for the same, `peers` are new or have another process or address, and those in `gone` are
    peers no more.
    """

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
    begins: Beginning | None = None
    """Checkpoint whose parameters chunks of an initial source begin with; None: with what the job says."""
    data_fingerprint: str = ""
    """Fingerprint of the data that the job was trained on, to which a reader is held; "": of none yet."""
    choices: tuple[ToldChoice, ...] = ()
    """Choice by which samples are drawn at `version`, of an array those of all its rows; none: all rows are drawn, or
    what the job says of them."""
    peers: tuple[Member, ...] = ()
    """Workers with which this one exchanges tensors under the plan, or from which it fetches state."""
    gone: tuple[WorkerId, ...] = ()
    since: Generation = NO_GENERATION
    """Generation of the Assign to which this one is the difference; 0: this one is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(GenerationDirective):
    """Begin `step`: all members are ready."""

    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(GenerationDirective):
    """Forward `num_microbatches` of validation data through `version`, loss only.

    In a probe all evaluation paths, one for each walker, get the same samples. In a selection samples are the training
    rows, and who has all of its share answers by `CandidatesPicked`.
    """

    version: Step
    num_microbatches: int
    phase: Phase = Phase.EVALUATE
    num_rows: int = 0
    """Training rows of all workers, in a selection."""

    def ways(self, num_paths: int) -> Iterator[int]:
        """Evaluation path that each microbatch takes, in order of microbatches.

        They take the paths in turn; in a selection whole parts of the rows do, which candidates are picked of.
        """
        return _ways(self.num_microbatches, self._num_parts, num_paths)

    def num_visits(self, num_paths: int) -> Mapping[int, int]:
        """Microbatches that each evaluation path gets."""
        return _num_visits(self.num_microbatches, self._num_parts, num_paths)

    @property
    def _num_parts(self) -> int:
        is_in_parts = self.phase.selects and self.num_microbatches > 0
        return num_parts_of(self.num_microbatches, self.num_rows) if is_in_parts else self.num_microbatches


def _ways(num_microbatches: int, num_parts: int, num_paths: int) -> Iterator[int]:
    return (e % num_parts % num_paths for e in range(num_microbatches))


@lru_cache(maxsize=8)
def _num_visits(num_microbatches: int, num_parts: int, num_paths: int) -> Mapping[int, int]:
    return Counter(_ways(num_microbatches, num_parts, num_paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class UseChoice(GenerationDirective):
    """A choice of rows is recorded: draw samples by it from its version on."""

    choice: ToldChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTerms:
    """Exchange that a reduction carries out by the job's rule, and the numbers of the step that it ends.

    `scales` has for each member of the group the factor on its summed gradients: 1 / tokens times its clip, 0 for one
    that makes no local step. `due_step` is the step that the rule ends with this exchange. `taken_at` is None where
    that is the step whose record applies the result; else the version at which members send, to go on with steps until
    that record. `checkers` are followers that compute the leader's score again from what they have received.
    `num_steps` are the whole job's: with the last all exchanges are due.
    """

    reach: Reach
    learning_rate: float
    scales: tuple[float, ...]
    due_step: Step
    num_steps: int
    taken_at: Step | None = None
    checkers: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(GenerationDirective):
    """Reduce `group`: its members' ledgers, disjoint and covering, are `parts`; or exchange, by the job's rule."""

    step: Step
    group: Group
    attempt: Attempt
    parts: tuple[Ledger, ...]
    exchange: ExchangeTerms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSketch(GenerationDirective):
    """Sketch a result under `seed`, which is told once every holder has that. Answered by `SketchTaken`."""

    step: Step
    group: GroupId
    attempt: Attempt
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(GenerationDirective):
    """The step is decided: apply it. `goes_on`: begin the next step at once, else wait for a directive.

    `keeps_late`: whoever the record leaves out goes on with the local step that it is in, else it gives that up.
    """

    record: StepRecord
    goes_on: bool
    keeps_late: bool = False
    position: LogPosition | None = None
    """Position of the run log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(GenerationDirective):
    """Copy these stages at `version` and write them under `url` (None: upload to the coordinator).

    `walkers` has for each stage the number of its walker in this checkpoint; 0 is the main one, or the only one.
    """

    version: Step
    stages: tuple[StageIndex, ...]
    url: str | None
    walkers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(GenerationDirective):
    """Copy these stages when they are at `version`, and give the copies to peers that ask.

    With `keeps_results`, keep what every step from then on applies too. Older copies may go.
    """

    version: Step
    stages: tuple[StageIndex, ...]
    keeps_results: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch(EpochDirective):
    """Fetch a stage's state at `version` from all of `donors`, beside whatever is running. Answered by `Prefetched`.

    A backup is kept for others as it is, until newer ones of all stages are complete; otherwise the receiver will hold
    the stage under a coming plan, and is told of every commit meanwhile.
    """

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
class OpenData(EpochDirective):
    """Open a job's data, beside whatever is running: paths will begin here. Answered by `DataOpened`."""

    job: JobId
    job_spec: str
    """Canonical JSON of the `JobSpec`."""
    data_fingerprint: str = ""
    """Fingerprint of the data that the job was trained on, to which a reader is held; "": of none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow(EpochDirective):
    """A step is committed: bring what was prefetched up to date with its result. Answered by `Prefetched`."""

    job: JobId
    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Measure the links to these peers.

    Where a peer cannot be dialled, the link by way of its relay is measured, unless `only_direct`.
    """

    peers: tuple[Member, ...]
    only_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Measure the device again. Answered by `SpeedMeasured`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Say who of these peers is there: the coordinator hears nothing of them. Answered by `PeersSeen`."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss(EpochDirective):
    """The job is over for this worker: drop all state of it. `may_exit` answers `Leaving`."""

    job: JobId | None
    may_exit: bool


Directive = (
    Welcome
    | Refused
    | NewGeneration
    | Assign
    | Start
    | Evaluate
    | UseChoice
    | Prepare
    | TakeSketch
    | Commit
    | Save
    | Snapshot
    | Prefetch
    | OpenData
    | Follow
    | Probe
    | Measure
    | Look
    | Ways
    | Dismiss
)
