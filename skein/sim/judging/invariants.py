"""Invariants that hold in a simulated world after every event, however its machines are disturbed.

Rules of this file
- The run log is the only authority. A lineage names one history of commits: equal lineages mean equal parameters.
- Nothing in here asks a machine what it believes, but for the numbers that may only grow.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skein.config.job import ArrayJob, JobSpec
from skein.plan.changing.shards import rows_by_end
from skein.plan.ops import Direction
from skein.plan.plan import Plan
from skein.protocol.log.choosing import is_choice_due
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import (
    Averaged,
    CheckpointCommitted,
    CoresetChosen,
    DataCounted,
    EpochOpened,
    GenerationOpened,
    JobEnded,
    JobHeld,
    JobSubmitted,
    PlanAdopted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.protocol.log.row_choices import choices_in_force
from skein.protocol.messages.coresets import DrawingRow, ToldChoice
from skein.protocol.messages.directives import (
    Assign,
    Commit,
    Directive,
    NewGeneration,
    Prepare,
    Resumption,
    StepRecord,
)
from skein.protocol.worker.ops import ComputeOp, Op
from skein.protocol.worker.worker import Worker
from skein.sim.judging.rows import begin_faults, row_faults, rows_at_begin
from skein.types import (
    ChunkRef,
    Epoch,
    Exchanged,
    Generation,
    Incarnation,
    JobId,
    JobState,
    Local,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

INITIAL = "initial"
"""Begin of the lineage of what is drawn from a job's seed."""


class Violated(AssertionError):
    """An invariant of the protocol does not hold."""


def initial_of(job: JobId) -> str:
    """The lineage of what is drawn from the seed of a job: no other job's is equal to it."""
    return f"{INITIAL} of {job}"


def lineage_after(lineage: str, record: StepRecord) -> str:
    """The lineage of parameters of `lineage` to which `record` was applied."""
    attempts = [(result.group, result.attempt) for result in record.results]
    text = f"{lineage} {record.step} {record.decision} {attempts}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """Visitors in one step of a recorded plan: microbatches of each stage, and the order in which a chunk adds them."""

    by_stage: Mapping[StageIndex, frozenset[MicrobatchId]]
    by_chunk: Mapping[ChunkRef, tuple[MicrobatchId, ...]]


def visits_of(plan: Plan) -> Visits:
    """Visitors from the paths, orders from the schedules."""
    by_stage: dict[StageIndex, set[MicrobatchId]] = {stage.index: set() for stage in plan.stages}
    for index, path in enumerate(plan.paths):
        for hop in path.hops:
            by_stage[hop.stage].add(MicrobatchId(index))
    return Visits(
        by_stage={stage: frozenset(ids) for stage, ids in by_stage.items()},
        by_chunk=plan.microbatches_by_chunk(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStage:
    """A stage in some process's memory."""

    worker: WorkerId
    stage: StageSpec
    version: Step
    lineage: str


_WorkerPlace = tuple[Epoch, Generation]


@dataclass(slots=True)
class _Branch:
    """The history of one job that counts: roll-backs cut it short."""

    lineages: list[str]
    records: list[StepRecord] = field(default_factory=list)
    highest: int = 0
    """Versions that were ever recorded, rolled back or not."""
    averages: dict[str, tuple[str, tuple[StageSpec, ...]]] = field(default_factory=dict)
    """By the lineage before: the one after, and the stages that were made of others."""


