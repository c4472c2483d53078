"""Ops that a worker's executor is asked to run, one at a time, and what it answers.

An op names its operands by identity (`TensorKey`, ledgers, attempts); the payloads stay with the driver. So the
simulator can run the same ops by a cost model and the worker by torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from skein.plan.ops import Direction, OpKind
from skein.plan.plan import Group, Path
from skein.protocol.messages.array_rounds import ArrayRound, RowScore
from skein.protocol.messages.directives import ExchangeTerms, StepRecord, TakeSketch
from skein.protocol.messages.reports import Balance, SketchTaken, Vote
from skein.protocol.messages.tensors import HopTensor, Phase, ShardTensor
from skein.types import Attempt, ChunkRef, Generation, GroupId, MicrobatchId, StageIndex, Step, WorkerId


class HopKey(NamedTuple):
    """Identity of a boundary tensor, without its route."""

    direction: Direction
    phase: Phase
    step: Step
    microbatch: MicrobatchId
    hop: int

    @property
    def outlasts_steps(self) -> bool:
        """Whether it is still wanted once its step is committed."""
        return self.phase.outlasts_steps


def hop_key(tensor: HopTensor) -> HopKey:
    """The identity in a boundary tensor's header."""
    return HopKey(tensor.direction, tensor.phase, tensor.step, tensor.microbatch, tensor.hop)


TensorKey = HopKey | ShardTensor
"""Key that the driver files a payload under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOp:
    """A microbatch's op at hop `hop` of its path; what it takes and gives is in its kind's row (`skein.plan.ops`)."""

    kind: ClassVar[OpKind]
    phase: Phase
    step: Step
    microbatch: MicrobatchId
    hop: int
    path: Path

    @property
    def chunk(self) -> ChunkRef:
        return self.path.hops[self.hop]

    @property
    def accumulates(self) -> bool:
        """Whether its end adds to the chunk's gradient: nothing does outside of training."""
        return self.kind.row.is_accumulating and self.phase.trains

    @property
    def operand(self) -> HopKey | None:
        """The boundary tensor that it takes; None at a path's beginning, which takes the data."""
        takes = self.kind.row.takes
        if takes is None:
            return None
        # Only data come from no hop: a gradient that none makes is looked for, and found missing.
        if takes is Direction.FORWARD and not self.path.makers(takes, self.hop):
            return None
        return HopKey(takes, self.phase, self.step, self.microbatch, self.hop)

    @property
    def outputs(self) -> tuple[HopTensor, ...]:
        """Headers of the boundary tensor that it makes, one for each hop that takes it."""
        gives = self.kind.row.gives
        if gives is None:
            return ()
        return outputs_of(gives, self.phase, self.step, self.microbatch, self.hop, self.path)


