"""The Worker machine: directives, tensors and ended ops go in; ops, sends and reports come out.

Rules of this file
- One op runs at a time. A running op is never interrupted: what invalidates it waits for its end.
- Nothing computes between adopting a generation and having what it assigns (`_pipeline` is None).
- A message of an older generation or step is dropped; one of a newer waits in `_parked`. Neither is a failure.
- Parameters change in ApplyOp alone, from results of the very attempts that the record names.
- A chunk that the plan takes away stays until a step begins: till then a peer may need it, or the next generation.
"""

from collections import deque
from typing import assert_never

from skein import PROTOCOL_VERSION
from skein.plan.plan import Group
from skein.protocol.messages import (
    Ack,
    Assign,
    Beat,
    CheckpointWritten,
    ChunksReady,
    ChunkVersion,
    Commit,
    Decision,
    Directive,
    Dismiss,
    Envelope,
    Evaluate,
    EvaluationDone,
    Hello,
    HopTensor,
    Leaving,
    LinksMeasured,
    Member,
    NewGeneration,
    Origin,
    Phase,
    Prepare,
    Probe,
    Refused,
    Report,
    Save,
    ShardTensor,
    StageDone,
    Start,
    StepRecord,
    Suspected,
    TensorHeader,
    Trouble,
    Vote,
    Welcome,
)
from skein.protocol.ops import (
    ApplyOp,
    BackwardOp,
    ClearOp,
    ForwardOp,
    Joined,
    JoinOp,
    Loss,
    LossOp,
    Op,
    OpFailed,
    OpOutcome,
    PackOp,
    SaveOp,
    SumOp,
)
from skein.protocol.pipeline import Pipeline
from skein.protocol.reduction import Exchange
from skein.protocol.story import Story
from skein.protocol.worker_io import (
    Build,
    BuildFailed,
    Built,
    CancelBuild,
    CheckpointSaved,
    DirectiveArrived,
    DropTensor,
    Exit,
    ForgetJob,
    Identity,
    LinksProbed,
    MeasureLinks,
    OpEnded,
    RunOp,
    SaveFailed,
    SendFailed,
    SendReport,
    SendTensor,
    StopRequested,
    StreamLost,
    StreamOpened,
    TensorArrived,
    TimePassed,
    WorkerCommand,
    WorkerEvent,
)
from skein.types import (
    Attempt,
    Epoch,
    Generation,
    GroupId,
    JobId,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)


