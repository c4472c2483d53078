"""Events and commands of a Coordinator machine: the border between deciding and acting."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from skein import rng
from skein.config.job import JobSpec
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.portions import Chosen, Picking, Portion, choose_of_portions
from skein.plan.plan import Infeasible, Plan
from skein.protocol.deadline import TimePassed
from skein.protocol.log.history import History
from skein.protocol.log.records import CheckpointCommitted, Record
from skein.protocol.messages.directives import Beginning, Directive, Member
from skein.protocol.messages.passes import GenerationKey, probe_secret
from skein.protocol.messages.positions import LogPosition, is_signed, signed
from skein.protocol.messages.reports import Report
from skein.protocol.messages.stamps import NO_GENERATION, stamped
from skein.topology.fleet import Fleet
from skein.types import DEFAULT_NAMESPACE, Condition, Generation, Incarnation, JobId, Step, WorkerId

# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportArrived:
    """A worker said something on its control stream. A Hello opens the stream."""

    worker: WorkerId
    incarnation: Incarnation
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRefused:
    """A worker sent what no worker of this release sends; `reason` names the field, the value, what would be right."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroken:
    """A worker's control stream ended."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitAsked:
    """A client submits a job whose spec is valid, perhaps one that begins from another. A known key changes nothing."""

    key: str
    spec: JobSpec
    begins: Beginning | None = None
    namespace: str = DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """A client wants a job to end, and may say why; what it has come to is saved before, unless it `discards` that."""

    job: JobId
    reason: str = ""
    discards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseAsked:
    """A client wants a job to be saved and then held."""

    job: JobId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeAsked:
    """A client wants a job to go on that is held or has ended, or is about to; perhaps to another number of steps.

    Nothing happens where `skein.protocol.coordinator.lifecycle.check_resumable` refuses it.
    """

    job: JobId
    steps: int | None = None
    takes_new_data: bool = False
    """Go on with the data that workers have now, though the job was trained on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAsked:
    """A client wants a checkpoint of a job that has ended to be no more.

    Nothing happens where `skein.protocol.coordinator.lifecycle.deletable` refuses it.
    """

    job: JobId
    version: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """An operator wants a worker to be free of work, and to exit."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureAsked:
    """An operator wants workers to measure their devices again: this one, or all."""

    worker: WorkerId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """The answer to MakePlan of the same number.

    `current_s` is what a step of the previous plan would take on that fleet, by the planner's reckoning; None if it
    does not know. `move_s` is what bringing state to where it is not held would take. `may_improve`: nothing was
    searched for, so that another asking may find better.
    """

    request: int
    result: Plan | Infeasible
    current_s: float | None = None
    move_s: float = 0.0
    may_improve: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestWritten:
    """The files of a checkpoint are what was written and its manifest exists, so it does; or `error` says why not."""

    checkpoint: CheckpointCommitted
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerified:
    """All files of a checkpoint were read, or could not be: then `reason` says why."""

    checkpoint: CheckpointCommitted
    condition: Condition
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChosen:
    """The answer to ChooseRows of the same number."""

    request: int
    run: JobId
    chosen: Chosen


Asked = SubmitAsked | CancelAsked | PauseAsked | ResumeAsked | DeleteAsked | DrainAsked | MeasureAsked
"""Request of a client."""

CoordinatorEvent = (
    ReportArrived
    | ReportRefused
    | StreamBroken
    | Asked
    | PlanMade
    | RowsChosen
    | ManifestWritten
    | CheckpointVerified
    | TimePassed
)

# --- commands ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Make this record durable before any later command is carried out."""

    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Say this on the control stream of that incarnation; without a stream it is lost, and that is no failure."""

    worker: WorkerId
    incarnation: Incarnation
    directive: Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """Plan this job on this fleet, for so many steps to come. Answered by PlanMade.

    A newer request of the same run makes an older one void.
    """

    request: int
    run: JobId
    job: JobSpec
    fleet: Fleet
    previous: Plan | None
    steps_left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseRows:
    """Choose among what workers have picked of their portions of the rows. Answered by RowsChosen.

    `proposed` has candidates of each, or why there are none. A newer request of the same run makes an older one void.
    """

    request: int
    run: JobId
    portions: Mapping[WorkerId, Portion]
    proposed: Mapping[WorkerId, Candidates | str]
    picking: Picking

    @property
    def num_candidates(self) -> int:
        """Rows that all workers together have picked."""
        return sum(len(x.ids) for x in self.proposed.values() if not isinstance(x, str))

    def answer(self) -> RowsChosen:
        """The choice; takes seconds where rows are many."""
        chosen = choose_of_portions(self.portions, self.proposed, self.picking)
        return RowsChosen(request=self.request, run=self.run, chosen=chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """All stages' files were written: read them once, and write the manifest last. Answered by ManifestWritten."""

    checkpoint: CheckpointCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCheckpoint:
    """Read all files of a checkpoint and compare them with what was written. Answered by CheckpointVerified."""

    checkpoint: CheckpointCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCheckpoints:
    """Delete the job's checkpoints but these and what is newer, manifest first; and `drop`, which is wanted no more."""

    job: JobId
    url: str | None
    keep: tuple[Step, ...]
    drop: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Command to end this coordinator; `reason` says what an operator can do. Later commands are not carried out."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A decision changed: one line for people, about `job` if that is given.

    `worker`: who came, was turned away or went; what is only said about a worker has none.
    """

    words: str
    job: JobId | None = None
    worker: WorkerId | None = None

    @property
    def line(self) -> str:
        """The line as it is shown."""
        job = "" if self.job is None else f"job={self.job} "
        return f"{job}{'' if self.worker is None else f'worker={self.worker} '}{self.words}"


CoordinatorCommand = (
    Append | Send | MakePlan | ChooseRows | WriteManifest | VerifyCheckpoint | PruneCheckpoints | Halt | Log
)


@dataclass(slots=True)
class Outbox:
    """Commands in the order they must happen. Recording changes the hard state at once."""

    history: History
    commands: list[CoordinatorCommand] = field(default_factory=list)
    num_plans_asked: int = 0
    key: bytes = field(default=b"", repr=False)
    """Random, of this coordinator's process: secrets of its generations are made of it, and none is ever stored."""

    _log_key: bytes = field(default=b"", init=False, repr=False)

    @property
    def position(self) -> LogPosition | None:
        """Signed length of the log; None before its first epoch."""
        position = self.history.position
        return None if position is None else signed(position, self._log_key)

    def sign_with(self, log_key: bytes) -> None:
        """Random, and kept beside the run log: positions of that are signed with it."""
        self._log_key = log_key

    def has_signed(self, position: LogPosition) -> bool:
        """Whether a coordinator of this run log has told of that position."""
        return is_signed(position, self._log_key)

    def next_request(self) -> int:
        """A number for a MakePlan or ChooseRows that no other has."""
        self.num_plans_asked += 1
        return self.num_plans_asked

    def generation_key(self, generation: Generation) -> GenerationKey:
        """Key of a generation of the present epoch, from which its members derive what they show each other."""
        return GenerationKey.of(self.key, self.history.epoch, generation)

    def as_donor(self, member: Member, generation: Generation) -> Member:
        """A member of a generation as those may know it who are to fetch its state, members or not."""
        return self.generation_key(generation).as_donor(member)

    def to_probe(self, member: Member) -> Member:
        """A worker as those may know it who are to measure the link to it."""
        secret = probe_secret(self.key, self.history.epoch, member.worker, member.incarnation)
        return replace(member, door=secret)

    def chance(self, *about: str | int) -> np.random.Generator:
        """A stream of random numbers that nobody can foresee who does not have this coordinator's key."""
        seed = hmac.digest(self.key, b"chance", "sha256")
        return rng.stream(int.from_bytes(seed), self.history.epoch, *about)

    def do(self, *commands: CoordinatorCommand) -> None:
        """Have these carried out after what was commanded before."""
        self.commands += commands

    def record(self, record: Record) -> None:
        """Apply a record to the hard state and have it appended."""
        self.history.apply(record)
        self.commands.append(Append(record=record))

    def send(
        self,
        directive: Directive,
        *processes: tuple[WorkerId, Incarnation],
        generation: Generation = NO_GENERATION,
    ) -> None:
        """Say this to these processes, as of the newest epoch, and of a generation if it belongs to one."""
        said = stamped(directive, epoch=self.history.epoch, generation=generation)
        self.commands += [Send(worker=x, incarnation=process, directive=said) for x, process in processes]

    def log(self, words: str, *, job: JobId | None = None, worker: WorkerId | None = None) -> None:
        """Tell people; lines about a job are kept with it, and whether a `worker` came or went with the audit log."""
        self.commands.append(Log(words=words, job=job, worker=worker))

    def drain(self) -> list[CoordinatorCommand]:
        """All commands since the last call."""
        commands, self.commands = self.commands, []
        return commands