class Invariants:
    """Follows the run log and compares with it what workers hold and are told."""

    def __init__(self) -> None:
        self.visits: dict[Generation, Visits] = {}
        """By the generation whose plan was recorded."""
        self.has_storage_failed = False
        self.has_liars = False
        """Whether a worker may say that it holds what it does not, or not what it does."""
        self._branches: dict[JobId, _Branch] = {}
        self._epoch = Epoch(0)
        self._generation = Generation(0)
        self._job_of: dict[Generation, JobId] = {}
        self._lost = (Epoch(0), Generation(0))
        """The newest that was in the log before it lost its end, or in another log."""
        self._known: dict[int, StepRecord] = {}
        """Recorded decisions by object identity: thousands of workers hear each."""
        self._places: dict[Incarnation, _WorkerPlace] = {}
        self._members: dict[Generation, frozenset[tuple[WorkerId, Incarnation]]] = {}
        self._owners: dict[tuple[Epoch, Generation], dict[tuple[MicrobatchId, StageIndex], WorkerId]] = {}
        """Workers that have accumulated, or will, what a step that goes on consists of."""
        self._built: dict[Incarnation, Generation] = {}
        self._read: dict[Generation, dict[WorkerId, str]] = {}
        """Fingerprints of the data that readers of a generation have opened."""
        self._replayed = History()

    def forget_all_but(self, log: Iterable[Record]) -> None:
        """A disk has lost the end of the log: what comes after follows what is left, and workers know more."""
        left = Invariants()
        for record in log:
            left.recorded(record)
        for job, branch in left._branches.items():
            branch.highest = max(branch.highest, self._branches[job].highest)
        self._lost = max(self._lost, (self._epoch, self._generation))
        self._branches, self._replayed = left._branches, left._replayed
        self._epoch, self._generation = left._epoch, left._generation

    def opened_elsewhere(self, epoch: Epoch) -> None:
        """A coordinator opens this epoch of another run log: workers that hold nothing may follow it."""
        self._lost = max(self._lost, (epoch, Generation(0)))

    def recorded(self, record: Record) -> None:
        """A record is durable: numbers grow, and steps are committed one after the other."""
        self._check(record)
        self._replayed.apply(record)

    def _check(self, record: Record) -> None:
        match record:
            case EpochOpened():
                _grows("epoch", self._epoch, record.epoch)
                self._epoch = record.epoch
            case GenerationOpened():
                _grows("generation", self._generation, record.generation)
                self._generation = record.generation
                self._job_of[record.generation] = record.job
                self._members[record.generation] = frozenset(
                    (m.worker, m.incarnation) for m in record.members
                )
            case JobSubmitted():
                if record.sweep is not None and not self.has_liars:
                    _check_begin(self._replayed, record)
                self._branches[record.job] = _Branch(lineages=[initial_of(record.job)])
            case PlanAdopted():
                self.visits[record.generation] = visits_of(record.plan)
                _check_rows(self._replayed.jobs[record.job].spec, record.plan)
            case StepCommitted():
                job, branch = self._replayed.jobs[record.job], self._branches[record.job]
                if not self.has_liars:
                    self._check_data(job)
                    self._check_round(job, branch.records[-1:], record.record)
                self._committed(branch, record.record, num_samples=job.spec.batch.samples)
            case DataCounted():
                self._check_counted(self._replayed.jobs[record.job], record)
            case CoresetChosen():
                _check_choice(record)
            case RolledBack():
                branch = self._branches[record.job]
                del branch.records[record.to_version :]
                del branch.lineages[record.to_version + 1 :]
            case Averaged():
                self._averaged(self._branches[record.job], record)
            case JobEnded(state=JobState.FAILED) if self.has_storage_failed and not self.has_liars:
                raise Violated(f"the job ends for what storage did: {record.reason}")
            case CheckpointCommitted(version=version) if version > len(self._branches[record.job].records):
                raise Violated(f"a checkpoint of version {version}, which does not count")
            case _:
                pass

    def _check_round(self, job: JobHistory, last: Sequence[StepRecord], record: StepRecord) -> None:
        """A round of an array is committed, after another or first."""
        if not isinstance(job.spec, ArrayJob):
            return
        before = last[0].rows if last else rows_at_begin(job.spec, self._replayed)
        if faults := row_faults(job.spec, before, record.rows, job.places):
            raise Violated(f"step {record.step}: {faults[0]}")

    def _committed(self, branch: _Branch, record: StepRecord, *, num_samples: int) -> None:
        if record.step != len(branch.records):
            raise Violated(f"step {record.step} is committed at version {len(branch.records)}")
        if record.samples_after != (record.step + 1) * num_samples:
            raise Violated(f"after step {record.step} the cursor is at {record.samples_after}")
        self._known[id(record)] = record
        branch.records.append(record)
        branch.lineages.append(lineage_after(branch.lineages[-1], record))
        branch.highest = max(branch.highest, len(branch.records))

    def _averaged(self, branch: _Branch, record: Averaged) -> None:
        """Some stages are others from here on, so the model has another lineage; the rest of it is as it was."""
        before = branch.lineages[record.version]
        text = f"{before} averages {[stage.index for stage in record.stages]}"
        branch.lineages[-1] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        branch.averages[before] = branch.lineages[-1], record.stages

    def gives_up(
        self,
        record: RolledBack | JobHeld,
        within_reach: Iterable[FoundStage],
        *,
        keeps_checkpoints: bool = False,
    ) -> None:
        """Steps are about to be given up, or left unsaved: who is here, or was not waited for, may not hold them.

        Of a job that is held only its newest version could be saved. With `keeps_checkpoints` no checkpoint was ever
        damaged, so no step of one may be given up, though its files may not be there for a while.
        """
        job, branch = self._replayed.jobs[record.job], self._branches[record.job]
        is_wanted = self.has_liars
        if isinstance(record, RolledBack):
            first, last = record.to_version, record.from_version
            is_wanted = is_wanted or record.learning_rate_ratio is not None
            saved = max((x.version for x in job.checkpoints if x.version <= last), default=0)
            if keeps_checkpoints and not is_wanted and first < saved:
                raise Violated(
                    f"{record.job} goes back to {first}, and its checkpoint {saved} was never damaged"
                )
        else:
            saved = 0 if job.newest_checkpoint is None else job.newest_checkpoint.version
            first, last = Step(max(saved, job.version - 1)), job.version
        if is_wanted or not job.spec.aggregation.walkers.have_equal_holders or job.worked is None:
            return
        held: dict[int, dict[StageSpec, WorkerId]] = {}
        for found in within_reach:
            lineage = self.lineage_now(record.job, found.stage, found.lineage)
            if lineage in branch.lineages[found.version : found.version + 1]:
                held.setdefault(found.version, {})[found.stage] = found.worker
        for version in range(first + 1, last + 1):
            holders = held.get(version, {})
            if holders.keys() >= set(job.worked.plan.stages):
                raise Violated(
                    f"steps from {first} on are given up, and {sorted(set(holders.values()))} "
                    f"hold version {version} of {last}"
                )

    def lineage_now(self, job: JobId, stage: StageSpec, lineage: str) -> str:
        """The lineage of a stage that was held when others were averaged; an average itself is not what was before."""
        averages = self._branches[job].averages
        while lineage in averages:
            after, made = averages[lineage]
            if any(stage.first < other.stop and other.first < stage.stop for other in made):
                break
            lineage = after
        return lineage

    def announced(self, directive: Directive) -> None:
        """A worker hears a directive: whatever it says is decided must be durable."""
        match directive:
            case Commit(record=record) | NewGeneration(last_commit=StepRecord() as record):
                if id(record) not in self._known:
                    raise Violated(f"announced before it was recorded: {record}")
            case _:
                pass
        match directive:
            case Assign():
                peers = {(peer.worker, peer.incarnation) for peer in directive.peers}
                if others := peers - self._members[directive.generation]:
                    raise Violated(
                        f"generation {directive.generation} has {sorted(others)} as peers, no members"
                    )
                if directive.resumption is not None:
                    self._resumes(directive, directive.resumption)
            case Prepare():
                self._prepares(directive)
            case _:
                pass

    def _resumes(self, assign: Assign, resumption: Resumption) -> None:
        """Check that each contribution that goes on is of one worker alone: added up before, or still to come."""
        owners = self._owners.setdefault((assign.epoch, assign.generation), {})
        me = resumption.schedule.worker
        kept = [(m, chunk.stage) for chunk in resumption.chunks for m in chunk.ledger]
        left = [(op.microbatch, op.stage) for op in resumption.schedule.ops if op.kind.row.is_accumulating]
        if len({*kept, *left}) < len(kept) + len(left):
            raise Violated(f"{me} is to add up twice, of {kept} and {left}")
        for contribution in (*kept, *left):
            if owners.setdefault(contribution, me) != me:
                raise Violated(f"{contribution} is {me}'s, and {owners[contribution]}'s too")

    def _prepares(self, prepare: Prepare) -> None:
        """The parts of an attempt are disjoint, and together all that visits its stages; some, if not all take part."""
        by_stage: dict[StageIndex, list[MicrobatchId]] = {}
        for part in prepare.parts:
            by_stage.setdefault(part.stage, []).extend(part.microbatches)
        visits = self.visits[prepare.generation].by_stage
        for stage, microbatches in by_stage.items():
            is_alone = isinstance(prepare.group.group, Local)
            is_wrong = (
                not set(microbatches) <= set(visits[stage]) or len(set(microbatches)) < len(microbatches)
                if is_alone or isinstance(prepare.group.group, Exchanged)
                else sorted(microbatches) != sorted(visits[stage])
            )
            if is_wrong:
                raise Violated(f"stage {stage} is reduced from {sorted(microbatches)} at step {prepare.step}")

    def replays(self, live: History) -> None:
        """The records so far, one after the other, give the state that the coordinator has."""
        replayed = self._replayed
        if (replayed.epoch, replayed.generation) != (live.epoch, live.generation):
            raise Violated("replaying the log gives another epoch or generation")
        if replayed.drained != live.drained:
            raise Violated("replaying the log gives other drained workers")
        if (replayed.jobs, replayed.job_by_key) != (live.jobs, live.job_by_key):
            raise Violated("replaying the log gives other jobs")

    def built(self, who: Worker, generation: Generation) -> None:
        """A worker has what a generation assigns to it."""
        self._built[who.identity.incarnation] = generation

    def reads(self, who: Worker, generation: Generation, fingerprint: str) -> None:
        """A worker has opened data for a generation."""
        self._read.setdefault(generation, {})[who.identity.worker] = fingerprint

    def _check_data(self, job: JobHistory) -> None:
        """A step is made with one kind of data: those that are recorded, or while no record counts, one at least."""
        readers = self._read.get(job.generation, {})
        recorded = "" if job.counted is None else job.counted.fingerprint
        expected = recorded or min(readers.values(), default="")
        odd = {worker: found for worker, found in readers.items() if found != expected}
        if odd:
            raise Violated(f"{job.job} is trained on {expected}, and step {job.version} reads {odd}")

    def _check_counted(self, job: JobHistory, record: DataCounted) -> None:
        """Data that steps were made with are replaced only where a client has asked for it."""
        before = "" if job.counted is None else job.counted.fingerprint
        if job.version and before not in ("", record.fingerprint):
            raise Violated(f"{job.job} was trained on {before} and goes on with {record.fingerprint}")

    def begins(self, who: Worker, op: Op) -> None:
        """A worker computes only what the generation that it follows has assigned, for the job of that."""
        if who.job is not None and self._job_of.get(who.generation, who.job) != who.job:
            raise Violated(f"{who.identity.worker} works on {who.job} under another job's {who.generation}")
        if isinstance(op, ComputeOp):
            built = self._built.get(who.identity.incarnation)
            if built != who.generation:
                raise Violated(f"{who.identity.worker} computes under {who.generation}, has built {built}")

    def draws(self, who: Worker, op: Op, choices: Sequence[ToldChoice]) -> None:
        """Samples of a step are drawn by the choice that was recorded last before it, once one is due.

        Of an array each row has its own.
        """
        job = None if who.job is None else self._replayed.jobs[who.job]
        if job is None or who.generation != job.generation or not isinstance(op, ComputeOp):
            return
        is_drawn = op.kind.row.takes is Direction.FORWARD and op.operand is None
        if not op.phase.trains or not is_drawn or op.step > job.version:
            return
        name = who.identity.worker
        if op.step == job.version and is_choice_due(job):
            raise Violated(f"{name} draws samples of step {op.step}, before which rows are to be chosen")
        recorded = _by_row(choices_in_force([x for x in job.chosen if x.version <= op.step], job.places))
        resting = {row for row, place in enumerate(job.places) if not place.is_going}
        if {row: x for row, x in _by_row(choices).items() if row not in resting} != recorded:
            raise Violated(f"{name} draws samples of step {op.step} by another choice than was recorded")

    def applies(self, who: Worker, record: StepRecord, lineages: Iterable[str]) -> None:
        """Chunks of these lineages are about to be updated by `record`."""
        branch = self._branch(who)
        if branch is None or record not in branch.records[record.step : record.step + 1]:
            return  # A fenced worker may still finish what was rolled back since.
        if any(lineage != branch.lineages[record.step] for lineage in lineages):
            raise Violated(f"{who.identity.worker} applies step {record.step} to other parameters")

    def holds(
        self, who: Worker, generation: Generation, version: Step, by_stage: Mapping[StageIndex, str]
    ) -> None:
        """Chunks at `version` were built or saved under `generation`: they must be what the log makes of it."""
        branch = self._branch(who)
        is_newest = who.job is not None and generation == self._replayed.jobs[who.job].generation
        if branch is None or not is_newest or version >= len(branch.lineages):
            return
        for stage, lineage in by_stage.items():
            if lineage != branch.lineages[version]:
                raise Violated(f"{who.identity.worker} holds another stage {stage} at version {version}")

    def is_of(self, job: JobId, version: Step, lineage: str) -> bool:
        """Whether this is what the log makes of a version."""
        return lineage in self._branches[job].lineages[version : version + 1]

    def handled(self, who: Worker) -> None:
        """A worker has handled an event: it never steps back, is never ahead of the log, and keeps to its slots."""
        place = (who.epoch, who.generation)
        before = self._places.get(who.identity.incarnation)
        if place != before:
            self._moved(who, before, place)
        pipeline = who.pipeline
        if pipeline is not None:
            for taken, slots in pipeline.slots_taken():
                if not 0 <= taken <= slots:
                    raise Violated(f"{who.identity.worker} has taken slots {list(pipeline.slots_taken())}")
        branch = self._branch(who)
        if branch is not None and who.version > branch.highest:
            raise Violated(f"{who.identity.worker} is at version {who.version}, the log at {branch.highest}")

    def _moved(self, who: Worker, before: _WorkerPlace | None, place: _WorkerPlace) -> None:
        """A worker follows another epoch or generation: a newer one, which the log has or once had."""
        begins_anew = (
            place == (0, 0) and who.job is None
        )  # It follows another run log, and holds nothing of this one.
        if before is not None and place < before and not begins_anew:
            raise Violated(f"{who.identity.worker} went back to {place}")
        self._places[who.identity.incarnation] = place
        epoch, generation = self._lost
        if who.epoch > max(epoch, self._epoch) or who.generation > max(generation, self._generation):
            raise Violated(f"{who.identity.worker} is at {place}, the log at {self._epoch, self._generation}")

    def _branch(self, who: Worker) -> _Branch | None:
        return None if who.job is None else self._branches.get(who.job)


