"""Ops on the tensors that this worker holds of a job.

Rules of this file
- Everything runs on the torch thread. `run` is a function of what is held and of the op's operands; what it gives back
  is to be filed by the caller.
- Operands are read in place and outputs are not copied: nobody writes to a tensor that has been handed over.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch import Tensor

from skein.errors import LocalError
from skein.numeric.gradients import (
    digest,
    is_finite,
    shard_bounds,
    sketch,
    squared_norm,
    sum_in_order,
)
from skein.plan.ops import Direction
from skein.plan.plan import Group
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.directives import Decision, StepRecord
from skein.protocol.worker.ops import (
    ApplyOp,
    BackwardOp,
    ForwardOp,
    InputOp,
    Joined,
    JoinOp,
    LossInputOp,
    LossOp,
    Op,
    OpOutcome,
    PackOp,
    SaveOp,
    Sketched,
    SketchOp,
    SnapshotOp,
    SumOp,
    TensorKey,
    VisitOp,
    WeightOp,
)
from skein.types import (
    Attempt,
    ChunkRef,
    GroupId,
    JobId,
    Local,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)
from worker.bundle import release_blocks
from worker.compute.chunk import Chunk
from worker.compute.exchanging import Exchanging, loss_on_probe
from worker.compute.holding import Holding, share_among
from worker.compute.operands import check_operands
from worker.compute.payload import (
    SHARD,
    TELLING,
    Payload,
    concatenated,
    pack,
    ready,
    unpack,
)
from worker.compute.snapshots import Snapshots
from worker.compute.state import Saved
from worker.compute.visits.left import Left
from worker.compute.visits.visiting import Added, Outputs, Visiting
from worker.probe import synchronize
from worker.selection.traits import Traits
from worker.telling.aggregating import Gauges


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Result of running an op: its outcome, payloads to file, and a state to write if it was a SaveOp.

    What is `added` goes with payloads of earlier ops from now on, where they are sent again.
    """

    outcome: OpOutcome = None
    outputs: Outputs = field(default_factory=dict)
    added: Added = field(default_factory=dict)
    saved: Saved | None = None


