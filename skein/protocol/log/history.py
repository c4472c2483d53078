"""The hard state: what the run log says. Live and replayed coordinators change it in one way, `apply(record)`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isfinite, prod
from typing import assert_never

from skein.config.job import ArrayJob, JobSpec, read_spec, with_steps
from skein.plan.agreeing.walkers import walkers_of
from skein.plan.changing.reroute import ways
from skein.plan.sweeping.choosing import RowPlace, rounds_left
from skein.protocol.log import records
from skein.protocol.log.divergence import LossWatch
from skein.protocol.log.holding import Holding, absent, holding_of
from skein.protocol.log.learned import learned_after, learned_under
from skein.protocol.log.openings import Opening, is_covered, is_given_up, position_reached
from skein.protocol.log.row_choices import carried_choices, newest_choices, row_places
from skein.protocol.log.row_history import RowsByVersion, is_turn, rounds_with, rows_begun
from skein.protocol.log.shelved import Fetch, JobCard, JobTable
from skein.protocol.log.usage import Usage
from skein.protocol.log.workclock import WorkClock
from skein.protocol.messages.array_rounds import RowNumbers
from skein.protocol.messages.directives import Beginning, ChunkVersion, StepRecord
from skein.protocol.messages.positions import LogPosition
from skein.types import (
    DEFAULT_NAMESPACE,
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    JobState,
    StageSpec,
    Step,
    WorkerId,
)

_TURNS = (
    records.JobSubmitted,
    records.HaltAsked,
    records.JobHeld,
    records.JobResumed,
    records.JobEnded,
)


KEPT_CHOICES = 8
"""Each may take 2 MiB."""


@dataclass(slots=True, kw_only=True)
class JobHistory:
    """State of one job as recorded. `version` is the number of steps that count: roll-backs take some away."""

    job: JobId
    key: str
    spec: JobSpec
    submitted_wall_s: float
    namespace: str = DEFAULT_NAMESPACE
    """Namespace that owns the job; namespaces share workers evenly."""
    number: int = 0
    """Number of jobs that clients submitted before; an array has its sweep's."""
    sweep: JobId | None = None
    """Sweep that it is an array of, and no job of a client."""
    trials: tuple[int, ...] = ()
    """Trials that are its rows, if it is an array."""
    arrays: list[JobId] = field(default_factory=list)
    """Arrays of a sweep so far, oldest first."""
    last_wall_s: float = 0.0
    """Wall-clock time of the job's newest record."""
    version: Step = field(default=Step(0))
    last_commit: StepRecord | None = None
    num_tokens: int = 0
    num_late_samples: int = 0
    """Left out of committed steps, rolled back ones included."""
    last_evaluation: records.Evaluated | None = None
    chosen: list[records.CoresetChosen] = field(default_factory=list)
    """Newest choices of rows that count, oldest first; who goes back further chooses anew."""
    rounds: dict[Step, tuple[RowNumbers, ...]] = field(default_factory=dict)
    """Numbers of an array's rows after steps that it may go back to."""
    losses: LossWatch = field(default_factory=LossWatch)
    clock: WorkClock = field(default_factory=WorkClock)
    diverged: records.Diverged | None = None
    """Record that the losses diverged, until a step learns again."""
    scores: dict[Step, float] = field(default_factory=dict)
    """Validation losses of checkpoints and of versions after them; infinite if not finite."""
    checkpoints: list[records.CheckpointCommitted] = field(default_factory=list)
    damaged: dict[Step, str] = field(default_factory=dict)
    """Checkpoints among them that nobody is to read, and why."""
    generation: Generation = field(default=Generation(0))
    """Newest generation of the job."""
    members: tuple[records.GenerationMember, ...] = ()
    followers: set[Incarnation] = field(default_factory=set)
    """Processes that were ever members."""
    outdated: set[Incarnation] = field(default_factory=set)
    """Followers whose chunks may be of a history that does not count; a commit clears who computed it."""
    plan: records.PlanAdopted | None = None
    worked: records.PlanAdopted | None = None
    """The plan by which the last step was made."""
    standing: tuple[tuple[ChunkRef, ...], ...] = ()
    """Walkers of the last step, where it had many, that no plan adopted since may have given anything."""
    worked_by: tuple[records.GenerationMember, ...] = ()
    """Members at the last step."""
    holding: tuple[Holding, ...] = ()
    """Stages that processes may hold at `version`: by the plan of the last step, and by those adopted since."""
    behind: dict[records.GenerationMember, frozenset[ChunkVersion]] = field(default_factory=dict)
    """Chunks that processes may hold which were away when later steps were made; newer than any checkpoint."""
    given_up: dict[Incarnation, Step] = field(default_factory=dict)
    """Processes that were not here when a version was given up which they may hold, and that version."""
    turned_at: Step | None = None
    """The version at which a plan last sent microbatches through other stages than before, or a stage was averaged:
    what had been done of that step under an older plan is of another step."""
    rollbacks: list[records.RolledBack] = field(default_factory=list)
    averaged: dict[StageSpec, Step] = field(default_factory=dict)
    """At which version a stage was last made of its neighbours."""
    quarantined: dict[WorkerId, records.Quarantined] = field(default_factory=dict)
    """Workers that get no more work of the job."""
    incidents: list[records.Incident] = field(default_factory=list)
    """Incidents of it, or of all its arrays, as they were recorded."""
    learned: tuple[int, ...] = ()
    """Tokens that each walker has learned from since the last exchange, in the plan's order; of one walker, nothing."""
    begins: Beginning | None = None
    """Checkpoint whose parameters the job begins with, if they are another job's."""
    counted: records.DataCounted | None = None
    """Size of the job's data when they were opened first."""
    halt: records.HaltAsked | None = None
    """Request for the state that the job is to come to once it is saved."""
    held: records.JobHeld | None = None
    end: records.JobEnded | None = None
    asked: JobSpec | None = None
    """Spec as it was submitted, if its budget is another since."""
    may_rewind: bool = False
    """Whether somebody has the job go on although it had diverged, so that it goes back once more."""

    @property
    def asked_as(self) -> JobId:
        """Job that a client submitted for it: itself, or the sweep that it is an array of."""
        return self.sweep or self.job

    @property
    def is_at_rest(self) -> bool:
        """Whether it has ended or is held."""
        return self.end is not None or self.held is not None

    @property
    def ends_with_round(self) -> bool:
        """Whether it is an array that is to end with its round, so that its rows go on in others."""
        return self.halt is not None and self.halt.state is JobState.FINISHED

    @property
    def may_hold(self) -> dict[records.GenerationMember, frozenset[ChunkVersion]]:
        """Chunks that processes may hold, here or not: stages at `version`, or as they were when these went away."""
        merged = dict(self.behind)
        for held in self.holding:
            for member, stages in held.items():
                now = {ChunkVersion(stage=stage, version=self.version) for stage in stages}
                merged[member] = merged.get(member, frozenset()) | now
        return merged

    @property
    def newest_checkpoint(self) -> records.CheckpointCommitted | None:
        """Newest checkpoint that is whole, as far as is known; None if there is none."""
        return max(self.whole_checkpoints, key=lambda checkpoint: checkpoint.version, default=None)

    @property
    def whole_checkpoints(self) -> list[records.CheckpointCommitted]:
        """Checkpoints that were not found damaged."""
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.version not in self.damaged]

    @property
    def total_steps(self) -> int:
        """Steps after which the budget is spent, as far as data were counted and the pace tells of its hours."""
        if isinstance(self.spec, ArrayJob) and self.spec.data.coreset.follows_model:
            # Rounds end where choices are due, so there are more than the budget has.
            last_step, round_steps = self.spec.array.last_step, self.spec.round_steps
            return self.version + rounds_left(self.places, last_step=last_step, round_steps=round_steps)
        by_time = self.clock.total_steps(self.spec, self.version)
        num_steps = None if self.counted is None else self.counted.num_steps
        return by_time if num_steps is None else min(by_time, num_steps)

    @property
    def places(self) -> tuple[RowPlace, ...]:
        """Places of the rows of an array; any other job has none."""
        if not isinstance(self.spec, ArrayJob):
            return ()
        return row_places(self.spec, self.counted, self.chosen, self.rounds.get(self.version, ()))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the checkpoints that are kept."""
        return sum(checkpoint.num_bytes for checkpoint in self.checkpoints)

    @property
    def card(self) -> JobCard | None:
        """Facts that stand for the job once it is shelved; None: it has not ended."""
        if self.end is None:
            return None
        return JobCard(
            job=self.job,
            key=self.key,
            namespace=self.namespace,
            number=self.number,
            sweep=self.sweep,
            state=self.end.state,
            stored_bytes=self.stored_bytes,
            holders=tuple(sorted({member.incarnation for member in self.holders()})),
        )

    def holders(self) -> Iterable[records.GenerationMember]:
        """Processes that may hold chunks of it, some perhaps more than once."""
        yield from self.behind
        for held in self.holding:
            yield from held

    @property
    def rewinds(self) -> list[records.RolledBack]:
        """Roll-backs because training had diverged."""
        return [back for back in self.rollbacks if back.learning_rate_ratio is not None]

    @property
    def learning_rate_ratio(self) -> float:
        """Share that roll-backs have left of the learning rate that the job asks for."""
        return prod(back.learning_rate_ratio or 1.0 for back in self.rewinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryHead:
    """All of a history but its jobs. Field names are those of `History`."""

    epoch: Epoch
    generation: Generation
    usage: Mapping[str, Usage]
    pending: tuple[JobId, ...]
    sweeps: tuple[JobId, ...]
    num_submitted: int
    num_turns: int
    drained: frozenset[Incarnation]
    num_records: int
    openings: tuple[Opening, ...]
    has_decided: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job in a snapshot: `read` gives it as it was when entry `entry` changed it; `card` is of one that had ended."""

    job: JobId
    entry: int
    card: JobCard | None
    read: Callable[[], JobHistory]