def _check_begin(history: History, record: JobSubmitted) -> None:
    """An array of a sweep begins."""
    if faults := begin_faults(history, record):
        raise Violated(f"{record.job}: {faults[0]}")


def _by_row(choices: Sequence[ToldChoice]) -> dict[int, tuple[ToldChoice, DrawingRow | None]]:
    """Choices by the row of an array that draws by them; of any other job that of row 0."""
    found: dict[int, tuple[ToldChoice, DrawingRow | None]] = {}
    for choice in choices:
        if not choice.rows:
            found[0] = choice, None
        found |= {row.row: (replace(choice, version=Step(0), rows=()), row) for row in choice.rows}
    return found


def _check_rows(job: JobSpec, plan: Plan) -> None:
    """Shards of an end have every row of the vocabulary, once and in order."""
    for end, held in rows_by_end(job.model, plan.stages).items():
        rows = [row for block in held for row in block]
        if rows and rows != [*range(job.model.vocab_size or 0)]:
            raise Violated(f"stages of the {end} hold rows {held} of {job.model.vocab_size}")


def _check_choice(record: CoresetChosen) -> None:
    """Rows are chosen once each, and together stand for all rows but those that were set aside."""
    choice = record.told.read()
    ids, total = choice.ids, float(choice.sizes.sum(dtype=float))
    if len(np.unique(ids)) != len(ids) or not len(ids) or ids.min() < 0 or ids.max() >= record.num_rows:
        raise Violated(f"rows {ids.tolist()} of {record.num_rows} are chosen")
    if (choice.sizes <= 0).any() or abs(total - (record.num_rows - record.num_set_aside)) > 1e-3 * total:
        raise Violated(
            f"rows that stand for {total} are chosen of {record.num_rows}, {record.num_set_aside} set aside"
        )
    if choice.digest != record.digest:
        raise Violated(f"the choice {choice.digest} is recorded as {record.digest}")


def _grows(what: str, before: int, after: int) -> None:
    if after <= before:
        raise Violated(f"{what} {after} after {before}")
