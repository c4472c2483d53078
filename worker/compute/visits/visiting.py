"""Visits of microbatches: forwards, losses and the ways back, through the chunks that are here.

Rules of this file
- Operands are read in place and outputs are not copied: nobody writes to a tensor that has been handed over.
- In `LOOP` labels never leave the worker that the path began on; in `LINE` they go with what leaves a worker.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch import Tensor

from skein.errors import LocalError
from skein.plan.ops import Direction
from skein.protocol.messages.reports import Balance
from skein.protocol.worker.ops import (
    BackwardOp,
    ForwardOp,
    HopKey,
    InputOp,
    Loss,
    LossInputOp,
    LossOp,
    TensorKey,
    VisitOp,
    WeightOp,
    hop_key,
    outputs_of,
)
from skein.rng import key
from skein.types import ChunkRef
from worker.compute.chunk import Chunk
from worker.compute.holding import Holding
from worker.compute.payload import (
    CHOICES,
    GRADIENTS,
    REPEATED,
    VALID,
    Payload,
    crossed,
    crossing,
    labelled,
    pack,
    placed,
    ready,
    tensor_if_any,
    unpack,
)
from worker.compute.visits.left import Left, Passage
from worker.mesh.stage import MeshStage
from worker.model.base import Crossing, Labels
from worker.model.dropout import luck_of
from worker.model.sparse.junction import RoutedMicrobatch
from worker.model.stage import Stage
from worker.selection.scoring import loss_at_end
from worker.selection.traits import Traits

Outputs = dict[TensorKey, Payload]
Added = dict[HopKey, Payload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """Result of a visit: what the op answers, payloads to file, and what is added to those of earlier ops."""

    outcome: Loss | Balance | None = None
    outputs: Outputs = field(default_factory=dict)
    added: Added = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Given:
    """Input of a visit.

    Attributes:
        crossing: what the stage before gives, or samples.
        labels: those that came with it, or stay here.
        num_valid: how many are valid, if experts need to know.
        before: choices of the stage before.
        repeated: choices of this stage, from a visit that this one repeats.
    """

    crossing: Crossing
    labels: Labels | None
    num_valid: int | None
    before: Tensor | None = None
    repeated: Tensor | None = None


class Visiting:
    """Visits of the chunks of one holding; `left` has what ops of the step have left there for later ones."""

    def __init__(self, device: torch.device, holding: Holding, left: Left, traits: Traits) -> None:
        self.device = device
        self._holding = holding
        self._left = left
        self._traits = traits

    def run(self, op: VisitOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        """Carry out one op; raises as of `Compute.run`."""
        match op:
            case ForwardOp():
                return self._forward(op, operands)
            case LossOp() | LossInputOp():
                return self._loss(op, operands)
            case BackwardOp():
                return self._backward(op, operands)
            case InputOp():
                return self._input_gradient(op, operands)
            case WeightOp():
                self._left.add_up((op.microbatch, op.chunk.stage))
                return Visited()
            case _:
                assert_never(op)

    def _forward(self, op: ForwardOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        given = self._input(op, operands)
        x, labels, num_valid = given.crossing, given.labels, given.num_valid
        if labels is None and self._chunk(op.chunk).module.takes_labels:
            labels = self._samples(op)[1]
        classes = None if labels is None else labels.labels
        routed = self._routed(op, given)
        with (
            self._functions(op) as module,
            module.junction.visited(num_valid, routed, self._luck(op)) as visit,
        ):
            if op.phase.keeps_graph:
                y = module.onward(x.followed(is_sample=op.operand is None), classes)
            else:
                with torch.no_grad():
                    y = module.onward(x, classes)
        self._tell_routed(op, visit)
        if op.phase.keeps_graph:
            self._left.graphs[op.microbatch, op.chunk.stage] = Passage(
                given=x,
                made=y,
                classes=classes,
                num_valid=num_valid,
                before=given.before,
                choices=visit.choices,
            )
        if labels is not None and self._stay_here(op):
            self._left.labels[op.phase, op.microbatch] = labels
            labels = None
        tensors = crossing(y.detached(), num_valid, labels) | tensor_if_any(CHOICES, visit.choices)
        return Visited(outcome=visit.balance, outputs=self._given(op, tensors))

    def _luck(self, op: VisitOp) -> int | None:
        """Seed of what is drawn for this microbatch, whoever visits with it alike; None: nothing is."""
        job = self._holding.job
        if op.phase.trains and job.model.has_dropout:
            return luck_of(job.seed, op.step, op.microbatch * job.batch.microbatch_samples)
        has_luck = op.phase.trains and job.model.has_experts
        return key(job.seed, "routing", op.step, op.microbatch) if has_luck else None

    def _tell_routed(self, op: VisitOp, visit: RoutedMicrobatch) -> None:
        """Note how many choices of a microbatch went to each expert; of one that is made once more, not again."""
        chunk = self._chunk(op.chunk)
        first = max(0, chunk.stage.first - self._holding.job.model.inner_layers.start)
        self._left.gauges.routed(first, visit.counts)

    def _stay_here(self, op: ForwardOp) -> bool:
        """Whether the labels need not go along.

        In `LOOP` the end is where the path began, and whoever takes that place reads them again. Else they go wherever
        the path goes, though it may come back: who takes the place of the end may be no origin.
        """
        left = (op.path.end,) if self._holding.job.parallel.layout.comes_back else op.path.hops[op.hop :]
        return all(self._is_mine(hop) for hop in left)

    def _loss(self, op: LossOp | LossInputOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        if (own := self._chunk(op.chunk).own_loss(op, self._holding.batches, self._traits)) is not None:
            return Visited(outcome=own)
        given = self._input(op, operands)
        x, labels = given.crossing, given.labels
        self._left.labels.pop((op.phase, op.microbatch), None)
        if labels is None:
            # The path began here, and its loss has been computed once already.
            labels = self._samples(op)[1]
        if not op.phase.trains:
            with self._functions(op):
                scored = loss_at_end(op, self._chunk(op.chunk), x, labels, self._holding.job, self._traits)
            return Visited(outcome=scored)
        module = self._chunk(op.chunk).functions
        with module.junction.visited(given.num_valid, self._routed(op, given), self._luck(op)) as visit:
            followed = x.followed(is_sample=op.operand is None)
            total, num_valid = module.score(followed, labels.labels, labels.weights)
        self._tell_routed(op, visit)
        if isinstance(op, LossInputOp):
            self._left.put_aside((op.microbatch, op.chunk.stage), module.put_aside([total]))
        else:
            total.backward()  # type: ignore[no-untyped-call]
        self._keep_routed(op, visit.choices)
        outcome = Loss(loss_sum=total.item(), num_tokens=num_valid, balance=visit.balance)
        routed = tensor_if_any(CHOICES, given.before) | tensor_if_any(REPEATED, visit.choices)
        return Visited(outcome=outcome, outputs=self._handed_back(op, x, routed))

    def _backward(self, op: BackwardOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        tensors = self._gradients(op, operands)
        passage, balance = self._as_before(op, tensors)
        self._keep_routed(op, passage.choices)
        module = self._chunk(op.chunk).functions
        module.add_gradients(passage.made.differentiable, _in_order(tensors))
        outputs = self._handed_back(op, passage.given, tensor_if_any(CHOICES, passage.before))
        return Visited(outcome=balance, outputs=outputs, added=self._repeated(op, tensors))

    def _input_gradient(self, op: InputOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        tensors = self._gradients(op, operands)
        passage, balance = self._as_before(op, tensors)
        self._keep_routed(op, passage.choices)
        module = self._chunk(op.chunk).functions
        pending = module.put_aside(passage.made.differentiable, _in_order(tensors))
        self._left.put_aside((op.microbatch, op.chunk.stage), pending)
        outputs = self._handed_back(op, passage.given, tensor_if_any(CHOICES, passage.before))
        return Visited(outcome=balance, outputs=outputs, added=self._repeated(op, tensors))

    def _gradients(
        self, op: BackwardOp | InputOp, operands: Mapping[TensorKey, Payload]
    ) -> Mapping[str, Tensor]:
        """Gradients of what the op's forward has given, and what comes with them."""
        assert op.operand is not None
        return unpack(operands[op.operand], self.device)

    def _as_before(
        self, op: BackwardOp | InputOp, tensors: Mapping[str, Tensor]
    ) -> tuple[Passage, Balance | None]:
        """The forward that the gradients are of: where another worker made it and routed otherwise, made once more.

        The balance is that of a forward that was made once more.
        """
        passage = self._left.graphs.pop((op.microbatch, op.chunk.stage))
        told = tensors.get(CHOICES)
        if told is None or passage.choices is None or torch.equal(told, passage.choices):
            return passage, None
        module = self._chunk(op.chunk).functions
        with module.junction.visited(passage.num_valid, told, self._luck(op)) as visit:
            made = module.onward(passage.given, passage.classes)
        return replace(passage, made=made, choices=visit.choices), visit.balance

    def _repeated(self, op: BackwardOp | InputOp, tensors: Mapping[str, Tensor]) -> Added:
        """Choices that go with the activations which this hop gave, where they are handed over once more."""
        if REPEATED not in tensors:
            return {}
        made = outputs_of(Direction.FORWARD, op.phase, op.step, op.microbatch, op.hop, op.path)
        return {hop_key(header): pack({REPEATED: tensors[REPEATED]}) for header in made}

    def _keep_routed(self, op: VisitOp, choices: Tensor | None) -> None:
        """Note by which choices a gradient is made, where the step may be computed again to see whose are wrong."""
        if choices is not None and self._holding.job.checks.fraction:
            self._left.routed[op.step, op.microbatch, op.chunk.stage] = choices

    def _routed(self, op: ForwardOp | LossOp | LossInputOp, given: _Given) -> Tensor | None:
        """Choices that this stage has made of the microbatch before, here or elsewhere, as far as they are known."""
        if given.repeated is not None or not op.phase.trains:
            return given.repeated
        return self._left.routed.get((op.step, op.microbatch, op.chunk.stage))

    def _input(self, op: ForwardOp | LossOp | LossInputOp, operands: Mapping[TensorKey, Payload]) -> _Given:
        if op.operand is None:
            samples, labels = self._samples(op)
            weighs = op.phase.trains and self._holding.job.model.has_experts
            return _Given(Crossing(samples), labels, labels.num_valid if weighs else None)
        tensors = unpack(operands[op.operand], self.device)
        return _Given(
            crossed(tensors),
            labelled(tensors) or self._left.labels.get((op.phase, op.microbatch)),
            int(tensors[VALID]) if VALID in tensors else None,
            before=tensors.get(CHOICES),
            repeated=tensors.get(REPEATED),
        )

    def _samples(self, op: ForwardOp | LossOp | LossInputOp) -> tuple[Tensor, Labels]:
        """Samples and labels of a path that begins here."""
        batches = self._holding.batches
        if batches is None:
            raise LocalError("a path begins here, but no data were opened")
        return placed(batches.batch(op.phase, op.step, op.microbatch), self.device)

    def _handed_back(self, op: VisitOp, x: Crossing, routed: Mapping[str, Tensor]) -> Outputs:
        """Gradients of what the hop before gave, ready to be handed over with choices; the first hop has none."""
        if not op.outputs:
            return {}
        grads = {name: tensor.grad for name, tensor in zip(GRADIENTS, x.differentiable, strict=False)}
        found = {name: grad for name, grad in grads.items() if grad is not None}
        return self._given(op, found | dict(routed))

    def _given(self, op: VisitOp, tensors: Mapping[str, Tensor]) -> Outputs:
        """The op's boundary tensor, ready for each hop that takes it."""
        return {
            hop_key(x): ready(tensors, (x.path.hops[x.hop].worker,), self._holding.worker) for x in op.outputs
        }

    def _functions(self, op: VisitOp) -> AbstractContextManager[Stage | MeshStage]:
        """Computes what goes through the chunk: as it is, or in what outlasts steps as it was when that began."""
        chunk = self._chunk(op.chunk)
        return chunk.as_of(op.step) if op.phase.outlasts_steps else nullcontext(chunk.functions)

    def _chunk(self, ref: ChunkRef) -> Chunk:
        return self._holding.chunks[ref.stage]

    def _is_mine(self, ref: ChunkRef) -> bool:
        return ref.worker == self._holding.worker


def _in_order(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Gradients among tensors, in the order of `Crossing.differentiable`."""
    return [tensors[name] for name in GRADIENTS if name in tensors]
