"""A real model in the cost model's place: float64 numbers travel, are summed, and update parameters.

A stack of small layers with residuals, embedding and head at its ends, tied or not; squared error. The ops,
their times and all that the cost model checks stay as they are, so losses and norms of a disturbed run can be compared
with those of an undisturbed one. Layers take any cut into stages.

Where there are experts, each worker chooses otherwise, and what a stage gives is scaled by its choices: exactly, by a
power of two, that the next stage takes out again. So numbers are those of any choices, as long as a gradient meets
those that the activation before it was made with.

Shapes: B samples of a microbatch, D features.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from skein import rng
from skein.config.job import JobSpec
from skein.model.layers import LayerSpec
from skein.model.reduced import names_by_group
from skein.numeric.sketch import SKETCH_LENGTH
from skein.plan.ops import Direction
from skein.plan.plan import Group
from skein.protocol.messages.directives import Assign, ChunkAssignment
from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import (
    ApplyOp,
    BackwardOp,
    ComputeOp,
    ForwardOp,
    InputOp,
    Joined,
    JoinOp,
    Loss,
    LossInputOp,
    LossOp,
    Op,
    OpOutcome,
    PackOp,
    Sketched,
    SketchOp,
    SumOp,
    TensorKey,
    WeightOp,
    hop_key,
    outputs_of,
)
from skein.sim.compute.executor import SimExecutor, StageTimes
from skein.sim.judging.invariants import Visits
from skein.types import (
    Attempt,
    GroupId,
    MicrobatchId,
    Own,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
)

F64 = NDArray[np.float64]
_TIED = "tied"
_B, _D = 2, 3


class NumericModel:
    """The model of one simulated job."""

    def __init__(self, job: JobSpec) -> None:
        layers = job.layers
        self.num_layers = len(layers)
        self.is_tied = bool(layers[-1].num_tied_parameters)
        self._seed = job.seed
        self.layers = _named(layers, job.model.inner_layers.start)
        """Names of each layer's parameters, whose sum it computes with."""

    def names(self, stage: StageSpec) -> tuple[str, ...]:
        """Parameters of a stage, each once."""
        return tuple(dict.fromkeys(chain.from_iterable(self.layers[stage.first : stage.stop])))

    def drawn(self, name: str) -> F64:
        """A parameter as the seed draws it."""
        return rng.stream(self._seed, "numeric", name).normal(size=(_D, _D)) / _D

    def sample(self, phase: Phase, step: Step, microbatch: MicrobatchId) -> tuple[F64, F64]:
        """Inputs and targets of a microbatch, each (B, D)."""
        at = 0 if phase.validates else step
        drawn = rng.stream(self._seed, "sample", phase.value, at, microbatch).normal(size=(2, _B, _D))
        return drawn[0], drawn[1]

    # --- layers ---

    def forward(self, layer: int, theta: F64, x_BD: F64) -> F64:
        """Output of a layer."""
        if layer == 0:
            return x_BD @ theta
        if layer == self.num_layers - 1:
            return x_BD @ (theta.T if self.is_tied else theta)
        return x_BD + np.tanh(x_BD @ theta)

    def backward(self, layer: int, theta: F64, x_BD: F64, dy_BD: F64) -> tuple[F64, F64]:
        """Gradients of a layer's input and parameter."""
        if layer == 0:
            return dy_BD @ theta.T, x_BD.T @ dy_BD
        if layer == self.num_layers - 1:
            if self.is_tied:
                return dy_BD @ theta, dy_BD.T @ x_BD
            return dy_BD @ theta.T, x_BD.T @ dy_BD
        inner_BD = dy_BD * (1 - np.tanh(x_BD @ theta) ** 2)
        return dy_BD + inner_BD @ theta.T, x_BD.T @ inner_BD


def _named(layers: Sequence[LayerSpec], num_inputs: int) -> list[tuple[str, ...]]:
    """Names of each layer's parameters: tied blocks end the list, and are in the layers that begin it, or in one."""
    blocks = [layer for layer, x in enumerate(layers) if x.num_tied_parameters]
    tied = [_TIED if len(blocks) == 1 else f"{_TIED}{block}" for block in range(len(blocks))]
    names: list[tuple[str, ...]] = [(f"layer{layer}",) for layer in range(len(layers))]
    for layer, name in zip(blocks, tied, strict=True):
        names[layer] = (name,)
    each = len(blocks) // num_inputs
    for layer in range(num_inputs if blocks else 0):
        names[layer] = tuple(tied[layer * each : (layer + 1) * each])
    return names


def _choice_of(worker: WorkerId) -> int:
    """Choices of a worker's routers, whatever they choose among: the factor of what it gives."""
    return int(2 ** rng.stream(0, "choices", worker).integers(4))


@dataclass(frozen=True, slots=True)
class NumericPassage:
    """Input of a forward whose gradient has not come, and the choices there and before; 1: there are none."""

    x_BD: F64
    before: int
    own: int


_Gradients = list[tuple[str, F64]]
"""By name of the parameter, in the order in which they are added."""


