"""Reports of workers to the coordinator. Names here are those of protos/skein/wire/v1/control.proto."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from skein.config.resources import Label
from skein.numeric.sums import exact_sum
from skein.plan.plan import ChunkTime, TransferTime
from skein.protocol.messages.array_rounds import ArrayRound, RowScore
from skein.protocol.messages.coresets import CandidatesPicked
from skein.protocol.messages.directives import CheckpointFile, ChunkVersion, Ledger
from skein.protocol.messages.positions import LogPosition
from skein.protocol.messages.progress import ChunkProgress
from skein.protocol.messages.stamps import NO_GENERATION
from skein.protocol.messages.tensors import Phase
from skein.protocol.messages.ways import Unreached
from skein.topology.fleet import Link, Profile
from skein.types import (
    Attempt,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Labelled number of a worker's statistics, cumulative since its process started."""

    name: str
    label: str
    value: float


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
    position: LogPosition | None = None
    """Position of the run log that the worker has heard of; None for nothing."""
    host: str = ""
    """Name of the machine, for people."""
    secret: str = field(default="", repr=False)
    """Secret that a later process of this name must know to take its place at once; the coordinator keeps a digest."""
    offers_relay: bool = False
    """Whether it carries what others send each other."""
    labels: tuple[Label, ...] = ()
    """Labels that its owner gave it, each key once; at most `MAX_LABELS`."""
    offers: tuple[str, ...] = ()
    """Names of the data that its owner lets jobs name; at most `MAX_OFFERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Renews the lease. `progress` advances only when an op ends, so a stuck executor shows.

    `running_s` is how long the running op has been at it, less what it waited for a processor; 0 if none is.
    """

    progress: int
    running_s: float
    statistics: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Adopted a generation: all that this worker holds. Nothing older will be acted on.

    `backups` are copies in memory that nobody computes with, `kept` parameters of older versions by which rows are
    looked at. `assigned` is the generation of the newest Assign that this worker has of the job, to which the next one
    may be told as a difference; 0 for none.
    """

    generation: Generation
    chunks: tuple[ChunkVersion, ...]
    progress: tuple[ChunkProgress, ...]
    backups: tuple[ChunkVersion, ...]
    kept: tuple[ChunkVersion, ...] = ()
    assigned: Generation = NO_GENERATION


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksReady:
    """All assigned chunks are here at the assigned version. Only an origin knows `num_train_samples` and the rest."""

    generation: Generation
    num_train_samples: int
    num_validation_samples: int
    data_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Evenness with which tokens went to the experts of a chunk's layers.

    `loss_sum` is the balance loss of each layer and microbatch times its valid tokens, `num_tokens` these tokens, once
    for each layer; `num_dropped` of the `num_choices` of all tokens found their expert full.
    """

    loss_sum: float
    num_tokens: int
    num_choices: int
    num_dropped: int

    @property
    def mean(self) -> float:
        """Mean balance loss of a layer, per valid token; 0 without any."""
        return self.loss_sum / self.num_tokens if self.num_tokens else 0.0

    @property
    def drop_ratio(self) -> float:
        """Share of the choices that were dropped."""
        return self.num_dropped / self.num_choices if self.num_choices else 0.0

    @classmethod
    def sum_of(cls, balances: Iterable["Balance | None"]) -> "Balance | None":
        """Balance of several microbatches or chunks together; None: none of them has any."""
        told = [balance for balance in balances if balance is not None]
        if not told:
            return None
        return cls(
            loss_sum=exact_sum(balance.loss_sum for balance in told),
            num_tokens=sum(balance.num_tokens for balance in told),
            num_choices=sum(balance.num_choices for balance in told),
            num_dropped=sum(balance.num_dropped for balance in told),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDone:
    """A chunk's ledger covers what was assigned. Where paths end, it knows the loss.

    `loss_sum` is nats over all its microbatches, `tokens` the valid tokens of each, in the order of the ledger; 0 and
    nothing at any other chunk. `balance` is that of its microbatches, where its model has experts; `array` the round
    that they were, where the job is an array.
    """

    generation: Generation
    step: Step
    ledger: Ledger
    loss_sum: float
    tokens: tuple[int, ...]
    balance: Balance | None = None
    array: ArrayRound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A holder has the complete result of an attempt.

    `probe_loss` is the loss of a leader's parameters as this follower has received them, where it is to check them.
    """

    generation: Generation
    step: Step
    group: GroupId
    attempt: Attempt
    digest: str
    squared_norm: float
    is_finite: bool
    probe_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchTaken:
    """Sketch of a group's result, as this holder has it: `SKETCH_LENGTH` numbers."""

    generation: Generation
    step: Step
    group: GroupId
    attempt: Attempt
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """A head's share of an evaluation of `version`: summed loss in nats over so many tokens and microbatches.

    `digest` is that of the head's parameters in a probe, else empty; `rows` has an array's rows apart.
    """

    generation: Generation
    version: Step
    microbatches: tuple[MicrobatchId, ...]
    loss_sum: float
    num_tokens: int
    phase: Phase = Phase.EVALUATE
    digest: str = ""
    rows: tuple[RowScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWritten:
    """A walker's stage of a checkpoint is durable under the checkpoint's URL.

    `generation` is that of the Save, perhaps over.
    """

    generation: Generation
    version: Step
    stage: StageIndex
    files: tuple[CheckpointFile, ...]
    walker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnread:
    """A worker could not read a checkpoint's files, or they are not what was written; the worker may be well.

    At `version` 0 there is no checkpoint yet: the place where they are to lie does not answer.
    """

    generation: Generation
    version: Step
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUnwritten:
    """A walker's stage of a checkpoint could not be written; its holder has it as before."""

    generation: Generation
    version: Step
    stage: StageIndex
    reason: str
    walker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksMeasured:
    """Links as probes of peers found them, there and back.

    `unreached` peers gave no answer; `shut_out` are those that did, and cannot dial this worker.
    """

    links: tuple[Link, ...]
    unreached: tuple[Unreached, ...] = ()
    shut_out: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasured:
    """Speed of this worker's device now; see `Profile`."""

    flops_per_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSeen:
    """Processes that answered this worker when it was to look at them, and those that are gone: their machine refuses.

    Of those in neither list nothing is known: they stand still, or nothing passes.
    """

    reached: tuple[Incarnation, ...]
    gone: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesMeasured:
    """Times of this worker's chunks, medians of the last ops, and of its tensors until peers have accepted them.

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
    """This worker cannot do its part. `is_fatal`: as far as it sees no other could either; `is_unfit`: another may."""

    generation: Generation
    is_fatal: bool
    reason: str
    is_unfit: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOpened:
    """A job's data are open here; or, with an `error`, cannot be. `is_unfit`: another worker may have them."""

    job: JobId
    error: str
    is_unfit: bool


Report = (
    Hello
    | Beat
    | Ack
    | ChunksReady
    | StageDone
    | Vote
    | SketchTaken
    | EvaluationDone
    | CandidatesPicked
    | CheckpointWritten
    | CheckpointUnread
    | CheckpointUnwritten
    | LinksMeasured
    | SpeedMeasured
    | PeersSeen
    | TimesMeasured
    | Prefetched
    | DataOpened
    | Suspected
    | Trouble
    | Leaving
)
