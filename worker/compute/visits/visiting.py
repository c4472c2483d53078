"""Visits of microbatches: forwards, losses and the ways back, through the chunks that are here.

Rules of this file
- Operands are read in place and outputs are not copied: nobody writes to a tensor that has been handed over.
- In `LOOP` labels never leave the worker that the path began on; in `LINE` they go with what leaves a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import Tensor

from skein.errors import LocalError
from skein.protocol.messages.reports import Balance
from skein.protocol.worker.ops import (
    BackwardOp,
    ForwardOp,
    InputOp,
    Loss,
    LossInputOp,
    LossOp,
    TensorKey,
    VisitOp,
    WeightOp,
    hop_key,
)
from skein.types import ChunkRef
from worker.compute.chunk import Chunk
from worker.compute.holding import Holding
from worker.compute.payload import (
    GRADIENTS,
    VALID,
    Payload,
    crossed,
    crossing,
    labelled,
    placed,
    ready,
    unpack,
)
from worker.compute.visits.left import Left
from worker.model.base import Crossing, Labels
from worker.selection.scoring import loss_at_end
from worker.selection.traits import Traits

Outputs = dict[TensorKey, Payload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visited:
    """Result of a visit: what the op answers, and payloads to file."""

    outcome: Loss | Balance | None = None
    outputs: Outputs = field(default_factory=dict)


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
        x, labels, num_valid = self._input(op, operands)
        module = self._chunk(op.chunk).functions
        if labels is None and module.takes_labels:
            labels = self._samples(op)[1]
        classes = None if labels is None else labels.labels
        with module.junction.visited(num_valid) as visit:
            if op.phase.keeps_graph:
                y = module.onward(x.followed(is_sample=op.operand is None), classes)
                self._left.graphs[op.microbatch, op.chunk.stage] = (x, y)
            else:
                with torch.no_grad():
                    y = module.onward(x, classes)
        if labels is not None and self._stay_here(op):
            self._left.labels[op.phase, op.microbatch] = labels
            labels = None
        return Visited(
            outcome=visit.balance, outputs=self._given(op, crossing(y.detached(), num_valid, labels))
        )

    def _stay_here(self, op: ForwardOp) -> bool:
        """Whether the labels need not go along.

        In `LOOP` the end is where the path began, and whoever takes that place reads them again. Else they go wherever
        the path goes, though it may come back: who takes the place of the end may be no origin.
        """
        left = (op.path.end,) if self._holding.job.parallel.layout.comes_back else op.path.hops[op.hop :]
        return all(self._is_mine(hop) for hop in left)

    def _loss(self, op: LossOp | LossInputOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        if (own := self._chunk(op.chunk).own_loss(op, self._holding.batches)) is not None:
            return Visited(outcome=own)
        x, labels, valid_before = self._input(op, operands)
        self._left.labels.pop((op.phase, op.microbatch), None)
        if labels is None:
            # The path began here, and its loss has been computed once already.
            labels = self._samples(op)[1]
        module = self._chunk(op.chunk).functions
        if not op.phase.trains:
            return Visited(
                outcome=loss_at_end(op, self._chunk(op.chunk), x, labels, self._holding.job, self._traits)
            )
        with module.junction.visited(valid_before) as visit:
            followed = x.followed(is_sample=op.operand is None)
            total, num_valid = module.score(followed, labels.labels, labels.weights)
        if isinstance(op, LossInputOp):
            self._left.put_aside((op.microbatch, op.chunk.stage), module.put_aside([total]))
        else:
            total.backward()  # type: ignore[no-untyped-call]
        outcome = Loss(loss_sum=total.item(), num_tokens=num_valid, balance=visit.balance)
        return Visited(outcome=outcome, outputs=self._handed_back(op, x))

    def _backward(self, op: BackwardOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        x, y = self._left.graphs.pop((op.microbatch, op.chunk.stage))
        self._chunk(op.chunk).functions.add_gradients(y.differentiable, self._gradients(op, operands))
        return Visited(outputs=self._handed_back(op, x))

    def _input_gradient(self, op: InputOp, operands: Mapping[TensorKey, Payload]) -> Visited:
        place = op.microbatch, op.chunk.stage
        x, y = self._left.graphs.pop(place)
        module = self._chunk(op.chunk).functions
        self._left.put_aside(place, module.put_aside(y.differentiable, self._gradients(op, operands)))
        return Visited(outputs=self._handed_back(op, x))

    def _gradients(self, op: BackwardOp | InputOp, operands: Mapping[TensorKey, Payload]) -> list[Tensor]:
        """Gradients of what the op's forward has given."""
        assert op.operand is not None
        tensors = unpack(operands[op.operand], self.device)
        return [tensors[name] for name in GRADIENTS if name in tensors]

    def _input(
        self, op: ForwardOp | LossOp | LossInputOp, operands: Mapping[TensorKey, Payload]
    ) -> tuple[Crossing, Labels | None, int | None]:
        """The op's input, the labels if they came with it or stay here, and how many are valid if experts need that."""
        if op.operand is None:
            samples, labels = self._samples(op)
            weighs = op.phase.trains and self._holding.job.model.has_experts
            return Crossing(samples), labels, labels.num_valid if weighs else None
        tensors = unpack(operands[op.operand], self.device)
        labels_here = labelled(tensors) or self._left.labels.get((op.phase, op.microbatch))
        return crossed(tensors), labels_here, int(tensors[VALID]) if VALID in tensors else None

    def _samples(self, op: ForwardOp | LossOp | LossInputOp) -> tuple[Tensor, Labels]:
        """Samples and labels of a path that begins here."""
        batches = self._holding.batches
        if batches is None:
            raise LocalError("a path begins here, but no data were opened")
        return placed(batches.batch(op.phase, op.step, op.microbatch), self.device)

    def _handed_back(self, op: VisitOp, x: Crossing) -> Outputs:
        """Gradients of what the hop before gave, ready to be handed over; the first hop has none."""
        if not op.outputs:
            return {}
        grads = {name: tensor.grad for name, tensor in zip(GRADIENTS, x.differentiable, strict=False)}
        return self._given(op, {name: grad for name, grad in grads.items() if grad is not None})

    def _given(self, op: VisitOp, tensors: Mapping[str, Tensor]) -> Outputs:
        """The op's boundary tensor, ready for each hop that takes it."""
        return {
            hop_key(x): ready(tensors, (x.path.hops[x.hop].worker,), self._holding.worker) for x in op.outputs
        }

    def _chunk(self, ref: ChunkRef) -> Chunk:
        return self._holding.chunks[ref.stage]

    def _is_mine(self, ref: ChunkRef) -> bool:
        return ref.worker == self._holding.worker