def outputs_of(
    direction: Direction, phase: Phase, step: Step, microbatch: MicrobatchId, hop: int, path: Path
) -> tuple[HopTensor, ...]:
    """Headers of the tensor that leaves `hop` in `direction`; none where the path ends that way."""
    return tuple(
        HopTensor(direction=direction, phase=phase, step=step, microbatch=microbatch, hop=taker, path=path)
        for taker in path.takers(direction, hop)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp(ComputeOp):
    """Run a chunk forward. Input: x of `hop` (hop 0: the data). Output, ready to send: x of `hop + 1`.

    TRAIN keeps what the backward pass needs; EVALUATE keeps nothing.
    """

    kind: ClassVar[OpKind] = OpKind.FORWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOp(ComputeOp):
    """Run the last hop: forward and loss, and in TRAIN backward too, accumulating. Output: dy of `hop - 1`, if any."""

    kind: ClassVar[OpKind] = OpKind.LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOp(ComputeOp):
    """Run a chunk backward from dy of `hop`, adding to its accumulators. Output: dy of `hop - 1`, if any."""

    kind: ClassVar[OpKind] = OpKind.BACKWARD
    phase: Phase = Phase.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOp(ComputeOp):
    """Make the gradient for the hop before from dy of `hop`, and put all weight gradients aside: no sum changes."""

    kind: ClassVar[OpKind] = OpKind.INPUT
    phase: Phase = Phase.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputOp(ComputeOp):
    """Run the last hop but for weight gradients, which are put aside: no sum changes. Output: as of `LossOp`."""

    kind: ClassVar[OpKind] = OpKind.LOSS_INPUT
    phase: Phase = Phase.TRAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOp(ComputeOp):
    """Add all that the microbatch's `InputOp` or `LossInputOp` has put aside to the chunk's accumulators."""

    kind: ClassVar[OpKind] = OpKind.WEIGHT
    phase: Phase = Phase.TRAIN


VisitOp = ForwardOp | LossOp | BackwardOp | InputOp | LossInputOp | WeightOp
COMPUTE_OPS: Mapping[OpKind, type[VisitOp]] = {
    x.kind: x for x in (ForwardOp, LossOp, BackwardOp, InputOp, LossInputOp, WeightOp)
}
"""Class of the op that carries out each kind."""


Parcel = tuple[WorkerId, ShardTensor]
"""A shard and who is to have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOp:
    """A part of an attempt to reduce a group's sums, or with `exchange` what the job's rule sends in their place."""

    step: Step
    group: Group
    attempt: Attempt
    exchange: ExchangeTerms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOp(GroupOp):
    """Add up the group's accumulators of all local members, cut into shards that are filed as `parcels` say.

    Accumulators stay. By the job's rule it comes after the rule's local step, of the one member that is here.
    """

    stages: tuple[StageIndex, ...]
    parcels: tuple[Parcel, ...]
    """PART tensors and who adds them up, this worker or another; those that no member here shares in are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOp(GroupOp):
    """Add `parts` of one shard, PARTs or SUMs, in that order; filed as `total`, a RESULT or a SUM that goes on."""

    shard: int
    parts: tuple[ShardTensor, ...]
    total: ShardTensor
    to: tuple[WorkerId, ...]
    """Workers that are to have the total, perhaps this one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A JoinOp's answer: what the holder votes."""

    group: GroupId
    digest: str
    squared_norm: float
    is_finite: bool
    probe_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOp(GroupOp):
    """Put the group's `results` together (if none: add up what the members here have) and say what it is."""

    results: tuple[ShardTensor, ...] = ()

    def vote(self, joined: Joined, generation: Generation) -> Vote:
        """Answer to the coordinator."""
        return Vote(
            generation=generation,
            step=self.step,
            group=self.group.group,
            attempt=self.attempt,
            digest=joined.digest,
            squared_norm=joined.squared_norm,
            is_finite=joined.is_finite,
            probe_loss=joined.probe_loss,
        )


ReductionOp = PackOp | SumOp | JoinOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketched:
    """A SketchOp's answer."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchOp:
    """Sketch a joined result as the coordinator has asked."""

    asked: TakeSketch

    def report(self, outcome: Sketched) -> SketchTaken:
        """Answer to the coordinator."""
        asked = self.asked
        return SketchTaken(
            generation=asked.generation,
            step=asked.step,
            group=asked.group,
            attempt=asked.attempt,
            values=outcome.values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOp:
    """Update all chunks from the joined results as the record says, then clear accumulators and boundary tensors."""

    record: StepRecord
    keeps_step: bool = False
    """The decision was made without these chunks, which go on with the local step that they are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOp:
    """Copy a chunk's state for a checkpoint; it is written in the background and answered by `CheckpointWritten`.

    `walker` is its walker's number in that checkpoint.
    """

    generation: Generation
    version: Step
    stage: StageIndex
    url: str | None
    walker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOp:
    """Copy a chunk's state at `version` into host memory, for peers; then perhaps what each step applies to it, too.

    A copy that finds no room is left out: that is no failure.
    """

    generation: Generation
    version: Step
    stage: StageIndex
    keeps_results: bool


Op = VisitOp | ReductionOp | SketchOp | ApplyOp | SaveOp | SnapshotOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Answer of a `LossOp` or `LossInputOp`: summed nats and valid tokens.

    In a probe also the digest of the chunk's parameters; in training the balance of its experts, which is all that a
    `ForwardOp` answers. Of an array, in training the local steps that were made, else the score of each row.
    """

    loss_sum: float
    num_tokens: int
    digest: str = ""
    balance: Balance | None = None
    array: ArrayRound | None = None
    rows: tuple[RowScore, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFailed:
    """The op raised. `is_fatal`: it would on any worker, the job is wrong. `is_unfit`: this worker lacks something.

    `blamed`: the worker that has sent it what it could not use.
    """

    is_fatal: bool
    reason: str
    blamed: WorkerId | None = None
    is_unfit: bool = False


OpOutcome = Loss | Balance | Joined | Sketched | OpFailed | None