class History:
    """All jobs, the epoch and the newest generation, as the log has them."""

    def __init__(self) -> None:
        self.epoch = Epoch(0)
        self.generation = Generation(0)
        self.jobs = JobTable()
        self.job_by_key: dict[tuple[str, str], JobId] = {}
        """Jobs by namespace and key."""
        self._usage: dict[str, Usage] = {}
        """Use that each namespace has made of workers."""
        self._pending: dict[JobId, JobHistory] = {}
        self._sweeps: dict[JobId, JobHistory] = {}
        self.num_submitted = 0
        """Jobs of clients."""
        self.num_turns = 0
        """Records by which a job began, was to rest, came to rest or went on."""
        self.drained: set[Incarnation] = set()
        """Processes that an operator wants to go."""
        self.num_records = 0
        """Entries of the log."""
        self.openings: list[Opening] = []
        """Openings of the log, one for each epoch."""
        self.has_decided = False
        """Whether a record that binds was written in this epoch: then the log before it is the one that counts."""

    # --- snapshots ---

    def head(self) -> HistoryHead:
        """All but the jobs, for a snapshot."""
        return HistoryHead(
            epoch=self.epoch,
            generation=self.generation,
            usage=self._usage,
            pending=tuple(self._pending),
            sweeps=tuple(self._sweeps),
            num_submitted=self.num_submitted,
            num_turns=self.num_turns,
            drained=frozenset(self.drained),
            num_records=self.num_records,
            openings=tuple(self.openings),
            has_decided=self.has_decided,
        )

    def restore(self, head: HistoryHead, jobs: Iterable[KnownJob], fetch: Fetch) -> None:
        """Become what a snapshot says, before any record; `jobs` in the order in which they were submitted.

        Ended jobs stay on the shelf, which `fetch` reads; arrays only once their sweep has ended, too.
        """
        known = {job.job: job for job in jobs}
        self.jobs.fetch = fetch
        for job in known.values():
            sweep = None if job.card is None or job.card.sweep is None else known[job.card.sweep]
            if job.card is None or (sweep is not None and sweep.card is None):
                self.jobs.add(job.read(), job.entry)
            else:
                self.jobs.add_card(job.card)
        self.job_by_key = {(x.namespace, x.key): x.job for x in self.jobs.all() if x.sweep is None}
        self.epoch, self.generation = head.epoch, head.generation
        self._usage = dict(head.usage)
        self._pending = {job: self.jobs[job] for job in head.pending}
        self._sweeps = {job: self.jobs[job] for job in head.sweeps}
        self.num_submitted, self.num_turns = head.num_submitted, head.num_turns
        self.drained = set(head.drained)
        self.num_records, self.openings = head.num_records, list(head.openings)
        self.has_decided = head.has_decided

    def let_go(self, entry: int, fetch: Fetch, *, keep: Iterable[JobId]) -> list[JobId]:
        """Let go of ended jobs that a snapshot up to `entry` has, but for those in `keep`; gives those that are gone.

        Args:
            entry: last entry of the log that the snapshot covers.
            fetch: reads a job of that snapshot.
            keep: jobs that others refer to now.
        """
        self.jobs.fetch, spared, gone = fetch, {*keep}, []
        for job in list(self.jobs.resident()):
            sweep = None if job.sweep is None else self.jobs.peek(job.sweep)
            is_whole = not isinstance(sweep, JobHistory) or sweep.end is not None
            if job.job in spared or not is_whole or (card := job.card) is None:
                continue
            if self.jobs.let_go(card, entry):
                gone.append(job.job)
        return gone

    # --- records ---

    def apply(self, record: records.Record) -> None:
        """Take one record, in log order."""
        self.num_records += 1
        self.has_decided |= isinstance(
            record,
            records.StepCommitted
            | records.Evaluated
            | records.CheckpointCommitted
            | records.RolledBack
            | records.Averaged
            | records.JobEnded,
        )
        self.num_turns += isinstance(record, _TURNS)
        match record:
            case records.EpochOpened():
                assert record.epoch > self.epoch, f"epoch {record.epoch} after {self.epoch}"
                self.epoch = record.epoch
                self.openings.append(Opening(record=record, entry=self.num_records))
                self.has_decided = False
            case records.JobSubmitted():
                self._submitted(record)
            case records.Drained():
                self.drained.add(record.incarnation)
            case _:
                job = self.jobs.change(record.job, self.num_records)
                self._of_job(job, record)
                if not isinstance(record, records.PlanAdopted):
                    job.last_wall_s = record.wall_s
                self._note_pending(job)

    def _submitted(self, record: records.JobSubmitted) -> None:
        namespace = record.namespace or DEFAULT_NAMESPACE
        sweep = None if record.sweep is None else self.jobs.change(record.sweep, self.num_records)
        job = JobHistory(
            job=record.job,
            namespace=namespace,
            number=self.num_submitted if sweep is None else sweep.number,
            key=record.key,
            spec=read_spec(record.spec),
            submitted_wall_s=record.wall_s,
            last_wall_s=record.wall_s,
            begins=record.begins,
            sweep=record.sweep,
            trials=record.trials,
        )
        self.jobs.add(job, self.num_records)
        if isinstance(job.spec, ArrayJob):
            job.chosen = carried_choices(job.spec, job.job, self._chosen_of)
            job.rounds = {Step(0): rows_begun(job.spec, self._rounds_of)}
        if sweep is None:
            self.num_submitted += 1
            self.job_by_key[namespace, record.key] = record.job
        else:
            sweep.arrays.append(record.job)
        self._note_pending(job)

    def _chosen_of(self, job: JobId) -> list[records.CoresetChosen]:
        return self.jobs[job].chosen if job in self.jobs else []

    def _rounds_of(self, job: JobId) -> RowsByVersion:
        return self.jobs[job].rounds if job in self.jobs else {}

    def _note_pending(self, job: JobHistory) -> None:
        """Keep the pending jobs in order: many more have ended, and the scheduler asks all the time."""
        kept = self._pending if job.spec.sweep is None else self._sweeps
        if job.is_at_rest:
            kept.pop(job.job, None)
        elif job.job not in kept:
            is_last = not kept or job.number >= next(reversed(kept.values())).number
            kept[job.job] = job
            if not is_last:
                in_order = sorted(kept.items(), key=lambda item: item[1].number)
                kept.clear()
                kept.update(in_order)

    def _of_job(self, job: JobHistory, record: records.JobRecord) -> None:
        match record:
            case records.GenerationOpened():
                assert record.generation > self.generation, f"{record} after {self.generation}"
                self.generation = job.generation = record.generation
                job.members = record.members
                self._forgotten_elsewhere(job)
                job.clock.stops()
                job.followers.update(member.incarnation for member in record.members)
            case records.PlanAdopted():
                if job.plan is not None and ways(job.plan.plan) != ways(record.plan):
                    job.turned_at = job.version
                job.standing = _still_standing(job, record)
                if job.learned and job.plan is not None:
                    job.learned = learned_under(job.learned, job.plan.plan, record.plan, job.standing)
                job.plan = record
                job.holding = (*job.holding, holding_of(job.members, record.plan))
            case records.StepCommitted():
                assert record.record.step == job.version, f"{record} at version {job.version}"
                job.behind, job.holding = _behind(job), job.holding[-1:]
                num_workers = 0 if job.plan is None else len(job.plan.plan.workers)
                worker_s = num_workers * max(0.0, record.wall_s - job.last_wall_s)
                self._usage.setdefault(job.namespace, Usage()).add(worker_s, wall_s=record.wall_s)
                job.version = Step(job.version + 1)
                job.last_commit = record.record
                if job.spec.rows:
                    job.rounds = rounds_with(job.rounds, job.version, record.record.rows, job.checkpoints)
                    self.num_turns += is_turn(job.rounds, job.version)
                job.losses.stepped(record.record)
                job.clock.stepped(record.wall_s)
                job.diverged = None if job.losses.doubt() is None else job.diverged
                job.num_tokens += record.record.num_tokens
                job.num_late_samples += record.record.num_late_samples
                plan = None if job.plan is None else job.plan.plan
                job.learned = learned_after(job.learned, job.spec, plan, record.record)
                job.worked, job.worked_by = job.plan, job.members
                are_lines = job.spec.aggregation.walkers.are_lines
                job.standing = walkers_of(job.plan.plan) if are_lines and job.plan is not None else ()
                if job.outdated and job.plan is not None:
                    placed = set(job.plan.plan.workers)
                    job.outdated.difference_update(m.incarnation for m in job.members if m.worker in placed)
            case records.Evaluated():
                job.last_evaluation = record
                job.clock.goes_on(record.wall_s)
                job.scores[record.version] = record.loss if isfinite(record.loss) else inf
            case records.CoresetChosen():
                assert record.version == job.version, f"{record.version} at version {job.version}"
                job.chosen = newest_choices([*job.chosen, record], KEPT_CHOICES)
                job.clock.goes_on(record.wall_s)
            case records.CheckpointCommitted():
                found = [c for c in job.checkpoints if c.version != record.version]
                whole = [c.version for c in found if c.version not in job.damaged]
                keeps = record.keeps or (*whole, record.version)[-job.spec.checkpoint.keep :]
                job.checkpoints = [c for c in (*found, record) if c.version in keeps]
                job.scores = {v: x for v, x in job.scores.items() if v in keeps or v > record.version}
                job.damaged = {
                    at: why for at, why in job.damaged.items() if at in keeps and at != record.version
                }
            case records.Diverged():
                job.diverged = record
            case records.CheckpointChecked():
                job.damaged.pop(record.version, None)
                if not record.is_whole:
                    job.damaged[record.version] = record.reason
            case records.CheckpointDeleted():
                job.checkpoints = [c for c in job.checkpoints if c.version != record.version]
                job.damaged.pop(record.version, None)
            case records.RolledBack():
                assert record.from_version == job.version >= record.to_version
                job.given_up |= absent(job.may_hold, job.members)
                job.holding = ()
                job.behind.clear()
                job.version = record.to_version
                job.learned = ()
                job.chosen = [x for x in job.chosen if x.version <= record.to_version]
                job.rounds = {at: x for at, x in job.rounds.items() if at <= record.to_version}
                job.last_commit = None
                job.standing = ()
                job.rollbacks.append(record)
                job.averaged = {x: at for x, at in job.averaged.items() if at <= record.to_version}
                job.outdated |= job.followers
                if job.last_evaluation is not None and job.last_evaluation.version > record.to_version:
                    job.last_evaluation = None
                job.checkpoints = [c for c in job.checkpoints if c.version <= record.to_version]
                job.scores = {v: x for v, x in job.scores.items() if v <= record.to_version}
                job.losses.went_back(record.to_version)
                job.diverged, job.may_rewind = None, False
                job.damaged = {at: why for at, why in job.damaged.items() if at <= record.to_version}
            case records.Averaged():
                assert record.version == job.version
                job.turned_at = job.version
                job.losses.changed()
                job.averaged.update(dict.fromkeys(record.stages, record.version))
                job.given_up |= absent(job.may_hold, job.members)
                job.behind.clear()
                here = set(job.members)
                job.holding = tuple({m: x for m, x in held.items() if m in here} for held in job.holding)
                job.outdated |= job.followers.difference(m.incarnation for m in job.members)
            case records.Incident():
                job.incidents.append(record)
                if job.sweep is not None:
                    self.jobs.change(job.sweep, self.num_records).incidents.append(record)
            case records.DataCounted():
                job.counted = record
            case records.Quarantined():
                job.quarantined[record.worker] = record
            case records.HaltAsked():
                job.halt = record
            case records.JobHeld():
                job.held, job.halt = record, None
            case records.JobResumed():
                _resume(job, record)
                for array in job.arrays:
                    # A sweep that goes on looks at all of its arrays.
                    self.jobs.change(array, self.num_records)
            case records.JobEnded():
                job.end, job.held, job.halt = record, None, None
            case _:
                assert_never(record)

    def _forgotten_elsewhere(self, job: JobHistory) -> None:
        """Members of a job's new generation hold nothing of other jobs any more."""
        here = set(job.members)
        shelved = self.jobs.held_by([member.incarnation for member in job.members])
        for name in [*shelved, *(other.job for other in self.jobs.resident())]:
            other = self.jobs[name]
            if other is job or here.isdisjoint(other.holders()):
                continue
            other = self.jobs.change(name, self.num_records)
            other.holding = tuple({m: x for m, x in held.items() if m not in here} for held in other.holding)
            other.behind = {m: x for m, x in other.behind.items() if m not in here}

    @property
    def position(self) -> LogPosition | None:
        """Position that the log has reached; None before its first epoch."""
        return position_reached(self.openings, self.num_records)

    def trained_on(self, job: JobHistory) -> records.DataCounted | None:
        """Data that a job's steps were made with, to which each later reader is held; None: of none that are recorded.

        An array without a step of its own goes on from rows of its sweep, so it is held to what those read.
        """
        siblings = () if job.sweep is None else self.jobs[job.sweep].arrays
        for found in chain((job,), (self.jobs[array] for array in siblings if array in self.jobs)):
            is_alike = (found.spec.data, found.spec.seed) == (job.spec.data, job.spec.seed)
            if found.version and is_alike and found.counted is not None and found.counted.fingerprint:
                return found.counted
        return None

    def covers(self, known: LogPosition) -> bool:
        """Whether the log has all that somebody knows of it."""
        return is_covered(known, self.openings, self.num_records)

    def has_given_up(self, known: LogPosition) -> bool:
        """Whether an operator accepted the loss of the part of this log that `known` is of."""
        return is_given_up(known, self.openings)

    def pending(self) -> list[JobHistory]:
        """Jobs with a run, or that wait for one, oldest first: arrays too, and no sweep, whose arrays run for it."""
        return list(self._pending.values())

    def sweeps(self) -> list[JobHistory]:
        """Sweeps that have not ended and are not held, oldest first."""
        return list(self._sweeps.values())

    def queue(self) -> list[JobHistory]:
        """Jobs of clients that have not ended and are not held, oldest first."""
        asked = [job for job in self._pending.values() if job.sweep is None]
        return sorted((*asked, *self._sweeps.values()), key=lambda job: job.number)

    def listed(self) -> list[JobHistory | JobCard]:
        """Jobs of clients, oldest first; of those that are shelved their cards."""
        return [job for job in self.jobs.all() if job.sweep is None]

    def used_s(self, namespace: str, *, now: float) -> float:
        """Worker seconds that a namespace has used, older ones counting less."""
        return self._usage[namespace].at(now) if namespace in self._usage else 0.0

    def state_of(self, job: JobId) -> JobState | None:
        """The state of a job that has ended or is held; None of one that goes on."""
        found = self.jobs.peek(job)
        if isinstance(found, JobCard):
            return found.state
        if found.end is not None:
            return found.end.state
        return None if found.held is None else JobState.HELD


