"""The cost model in torch's place: ops take time, and their contents are sets of contributions.

Instead of gradients, an accumulator holds the microbatches added to it, in that order; instead of parameters, a chunk
has a lineage: a hash over all that was ever applied. So "each visit of a path counts once, in the schedule's order" and
"replicas are equal" can be checked at every update, independently of what the machines believe.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.job import ArrayJob, JobSpec
from skein.model.layers import LayerSpec, stage_cost
from skein.numeric.sketch import SKETCH_LENGTH
from skein.plan.ops import Direction, Kept
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.directives import Assign, Decision
from skein.protocol.messages.progress import ResumedChunk
from skein.protocol.messages.reports import Balance
from skein.protocol.messages.tensors import Envelope, ShardTensor
from skein.protocol.worker.keeping.desk import Desk, is_release, key_of, operand_keys
from skein.protocol.worker.ops import (
    ApplyOp,
    ComputeOp,
    HopKey,
    Joined,
    JoinOp,
    Loss,
    Op,
    OpFailed,
    OpOutcome,
    PackOp,
    SaveOp,
    Sketched,
    SketchOp,
    SnapshotOp,
    SumOp,
    TensorKey,
    hop_key,
)
from skein.sim.compute.rows import AskedModel, SimRows
from skein.sim.judging.contributions import (
    Contributions,
    Judge,
    KeptJoin,
    SimChunk,
    is_late,
    is_ledger,
    taken_by,
)
from skein.sim.judging.invariants import Violated, Visits, lineage_after
from skein.types import (
    Attempt,
    ChunkRef,
    Generation,
    GroupId,
    JobId,
    MicrobatchId,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

REDUCE_BYTES_PER_S = 2e9
"""Memory traffic of packing, summing and updating."""
OP_OVERHEAD_S = 0.0005

NO_GENERATION = Generation(0)
SPOILT = (Step(-1), -1, StageIndex(-1))
"""Contribution that a failed op leaves in a chunk's sums."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Content of an envelope. Boundary tensors carry no contributions; the numeric executor adds `values`."""

    num_bytes: int
    contributions: Contributions | None = None
    values: NDArray[np.float64] | None = None
    choices: int | None = None
    """Choices of the stage that gives an activation, or that takes a gradient; None: there are no experts."""
    repeated: int | None = None
    """Choices of the stage that takes an activation once more, or where the path of a gradient ends."""


