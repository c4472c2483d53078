"""Forwards at one worker that nothing is learned from: which is next, and which losses are here.

Rules of this file
- Losses come first, then forwards, by microbatch, and of one microbatch the hop nearest to its loss.
- A forward holds a slot until an empty gradient comes back, so nothing piles up before a slow stage. Paths visit all
  stages in order: who holds a slot waits for later stages alone, and the last never waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from skein.numeric.sums import exact_sum
from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.protocol.messages.array_rounds import added_scores
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import ForwardOp, Loss, LossOp, outputs_of
from skein.types import MicrobatchId, StageIndex, Step

_Waiting = tuple[MicrobatchId, int, Path]
"""A microbatch that is ready, its hop and its path."""


class Slotted(Protocol):
    """Slots of a chunk, and how many are taken."""

    slots: int
    in_flight: int


@dataclass(slots=True)
class OwnSlots:
    """Slots that nobody else takes of."""

    slots: int
    in_flight: int = 0


class Scoring:
    """Forwards of one purpose at one version of the parameters.

    Args:
        slots: of each chunk here.
    """

    def __init__(self, slots: Mapping[StageIndex, Slotted], phase: Phase, step: Step) -> None:
        self.phase = phase
        self.step = step
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget everything but slots that are taken."""
        self._losses: list[_Waiting] = []
        self._forwards: dict[StageIndex, list[_Waiting]] = {stage: [] for stage in self._slots}
        self._scores: dict[StageIndex, dict[MicrobatchId, Loss]] = {stage: {} for stage in self._slots}

    def turn_to(self, phase: Phase) -> None:
        """Forget losses of another purpose, which is over."""
        if phase is not self.phase:
            self.phase = phase
            for scores in self._scores.values():
                scores.clear()

    @property
    def num_forwards(self) -> int:
        """Forwards that wait."""
        return sum(map(len, self._forwards.values()))

    @property
    def num_losses(self) -> int:
        """Losses that wait."""
        return len(self._losses)

    def arrive(self, tensor: HopTensor) -> tuple[HopTensor, ...]:
        """Take a boundary tensor that is here; a release frees its slot, and is passed upstream."""
        stage = tensor.path.hops[tensor.hop].stage
        if tensor.direction is Direction.BACKWARD:
            self._slots[stage].in_flight -= 1
            return outputs_of(
                Direction.BACKWARD, tensor.phase, tensor.step, tensor.microbatch, tensor.hop, tensor.path
            )
        queue = self._losses if tensor.path.is_end(tensor.hop) else self._forwards[stage]
        heappush(queue, (tensor.microbatch, tensor.hop, tensor.path))
        return ()

    def next_op(self) -> LossOp | ForwardOp | None:
        """The op to run now; None: nothing that is here may run."""
        if self._losses:
            microbatch, hop, path = heappop(self._losses)
            return LossOp(phase=self.phase, step=self.step, microbatch=microbatch, hop=hop, path=path)
        queues = self._forwards.items()
        free = [
            (queue[0][0], -queue[0][1], stage)
            for stage, queue in queues
            if queue and self._slots[stage].in_flight < self._slots[stage].slots
        ]
        if not free:
            return None
        # Oldest microbatch first; of one microbatch the hop nearest to its loss.
        _, _, stage = min(free)
        self._slots[stage].in_flight += 1
        microbatch, hop, path = heappop(self._forwards[stage])
        return ForwardOp(phase=self.phase, step=self.step, microbatch=microbatch, hop=hop, path=path)

    def scored(self, stage: StageIndex, microbatch: MicrobatchId, loss: Loss) -> None:
        """A microbatch has its loss."""
        self._scores[stage][microbatch] = loss

    def scores(self, stage: StageIndex) -> tuple[tuple[MicrobatchId, ...], Loss]:
        """Microbatches whose loss a chunk has, ascending, and their sum."""
        found = self._scores[stage]
        listed = list(found.values())
        total = Loss(
            loss_sum=exact_sum(loss.loss_sum for loss in listed),
            num_tokens=sum(loss.num_tokens for loss in listed),
            digest=listed[0].digest if listed else "",
            rows=added_scores(loss.rows for loss in listed),
        )
        return tuple(sorted(found)), total
