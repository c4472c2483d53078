"""A worker's part in steps and evaluations: what it holds, which op is next, and what it makes of each that ends.

Rules of this file
- Nothing computes while `pipeline` is None: between adopting a generation and having what it assigns. An op that was
  running then is booked when it ends: a generation takes permissions away, not work.
- A tensor of an older generation or step is dropped; one of a newer waits in `_parked`. Neither is a failure.
- Parameters change in ApplyOp alone, from results of the very attempts that the record names.
- A chunk that the plan takes away stays until a step begins: till then a peer may need it, or the next generation.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from skein.plan.ops import Direction
from skein.protocol.messages.directives import (
    Assign,
    ChunkVersion,
    Commit,
    Evaluate,
    Prepare,
    Resumption,
    Save,
    Start,
    StepRecord,
    TakeSketch,
)
from skein.protocol.messages.progress import ChunkProgress
from skein.protocol.messages.reports import Balance, StageDone
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase, ShardTensor, TensorHeader
from skein.protocol.worker.exchanges import Exchanges
from skein.protocol.worker.ops import (
    ApplyOp,
    ComputeOp,
    HopKey,
    Joined,
    JoinOp,
    Loss,
    Op,
    OpOutcome,
    ReductionOp,
    SaveOp,
    SketchOp,
    hop_key,
)
from skein.protocol.worker.pipeline import NOTHING, Carried, Pipeline
from skein.protocol.worker.reduction import Exchange, Moves, handed_out
from skein.protocol.worker.scoring.evaluations import Evaluations
from skein.protocol.worker.standing import Standing
from skein.protocol.worker.worker_io import DropTensor
from skein.types import MicrobatchId, StageIndex, StageSpec, Step

StepDirective = Start | Evaluate | Prepare | TakeSketch | Commit | Save


class Steps:
    """Chunks that a worker holds, and its computing. The Worker machine says when; commands go to `standing`."""

    def __init__(self, standing: Standing) -> None:
        self.version = Step(0)
        self.chunks: tuple[StageSpec, ...] = ()
        self.pipeline: Pipeline | None = None
        self._standing = standing
        self._me = standing.identity.worker
        self._given_up: tuple[StageSpec, ...] = ()
        self._assign: Assign | None = None
        self._exchanges = Exchanges(self._me)
        self._ahead: deque[Commit | Save] = deque()
        """Decisions on steps after the one that is to be applied now, in order, and what is to be saved after them."""
        self._commit: Commit | None = None
        self._told: list[StepRecord] = []
        """Decisions that were heard under the plan that was built last, and not applied before it ended."""
        self._to_begin: Start | Evaluate | None = None
        self._evaluations = Evaluations(standing)
        self._reported: set[StageIndex] = set()
        self._queue: deque[Op] = deque()
        self._fenced: Pipeline | None = None
        """Pipeline that an older generation computed with, until all that it did is booked."""
        self._carried: dict[StageIndex, Carried] = {}
        self._logged: dict[HopKey, StageIndex] = {}
        """Boundary tensors of this step that the boundary log has, and which stage made them."""
        self._resumption: Resumption | None = None
        self._parked: list[Envelope] = []

    # --- generations ---

    def stop(self) -> None:
        """A new generation: nothing more is computed under the older one. What is held and done stays."""
        self._fenced = self.pipeline or self._fenced
        self.pipeline = None
        heard = () if self._commit is None else (self._commit,)
        self._told += [x.record for x in (*heard, *self._ahead) if isinstance(x, Commit)]
        self._resumption = None
        self._commit = None
        self._ahead.clear()
        self._to_begin = None
        self._evaluations.stop()
        self._queue.clear()

    @property
    def kept(self) -> tuple[ChunkVersion, ...]:
        """Parameters of older versions that are kept of what is held."""
        held = (*self.chunks, *self._given_up)
        return tuple(x for x in self._evaluations.kept if x.stage in held and x.version < self.version)

    def forget(self) -> None:
        """The job is over: nothing is held."""
        self.stop()
        self._evaluations.forget()
        self.version = Step(0)
        self.chunks = self._given_up = ()
        self._assign = None
        self._told.clear()
        self._exchanges.settle((), ())
        self._exchanges.clear()
        self._parked.clear()
        self._clear_step()

    def _clear_step(self) -> None:
        self._fenced = None
        self._carried.clear()
        self._logged.clear()

    def adopt(self, record: StepRecord | None) -> None:
        """Finish the recorded step if its results are here, or if the plan that is built made it without this worker.

        Whoever took no part in that plan, and was left out, holds what is of no use now.
        """
        if record is None or not self.chunks:
            return
        is_ours = self._is_of_plan(record)
        version = self.version
        for x in (*self._told, record) if is_ours else (record,):
            is_without_us = is_ours and self._exchanges.is_left_out(x)
            is_here = x.step == self.version and self._exchanges.has_results(x)
            if x.step == version and (is_without_us or is_here):
                self._queue.append(ApplyOp(record=x))
                version = Step(version + 1)

    def _is_of_plan(self, record: StepRecord) -> bool:
        """Whether a step was decided under the generation whose plan was built here last."""
        place = None if self._assign is None else (self._assign.epoch, self._assign.generation)
        return all((x.attempt.epoch, x.attempt.generation) == place for x in record.results)

    def fenced(self) -> tuple[tuple[ChunkVersion, ...], tuple[ChunkProgress, ...]]:
        """Close older generations, of which nothing runs any more; gives what is held and what was done of the step."""
        self._exchanges.clear()
        if self._fenced is not None:
            self._carried = self._fenced.carried()
            self._fenced = None
        held = (*self.chunks, *self._given_up)
        chunks = tuple(ChunkVersion(stage=stage, version=self.version) for stage in held)
        return chunks, tuple(self._progress(stage) for stage in sorted(self._carried))

    def _progress(self, stage: StageIndex) -> ChunkProgress:
        carried = self._carried[stage]

        def logged(direction: Direction) -> tuple[MicrobatchId, ...]:
            made = (key for key, made_by in self._logged.items() if made_by == stage)
            return tuple(sorted(key.microbatch for key in made if key.direction is direction))

        return ChunkProgress(
            stage=stage,
            ledger=carried.ledger,
            forwards=(),
            outputs=logged(Direction.FORWARD),
            gradients=logged(Direction.BACKWARD),
        ).holding(carried.held)

    def hold(self, assign: Assign) -> None:
        """Hold what was built, whatever generation asked for it. Of the step in progress, what `assign` says stays."""
        self._keep(assign.resumption)
        self._evaluations.hold(assign)
        held = (*self.chunks, *self._given_up) if assign.version == self.version else ()
        self.version = assign.version
        self._told.clear()
        self.chunks = tuple(chunk.stage for chunk in assign.chunks)
        self._given_up = tuple(stage for stage in held if stage not in self.chunks)

    def _keep(self, resumption: Resumption | None) -> None:
        if resumption is None or resumption.step != self.version:
            self._clear_step()
            return
        kept: dict[StageIndex, Carried] = {}
        for chunk in resumption.chunks:
            before = self._carried.get(chunk.stage, NOTHING)
            is_here = chunk.ledger in ((), before.ledger) and chunk.held <= before.held.keys()
            assert is_here, f"told to keep {chunk}, here is {before}"
            held = {key: place for key, place in before.held.items() if key in chunk.held}
            kept[chunk.stage] = replace(before, ledger=chunk.ledger, held=held)
        self._carried = kept

    def settle(self, assign: Assign) -> None:
        """The generation's own chunks are here: ready to begin."""
        self._assign = assign
        self._exchanges.settle(assign.groups, self.chunks)
        kept = {x.stage.index: x.version for x in self.kept if x.stage in self.chunks}
        self.pipeline = Pipeline(self._me, assign.chunks, assign.schedule, self.version, kept=kept)
        self._resumption = assign.resumption
        if assign.resumption is not None:
            self.pipeline.resume(self._carried, assign.resumption.schedule)
        self._reported.clear()

    # --- directives ---

    def take(self, directive: StepDirective) -> None:
        """A directive of this generation."""
        match directive:
            case Evaluate() if directive.phase.outlasts_steps:
                self._evaluations.want(directive)
                self._begin_when_due()
            case Start() | Evaluate():
                self._to_begin = directive
                self._begin_when_due()
            case Save():
                self._save(directive)
            case Prepare():
                self._prepare(directive)
            case TakeSketch():
                self._take_sketch(directive)
            case Commit():
                self._commit_step(directive)
            case _:
                assert_never(directive)

    def _begin_when_due(self) -> None:
        """Begin what was asked for as soon as the parameters are at its version."""
        if self.pipeline is None or self._assign is None:
            return
        if self._evaluations.is_to_look(self.version):
            self._given_up = ()
            self._evaluations.look(self.pipeline, self._assign, self.version)
        asked = self._to_begin
        if isinstance(asked, Start) and asked.step == self.version:
            self._to_begin = None
            self._given_up = ()
            self._begin_training(self.pipeline, self._assign)
        elif isinstance(asked, Evaluate) and asked.version == self.version:
            self._to_begin = None
            self._given_up = ()
            self._evaluations.begin(asked, self.pipeline, self._assign)

    def selected(self) -> None:
        """Rows are chosen: no selection goes on any longer."""
        self._evaluations.selected(self.pipeline)

    def _begin_training(self, pipeline: Pipeline, assign: Assign) -> None:
        resumption, self._resumption = self._resumption, None
        if resumption is None or resumption.step != self.version:
            pipeline.begin(Phase.TRAIN, assign.origins)
        else:
            pipeline.begin(Phase.TRAIN, resumption.origins)
            self._deliver(resumption.repeats)
        # Who goes on with an older step may have told of its end when nobody waited for that.
        self._reported.clear()
        # A chunk that no path visits is complete as it is.
        for chunk in assign.chunks:
            self._report_done(chunk.stage.index)

    def _save(self, directive: Save) -> None:
        """Queue behind the update that makes the version, if that is still to come."""
        coming = self.version if self._commit is None else self._commit.record.step + 1
        if directive.version > coming and self.pipeline is not None:
            self._ahead.append(directive)
        elif directive.version == coming:
            for stage, walker in zip(directive.stages, directive.walkers, strict=True):
                self._queue.append(
                    SaveOp(
                        generation=directive.generation,
                        version=directive.version,
                        stage=stage,
                        url=directive.url,
                        walker=walker,
                    )
                )

    def _prepare(self, directive: Prepare) -> None:
        if self.pipeline is None or not self._exchanges.is_due(directive, self.version):
            return
        for part in directive.parts:
            if part.worker == self._me and self.pipeline.ledger(part.stage) != part:
                ledger = self.pipeline.ledger(part.stage)
                self._standing.trouble(f"asked to reduce {part}, but the ledger is {ledger}")
                return
        self._advance(*self._exchanges.prepare(directive))
        if directive.exchange is not None and directive.exchange.taken_at is not None:
            self.unpark()

    def _take_sketch(self, directive: TakeSketch) -> None:
        """Sketch a result that was voted on, before it may be applied or given up."""
        if directive.step == self.version and self._exchanges.is_joined(directive.group, directive.attempt):
            self._queue.append(SketchOp(asked=directive))

    def _commit_step(self, directive: Commit) -> None:
        record = directive.record
        if record.step > self.version and self.pipeline is not None:
            # Others have gone on without this worker while an op ran.
            self._ahead.append(directive)
            return
        if record.step != self.version or self.pipeline is None or self._commit is not None:
            return
        is_left_out = self._exchanges.is_left_out(record)
        if not is_left_out and not self._exchanges.has_results(record):
            self._standing.trouble(
                f"step {record.step} is committed, but a result it names is not here, or another"
            )
            return
        self._commit = directive
        self._queue.append(ApplyOp(record=record, keeps_step=is_left_out and directive.keeps_late))

    # --- tensors ---

    def tensor_arrived(self, envelope: Envelope) -> None:
        """Use a peer's tensor, keep it for later, or drop it."""
        standing, step = self._standing, envelope.header.step
        place = (envelope.epoch, envelope.generation)
        is_now = place == standing.place
        is_beside = envelope.header.outlasts_steps and step < self.version
        is_on_its_way = is_beside or (step != self.version and self._exchanges.is_on_its_way(envelope.header))
        is_early = self.pipeline is None or (step > self.version and not is_on_its_way)
        if place > standing.place or (is_now and is_early):
            self._parked.append(envelope)
            return
        is_wanted = is_now and envelope.job == standing.job and (step == self.version or is_on_its_way)
        if not is_wanted or not self._use(envelope.header):
            standing.commands.append(DropTensor(envelope=envelope))

    def unpark(self) -> None:
        """Look again at what came too early."""
        parked, self._parked = self._parked, []
        for envelope in parked:
            self.tensor_arrived(envelope)

    def _use(self, header: TensorHeader) -> bool:
        """Use a tensor of this generation and step; False if it is not for this worker."""
        assert self.pipeline is not None
        if isinstance(header, ShardTensor):
            if (header.attempt.epoch, header.attempt.generation) != self._standing.place:
                return False
            found = self._exchanges.arrive(header)
            if found is not None:
                self._advance(*found)
            return found is not None
        if not self.pipeline.may_hold(header):
            return False
        self._deliver(self.pipeline.arrive(header))
        return True

    def _deliver(self, headers: Iterable[HopTensor]) -> None:
        """Send boundary tensors where their paths say, or take those that are for this worker."""
        waiting = deque(headers)
        while waiting:
            header = waiting.popleft()
            target = header.path.hops[header.hop].worker
            if target == self._me:
                assert self.pipeline is not None
                waiting.extend(self.pipeline.arrive(header))
            else:
                self._standing.send(target, header)

    # --- ops ---

    @property
    def has_queue(self) -> bool:
        """Whether ops wait that come before any computing."""
        return bool(self._queue)

    def next_op(self) -> Op | None:
        """Next op to run: first what was asked for, then what the pipeline has; None if nothing is ready."""
        if self._queue:
            return self._queue.popleft()
        return None if self.pipeline is None else self.pipeline.next_op()

    def applied(self, op: ApplyOp) -> None:
        """The update has ended: the chunks are at the next version."""
        self.version = Step(op.record.step + 1)
        due = self._exchanges.applied(self.version)
        commit, self._commit = self._commit, None
        keeps_step = op.keeps_step and self.pipeline is not None and commit is not None
        if not keeps_step:
            self._clear_step()
        if self.pipeline is None or commit is None:
            return
        self._reported.clear()
        if keeps_step:
            self._keep_on(self.pipeline)
        else:
            self.pipeline.advance(self.version)
            self._evaluations.committed()
        for prepare in due:
            self._prepare(prepare)
        if commit.goes_on and not keeps_step and self._assign is not None:
            self._begin_training(self.pipeline, self._assign)
        self._begin_when_due()
        self.unpark()
        self._take_ahead()

    def _take_ahead(self) -> None:
        """The next decision that came too early, and what was to be saved after it."""
        while self._ahead and (self._commit is None or isinstance(self._ahead[0], Save)):
            self.take(self._ahead.popleft())

    def _keep_on(self, pipeline: Pipeline) -> None:
        """Others have ended a step; what this worker has of its own counts for the one that begins."""
        pipeline.keep_on(self.version)
        for stage in self.chunks:
            self._report_done(stage.index)

    def computed(self, op: ComputeOp, outcome: OpOutcome) -> None:
        """A compute op has ended: pass on what it made, and report what it completed."""
        pipeline = self.pipeline or self._fenced
        if pipeline is None or not self._is_wanted(op, pipeline):
            return
        loss = outcome if isinstance(outcome, Loss) else None
        told = outcome if loss is None else loss.balance
        made = pipeline.end(op, loss, told if isinstance(told, Balance) else None)
        if op.phase.trains:
            self._logged.update((hop_key(header), op.chunk.stage) for header in made)
        if self.pipeline is None:
            return
        self._deliver(made)
        if op.accumulates:
            self._report_done(op.chunk.stage)
        elif op.kind.row.scores and not op.phase.trains:
            assert self._assign is not None
            self._evaluations.report(op.phase, self.pipeline, self._assign)

    def _is_wanted(self, op: ComputeOp, pipeline: Pipeline) -> bool:
        return pipeline.is_selecting(op.step) if op.phase.outlasts_steps else op.step == self.version

    def log_shortened(self, keys: Iterable[HopKey]) -> None:
        """The boundary log has forgotten these."""
        for key in keys:
            self._logged.pop(key, None)

    def spoilt(self, op: ComputeOp) -> None:
        """A compute op failed halfway: nobody knows what its chunk's sums are now, so they count for nothing."""
        pipeline = self.pipeline or self._fenced
        if pipeline is not None:
            pipeline.spoil(op)

    def reduced(self, op: ReductionOp, outcome: OpOutcome) -> None:
        """A part of a reduction has ended: pass on shards, or vote."""
        exchange = self._exchanges.of_op(op)
        if exchange is None or self.pipeline is None:
            return
        if isinstance(op, JoinOp):
            assert isinstance(outcome, Joined)
            exchange.is_joined, exchange.digest = True, outcome.digest
            self._standing.tell(op.vote(outcome, self._standing.generation))
            return
        self._advance(exchange, Moves(parcels=handed_out(op)))

    def _advance(self, exchange: Exchange, moves: Moves) -> None:
        """Run what an exchange can run now, and hand over its shards: to others, or back to it."""
        self._queue.extend(moves.ops)
        for to, header in moves.parcels:
            if to == self._me:
                self._advance(exchange, exchange.arrive(header))
            else:
                self._standing.send(to, header)

    # --- reports ---

    def _report_done(self, stage: StageIndex) -> None:
        assert self.pipeline is not None
        if stage in self._reported or not self.pipeline.is_done(stage):
            return
        self._reported.add(stage)
        self._standing.tell(
            StageDone(
                generation=self._standing.generation,
                step=self.version,
                ledger=self.pipeline.ledger(stage),
                loss_sum=self.pipeline.train_loss_sum(stage),
                tokens=self.pipeline.train_tokens(stage),
                balance=self.pipeline.balance(stage),
                array=self.pipeline.array(stage),
            )
        )
