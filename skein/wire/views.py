"""Views that clients have of jobs and workers. Field names are those of protos/skein/wire/v1/jobs.proto."""

from dataclasses import dataclass
from enum import StrEnum

from skein.config.quota import QuotaUse
from skein.config.resources import Label
from skein.plan.changing.redundancy import Shortfall
from skein.plan.clock.holding import WorkerUse
from skein.plan.plan import ChunkTime, TransferTime
from skein.protocol.coordinator.runs.incidents import OpenIncident
from skein.protocol.coordinator.runs.workers.probation import Exclusion
from skein.protocol.log.records import Incident
from skein.protocol.messages.array_rounds import PassKind
from skein.protocol.messages.directives import StepRecord
from skein.topology.fleet import Profile
from skein.types import (
    DEFAULT_NAMESPACE,
    Condition,
    Generation,
    JobId,
    JobState,
    SiteId,
    StageIndex,
    Step,
    WorkerId,
)
from skein.wire.extra import LogLine


class WorkerState(StrEnum):
    """State of a worker to the coordinator: without work, with work, on its way out, or gone."""

    IDLE = "idle"
    WORKING = "working"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """A checkpoint that is kept, as far as is known or after all of it was read. No `url`: at the coordinator."""

    job: JobId
    version: Step
    url: str | None
    num_files: int
    num_bytes: int
    wall_s: float
    condition: Condition
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitReply:
    """The job of a key, and whether this call made it."""

    job: JobId
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIdentity:
    """Identity that the coordinator's authority has made out; times are Unix seconds, `revoked_s` 0: it is not."""

    role: str
    name: str
    namespace: str
    since_s: float
    ends_s: float
    revoked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLink:
    """A page and what lets whoever opens it in: once, within `link_s`.

    Args:
        address: host:port where it is served; the host may stand for all of a machine's.
        link: "" where nobody needs one.
        is_encrypted: it is served by HTTPS, with a certificate of the cluster's authority.
    """

    address: str
    link: str
    link_s: float
    is_encrypted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """A chunk's ops for one microbatch, as the plan has them and as they are; None: not measured yet."""

    planned: ChunkTime
    measured: ChunkTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """A boundary tensor's way, as the plan has it and as it is; None: not measured yet."""

    planned: TransferTime
    measured: TransferTime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStatus:
    """The choice of rows by which samples are drawn since `version`, and what making it took.

    `num_by_chance` rows have what stands for them drawn, for their workers' candidates were wanting; `overhead` is the
    share that `seconds` are of the training before, None if that was not timed.
    """

    version: Step
    num_picks: int
    num_rows: int
    num_set_aside: int
    num_by_chance: int
    largest_weight: float
    seconds: float
    overhead: float | None
    next_version: Step | None
    """Version at which the next is due; None: it stays."""
    farness: float | None = None
    """Distance of all rows to those that stand for them, summed, about; None: unknown."""
    chance_farness: float | None = None
    """The same of as many rows drawn by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRow:
    """State of a trial as it was saved last, after so many of its steps: row of an array's newest checkpoint."""

    array: JobId
    version: Step
    row: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """A trial of a sweep now: `num_steps` of `num_steps_wanted` are made; losses are nats, of the newest step."""

    trial: int
    settings: str
    """JSON object: values by dotted key of the job."""
    state: JobState
    reason: str
    num_steps: int
    num_steps_wanted: int
    loss: float | None
    evaluation_loss: float | None
    workers: tuple[WorkerId, ...] = ()
    array: JobId | None = None
    """Array that it is in, or was in last; None before it has begun."""
    row: int = 0
    pass_kind: PassKind | None = None
    """Way of the array's rows through their models; None for a trial alone."""
    speedup: float | None = None
    """Times as fast as one row after the other, as it was measured; None for a trial alone."""
    is_best: bool = False
    choice: ChoiceStatus | None = None
    """Rows that it draws by now, versions being its own steps; None: nothing was chosen for it along the run."""
    saved: SavedRow | None = None
    """Its state in its array's checkpoint, or in that of the array before until there is one; None: it has none."""