class Compute:
    """The tensors of one job on one device, and the ops on them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.holding: Holding | None = None
        self.snapshots = Snapshots()
        self.gauges = Gauges()
        self.traits = Traits()
        self._left = Left(self.gauges)
        self._results: dict[tuple[GroupId, Attempt], tuple[Joined, Tensor]] = {}
        self._exchanging: Exchanging | None = None
        self._looked_at: Step | None = None
        """Version of which a selection goes on; None: of none."""
        self._leaving: tuple[Chunk, ...] = ()
        """Given up, but peers may still fetch them: once anybody computes, everybody has what was assigned."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked to."""
        synchronize(self.device)

    # --- what is held ---

    def hold(self, holding: Holding) -> None:
        """Replace everything held. Of a step in progress, what is to stay stays; other accumulators begin at zero."""
        before = self._here(holding.job_id)
        is_ours = self.holding is not None and self.holding.job_id == holding.job_id
        resumed = () if holding.resumption is None else holding.resumption.chunks
        left = self._left.staying(resumed) if is_ours else Left(self.gauges)
        self.forget()
        self._left = left
        carried = {x.stage for x in resumed if x.ledger}
        share_among(holding.chunks)
        for index, chunk in holding.chunks.items():
            if index not in carried:
                chunk.lay_out(holding.groups, holding.worker)
            chunk.join(holding.groups, holding.worker)
        self.holding = holding
        self._exchanging = Exchanging(holding.job, holding.worker, self.gauges)
        self.gauges.began(holding.job_id, holding.job.aggregation.rule, holding.traffic)
        kept = holding.chunks.values()
        self._leaving = tuple(chunk for chunk in before if chunk not in kept)

    def keep_parameters(self, version: Step) -> None:
        """Compute a selection by parameters at this version, whatever steps are applied."""
        self._looked_at = version

    def draw_by(self, choice: ToldChoice) -> None:
        """Draw samples by this choice from now on: selections are over."""
        self._end_selection()
        if self.holding is not None:
            for chunk in self._here(self.holding.job_id):
                chunk.drop_kept()
            self.holding.draw_by(choice)

    def _end_selection(self) -> None:
        self._looked_at = None
        self.traits.forget()
        self._left.labels = {key: x for key, x in self._left.labels.items() if not key[0].outlasts_steps}

    def forget(self) -> None:
        """Hold nothing."""
        self._end_selection()
        self._drop_step()
        self._exchanging = None
        if self.holding is not None and self.holding.batches is not None:
            self.holding.batches.close()
        self.holding = None

    def chunk_of(self, job: JobId, stage: StageSpec, version: Step) -> Chunk | None:
        """A chunk of `job` that is here at `version`, even if it was given up."""
        found = (chunk for chunk in self._here(job) if (chunk.stage, chunk.version) == (stage, version))
        return next(found, None)

    def copy_state(
        self, job: JobId, stage: StageIndex, version: Step, names: Collection[str] | None = None
    ) -> dict[str, Tensor] | None:
        """State of a chunk of `job`, copied, or `names` of it; None if it is not here at that version.

        After another cut, two may have the index: then this is the state of both, and the names tell.
        """
        state: dict[str, Tensor] = {}
        for chunk in self._here(job):
            if (chunk.stage.index, chunk.version) == (stage, version):
                state |= chunk.copy_state(names)
        return state or None

    def _here(self, job: JobId) -> tuple[Chunk, ...]:
        is_ours = self.holding is not None and self.holding.job_id == job
        return (*self._held.chunks.values(), *self._leaving) if is_ours else ()

    def _drop_step(self) -> None:
        self.gauges.step_ended()
        self._left = Left(self.gauges)
        self._results.clear()
        self._leaving = ()  # An update may change a part of these.

    @property
    def _exchanges(self) -> Exchanging:
        if self._exchanging is None:
            raise LocalError("an exchange came before anything was built")
        return self._exchanging

    @property
    def _held(self) -> Holding:
        if self.holding is None:
            raise LocalError("an op came before anything was built")
        return self.holding

    # --- ops ---

    def run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        """Carry out one op.

        Raises:
            UserError: the data cannot be read; it would not be readable on any worker.
            OperandError: a peer has sent what cannot be used.
        """
        if self.holding is not None:
            check_operands(op, operands, self.holding.chunks, self._left.graphs, self._exchanges)
        match op:
            case ForwardOp() | LossOp() | LossInputOp() | BackwardOp() | InputOp() | WeightOp():
                return self._visit(op, operands)
            case PackOp():
                return Done(outputs=self._pack(op))
            case SumOp():
                return Done(outputs=self._sum(op, operands))
            case JoinOp():
                return Done(outcome=self._join(op, operands))
            case SketchOp():
                return Done(outcome=self._sketch(op))
            case ApplyOp():
                self._apply(op)
                return Done()
            case SaveOp():
                return Done(saved=self._save(op))
            case SnapshotOp():
                self._snapshot(op)
                return Done()
            case _:
                assert_never(op)

    def _visit(self, op: VisitOp, operands: Mapping[TensorKey, Payload]) -> Done:
        if op.kind.row.takes is Direction.FORWARD:
            self._leaving = ()
        visited = Visiting(self.device, self._held, self._left, self.traits).run(op, operands)
        return Done(outcome=visited.outcome, outputs=visited.outputs, added=visited.added)

    # --- reduction; accumulators are only read ---

    def _pack(self, op: PackOp) -> Outputs:
        if op.exchange is not None:
            (stage,) = op.stages
            sent = self._exchanges.pack(op, self._held.chunks[stage])
            return {key: self._sent(sent[key.shard], (to,)) for to, key in op.parcels}
        flat = self._sums_here(op.group)
        bounds = shard_bounds(flat.numel(), op.group.num_shards)
        outputs: Outputs = {}
        routed = self._left.routed_of(op)
        for to, key in op.parcels:
            start, stop = bounds[key.shard]
            part = {SHARD: flat[start:stop].to(self._wire_dtype(flat.dtype), copy=True)}
            told = routed if key.shard == TELLING else {}
            outputs[key] = part if to == self._held.worker else pack(part | told)
        return outputs

    def _sums_here(self, group: Group) -> Tensor:
        """Sum of the accumulators of the group's members that are here; of one, that itself."""
        flats = [self._chunk(x).accumulator(group.group) for x in group.members if self._is_mine(x)]
        return flats[0] if len(flats) == 1 else sum_in_order(flats)

    def _wire_dtype(self, own: torch.dtype) -> torch.dtype:
        """Dtype in which sums of gradients travel: two bytes wide where the rule says so, else their own."""
        return torch.bfloat16 if self._held.job.aggregation.sum_wire == "bf16" else own

    def _sum(self, op: SumOp, operands: Mapping[TensorKey, Payload]) -> Outputs:
        if op.exchange is not None:
            sent = [dict(unpack(operands[key], self.device)) for key in op.parts]
            chunk = self._held.chunks[op.total.member.stage]
            return {op.total: self._sent(self._exchanges.combine(op, chunk, sent), op.to)}
        own = self._held.chunks[op.total.member.stage].dtype
        parts = [unpack(operands[key], self.device) for key in op.parts]
        summed = sum_in_order([part[SHARD].to(own) for part in parts])
        total = {SHARD: summed.to(self._wire_dtype(own))}
        if op.shard == TELLING:
            self._hear_routed(op, parts)
            total |= self._left.routed_of(op)
        return {op.total: self._sent(total, op.to)}

    def _hear_routed(self, op: SumOp | JoinOp, told: Iterable[Mapping[str, Tensor]]) -> None:
        """Note choices of experts that other holders of a group's stage send with one of its shards."""
        stages = {member.stage for member in op.group.members}
        if self._held.job.checks.fraction and len(stages) == 1:
            stage = self._held.chunks[min(stages)].stage
            for part in told:
                self._left.hear_routed(op.step, stage, self._held.job, part)

    def _join(self, op: JoinOp, operands: Mapping[TensorKey, Payload]) -> Joined:
        group = op.group
        chunk = self._held.chunks[self._member_of(group).stage]
        if op.exchange is not None:
            results = {key.shard: dict(unpack(operands[key], self.device)) for key in op.results}
            joined, flat = self._exchanges.join(op, chunk, results)
            if self._exchanges.is_to_check(op):
                probe_loss = loss_on_probe(chunk, flat, op.step, self._held.batches)
                joined = replace(joined, probe_loss=probe_loss)
            return joined
        if not op.results:
            flat = self._sums_here(group)
        else:
            shards = [unpack(operands[key], self.device) for key in op.results]
            self._hear_routed(op, shards)
            flat = concatenated([shard[SHARD].to(chunk.dtype) for shard in shards])
        norm = squared_norm(flat)
        # A sum of squares can only be infinite without an infinite element where squares overflow float64.
        joined = Joined(
            group=group.group,
            digest=digest(flat),
            squared_norm=norm,
            is_finite=math.isfinite(norm) or is_finite(flat),
        )
        self._results[group.group, op.attempt] = (joined, flat)
        return joined

    def _sketch(self, op: SketchOp) -> Sketched:
        group = op.asked.group
        _, flat = self._results[group, op.asked.attempt]
        chunk = next(chunk for chunk in self._held.chunks.values() if group in chunk.groups)
        return Sketched(values=sketch(chunk.named(group, flat), op.asked.seed))

    def _sent(self, tensors: Mapping[str, Tensor], to: tuple[WorkerId, ...]) -> Payload:
        return ready(tensors, to, self._held.worker)

    def _member_of(self, group: Group) -> ChunkRef:
        """The first member of a group that is here."""
        return next(member for member in group.members if self._is_mine(member))

    def _apply(self, op: ApplyOp) -> None:
        record = op.record
        if op.keeps_step:
            for chunk in self._held.chunks.values():
                chunk.version = Step(record.step + 1)
            self._exchanges.committed(record.step)
            return
        results: dict[GroupId, Tensor] = {}
        if record.decision is Decision.APPLY:
            for result in record.results:
                found = self._results.get((result.group, result.attempt))
                if found is None:
                    continue
                joined, results[result.group] = found
                if joined.digest != result.digest:
                    raise LocalError(
                        f"group {result.group}: {joined.digest} is here, {result.digest} was voted"
                    )
        self.snapshots.finish()
        if self._looked_at == record.step:
            for chunk in self._held.chunks.values():
                chunk.keep_parameters()
        for chunk in self._held.chunks.values():
            self._apply_to(chunk, record, results)
            self.snapshots.applied(chunk, record, results)
        self._clear(record.step)

    def _apply_to(self, chunk: Chunk, record: StepRecord, results: Mapping[GroupId, Tensor]) -> None:
        """Apply the decision to a chunk: an exchange by the rule, a step of its own, or the common gradient's."""
        if record.decision is not Decision.APPLY:
            chunk.apply(record, results)
            return
        alone = Local(ChunkRef(stage=chunk.stage.index, worker=self._held.worker))
        weight_by_group = {result.group: result.weight for result in record.results}
        walker = self._exchanges.finish(record, chunk, beside=False)
        if walker is not None:
            chunk.take(walker, record)
        elif alone in weight_by_group:
            chunk.step_alone(record, weight_by_group[alone])
        else:
            chunk.apply(record, results)
        self._exchanges.finish(record, chunk, beside=True)

    def _save(self, op: SaveOp) -> Saved:
        # Blocks that the last reduction left and copies of the state would add up to more than any step takes.
        release_blocks()
        params, state = self._chunk_for(op).copy_for_checkpoint(self._held.job.aggregation.walkers)
        return Saved(
            job_id=self._held.job_id,
            generation=op.generation,
            version=op.version,
            stage=op.stage,
            walker=op.walker,
            url=op.url,
            params=params,
            state=state,
        )

    def _snapshot(self, op: SnapshotOp) -> None:
        self.snapshots.take(op, self._held.job_id, self._chunk_for(op))

    def _chunk_for(self, op: SaveOp | SnapshotOp) -> Chunk:
        # Also one that was given up: the plan that it was given up for may never have been put into place.
        here = self._here(self._held.job_id)
        chunk = next((c for c in here if (c.stage.index, c.version) == (op.stage, op.version)), None)
        if chunk is None:
            raise LocalError(f"stage {op.stage} is not here at version {op.version}")
        return chunk

    def _clear(self, step: Step) -> None:
        outlasting = self._left.outlasting()
        self._drop_step()
        self._left = outlasting
        self._exchanges.committed(step)
        if self.holding is not None:
            for chunk in self.holding.chunks.values():
                chunk.clear()

    # --- small things ---

    def _chunk(self, ref: ChunkRef) -> Chunk:
        return self._held.chunks[ref.stage]

    def _is_mine(self, ref: ChunkRef) -> bool:
        return ref.worker == self._held.worker
