"""Which compute op a worker runs next: backward before loss before forward, the oldest microbatch first.

Rules of this file
- A chunk takes its microbatches of a training step in ascending order, forward and backward. So sums are made in one
  order whatever the network does, and the oldest microbatch never waits for a slot that a younger one holds.
- A forward starts only into a free slot; its slot is free again when that microbatch's backward has ended.
- A microbatch enters the ledger once, when its last op on the chunk has ended; repeats are dropped on arrival.
- An evaluation microbatch holds its slot until an empty gradient comes back, so nothing piles up before a slow stage.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush

from skein.plan.plan import Path
from skein.protocol.messages import ChunkAssignment, Direction, HopTensor, Ledger, Origin, Phase
from skein.protocol.ops import BackwardOp, ForwardOp, Loss, LossOp, exact_sum, hop_key
from skein.types import MicrobatchId, StageIndex, Step, WorkerId

ComputeOp = ForwardOp | LossOp | BackwardOp
_Place = tuple[int, Path]
"""Hop and path of a microbatch that is ready."""


class _Chunk:
    """One chunk's queues and ledger."""

    def __init__(self, assignment: ChunkAssignment) -> None:
        self.slots = assignment.slots
        self.order = assignment.microbatches
        self.in_flight = 0
        self.evaluation_forwards: list[tuple[MicrobatchId, int, Path]] = []
        self.evaluation_losses: dict[MicrobatchId, Loss] = {}
        self.clear()

    def clear(self) -> None:
        self.num_forwards = 0
        self.forwards: dict[MicrobatchId, _Place] = {}
        self.losses: dict[MicrobatchId, _Place] = {}
        self.backwards: dict[MicrobatchId, _Place] = {}
        self.ledger: list[MicrobatchId] = []
        self.train_losses: list[Loss] = []

    def accumulates_next(self) -> MicrobatchId | None:
        done = len(self.ledger)
        return self.order[done] if done < len(self.order) else None

    def forwards_next(self) -> MicrobatchId | None:
        return self.order[self.num_forwards] if self.num_forwards < len(self.order) else None