def _resume(job: JobHistory, record: records.JobResumed) -> None:
    if job.end is not None or job.held is not None:
        # Whoever worked on it has forgotten it.
        job.members = ()
        job.losses.went_back(job.version)
        job.may_rewind = job.diverged is not None and job.spec.on_divergence != "ignore"
    job.end = job.held = job.halt = None
    if record.steps is not None:
        job.asked = job.asked or job.spec
        job.spec = with_steps(job.spec, record.steps)
        job.counted = None if job.counted is None else replace(job.counted, num_steps=None)
    if record.takes_new_data and job.counted is not None:
        job.counted = replace(job.counted, fingerprint="", num_validation_samples=None)


def _behind(job: JobHistory) -> dict[records.GenerationMember, frozenset[ChunkVersion]]:
    """Value of `behind` once the step at hand is made by the newest plan."""
    if len(job.holding) < 2 and not job.behind:
        return job.behind
    here = {member.worker for member in job.members}
    saved = Step(0) if job.newest_checkpoint is None else job.newest_checkpoint.version
    away = {
        member: frozenset(held for held in chunks if held.version > saved)
        for member, chunks in job.may_hold.items()
        if member.worker not in here
    }
    return {member: chunks for member, chunks in away.items() if chunks}


def _still_standing(job: JobHistory, record: records.PlanAdopted) -> tuple[tuple[ChunkRef, ...], ...]:
    """Walkers that a plan has too, with nobody in them who is not the very process that made the last step."""
    if not job.standing:
        return ()
    same = {m.worker for m in set(job.worked_by) & set(job.members)}
    kept = set(walkers_of(record.plan))
    return tuple(x for x in job.standing if x in kept and all(at.worker in same for at in x))