RELEASE = Payload(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage's ops for one microbatch on a device of 1 FLOP/s, and bytes of what it takes and sends."""

    forward: float
    backward: float
    input_bytes: int
    output_bytes: int
    parameter_bytes: int
    num_sparse_layers: int | None = None
    """Blocks with experts; None: the model has none anywhere."""


def stage_times(job: JobSpec, layers: tuple[LayerSpec, ...], stage: StageSpec) -> StageTimes:
    """Costs of `stage` for one microbatch of `job`."""
    cost = stage_cost(layers, stage)
    samples = job.batch.microbatch_samples
    return StageTimes(
        forward=float(cost.forward_flops * samples),
        backward=float(cost.backward_flops * samples),
        input_bytes=layers[stage.first - 1].output_bytes * samples if stage.first else 0,
        output_bytes=cost.output_bytes * samples,
        parameter_bytes=4 * cost.num_parameters,
        num_sparse_layers=job.model.num_blocks_in(stage) if job.model.has_experts else None,
    )


class SimLog:
    """A boundary log without bytes. It forgets when it is told to, and knows what."""

    def __init__(self) -> None:
        self.forgotten: set[HopKey] = set()
        self._kept: dict[HopKey, Payload] = {}

    def put(self, key: HopKey, payload: Payload) -> tuple[HopKey, ...]:
        """See `skein.protocol.worker.keeping.desk.ForgetfulLog`."""
        self._kept[key] = payload
        self.forgotten.discard(key)
        return ()

    def add(self, key: HopKey, payload: Payload) -> tuple[HopKey, ...]:
        """See `put`."""
        if key in self._kept:
            self._kept[key] = replace(self._kept[key], repeated=payload.repeated)
        return ()

    def get(self, key: HopKey) -> Payload | None:
        """See `put`."""
        return self._kept.get(key)

    def drop_steps(self, step: Step) -> None:
        """See `put`."""
        self._kept = {key: x for key, x in self._kept.items() if key.step > step}
        self.forgotten = {key for key in self.forgotten if key.step > step}

    def clear(self) -> None:
        """See `put`."""
        self._kept.clear()
        self.forgotten.clear()

    def shorten(self, num_kept: int) -> tuple[HopKey, ...]:
        """Forget all but some entries; gives those that are gone."""
        gone = sorted(self._kept)[: max(0, len(self._kept) - num_kept)]
        for key in gone:
            del self._kept[key]
        self.forgotten.update(gone)
        return tuple(gone)


class SimExecutor:
    """Runs one worker's ops; what goes in and comes out lies on its desk."""

    def __init__(self, worker: WorkerId, flops_per_s: float) -> None:
        """`flops_per_s` is what the worker says when it starts."""
        self.worker = worker
        self.flops_per_s = self.nominal_flops_per_s = flops_per_s
        self.share_of_time = 1.0
        """Share that the machine gives to its ops, others having the rest."""
        self.is_told_true = True
        """Whether no worker has lied about tokens, so that weights are what they must be."""
        self.chunks: dict[StageIndex, SimChunk] = {}
        self._given_up: dict[StageSpec, SimChunk] = {}
        self.times: Mapping[StageIndex, StageTimes] = {}
        self.log = SimLog()
        self.desk = Desk(worker, self.log, weigh=lambda payload: payload.num_bytes, release=RELEASE)
        self._operands: dict[TensorKey, Payload] = {}
        self._lost: tuple[HopKey, ...] = ()
        """Operands of the running op that the boundary log has forgotten."""
        self._outputs: dict[TensorKey, Payload] = {}
        self._added: dict[HopKey, Payload] = {}
        """Choices that go with tensors of earlier ops from now on."""
        self._joined: dict[tuple[GroupId, Attempt], KeptJoin] = {}
        self._members: dict[GroupId, tuple[ChunkRef, ...]] = {}
        self._shard_bytes: dict[GroupId, int] = {}
        self._visits = Visits(by_stage={}, by_chunk={})
        self._is_resumed = False
        self.choices: tuple[ToldChoice, ...] = ()
        """By which samples are drawn; none: as the job says."""
        self.rows = SimRows()
        self._kept: set[tuple[Kept, MicrobatchId, StageIndex]] = set()

    def build(
        self,
        assign: Assign,
        given: Mapping[StageIndex, str],
        times: Mapping[StageIndex, StageTimes],
        visits: Visits,
    ) -> None:
        """Hold the assigned chunks, in state `given`; what was held before stays until the first compute op.

        `visits` are those of the recorded plan, which what is applied is compared with.
        """
        self._given_up |= {chunk.stage: chunk for chunk in self.chunks.values()}
        self.times = times
        self.choices = assign.choices
        self.rows.built(assign.chunks)
        self._visits = visits
        self._members = {group.group: group.members for group in assign.groups}
        before = self.chunks
        self.chunks = {
            c.stage.index: SimChunk(c.stage, given[c.stage.index], assign.version, assign.version)
            for c in assign.chunks
        }
        self._is_resumed = assign.resumption is not None
        kept = () if assign.resumption is None else assign.resumption.chunks
        self._kept &= {(*held, chunk.stage) for chunk in kept for held in chunk.held}
        if assign.resumption is None:
            self.log.clear()
        else:
            for resumed in assign.resumption.chunks:
                chunk = self.chunks[resumed.stage]
                chunk.accumulated = self._carried(assign, resumed, before)
                if chunk.accumulated:
                    chunk.begun_at = before[resumed.stage].begun_at
        self._joined.clear()
        for group in assign.groups:
            held = [times[m.stage].parameter_bytes for m in group.members if m.stage in times]
            self._shard_bytes[group.group] = max(held) // group.num_shards

    def draw_by(self, choice: ToldChoice) -> None:
        """Draw samples by this choice from now on."""
        self.choices = (choice,)

    def asked(self, job: JobSpec, version: Step) -> Mapping[int, AskedModel]:
        """Models that are asked what is to be chosen, by the row of an array; of any other job that of row 0."""
        return {0: AskedModel(seed=job.seed, step=version)}

    def _carried(
        self, assign: Assign, resumed: ResumedChunk, before: Mapping[StageIndex, SimChunk]
    ) -> Contributions:
        """Contributions that a chunk had accumulated, which must be what the coordinator believes."""
        if not resumed.ledger:
            return {}
        chunk = before[resumed.stage]
        is_same = is_ledger(chunk, assign.version, resumed.ledger)
        if not is_same or set(chunk.accumulated.values()) != {1}:
            raise Violated(f"{self.worker} is to go on with {resumed.ledger}, and has {chunk.accumulated}")
        return chunk.accumulated

    def state_of(self, stage: StageSpec, version: Step) -> str | None:
        """Lineage of a chunk that a peer may fetch, or a plan keep; None if it is not here at that version."""
        now = self.chunks.get(stage.index)
        chunk = now if now is not None and now.stage == stage else self._given_up.get(stage)
        return chunk.lineage if chunk is not None and chunk.version == version else None

    def held(self, stage: StageIndex) -> SimChunk:
        """A chunk that is here, even if it was given up."""
        given_up = {chunk.stage.index: chunk for chunk in self._given_up.values()}
        return self.chunks.get(stage) or given_up[stage]

    def reads(self, stage: StageIndex, files: tuple[str, ...], *, num_walkers: int) -> None:
        """The next build takes a stage from these files of a checkpoint: a lineage says all that is in them."""

    def begins_rows(self, job: JobId, spec: ArrayJob, origins: Sequence[str | None]) -> None:
        """The next build begins an array whose rows go on from these lineages of others; None: a row is drawn."""

    def writes(self, stage: StageIndex, file: str) -> None:
        """A stage is written to a file of a checkpoint."""

    def forget(self) -> None:
        """Drop everything."""
        self.chunks = {}
        self.rows.end()
        self._given_up.clear()
        self._joined.clear()

    def payload(self, envelope: Envelope) -> Payload | None:
        """Payload that is sent under an envelope; None if the boundary log has forgotten it."""
        payload, header = self.desk.for_sending(envelope), envelope.header
        if payload is None and key_of(header) not in self.log.forgotten:
            raise Violated(f"{self.worker} has not made {header}, or not kept it")
        return payload

    def begins(self, op: Op, generation: Generation) -> None:
        """An op takes its operands now: what came under this generation, or what was made here."""
        self._operands, self._lost = self.desk.take(op, generation)
        here, forgotten = self._operands, self.log.forgotten
        missing = [key for key in operand_keys(op) if key not in here and key not in forgotten]
        if missing:
            raise Violated(f"{self.worker} begins {op} without {missing}")
        if isinstance(op, ComputeOp) and op.phase.outlasts_steps:
            chunk = self.chunks[op.chunk.stage]
            self.rows.begins(op, chunk.stage, chunk.version)

    def _boundary_bytes(self, op: ComputeOp) -> int:
        times = self.times[op.chunk.stage]
        return times.output_bytes if op.kind.row.gives is Direction.FORWARD else times.input_bytes

    def seconds(self, op: Op) -> float:
        """Seconds that an op takes here."""
        match op:
            case ComputeOp():
                times = self.times[op.chunk.stage]
                return (
                    OP_OVERHEAD_S + op.kind.row.cost.seconds(times.forward, times.backward) / self.flops_per_s
                )
            case PackOp() | SumOp() | JoinOp() | SketchOp() | ApplyOp() | SaveOp() | SnapshotOp():
                size = sum(self.times[stage].parameter_bytes for stage in self.chunks)
                return OP_OVERHEAD_S + size / REDUCE_BYTES_PER_S

    def fail(self, op: Op, generation: Generation, reason: str) -> OpFailed:
        """An op fails halfway: what it adds to is of no use any more."""
        self.desk.ended(op, generation, None)
        if isinstance(op, ComputeOp):
            self._kept -= {(kept, op.microbatch, op.chunk.stage) for kept in Kept}
            if op.kind.row.is_accumulating and op.chunk.stage in self.chunks:
                self.chunks[op.chunk.stage].accumulated[SPOILT] = 1
        return OpFailed(is_fatal=False, reason=reason)

    def run(self, op: Op, generation: Generation = NO_GENERATION) -> OpOutcome:
        """Carry an op out, at its end; what it makes is filed under `generation`."""
        if self._lost:
            return self.fail(op, generation, f"{self._lost[0]} is not here")
        self._outputs, self._added = {}, {}
        outcome = self._carry_out(op)
        self.desk.ended(op, generation, self._outputs, self._added)
        return outcome

    def _carry_out(self, op: Op) -> OpOutcome:
        match op:
            case ComputeOp():
                return self._compute(op)
            case PackOp():
                self._pack(op)
            case SumOp():
                self._sum(op)
            case JoinOp():
                return self._join(op)
            case SketchOp():
                return self._sketch(op)
            case ApplyOp():
                self._apply(op)
            case SaveOp():
                pass
        return None

    def _compute(self, op: ComputeOp) -> Loss | Balance | None:
        """Do to sets of contributions what the op's row says."""
        row, place = op.kind.row, (op.microbatch, op.chunk.stage)
        if row.takes is Direction.FORWARD:
            self._given_up.clear()
        if row.uses and (row.uses, *place) not in self._kept:
            raise Violated(f"{self.worker} has no activation for {op}")
        if row.uses:
            self._kept.discard((row.uses, *place))
        if row.leaves and op.phase.keeps_graph:
            self._kept.add((row.leaves, *place))
        if row.scores and op.phase.selects:
            self.rows.looked_at.add(op.microbatch)
        if op.accumulates:
            accumulated = self.chunks[op.chunk.stage].accumulated
            contribution = (op.step, op.microbatch, op.chunk.stage)
            accumulated[contribution] = accumulated.get(contribution, 0) + 1
        for header in op.outputs:
            if not is_release(header):
                self._outputs[hop_key(header)] = Payload(self._boundary_bytes(op))
        balance = self._balance(op) if row.takes is Direction.FORWARD and op.phase.trains else None
        return (
            Loss(loss_sum=float(op.microbatch + 1), num_tokens=1, balance=balance) if row.scores else balance
        )

    def _balance(self, op: ComputeOp) -> Balance | None:
        """Balance of the experts here: of each layer as many as the microbatch's number."""
        num_layers = self.times[op.chunk.stage].num_sparse_layers
        if num_layers is None:
            return None
        return Balance(
            loss_sum=float(num_layers * (op.microbatch + 1)),
            num_tokens=num_layers,
            num_choices=4 * num_layers,
            num_dropped=num_layers * (op.microbatch % 2),
        )

    def _pack(self, op: PackOp) -> None:
        held = max(self.times[stage].parameter_bytes for stage in op.stages)
        self._shard_bytes[op.group.group] = held // op.group.num_shards
        offered = self._offered(op)
        for _, tensor in op.parcels:
            self._outputs[tensor] = self._shard(op, offered)

    def _offered(self, op: PackOp | JoinOp) -> Contributions:
        """Contributions that the members here give to a reduction or exchange."""
        taken_at = None if op.exchange is None else op.exchange.taken_at
        stages = [member.stage for member in op.group.members if member.worker == self.worker]
        if taken_at is None:
            return _added(self.chunks[stage].accumulated for stage in stages)
        (stage,) = stages
        chunk = self.chunks[stage]
        if chunk.version != taken_at:
            raise Violated(f"{self.worker} is to give what it has at {taken_at}, and is at {chunk.version}")
        place = op.group.members.index(ChunkRef(stage=stage, worker=self.worker))
        return taken_by(place, taken_at, stage)

    def _sum(self, op: SumOp) -> None:
        self._outputs[op.total] = self._shard(op, _added(self._contributed(part) for part in op.parts))

    def _shard(self, op: PackOp | SumOp, contributions: Contributions) -> Payload:
        return Payload(self._shard_bytes[op.group.group], contributions)

    def _contributed(self, tensor: ShardTensor) -> Contributions:
        contributions = self._operands[tensor].contributions
        assert contributions is not None
        return contributions

    def _join(self, op: JoinOp) -> Joined:
        group = op.group
        if not op.results:
            result = self._offered(op)
        else:
            shards = [self._contributed(tensor) for tensor in op.results]
            if any(shard != shards[0] for shard in shards):
                raise Violated(f"shards of {group.group} at step {op.step} differ: {shards}")
            result = shards[0]
        taken_at = None if op.exchange is None else op.exchange.taken_at
        kept = KeptJoin(step=op.step, group=group, contributions=result, taken_at=taken_at)
        self._joined[group.group, op.attempt] = kept
        return Joined(group=group.group, digest=_digest(result), squared_norm=1.0, is_finite=True)

    def _sketch(self, op: SketchOp) -> Sketched:
        """Sketch of contributions: each has numbers of its own, which are added up."""
        result = self._joined[op.asked.group, op.asked.attempt].contributions
        drawn = [
            n * rng.stream(op.asked.seed, str(op.asked.group), *key).normal(size=SKETCH_LENGTH)
            for key, n in result.items()
        ]
        return Sketched(values=tuple(np.sum(drawn, axis=0).tolist()) if drawn else (0.0,) * SKETCH_LENGTH)

    def _apply(self, op: ApplyOp) -> None:
        record = op.record
        results = {result.group: result for result in record.results}
        judge = self._judge()
        for chunk in self.chunks.values():
            if chunk.version != record.step:
                raise Violated(f"{self.worker} applies step {record.step} to {chunk}")
            me = ChunkRef(stage=chunk.stage.index, worker=self.worker)
            if op.keeps_step and not is_late(me, results):
                raise Violated(f"{self.worker} is to keep step {record.step}, which has its part")
            if record.decision is Decision.APPLY and not op.keeps_step:
                if not self._is_resumed and not is_late(me, results):
                    judge.check_order(chunk, record.step)
                if not is_late(me, results):
                    self._check_nothing_aside(chunk, record.step)
                judge.check_results(me, record.step, results)
            chunk.lineage = lineage_after(chunk.lineage, record)
            chunk.version = Step(record.step + 1)
        if not op.keeps_step:
            self._is_resumed = False
            self._clear(Step(record.step + 1))

    def _check_nothing_aside(self, chunk: SimChunk, step: Step) -> None:
        """All that was put aside of the step is in the chunk's sum: nothing outlives the ledger that it belongs to."""
        aside = sorted(
            m for kept, m, stage in self._kept if (kept, stage) == (Kept.PENDING, chunk.stage.index)
        )
        if aside:
            raise Violated(f"{self.worker} applies step {step} with weight gradients of {aside} put aside")

    def _judge(self) -> Judge:
        return Judge(
            worker=self.worker,
            visits=self._visits,
            members=self._members,
            chunks=self.chunks,
            joined=self._joined,
            is_resumed=self._is_resumed,
            is_told_true=self.is_told_true,
        )

    def _clear(self, version: Step) -> None:
        self._joined = {key: kept for key, kept in self._joined.items() if kept.step >= version}
        self._kept.clear()
        for chunk in self.chunks.values():
            chunk.accumulated.clear()
            chunk.begun_at = version


def _added(parts: Iterable[Contributions]) -> Contributions:
    total: Contributions = {}
    for part in parts:
        for key, count in part.items():
            total[key] = total.get(key, 0) + count
    return total


def _digest(result: Contributions) -> str:
    return f"{hash(frozenset(result.items())):x}"