class Worker:
    """One worker's state. `handle` is the only way in, what it returns the only way out."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.epoch = Epoch(0)
        self.generation = Generation(0)
        self.job: JobId | None = None
        self.version = Step(0)
        self.progress = 0
        self.chunks: tuple[StageSpec, ...] = ()
        self._given_up: tuple[StageSpec, ...] = ()
        self._members: dict[WorkerId, Member] = {}
        self._assign: Assign | None = None
        self._pipeline: Pipeline | None = None
        self._exchanges: dict[tuple[GroupId, Attempt], Exchange] = {}
        self._groups: dict[GroupId, Group] = {}
        self._adopting: NewGeneration | None = None
        self._to_build: Assign | None = None
        self._building: Assign | None = None
        self._is_build_cancelled = False
        self._is_build_void = False
        self._commit: Commit | None = None
        self._to_begin: Start | Evaluate | None = None
        self._num_evaluation = 0
        self._reported: set[tuple[Phase, StageIndex]] = set()
        self._queue: deque[Op] = deque()
        self._running: Op | None = None
        self._is_running_void = False
        self._parked: list[Envelope] = []
        self._is_connected = False
        self._is_stopping = False
        self._beat_s = 1.0
        self._next_beat: float | None = None
        self._story = Story()
        self._out: list[WorkerCommand] = []

    # --- the way in ---

    def handle(self, event: WorkerEvent, *, now: float) -> list[WorkerCommand]:
        """Take one event at time `now` (seconds, any origin); gives what to do about it, in order."""
        match event:
            case TensorArrived():
                self._tensor_arrived(event.envelope)
            case OpEnded():
                self._op_ended(event.op, event.outcome, now=now)
            case DirectiveArrived():
                self._directive(event.directive, now=now)
            case TimePassed():
                self._beat(now=now)
            case SendFailed():
                if event.generation == self.generation:
                    self._tell(Suspected(generation=self.generation, peer=event.to, reason=event.reason))
            case Built():
                self._built(event)
            case BuildFailed():
                self._build_failed(event)
            case CheckpointSaved():
                self._saved(event)
            case SaveFailed():
                # What an older generation asked for is asked for again where it still matters.
                if event.generation == self.generation:
                    self._trouble(f"checkpoint {event.version} of stage {event.stage}: {event.reason}")
            case LinksProbed():
                self._tell(LinksMeasured(links=event.links))
            case StreamOpened():
                self._stream_opened(now=now)
            case StreamLost():
                self._is_connected = False
                self._next_beat = None
                self._story.tell("stream", f"lost: {event.reason}", now=now)
                if self._is_stopping:
                    self._out.append(Exit(is_clean=True, reason="asked to stop, and no coordinator to tell"))
            case StopRequested():
                self._stop(event.reason)
            case _:
                assert_never(event)
        self._dispatch()
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """When `TimePassed` is wanted next; None: no time matters."""
        return self._next_beat

    def story(self, about: str) -> tuple[str, ...]:
        """The last lines about "stream", "generation" or "op"."""
        return self._story.of(about)

    @property
    def members(self) -> frozenset[WorkerId]:
        """The workers of the present generation."""
        return frozenset(self._members)

    @property
    def pipeline(self) -> Pipeline | None:
        """The compute state of the present generation; None while there is none."""
        return self._pipeline

    # --- the control stream ---

    def _stream_opened(self, *, now: float) -> None:
        self._is_connected = True
        self._next_beat = now + self._beat_s
        identity = self.identity
        self._tell(
            Hello(
                worker=identity.worker,
                incarnation=identity.incarnation,
                protocol_version=PROTOCOL_VERSION,
                site=identity.site,
                address=identity.address,
                profile=identity.profile,
                epoch=self.epoch,
            )
        )
        if self._is_stopping:
            self._tell(Leaving(reason="asked to stop"))

    def _beat(self, *, now: float) -> None:
        if self._next_beat is not None and now >= self._next_beat:
            self._tell(Beat(progress=self.progress, statistics=()))
            self._next_beat = now + self._beat_s

    def _stop(self, reason: str) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._is_connected:
            self._tell(Leaving(reason=reason))
        else:
            self._out.append(Exit(is_clean=True, reason=reason))

    def _tell(self, report: Report) -> None:
        if self._is_connected:
            self._out.append(SendReport(report=report))

    # --- directives ---

    def _directive(self, directive: Directive, *, now: float) -> None:
        match directive:
            case Welcome():
                if directive.epoch >= self.epoch:
                    self.epoch = directive.epoch
                    self._beat_s = directive.beat_s
                    self._next_beat = now + directive.beat_s
            case Refused():
                self._out.append(Exit(is_clean=False, reason=directive.reason))
            case Probe():
                self._out.append(MeasureLinks(peers=directive.peers))
            case Dismiss():
                self._dismiss(directive)
            case NewGeneration():
                self._new_generation(directive, now=now)
            case Assign() | Start() | Evaluate() | Prepare() | Commit() | Save():
                if (directive.epoch, directive.generation) == (self.epoch, self.generation):
                    self._of_this_generation(directive)
            case _:
                assert_never(directive)

    def _of_this_generation(self, directive: Assign | Start | Evaluate | Prepare | Commit | Save) -> None:
        match directive:
            case Assign():
                self._to_build = directive
            case Start() | Evaluate():
                self._to_begin = directive
                self._begin_when_due()
            case Save():
                self._save(directive)
            case Prepare():
                self._prepare(directive)
            case Commit():
                self._commit_step(directive)
            case _:
                assert_never(directive)

    def _new_generation(self, directive: NewGeneration, *, now: float) -> None:
        if (directive.epoch, directive.generation) <= (self.epoch, self.generation):
            return
        if self.job not in (None, directive.job):
            self._forget()
        self.epoch = directive.epoch
        self.generation = directive.generation
        self.job = directive.job
        self._members = {member.worker: member for member in directive.members}
        self._adopting = directive
        self._to_build = None
        self._pipeline = None
        self._cancel_build()
        self._commit = None
        self._to_begin = None
        self._queue.clear()
        self._story.tell("generation", f"adopted {directive.generation}", now=now)

    def _dismiss(self, directive: Dismiss) -> None:
        if directive.epoch < self.epoch:
            return
        if directive.job is None or directive.job == self.job:
            self._forget()
        if directive.may_exit:
            self._out.append(Exit(is_clean=True, reason="drained"))

    def _forget(self) -> None:
        self.job = None
        self.version = Step(0)
        self.chunks = self._given_up = ()
        self._assign = self._to_build = self._adopting = self._commit = self._pipeline = None
        self._to_begin = None
        self._is_running_void = self._running is not None
        self._is_build_void = self._building is not None
        self._cancel_build()
        self._exchanges.clear()
        self._groups.clear()
        self._queue.clear()
        self._parked.clear()
        self._out.append(ForgetJob())

    # --- adopting a generation, building chunks ---

    def _adopt(self, directive: NewGeneration) -> None:
        """Finish the recorded step if its results are here, clear the rest; the Ack follows the ClearOp."""
        self._adopting = None
        record = directive.last_commit
        if record is not None and self.chunks and record.step == self.version and self._has_results(record):
            self._queue.append(ApplyOp(record=record))
        self._queue.append(ClearOp())

    def _acknowledge(self) -> None:
        self._exchanges.clear()
        held = (*self.chunks, *self._given_up)
        chunks = tuple(ChunkVersion(stage=stage, version=self.version) for stage in held)
        self._tell(Ack(generation=self.generation, chunks=chunks, ledgers=()))

    def _start_build(self, assign: Assign) -> None:
        self._to_build = None
        self._building = self._assign = assign
        self._out.append(Build(assign=assign, members=tuple(self._members.values())))

    def _cancel_build(self) -> None:
        if self._building is not None and not self._is_build_cancelled:
            self._is_build_cancelled = True
            self._out.append(CancelBuild())

    def _end_build(self) -> Assign | None:
        """A build is over; gives what was built, unless it was forgotten meanwhile."""
        assign = None if self._is_build_void else self._building
        self._building = None
        self._is_build_cancelled = self._is_build_void = False
        return assign

    def _built(self, event: Built) -> None:
        assign = self._end_build()
        if assign is None:
            return
        # What is held now is a fact, whatever generation asked for it.
        held = (*self.chunks, *self._given_up) if assign.version == self.version else ()
        self.version = assign.version
        self.chunks = tuple(chunk.stage for chunk in assign.chunks)
        self._given_up = tuple(stage for stage in held if stage not in self.chunks)
        if event.generation != self.generation:
            return
        me = self.identity.worker
        self._groups = {g.group: g for g in assign.groups if any(m.worker == me for m in g.members)}
        self._pipeline = Pipeline(me, assign.chunks, self.version)
        self._reported.clear()
        self._tell(
            ChunksReady(
                generation=event.generation,
                num_train_samples=event.num_train_samples,
                num_validation_samples=event.num_validation_samples,
                data_fingerprint=event.data_fingerprint,
            )
        )
        self._unpark()

    def _build_failed(self, event: BuildFailed) -> None:
        if self._end_build() is None or event.generation != self.generation:
            return
        if event.peer is not None:
            self._tell(Suspected(generation=event.generation, peer=event.peer, reason=event.reason))
        else:
            self._tell(Trouble(generation=event.generation, is_fatal=event.is_fatal, reason=event.reason))

    # --- tensors ---

    def _tensor_arrived(self, envelope: Envelope) -> None:
        place = (envelope.epoch, envelope.generation)
        here = (self.epoch, self.generation)
        is_early = place > here or (
            place == here and (self._pipeline is None or envelope.header.step > self.version)
        )
        if is_early:
            self._parked.append(envelope)
        elif (
            place < here
            or envelope.job != self.job
            or envelope.header.step < self.version
            or not self._take(envelope.header)
        ):
            self._out.append(DropTensor(envelope=envelope))

    def _take(self, header: TensorHeader) -> bool:
        """Use a tensor of this generation and step; False if it is not for this worker."""
        assert self._pipeline is not None
        if isinstance(header, ShardTensor):
            if header.group not in self._groups:
                return False
            self._queue.extend(self._exchange(header.group, header.attempt).arrive(header))
            return True
        if not self._pipeline.may_hold(header):
            return False
        self._deliver(self._pipeline.arrive(header))
        return True

    def _unpark(self) -> None:
        parked, self._parked = self._parked, []
        for envelope in parked:
            self._tensor_arrived(envelope)

    def _deliver(self, header: HopTensor | None) -> None:
        """Send a boundary tensor where its path says, or take it if that is here."""
        while header is not None:
            target = header.path.hops[header.hop].worker
            if target != self.identity.worker:
                self._send(target, header)
                return
            assert self._pipeline is not None
            header = self._pipeline.arrive(header)

    def _send(self, to: WorkerId, header: TensorHeader) -> None:
        assert self.job is not None
        envelope = Envelope(
            job=self.job,
            epoch=self.epoch,
            generation=self.generation,
            sender=self.identity.worker,
            incarnation=self.identity.incarnation,
            header=header,
        )
        member = self._members.get(to)
        if member is None:
            self._tell(
                Suspected(generation=self.generation, peer=to, reason="not a member of the generation")
            )
            return
        self._out.append(SendTensor(to=member, envelope=envelope))

    # --- a step ---

    def _begin_when_due(self) -> None:
        """Begin what was asked for as soon as the parameters are at its version."""
        asked = self._to_begin
        if asked is None or self._pipeline is None or self._assign is None:
            return
        if isinstance(asked, Start) and asked.step == self.version:
            self._to_begin = None
            self._given_up = ()
            self._pipeline.begin(Phase.TRAIN, self._assign.origins)
        elif isinstance(asked, Evaluate) and asked.version == self.version:
            self._to_begin = None
            self._given_up = ()
            self._num_evaluation = asked.num_microbatches
            self._pipeline.begin(Phase.EVALUATE, self._evaluation_origins(self._assign))
            self._report_evaluated()

    def _save(self, directive: Save) -> None:
        """Queue behind the update that makes the version, if that is still to come."""
        coming = self.version if self._commit is None else self._commit.record.step + 1
        if directive.version == coming:
            for stage in directive.stages:
                self._queue.append(
                    SaveOp(
                        generation=directive.generation,
                        version=directive.version,
                        stage=stage,
                        url=directive.url,
                    )
                )

    def _saved(self, event: CheckpointSaved) -> None:
        self._tell(
            CheckpointWritten(
                generation=event.generation, version=event.version, stage=event.stage, files=event.files
            )
        )

    def _evaluation_origins(self, assign: Assign) -> tuple[Origin, ...]:
        """Evaluation microbatch e takes the path of e modulo the number of paths."""
        return tuple(
            Origin(microbatch=MicrobatchId(e), path=origin.path)
            for origin in assign.origins
            for e in range(origin.microbatch, self._num_evaluation, assign.num_paths)
        )

    def _exchange(self, group: GroupId, attempt: Attempt) -> Exchange:
        key = (group, attempt)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.identity.worker, self.version, attempt)
        return self._exchanges[key]

    def _prepare(self, directive: Prepare) -> None:
        group = self._groups.get(directive.group)
        if group is None or self._pipeline is None or directive.step != self.version:
            return
        for part in directive.parts:
            if part.worker == self.identity.worker and self._pipeline.ledger(part.stage) != part:
                self._trouble(
                    f"asked to reduce {part}, but the ledger is {self._pipeline.ledger(part.stage)}"
                )
                return
        self._queue.extend(self._exchange(directive.group, directive.attempt).prepare(group))

    def _has_results(self, record: StepRecord) -> bool:
        if record.decision is Decision.SKIP:
            return True
        attempts = {result.group: result.attempt for result in record.results}
        return all(
            group in attempts
            and (group, attempts[group]) in self._exchanges
            and self._exchanges[group, attempts[group]].is_joined
            for group in self._groups
        )

    def _commit_step(self, directive: Commit) -> None:
        if directive.record.step != self.version or self._pipeline is None or self._commit is not None:
            return
        if not self._has_results(directive.record):
            self._trouble(f"step {directive.record.step} is committed, but a result it names is not here")
            return
        self._commit = directive
        self._queue.append(ApplyOp(record=directive.record))

    def _applied(self, op: ApplyOp) -> None:
        self.version = Step(op.record.step + 1)
        self._exchanges.clear()
        commit, self._commit = self._commit, None
        if self._pipeline is None or commit is None:
            return
        self._pipeline.advance(self.version)
        self._reported.clear()
        self._num_evaluation = 0
        if commit.goes_on and self._assign is not None:
            self._pipeline.begin(Phase.TRAIN, self._assign.origins)
        self._begin_when_due()
        self._unpark()

    # --- ops ---

    def _dispatch(self) -> None:
        if self._running is not None or self._building is not None:
            return
        if self._adopting is not None:
            self._adopt(self._adopting)
        if not self._queue and self._to_build is not None:
            self._start_build(self._to_build)
            return
        op: Op | None = None
        if self._queue:
            op = self._queue.popleft()
        elif self._pipeline is not None:
            op = self._pipeline.next_op()
        if op is not None:
            self._running = op
            self._out.append(RunOp(generation=self.generation, op=op))

    def _op_ended(self, op: Op, outcome: OpOutcome, *, now: float) -> None:
        assert op == self._running, f"{op} ended, but {self._running} was running"
        self._running = None
        self.progress += 1
        if self._is_running_void:
            self._is_running_void = False
            return
        if isinstance(outcome, OpFailed):
            self._story.tell("op", f"{type(op).__name__} failed: {outcome.reason}", now=now)
            self._op_failed(op, outcome)
            return
        match op:
            case ApplyOp():
                self._applied(op)
            case ClearOp():
                if self._adopting is None:
                    self._acknowledge()
            case SaveOp():
                pass
            case ForwardOp() | LossOp() | BackwardOp():
                self._compute_ended(op, outcome)
            case PackOp() | SumOp() | JoinOp():
                self._reduction_ended(op, outcome)
            case _:
                assert_never(op)

    def _op_failed(self, op: Op, outcome: OpFailed) -> None:
        """The chunk's sums are spoilt, or its parameters: do nothing more until a new generation."""
        if isinstance(op, ApplyOp):
            self._out.append(Exit(is_clean=False, reason=f"an update failed halfway: {outcome.reason}"))
            return
        self._pipeline = None
        self._queue.clear()
        self._tell(Trouble(generation=self.generation, is_fatal=outcome.is_fatal, reason=outcome.reason))

    def _trouble(self, reason: str) -> None:
        self._tell(Trouble(generation=self.generation, is_fatal=False, reason=reason))

    def _compute_ended(self, op: ForwardOp | LossOp | BackwardOp, outcome: OpOutcome) -> None:
        if self._pipeline is None or op.step != self.version:
            return
        self._deliver(self._pipeline.end(op, outcome if isinstance(outcome, Loss) else None))
        if isinstance(op, LossOp) and op.phase is Phase.EVALUATE:
            self._report_evaluated()
        elif not isinstance(op, ForwardOp):
            self._report_done(op.chunk.stage)

    def _report_done(self, stage: StageIndex) -> None:
        assert self._pipeline is not None
        if (Phase.TRAIN, stage) in self._reported or not self._pipeline.is_done(stage):
            return
        self._reported.add((Phase.TRAIN, stage))
        loss = self._pipeline.train_loss(stage)
        self._tell(
            StageDone(
                generation=self.generation,
                step=self.version,
                ledger=self._pipeline.ledger(stage),
                loss_sum=loss.loss_sum,
                num_tokens=loss.num_tokens,
            )
        )

    def _report_evaluated(self) -> None:
        """Report each head here whose evaluation microbatches all have their loss."""
        if self._pipeline is None or self._assign is None or not self._num_evaluation:
            return
        for stage in (spec.index for spec in self.chunks):
            microbatches, loss = self._pipeline.evaluation_loss(stage)
            expected = self._pipeline.expected_evaluations(
                stage, self._num_evaluation, self._assign.num_paths
            )
            if not microbatches or len(microbatches) < expected or (Phase.EVALUATE, stage) in self._reported:
                continue
            self._reported.add((Phase.EVALUATE, stage))
            self._tell(
                EvaluationDone(
                    generation=self.generation,
                    version=self.version,
                    microbatches=microbatches,
                    loss_sum=loss.loss_sum,
                    num_tokens=loss.num_tokens,
                )
            )

    def _reduction_ended(self, op: PackOp | SumOp | JoinOp, outcome: OpOutcome) -> None:
        exchange = self._exchanges.get((op.group.group, op.attempt))
        if exchange is None or self._pipeline is None:
            return
        if isinstance(op, JoinOp):
            assert isinstance(outcome, Joined)
            exchange.is_joined = True
            self._tell(
                Vote(
                    generation=self.generation,
                    step=op.step,
                    group=op.group.group,
                    attempt=op.attempt,
                    digest=outcome.digest,
                    squared_norm=outcome.squared_norm,
                    is_finite=outcome.is_finite,
                )
            )
            return
        parcels = exchange.packed() if isinstance(op, PackOp) else exchange.summed(op.shard)
        for to, header in parcels:
            if to == self.identity.worker:
                self._queue.extend(exchange.arrive(header))
            else:
                self._send(to, header)