class JobKind(StrEnum):
    """Kind of a job: it trains one model, or many trials, or is an array of those inside a sweep."""

    TRAINING = "training"
    SWEEP = "sweep"
    ARRAY = "array"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job now. `step` of `total_steps` are committed; losses are nats per token; rates are of the last steps."""

    job: JobId
    name: str
    state: JobState
    reason: str
    step: Step
    total_steps: int
    loss: float | None
    evaluation_loss: float | None
    num_tokens: int
    """Trained on so far."""
    tokens_per_s: float
    step_s: float
    generation: Generation
    num_workers: int
    checkpoint_version: Step | None
    """Version of the newest complete checkpoint."""
    submitted_wall_s: float
    spec: str
    """Canonical JSON of the `JobSpec`; "" in a list of jobs."""
    plan: str
    """Reason for this plan and not another, in one line; "" before there is one."""
    predicted_step_s: float
    lower_bound_s: float
    measured_step_s: float | None = None
    """Median of the last steps under this plan; None: too few."""
    chunk_times: tuple[ChunkTimes, ...] = ()
    """Empty in a list of jobs, as are transfers."""
    transfer_times: tuple[TransferTimes, ...] = ()
    num_incidents: int = 0
    num_steps_lost: int = 0
    """Committed steps that all incidents together cost."""
    uses: tuple[WorkerUse, ...] = ()
    """Uses of each worker by the plan, with what workers told; empty in a list of jobs."""
    shortfalls: tuple[Shortfall, ...] = ()
    """Stages of a running job with fewer holders than asked; empty in a list of jobs."""
    predicted_spread: float = 0.0
    """Share by which first measurements lay apart that the prediction rests on; 0: all were measured while training."""
    num_late_samples: int = 0
    """Left out of steps so far, for their walkers were not waited for."""
    num_train_samples: int = 0
    """Samples of an epoch of the data; 0 while no worker has told."""
    waiting_since_wall_s: float | None = None
    """Wall-clock time since which it has waited for workers; None: it does not wait."""
    namespace: str = DEFAULT_NAMESPACE
    """Namespace that owns it."""
    quotas: tuple[QuotaUse, ...] = ()
    """Quotas of that namespace that have a bound."""
    exclusions: tuple[Exclusion, ...] = ()
    """Workers that get no more work of it for now, by name; empty in a list of jobs."""
    open_incident: OpenIncident | None = None
    """The failure that it is recovering from; None: it is recovering from none."""
    quarantined: tuple[WorkerId, ...] = ()
    """Workers that get no more work of it, for they were shown to contribute wrongly."""
    balance_loss: float | None = None
    """Mean over sparse layers in the newest step: 1 where experts are used evenly; None: there are none."""
    drop_ratio: float | None = None
    """Share of the newest step's choices of experts that found theirs full; None: there are no sparse layers."""
    busiest_expert: float | None = None
    """Choices of the busiest expert of any layer in the newest step, over what it would have if all had as many; None:
    nobody has told."""
    idlest_expert: float | None = None
    """The same of the idlest one."""
    trials: tuple[TrialStatus, ...] = ()
    """Trials of a sweep, by number; empty in a list of jobs."""
    choice: ChoiceStatus | None = None
    """Newest choice of rows along the run; None: there is none."""
    priority: int = 0
    kind: JobKind = JobKind.TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker now: what it is, what it holds, and how long ago it was last heard."""

    worker: WorkerId
    site: SiteId
    address: str
    state: WorkerState
    job: JobId | None
    profile: Profile
    stages: tuple[StageIndex, ...]
    beat_age_s: float
    measured_age_s: float = 0.0
    """Since it last measured its device, as far as this coordinator knows."""
    offers_relay: bool = False
    reached_by: tuple[WorkerId, ...] = ()
    """Relays by which peers that cannot dial it reach it; its own name where it is called back over a connection that
    it dialled, "" for the coordinator."""
    labels: tuple[Label, ...] = ()
    """Labels that its owner gave it."""
    offers: tuple[str, ...] = ()
    """Names of the data that it offers to jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The job's state is another."""

    state: JobState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsCounted:
    """Length of an epoch, in a job whose budget has some: all of them are `num_steps`."""

    num_train_samples: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFinished:
    """A step was committed; `tokens_per_s` is smoothed over the last steps."""

    record: StepRecord
    tokens_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFinished:
    """Mean validation loss of `version`, nats per token."""

    version: Step
    loss: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFinished:
    """A checkpoint is complete, at `url` or (None) at the coordinator."""

    version: Step
    url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBegun:
    """A new plan is in force, and why."""

    generation: Generation
    workers: tuple[WorkerId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WentBack:
    """Steps were lost with the last holder of a stage: the job goes on from an older version."""

    from_version: Step
    to_version: Step
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEnded:
    """Work goes on after a failure, and what that cost is known."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLogged:
    """A line of a worker's log, or of the coordinator's (`worker` None) about this job."""

    worker: WorkerId | None
    line: LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Last event of a job."""

    state: JobState
    reason: str


Key = tuple[int, int]

JobHappening = (
    StateChanged
    | EpochsCounted
    | StepFinished
    | EvaluationFinished
    | CheckpointFinished
    | GenerationBegun
    | WentBack
    | IncidentEnded
    | LineLogged
    | Ended
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Happening of a job.

    `sequence` counts what is recorded, from 1. What passes (lines, changes of state) has that of the record before, and
    a growing number of its own as `line`, which of what is recorded is 0.
    """

    sequence: int
    wall_s: float
    body: JobHappening
    line: int = 0

    @property
    def key(self) -> Key:
        """Orders all events of a job; watching since one skips what came up to it."""
        return self.sequence, self.line
