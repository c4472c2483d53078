"""Events that go into a Worker machine and commands that come out: the border between deciding and acting."""

from dataclasses import dataclass, field
from enum import StrEnum

from skein.config.resources import Label
from skein.protocol.deadline import TimePassed
from skein.protocol.messages.coresets import CandidatesPicked, ToldChoice
from skein.protocol.messages.directives import (
    Assign,
    ChunkVersion,
    Directive,
    Member,
    OpenData,
    Prefetch,
    StepRecord,
)
from skein.protocol.messages.reports import (
    CheckpointUnread,
    CheckpointUnwritten,
    CheckpointWritten,
    LinksMeasured,
    PeersSeen,
    Report,
    Suspected,
    Trouble,
)
from skein.protocol.messages.tensors import Envelope
from skein.protocol.messages.ways import Ways
from skein.protocol.worker.ops import HopKey, Op, OpOutcome, SaveOp, SnapshotOp
from skein.topology.fleet import Profile
from skein.types import Generation, Incarnation, JobId, SiteId, StageSpec, Step, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a worker process, and what it measured of itself.

    `host`: name of its machine. `secret`: known to whoever may replace it under its name at once, "" for nobody.
    `offers_relay`: whether it carries what others send each other. `labels`: what its owner says of it. `offers`:
    names of data that it has for jobs.
    """

    worker: WorkerId
    incarnation: Incarnation
    site: SiteId
    address: str
    profile: Profile
    host: str = ""
    secret: str = field(default="", repr=False)
    offers_relay: bool = False
    labels: tuple[Label, ...] = ()
    offers: tuple[str, ...] = ()


# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened:
    """The control stream to the coordinator is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLost:
    """The control stream is down; the driver tries again by itself."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveArrived:
    """The coordinator said something."""

    directive: Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArrived:
    """A peer's tensor is complete, checked and filed by the driver under (generation, key)."""

    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """A peer did not take a tensor, after the transport's own retries."""

    to: WorkerId
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTaken:
    """A peer has accepted a tensor of `num_bytes`, so many seconds after its first byte was offered."""

    to: WorkerId
    envelope: Envelope
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpEnded:
    """The running op is over, after so many seconds."""

    op: Op
    outcome: OpOutcome
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """All assigned chunks are here; the counts are 0 on workers that read no data."""

    generation: Generation
    num_train_samples: int
    num_validation_samples: int
    data_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailed:
    """A chunk could not be had, which is told as `report` says; None: the build was overtaken, and nobody waits."""

    report: CheckpointUnread | Suspected | Trouble | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesMoved:
    """A file is being read or written, or state comes in from a peer: slow as it may be, it is no standstill."""


class CopyKind(StrEnum):
    """Purpose of a prefetched copy: kept for others as it is, or brought up to date for a chunk that will be here."""

    BACKUP = "backup"
    FOLLOWED = "followed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsHeld:
    """Snapshots of this worker's chunks have come or gone; these are here now."""

    job: JobId
    copies: tuple[ChunkVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchEnded:
    """A copy is here whole, or one that follows the commits is at `version` by now."""

    job: JobId
    stage: StageSpec
    version: Step
    kind: CopyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningEnded:
    """A job's data are open; or, with an `error`, cannot be. `is_unfit`: this worker lacks something."""

    job: JobId
    error: str
    is_unfit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchFailed:
    """No donor could give all of the copy at `version`; what came is kept for another try."""

    job: JobId
    stage: StageSpec
    version: Step
    kind: CopyKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasured:
    """The device was measured again."""

    flops_per_s: float
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The operator wants this worker to go (SIGTERM)."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogShortened:
    """The boundary log has forgotten these for want of room; `is_wanted`: somebody waits for them."""

    keys: tuple[HopKey, ...]
    is_wanted: bool


Finding = CheckpointWritten | CheckpointUnwritten | LinksMeasured | PeersSeen | CandidatesPicked
"""Outcome of work beside the ops: the coordinator hears of it as it is."""

WorkerEvent = (
    StreamOpened
    | StreamLost
    | DirectiveArrived
    | TensorArrived
    | SendFailed
    | TensorTaken
    | OpEnded
    | Built
    | BuildFailed
    | BytesMoved
    | SnapshotsHeld
    | PrefetchEnded
    | PrefetchFailed
    | OpeningEnded
    | Finding
    | DeviceMeasured
    | StopRequested
    | LogShortened
    | TimePassed
)

# --- commands ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Say this to the coordinator. The driver fills a beat's statistics in."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOp:
    """Give the executor this op; its operands are filed under `generation`."""

    generation: Generation
    op: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Take further what an op has copied: write it where checkpoints lie, or have it whole and say which are here.

    Answered by CheckpointWritten or CheckpointUnwritten, and by SnapshotsHeld.
    """

    op: SaveOp | SnapshotOp


@dataclass(frozen=True, slots=True, kw_only=True)
class PickCandidates:
    """Pick of the rows whose features are here at `version`, beside everything else. Answered by CandidatesPicked.

    `num_rows`: of all workers.
    """

    generation: Generation
    version: Step
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepParameters:
    """Compute a selection by parameters at `version`, whatever steps are applied, until a choice is taken."""

    version: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeChoice:
    """Draw samples by this choice from now on; selections are over."""

    choice: ToldChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTensor:
    """Send the payload filed under the envelope's header to a peer. A release (evaluation, backward) has none."""

    to: Member
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTensor:
    """A filed payload is of no use."""

    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Make the assigned chunks present: keep, draw, load or fetch. Answered by Built or BuildFailed."""

    assign: Assign
    donors: tuple[Member, ...]
    """Peers that may give state, each with what it wants to be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelBuild:
    """A newer generation makes the running build pointless; it still answers, by Built or BuildFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrefetch:
    """Fetch a copy, beside everything else. Answered by PrefetchEnded or PrefetchFailed; asked again, it goes on."""

    prefetch: Prefetch


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOpening:
    """Open a job's data, beside everything else. Answered by OpeningEnded; asked again, it goes on."""

    opens: OpenData


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowCommit:
    """Bring the copy of `stage` up to date once its turn has come. Answered by PrefetchEnded."""

    job: JobId
    stage: StageSpec
    record: StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies:
    """Drop copies of no more use: what follows for these stages, older backups, and with `above` all newer ones."""

    followed: tuple[StageSpec, ...]
    backups_before: Step
    above: Step | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureDevice:
    """Measure the device, between ops. Answered by DeviceMeasured, once for all that were given meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLinks:
    """Probe these peers, by relays too unless `only_direct`. Answered by LinksMeasured."""

    peers: tuple[Member, ...]
    only_direct: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAtPeers:
    """See whether these processes answer. Answered by PeersSeen."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeWays:
    """Reach these peers by relays from now on, and all others at their addresses."""

    ways: Ways


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJob:
    """Drop every chunk and payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialAgain:
    """End the control stream and open the next one after `after_s`; `is_news`: `reason` was not given before."""

    after_s: float
    reason: str
    is_news: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End this process, on which nothing depends any more. `is_clean`: exit code 0."""

    is_clean: bool
    reason: str


WorkerCommand = (
    SendReport
    | RunOp
    | Complete
    | PickCandidates
    | KeepParameters
    | TakeChoice
    | SendTensor
    | DropTensor
    | Build
    | CancelBuild
    | StartPrefetch
    | StartOpening
    | FollowCommit
    | DropCopies
    | MeasureLinks
    | MeasureDevice
    | LookAtPeers
    | TakeWays
    | ForgetJob
    | DialAgain
    | Exit
)