class NumericExecutor(SimExecutor, ABC):
    """Computes what the cost model only counts; a subclass says what chunks begin with, and how they are updated."""

    def __init__(self, model: NumericModel, worker: WorkerId, flops_per_s: float) -> None:
        super().__init__(worker, flops_per_s)
        self._model = model
        self._params: dict[StageIndex, dict[str, F64]] = {}
        self._sums: dict[StageIndex, dict[str, F64]] = {}
        self._passages: dict[tuple[MicrobatchId, StageIndex], NumericPassage] = {}
        self._pending: dict[tuple[MicrobatchId, StageIndex], _Gradients] = {}
        """Gradients that input ops have put aside."""
        self._results: dict[tuple[GroupId, Attempt], F64] = {}
        self._names: dict[StageIndex, Mapping[GroupId, tuple[str, ...]]] = {}
        """Parameters that each stage contributes to its groups."""
        self._num_ways = 1
        """Paths to evaluate on."""

    def build(
        self,
        assign: Assign,
        given: Mapping[StageIndex, str],
        times: Mapping[StageIndex, StageTimes],
        visits: Visits,
    ) -> None:
        """Build as the cost model does; sums stay where the ledger does."""
        super().build(assign, given, times, visits)
        model, before = self._model, self._sums
        self._num_ways = max(1, assign.num_evaluation_paths)
        self._params, self._sums, self._names = {}, {}, {}
        groups = [group.group for group in assign.groups]
        for chunk in assign.chunks:
            stage, names = chunk.stage.index, model.names(chunk.stage)
            self._names[stage] = names_by_group(groups, stage, names, model.layers)
            self._params[stage] = self._given(assign, chunk, given[stage])
            is_carried = bool(self.chunks[stage].accumulated)
            self._sums[stage] = before[stage] if is_carried else {name: np.zeros((_D, _D)) for name in names}
        self._results.clear()

    @abstractmethod
    def _given(self, assign: Assign, chunk: ChunkAssignment, lineage: str) -> dict[str, F64]:
        """The parameters that a chunk begins with."""

    @abstractmethod
    def _updated(self, stage: StageIndex, op: ApplyOp) -> dict[str, F64]:
        """The parameters of a chunk after an update."""

    # --- tensors ---

    def _values(self, key: TensorKey) -> F64:
        """Values that the running op takes."""
        values = self._operands[key].values
        assert values is not None
        return values

    def _give(self, key: TensorKey, values: F64) -> None:
        """Numbers go with what an op makes."""
        self._outputs[key] = replace(self._outputs[key], values=values)

    def _give_on(self, op: ComputeOp, values: F64, choices: int, repeated: int | None = None) -> None:
        for header in op.outputs:
            key = hop_key(header)
            self._give(key, values)
            self._outputs[key] = replace(self._outputs[key], choices=choices, repeated=repeated)

    def _entered(self, op: ComputeOp) -> NumericPassage:
        """Input of a forward."""
        if op.operand is None:
            return NumericPassage(self._sample(op)[0], 1, self._own_choice(op, None))
        given = self._operands[op.operand]
        before = given.choices or 1
        return NumericPassage(self._values(op.operand) / before, before, self._own_choice(op, given.repeated))

    def _own_choice(self, op: ComputeOp, repeated: int | None) -> int:
        """Choices that the stage makes in training, unless it was told those of before."""
        if not op.phase.trains or not self.times[op.chunk.stage].num_sparse_layers:
            return 1
        return repeated or _choice_of(self.worker)

    def _gradient(self, op: BackwardOp | InputOp) -> tuple[NumericPassage, F64]:
        """Forward that a gradient is of, with the choices that come along, and the gradient of its output."""
        assert op.operand is not None
        passage, given = self._passages.pop((op.microbatch, op.chunk.stage)), self._operands[op.operand]
        own = given.choices or 1
        if given.repeated is not None:
            made = outputs_of(Direction.FORWARD, op.phase, op.step, op.microbatch, op.hop, op.path)
            self._added |= {hop_key(header): replace(given, values=None, choices=None) for header in made}
        return replace(passage, own=own), self._values(op.operand) * own

    def _sample(self, op: ComputeOp) -> tuple[F64, F64]:
        """Sample of a microbatch; in a probe the walkers' microbatches in turn are the same samples."""
        shared = op.microbatch // self._num_ways if op.phase.replicates_samples else op.microbatch
        return self._model.sample(op.phase, op.step, MicrobatchId(shared))

    # --- ops ---

    def _carry_out(self, op: Op) -> OpOutcome:
        if isinstance(op, ApplyOp):
            return self._update(op)
        outcome = super()._carry_out(op)
        match op:
            case LossOp() | LossInputOp():
                assert isinstance(outcome, Loss)
                return replace(self._loss(op), balance=outcome.balance)
            case ForwardOp():
                self._forward(op)
            case BackwardOp():
                self._add(op, self._backward(op, *self._gradient(op)))
            case InputOp():
                self._pending[op.microbatch, op.chunk.stage] = self._backward(op, *self._gradient(op))
            case WeightOp():
                self._add(op, self._pending.pop((op.microbatch, op.chunk.stage)))
            case PackOp():
                self._pack_values(op)
            case SumOp():
                self._sum_values(op)
            case JoinOp():
                return self._join_values(op)
            case SketchOp():
                return self._sketch_values(op)
            case _:
                pass
        return outcome

    def _layers(self, stage: StageIndex) -> list[tuple[int, F64]]:
        """Layers of a stage that is here and their parameters, in order."""
        spec, params, names = self.chunks[stage].stage, self._params[stage], self._model.layers
        return [
            (layer, reduce(np.add, (params[name] for name in names[layer])))
            for layer in range(spec.first, spec.stop)
        ]

    def _through(self, stage: StageIndex, x_BD: F64) -> list[F64]:
        """The input of each layer, and the output of the last."""
        values = [x_BD]
        for layer, theta in self._layers(stage):
            values.append(self._model.forward(layer, theta, values[-1]))
        return values

    def _forward(self, op: ForwardOp) -> None:
        passage = self._entered(op)
        if op.phase.keeps_graph:
            self._passages[op.microbatch, op.chunk.stage] = passage
        self._give_on(op, self._through(op.chunk.stage, passage.x_BD)[-1] * passage.own, passage.own)

    def _loss(self, op: LossOp | LossInputOp) -> Loss:
        passage = self._entered(op)
        error_BD = self._through(op.chunk.stage, passage.x_BD)[-1] - self._sample(op)[1]
        if isinstance(op, LossInputOp):
            self._pending[op.microbatch, op.chunk.stage] = self._backward(op, passage, error_BD)
        elif op.phase.trains:
            self._add(op, self._backward(op, passage, error_BD))
        return Loss(loss_sum=0.5 * float(np.sum(error_BD**2)), num_tokens=1)

    def _backward(self, op: ComputeOp, passage: NumericPassage, dy_BD: F64) -> _Gradients:
        """Gradients of the chunk's parameters; that of its input is handed over."""
        stage = op.chunk.stage
        inputs, gradients = self._through(stage, passage.x_BD), _Gradients()
        for (layer, theta), before_BD in reversed(list(zip(self._layers(stage), inputs, strict=False))):
            dy_BD, gradient = self._model.backward(layer, theta, before_BD, dy_BD)
            gradients += [(name, gradient) for name in self._model.layers[layer]]
        self._give_on(op, dy_BD / passage.before, passage.before, passage.own if op.kind.row.scores else None)
        return gradients

    def _add(self, op: ComputeOp, gradients: _Gradients) -> None:
        sums = self._sums[op.chunk.stage]
        for name, gradient in gradients:
            sums[name] = sums[name] + gradient

    # --- reductions ---

    def sums(self, group: GroupId, stage: StageIndex) -> F64:
        """Sums that a stage contributes to a group: its own ones where no plan lists the group."""
        names = self._names[stage].get(group, self._names[stage][Own(stage)])
        parts = [self._sums[stage][name].ravel() for name in names]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _pack_values(self, op: PackOp) -> None:
        split = np.array_split(self._sums_here(op.group), op.group.num_shards)
        for _, tensor in op.parcels:
            self._give(tensor, split[tensor.shard])

    def _sums_here(self, group: Group) -> F64:
        """Sums that the members here contribute to a group, added up."""
        mine = (member for member in group.members if member.worker == self.worker)
        return reduce(np.add, (self.sums(group.group, member.stage) for member in mine))

    def _sum_values(self, op: SumOp) -> None:
        self._give(op.total, reduce(np.add, (self._values(tensor) for tensor in op.parts)))

    def _join_values(self, op: JoinOp) -> Joined:
        group = op.group
        if not op.results:
            result = self._sums_here(group)
        else:
            result = np.concatenate([self._values(tensor) for tensor in op.results])
        self._results[group.group, op.attempt] = result
        return Joined(
            group=group.group,
            digest=result.tobytes().hex(),
            squared_norm=float(np.sum(result**2)),
            is_finite=bool(np.all(np.isfinite(result))),
        )

    def _sketch_values(self, op: SketchOp) -> Sketched:
        """Sketch by the names of parameters, whichever stages they are in."""
        names = next(x[op.asked.group] for x in self._names.values() if x.get(op.asked.group))
        result = self._results[op.asked.group, op.asked.attempt]
        draws = (
            rng.stream(op.asked.seed, name).choice([-1.0, 1.0], size=(SKETCH_LENGTH, _D * _D))
            for name in names
        )
        return Sketched(values=tuple((np.concatenate(list(draws), axis=1) @ result).tolist()))

    def _update(self, op: ApplyOp) -> OpOutcome:
        # In order: what several stages share is updated by the first of them.
        after = {stage: self._updated(stage, op) for stage in sorted(self.chunks)}
        outcome = super()._carry_out(op)
        self._params |= after
        if op.keeps_step:
            return outcome
        self._results.clear()
        for stage in self.chunks:
            self._sums[stage] = {name: np.zeros((_D, _D)) for name in after[stage]}
        self._passages.clear()
        self._pending.clear()
        return outcome
