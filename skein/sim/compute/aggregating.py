"""The job's aggregation rule over simulated workers: the same code as in the workers, on the numeric model's float64.

Walkers are filed by the history of commits that made them, and by whose they are. What a rule calls REPLICATED must be
bit-equal for all who have the same history; what an exchange must keep is checked as soon as all have its result. Of
many walkers each is of one trajectory in all its stages: a name that its chunks begin with and change together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from skein.config.job import JobSpec
from skein.model.reduced import keepers_of
from skein.numeric.aggregate.member import (
    ExchangeKey,
    StepExchanges,
    measured,
    newcomer,
    replicated,
)
from skein.numeric.aggregate.rule import Offer, Talk, Terms
from skein.numeric.aggregate.rules import rule_of
from skein.numeric.arrays import arrays_of, differing, tensors_bytes, tensors_of
from skein.numeric.walker import StateClass, Tensors, Walker
from skein.plan.agreeing.exchange import Broadcast
from skein.plan.plan import Group
from skein.protocol.messages.directives import (
    Assign,
    ChunkAssignment,
    Decision,
    ExchangeTerms,
    SourceKind,
    StepRecord,
)
from skein.protocol.messages.tensors import ShardTensor
from skein.protocol.worker.ops import ApplyOp, Joined, JoinOp, OpOutcome, PackOp, SumOp
from skein.sim.compute.executor import Payload, StageTimes
from skein.sim.compute.numeric import F64, NumericExecutor, NumericModel
from skein.sim.judging.invariants import INITIAL, Violated, Visits, lineage_after
from skein.types import (
    ChunkRef,
    Local,
    Own,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)


@dataclass(frozen=True, slots=True)
class TensorPayload(Payload):
    """A shard of an exchange."""

    tensors: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldStage:
    """A stage as a worker has it, and the trajectory that it is of."""

    walker: Walker
    trajectory: str

    def copy(self) -> "HeldStage":
        """The same in other memory."""
        return HeldStage(self.walker.copy(), self.trajectory)


class AggregatingModel(NumericModel):
    """The numeric model of a job whose rule is asked at every step."""

    def __init__(self, job: JobSpec) -> None:
        super().__init__(job)
        self.job = job
        self.rule = rule_of(job.aggregation, job.optimizer)
        self.walkers = job.aggregation.walkers
        self.checked: set[ExchangeKey] = set()
        """Exchanges that all members have the result of, and that have lost nothing."""
        self._held: dict[tuple[str, WorkerId], dict[StageSpec, HeldStage]] = {}
        self._disk: dict[str, tuple[StageSpec, HeldStage]] = {}
        self._trajectories: dict[tuple[str, int], str] = {}
        self._offers: dict[tuple[ExchangeKey, str], dict[int, Offer]] = {}

    def executor(self, worker: WorkerId, flops_per_s: float) -> "AggregatingExecutor":
        """Executor that a worker process computes with."""
        return AggregatingExecutor(self, worker, flops_per_s)

    def fresh(self, stage: StageSpec) -> HeldStage:
        """A stage as the seed draws it."""
        params = tensors_of({name: self.drawn(name) for name in self.names(stage)})
        return HeldStage(Walker(params=params, state=self.rule.init(params)), INITIAL)

    def hold(self, lineage: str, worker: WorkerId, stage: StageSpec, held: HeldStage) -> None:
        """A worker has this now, and may go on to change it.

        Raises:
            Violated: another has something else of the same history where all should have the same.
        """
        walker, is_one = held.walker, self.walkers.have_equal_holders
        own = dict(replicated(self.rule, walker, is_one=is_one))
        for (history, other), by_stage in self._held.items():
            if history == lineage and stage in by_stage:
                found = by_stage[stage].walker
                wrong = differing(own, dict(replicated(self.rule, found, is_one=is_one)))
                if wrong or (is_one and found.num_updates != walker.num_updates):
                    raise Violated(f"{worker} and {other} differ in {wrong} of {stage} after {lineage}")
                break
        self._held.setdefault((lineage, worker), {})[stage] = held.copy()

    def moved(self, lineage: str, walker: int, trajectory: str) -> str:
        """The trajectory of a walker that steps on, to the end of a history of commits.

        Raises:
            Violated: another stage of it is of another trajectory.
        """
        if not self.walkers.are_lines:
            return trajectory
        known = self._trajectories.setdefault((lineage, walker), trajectory)
        if known != trajectory:
            raise Violated(f"walker {walker} is of {known} and of {trajectory} before {lineage}")
        return f"{lineage} {walker}"

    def held(self, lineage: str, worker: WorkerId | None, stage: StageSpec) -> HeldStage:
        """A worker's walker; of one walker whoever's, if that one has it in a backup only."""
        by_stage = {} if worker is None else self._held.get((lineage, worker), {})
        if stage in by_stage:
            return by_stage[stage]
        others = (x[stage] for (history, _), x in self._held.items() if history == lineage and stage in x)
        found = next(others, None) if self.walkers.have_equal_holders else None
        if found is None:
            raise Violated(f"{worker} gives {stage} after {lineage}, and has never had it")
        return found

    # --- checkpoints ---

    def write(self, file: str, stage: StageSpec, held: HeldStage) -> None:
        """A file of a checkpoint."""
        self._disk[file] = stage, held.copy()

    def read(self, files: Iterable[str], stage: StageSpec) -> HeldStage:
        """A stage from the files that hold its parameters."""
        for saved, held in (self._disk[file] for file in files):
            if saved == stage:
                return held
        raise Violated(f"{stage} is cut otherwise in the checkpoint")

    # --- what must be kept ---

    def offered(self, key: ExchangeKey, lineage: str, offer: Offer) -> None:
        """A member has the result of an exchange; once all have, nothing may have been lost in it."""
        offers = self._offers.setdefault((key, lineage), {})
        offers[offer.talk.me] = offer
        if len(offers) == offer.talk.num_members:
            what = self.rule.lost([offers[i] for i in sorted(offers)])
            self.checked.add(key)
            if what:
                raise Violated(f"{key}: {what}")


class AggregatingExecutor(NumericExecutor):
    """Computes gradients as the numeric model does, and lets the job's rule do all else."""

    _model: AggregatingModel

    def __init__(self, model: AggregatingModel, worker: WorkerId, flops_per_s: float) -> None:
        super().__init__(model, worker, flops_per_s)
        self._rule = model.rule
        self._walkers: dict[StageIndex, HeldStage] = {}
        self._keepers: dict[StageIndex, dict[str, StageIndex]] = {}
        """For each stage the parameters that another one here keeps, and updates."""
        self._groups_of: dict[StageSpec, tuple[ChunkRef, ...]] = {}
        self._files: dict[StageIndex, tuple[tuple[str, ...], int]] = {}
        self._exchanges = StepExchanges()
        self._offers: dict[ExchangeKey, tuple[Offer, str]] = {}
        """With the history of commits after which each was made."""

    # --- what is held ---

    def build(
        self,
        assign: Assign,
        given: Mapping[StageIndex, str],
        times: Mapping[StageIndex, StageTimes],
        visits: Visits,
    ) -> None:
        """Build as the numeric model does, and have what several stages share once."""
        super().build(assign, given, times, visits)
        self._keepers = keepers_of({stage: self._walkers[stage].walker.params for stage in self.chunks})
        for stage, keepers in self._keepers.items():
            self._share(stage, {name: self._walkers[keeper].walker for name, keeper in keepers.items()})

    def _share(self, stage: StageIndex, keepers: Mapping[str, Walker]) -> None:
        """Have a stage's parameters where they are kept, which must be equal bit by bit.

        Raises:
            Violated: they are not.
        """
        walker = self._walkers[stage].walker
        before = walker.copy()
        walker.share(keepers)
        wrong = differing(*(dict(replicated(self._rule, x, is_one=True)) for x in (before, walker)))
        if wrong or any(keeper.num_updates != walker.num_updates for keeper in keepers.values()):
            raise Violated(f"{self.worker} has two of {wrong or [*keepers]} at stage {stage}")

    def reads(self, stage: StageIndex, files: tuple[str, ...], *, num_walkers: int) -> None:
        """The next build has a stage from these files of a checkpoint of so many walkers."""
        self._files[stage] = files, num_walkers

    def writes(self, stage: StageIndex, file: str) -> None:
        """A stage is being saved."""
        chunk = self.held(stage)
        self._model.write(file, chunk.stage, self._model.held(chunk.lineage, self.worker, chunk.stage))

    def _given(self, assign: Assign, chunk: ChunkAssignment, lineage: str) -> dict[str, F64]:
        stage = chunk.stage
        self._exchanges.clear()
        self._offers.clear()
        members = next(g.members for g in assign.groups if g.group == Own(stage.index))
        before = self._groups_of.get(stage, ())
        held = self._begun(chunk, lineage, len(before), len(members))
        me = ChunkRef(stage=stage.index, worker=self.worker)
        if chunk.source.kind is SourceKind.KEEP and before not in ((), members):
            self._rule.on_membership(held.walker, before=len(before), after=len(members), me=before.index(me))
        self._groups_of[stage] = members
        self._walkers[stage.index] = held
        self._model.hold(lineage, self.worker, stage, held)
        return arrays_of(held.walker.params)

    def _begun(self, chunk: ChunkAssignment, lineage: str, before: int, after: int) -> HeldStage:
        """The walker's part that a chunk begins with; never another's own memory."""
        stage, source, model = chunk.stage, chunk.source, self._model
        if lineage.startswith(INITIAL):
            return model.fresh(stage)
        match source.kind:
            case SourceKind.KEEP:
                return model.held(lineage, self.worker, stage).copy()
            case SourceKind.CHECKPOINT:
                return self._restored(chunk, before, after)
            case _:
                given = model.held(lineage, source.peer, stage)
        walker = newcomer(self._rule, given.walker, before=before, after=after)
        return HeldStage(walker, given.trajectory)

    def _restored(self, chunk: ChunkAssignment, before: int, after: int) -> HeldStage:
        """Stage from the files of its own walker; one that they lack is a newcomer, and of one walker all are."""
        files, num_saved = self._files[chunk.stage.index]
        given = self._model.read(files, chunk.stage)
        if not self._model.walkers.are_lines or chunk.walker >= num_saved:
            walker = newcomer(self._rule, given.walker, before=before, after=after, only_saved=True)
            return HeldStage(walker, given.trajectory)
        walker = given.walker.copy()
        fresh = self._rule.init(walker.params)
        for slot, kind in self._rule.slots.items():
            if not kind.is_saved or kind.kind is StateClass.SHARD:
                walker.state.pop(slot, None)
                walker.state |= {slot: fresh[slot]} if slot in fresh else {}
        if num_saved != after:
            self._rule.on_membership(walker, before=num_saved, after=after, me=chunk.walker)
        return HeldStage(walker, given.trajectory)

    def _update(self, op: ApplyOp) -> OpOutcome:
        outcome = super()._update(op)
        for key in self._exchanges.committed(op.record.step):
            del self._offers[key]
        return outcome

    # --- tensors ---

    def _tensors(self, key: ShardTensor) -> Tensors:
        """Tensors that the running op takes of an exchange."""
        payload = self._operands[key]
        assert isinstance(payload, TensorPayload)
        return dict(payload.tensors)  # type: ignore[arg-type]

    def _give_tensors(self, key: ShardTensor, tensors: Tensors) -> None:
        """A shard of an exchange is what the rule made it."""
        contributions = self._outputs[key].contributions
        self._outputs[key] = TensorPayload(tensors_bytes(tensors), contributions, tensors=tensors)

    # --- exchanges ---

    def _pack_values(self, op: PackOp) -> None:
        if op.exchange is None:
            super()._pack_values(op)
            return
        (stage,) = op.stages
        sent = self._sent((op.group.group, op.attempt), op.step, op.group, op.exchange, stage)
        for _, tensor in op.parcels:
            self._give_tensors(tensor, sent[tensor.shard])

    def _sent(
        self, key: ExchangeKey, step: Step, group: Group, exchange: ExchangeTerms, stage: StageIndex
    ) -> dict[int, Tensors]:
        dues = self._model.job.aggregation.dues_at(exchange.due_step, num_steps=exchange.num_steps)
        index = next(
            i for i, due in enumerate(dues) if (due.reach, due.fragment) == (exchange.reach, group.fragment)
        )
        me = next(i for i, member in enumerate(group.members) if member.worker == self.worker)
        talk = Talk(
            due=dues[index],
            num_members=len(group.members),
            me=me,
            num_shards=group.num_shards,
            weights=group.weights_by_shard,
            leader=group.pattern.leader if isinstance(group.pattern, Broadcast) else None,
        )
        walker, grads = self._walkers[stage].walker, tensors_of(self._sums[stage])
        before, terms = walker.copy(), None
        if exchange.taken_at is not None:
            sent = self._exchanges.take(key, self._rule, walker, talk, order=index, ends_with=step)
        else:
            terms = Terms(step=step, learning_rate=exchange.learning_rate, gradient_scale=exchange.scales[me])
            sent = self._exchanges.pack(key, self._rule, walker, grads, terms, talk, order=index)
        after = self._exchanges.walker(key)
        offer = Offer(before=before, after=after, grads=grads, terms=terms, talk=talk)
        self._offers[key] = offer, self.chunks[stage].lineage
        return sent

    def _sum_values(self, op: SumOp) -> None:
        if op.exchange is None:
            super()._sum_values(op)
            return
        key, parts = (op.group.group, op.attempt), [self._tensors(part) for part in op.parts]
        self._give_tensors(op.total, self._exchanges.combine(key, self._rule, op.shard, parts))

    def _join_values(self, op: JoinOp) -> Joined:
        if op.exchange is None:
            return super()._join_values(op)
        key, stage = (op.group.group, op.attempt), op.group.members[0].stage
        results = {tensor.shard: self._tensors(tensor) for tensor in op.results}
        if key not in self._exchanges:
            sent = self._sent(key, op.step, op.group, op.exchange, stage)
            results = {
                shard: self._exchanges.combine(key, self._rule, shard, [sent[shard]])
                for shard in sorted(sent)
            }
        flat = self._exchanges.join(key, self._rule, results)
        # What goes on beside steps is joined by some before and by others after what replicates changes.
        is_at_rest = op.exchange.taken_at is None
        is_one = self._model.walkers.have_equal_holders
        known = replicated(self._rule, self._walkers[stage].walker, is_one=is_one) if is_at_rest else []
        vote = measured(flat, [tensor for _, tensor in known])
        offer, lineage = self._offers[key]
        self._model.offered(key, lineage, offer.joined(flat))
        return Joined(
            group=op.group.group,
            digest=vote.digest,
            squared_norm=vote.squared_norm,
            is_finite=vote.is_finite,
        )

    def _updated(self, stage: StageIndex, op: ApplyOp) -> dict[str, F64]:
        chunk, held, record = self.chunks[stage], self._walkers[stage], op.record
        me = self._groups_of[chunk.stage].index(ChunkRef(stage=stage, worker=self.worker))
        if record.decision is Decision.APPLY and not op.keeps_step:
            after = self._finished(stage, record, beside=False)
            if after is not None:
                walker = held.walker
                walker.params, walker.state, walker.num_updates = after.params, after.state, after.num_updates
            else:
                self._step_alone(stage, record)
            self._finished(stage, record, beside=True)
        after_lineage = lineage_after(chunk.lineage, record)
        trajectory = self._model.moved(after_lineage, me, held.trajectory)
        self._walkers[stage] = HeldStage(held.walker, trajectory)
        self._model.hold(after_lineage, self.worker, chunk.stage, self._walkers[stage])
        return arrays_of(self._walkers[stage].walker.params)

    def _finished(self, stage: StageIndex, record: StepRecord, *, beside: bool) -> Walker | None:
        """The walker after the record's exchanges that went on beside steps, or after those that did not, if any."""
        results = ((x.group, x.attempt) for x in record.results)
        keys = self._exchanges.named(results, stage, beside=beside)
        if not keys:
            return None
        terms = Terms(step=record.step, learning_rate=record.learning_rate, gradient_scale=record.clip)
        return self._exchanges.finish(keys, self._rule, terms)

    def _step_alone(self, stage: StageIndex, record: StepRecord) -> None:
        """A step on the chunk's own sums, or its stage's; none for one that was too late."""
        alone = Local(ChunkRef(stage=stage, worker=self.worker))
        results = {x.group: x for x in record.results}
        result = results.get(alone) or results.get(Own(stage))
        if result is None or not result.weight:
            return
        walker, grads = self._walkers[stage].walker, Tensors()
        kept = walker.without(self._keepers[stage])
        for group, names in self._names[stage].items():
            part = result if group == Own(stage) else results.get(group)
            if part is not None and names:
                values = self._results[part.group, part.attempt].reshape(len(names), *_shape(walker))
                grads |= tensors_of(dict(zip(names, values, strict=True)))
        terms = Terms(
            step=record.step,
            learning_rate=record.learning_rate,
            gradient_scale=result.weight * record.clip,
        )
        own = {name: grad for name, grad in grads.items() if name in kept.params}
        self._rule.local_step(kept, own, terms, talks=False)
        walker.num_updates = kept.num_updates


def _shape(walker: Walker) -> tuple[int, ...]:
    return tuple(next(iter(walker.params.values())).shape)