class Pipeline:
    """The compute ops of one worker under one generation. It knows one step at a time, `step`."""

    def __init__(self, worker: WorkerId, chunks: Iterable[ChunkAssignment], step: Step) -> None:
        self.worker = worker
        self.step = step
        self._chunks = {chunk.stage.index: _Chunk(chunk) for chunk in chunks}
        self._evaluation_losses: list[tuple[MicrobatchId, int, Path]] = []
        self._seen: set[object] = set()

    @property
    def num_in_flight(self) -> int:
        """Microbatches that hold a slot here."""
        return sum(chunk.in_flight for chunk in self._chunks.values())

    def slots_taken(self) -> Iterator[tuple[int, int]]:
        """Of each chunk here, how many slots are taken and how many there are."""
        return ((chunk.in_flight, chunk.slots) for chunk in self._chunks.values())

    @property
    def queue_depths(self) -> Mapping[str, int]:
        """Ready ops by kind."""
        chunks = self._chunks.values()
        return {
            "forward": sum(len(chunk.forwards) + len(chunk.evaluation_forwards) for chunk in chunks),
            "loss": sum(len(chunk.losses) for chunk in chunks) + len(self._evaluation_losses),
            "backward": sum(len(chunk.backwards) for chunk in chunks),
        }

    def begin(self, phase: Phase, origins: Iterable[Origin]) -> None:
        """Make the microbatches that start here ready at their first hop."""
        for origin in origins:
            self.arrive(
                HopTensor(
                    direction=Direction.FORWARD,
                    phase=phase,
                    step=self.step,
                    microbatch=origin.microbatch,
                    hop=0,
                    path=origin.path,
                )
            )

    def may_hold(self, tensor: HopTensor) -> bool:
        """Whether the tensor is for a chunk here that was assigned its microbatch."""
        if not 0 <= tensor.hop < len(tensor.path.hops):
            return False
        at = tensor.path.hops[tensor.hop]
        chunk = self._chunks.get(at.stage)
        if at.worker != self.worker or chunk is None:
            return False
        return tensor.phase is Phase.EVALUATE or tensor.microbatch in chunk.order

    def arrive(self, tensor: HopTensor) -> HopTensor | None:
        """Take a boundary tensor that is here (or, at hop 0, the data); an evaluation's release is passed upstream."""
        key = hop_key(tensor)
        if key in self._seen:
            return None
        self._seen.add(key)
        chunk = self._chunks[tensor.path.hops[tensor.hop].stage]
        is_last = tensor.hop == len(tensor.path.hops) - 1
        if tensor.phase is Phase.EVALUATE:
            return self._arrive_evaluation(chunk, tensor, is_last=is_last)
        queue = chunk.backwards
        if tensor.direction is Direction.FORWARD:
            queue = chunk.losses if is_last else chunk.forwards
        queue[tensor.microbatch] = (tensor.hop, tensor.path)
        return None

    def _arrive_evaluation(self, chunk: _Chunk, tensor: HopTensor, *, is_last: bool) -> HopTensor | None:
        if tensor.direction is Direction.BACKWARD:
            chunk.in_flight -= 1
            return _passed_on(tensor, Direction.BACKWARD)
        queue = self._evaluation_losses if is_last else chunk.evaluation_forwards
        heappush(queue, (tensor.microbatch, tensor.hop, tensor.path))
        return None

    def next_op(self) -> ComputeOp | None:
        """The op to run now, or None if nothing that is here may run."""
        return self._next_backward() or self._next_loss() or self._next_forward()

    def _next_backward(self) -> BackwardOp | None:
        due = [
            (m, c)
            for c in self._chunks.values()
            if (m := c.accumulates_next()) in c.backwards and m is not None
        ]
        if not due:
            return None
        microbatch, chunk = min(due, key=lambda pair: pair[0])
        hop, path = chunk.backwards.pop(microbatch)
        return BackwardOp(step=self.step, microbatch=microbatch, hop=hop, path=path)

    def _next_loss(self) -> LossOp | None:
        due = [
            (m, c) for c in self._chunks.values() if (m := c.accumulates_next()) in c.losses and m is not None
        ]
        if due:
            microbatch, chunk = min(due, key=lambda pair: pair[0])
            hop, path = chunk.losses.pop(microbatch)
            return LossOp(phase=Phase.TRAIN, step=self.step, microbatch=microbatch, hop=hop, path=path)
        if self._evaluation_losses:
            microbatch, hop, path = heappop(self._evaluation_losses)
            return LossOp(phase=Phase.EVALUATE, step=self.step, microbatch=microbatch, hop=hop, path=path)
        return None

    def _next_forward(self) -> ForwardOp | None:
        best: tuple[MicrobatchId, int, Phase, _Chunk] | None = None
        for chunk in self._chunks.values():
            if chunk.in_flight >= chunk.slots:
                continue
            microbatch = chunk.forwards_next()
            if microbatch is not None and microbatch in chunk.forwards:
                found = (microbatch, -chunk.forwards[microbatch][0], Phase.TRAIN, chunk)
            elif chunk.evaluation_forwards:
                first = chunk.evaluation_forwards[0]
                found = (first[0], -first[1], Phase.EVALUATE, chunk)
            else:
                continue
            # Oldest microbatch first; of one microbatch the hop nearest to its loss.
            if best is None or found[:2] < best[:2]:
                best = found
        if best is None:
            return None
        microbatch, _, phase, chunk = best
        chunk.in_flight += 1
        if phase is Phase.TRAIN:
            chunk.num_forwards += 1
            hop, path = chunk.forwards.pop(microbatch)
        else:
            _, hop, path = heappop(chunk.evaluation_forwards)
        return ForwardOp(phase=phase, step=self.step, microbatch=microbatch, hop=hop, path=path)

    def end(self, op: ComputeOp, loss: Loss | None) -> HopTensor | None:
        """Book an op that has ended; gives the header of the tensor it made, to be sent on."""
        chunk = self._chunks[op.chunk.stage]
        match op:
            case ForwardOp():
                return output_of(op.phase, Direction.FORWARD, op.step, op.microbatch, op.hop, op.path)
            case BackwardOp():
                chunk.in_flight -= 1
                chunk.ledger.append(op.microbatch)
                return output_of(Phase.TRAIN, Direction.BACKWARD, op.step, op.microbatch, op.hop, op.path)
            case LossOp():
                assert loss is not None
                if op.phase is Phase.TRAIN:
                    chunk.num_forwards += 1
                    chunk.ledger.append(op.microbatch)
                    chunk.train_losses.append(loss)
                else:
                    chunk.evaluation_losses[op.microbatch] = loss
                return output_of(op.phase, Direction.BACKWARD, op.step, op.microbatch, op.hop, op.path)

    def advance(self, step: Step) -> None:
        """The step before `step` is committed: empty ledgers, the next step's numbers."""
        self.step = step
        self._seen.clear()
        for chunk in self._chunks.values():
            chunk.clear()
            # What an evaluation of the older version has not released by now is refused as stale when it comes.
            chunk.in_flight = 0
            chunk.evaluation_losses.clear()

    def ledger(self, stage: StageIndex) -> Ledger:
        """What the chunk of `stage` has accumulated in this step."""
        return Ledger(stage=stage, worker=self.worker, microbatches=tuple(self._chunks[stage].ledger))

    def is_done(self, stage: StageIndex) -> bool:
        """Whether the chunk's ledger covers what was assigned."""
        return self._chunks[stage].accumulates_next() is None

    def train_loss(self, stage: StageIndex) -> Loss:
        """Summed loss and valid tokens of the last hops that this chunk has run in this step."""
        return _total(self._chunks[stage].train_losses)

    def evaluation_loss(self, stage: StageIndex) -> tuple[tuple[MicrobatchId, ...], Loss]:
        """Evaluation microbatches whose loss this chunk has, ascending, and their sum."""
        losses = self._chunks[stage].evaluation_losses
        return tuple(sorted(losses)), _total(losses.values())

    def expected_evaluations(self, stage: StageIndex, num_evaluation: int, num_paths: int) -> int:
        """How many of `num_evaluation` microbatches visit this chunk: evaluation e takes path e modulo `num_paths`."""
        rounds, rest = divmod(num_evaluation, num_paths)
        order = self._chunks[stage].order
        return rounds * len(order) + sum(1 for microbatch in order if microbatch < rest)


def _total(losses: Iterable[Loss]) -> Loss:
    listed = list(losses)
    return Loss(
        loss_sum=exact_sum(loss.loss_sum for loss in listed),
        num_tokens=sum(loss.num_tokens for loss in listed),
    )


def _passed_on(tensor: HopTensor, direction: Direction) -> HopTensor | None:
    return output_of(tensor.phase, direction, tensor.step, tensor.microbatch, tensor.hop, tensor.path)


def output_of(
    phase: Phase, direction: Direction, step: Step, microbatch: MicrobatchId, hop: int, path: Path
) -> HopTensor | None:
    """Header of the tensor that leaves `hop` in `direction`; None before the first hop."""
    target = hop + 1 if direction is Direction.FORWARD else hop - 1
    if target < 0:
        return None
    return HopTensor(
        direction=direction, phase=phase, step=step, microbatch=microbatch, hop=target, path=path
    )
