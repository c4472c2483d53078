"""Choice of a worker's next compute op: of those whose input has arrived, the one that its schedule names first.

Rules of this file
- Of one chunk, ops that take a slot are begun strictly in the schedule's order, and so are those that add to its
  gradient. So sums are made in one order whatever the network does. Otherwise nothing waits for its turn: what is ready
  goes first.
- A forward starts only into a free slot; its slot is free again when that microbatch's backward has ended, and where
  that is split, its weight op.
- So what an op waits for is fixed: its input, the op before it in its chunk's order, and for the k-th forward of a
  chunk with n slots the backward number k - n. A worker is never idle while one of its ops is ready; hence a step can
  come to a halt only if these precedences run in a circle, which no timing makes or mends. `skein.plan.check` walks
  them.
- A microbatch enters the ledger once, when its last op on the chunk has ended; repeats are dropped on arrival.
- Evaluation comes after every training op that may run, in chunks' own slots, and a selection after that, in slots of
  its own: it goes on while steps are computed and committed, wherever these leave a worker idle.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from skein.numeric.sums import exact_sum
from skein.plan.ops import ChunkOrder, Direction, Kept, OpKind, only_using
from skein.plan.plan import Path, PlannedOp, Schedule
from skein.protocol.messages.array_rounds import ArrayRound
from skein.protocol.messages.directives import Assign, ChunkAssignment, Evaluate, Ledger, Origin
from skein.protocol.messages.reports import Balance
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import (
    COMPUTE_OPS,
    ComputeOp,
    HopKey,
    Loss,
    VisitOp,
    hop_key,
)
from skein.protocol.worker.scoring.scoring import OwnSlots, Scoring
from skein.types import MicrobatchId, StageIndex, Step, WorkerId

_Place = tuple[int, Path]
"""Hop and path of a microbatch that is ready."""


class _Listed(NamedTuple):
    """An op and its place in the schedule."""

    position: int
    op: PlannedOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Work that a chunk has done of a step: it outlives the generation under which it was done.

    `held` has the hop and the path of what ops have left there for later ones.
    """

    ledger: tuple[MicrobatchId, ...]
    held: Mapping[tuple[Kept, MicrobatchId], _Place]
    losses: Mapping[MicrobatchId, Loss]
    """Losses of those last hops whose contribution is in the ledger or put aside."""
    balances: Mapping[MicrobatchId, Balance]
    """Balances of the experts here, of microbatches that have gone forward."""


NEVER = Step(-1)
"""Version of a selection before the first."""
NONE_KEPT: Mapping[StageIndex, Step] = MappingProxyType({})
NOTHING = Carried(ledger=(), held={}, losses={}, balances={})


class _Chunk:
    """Queues and ledger of one chunk."""

    def __init__(self, assignment: ChunkAssignment, planned: Iterable[_Listed]) -> None:
        self.slots = assignment.slots
        self.evaluation_paths = assignment.evaluation_paths
        self.peak = self.peak_before = 0
        """Most microbatches that held a slot at once: in the step so far, and in the one before."""
        self._stage = assignment.stage.index
        self._whole_step = list(planned)
        self.arrived: dict[PlannedOp, _Place] = {}
        self.clear()

    def clear(self) -> None:
        """A step from its beginning."""
        self.arrived.clear()
        self.ledger: list[MicrobatchId] = []
        self.train_losses: dict[MicrobatchId, Loss] = {}
        self.balances: dict[MicrobatchId, Balance] = {}
        self.held: dict[tuple[Kept, MicrobatchId], _Place] = {}
        # What an evaluation of the older version has not released by now is refused as stale when it comes.
        self.in_flight = 0
        self._plan(self._whole_step)

    def resume(self, carried: Carried, left: Iterable[_Listed]) -> None:
        """A step that goes on: what was carried over counts, the ops in `left` are to come."""
        self.ledger = list(carried.ledger)
        counted = {*carried.ledger, *_pending(carried.held)}
        self.train_losses = {m: loss for m, loss in carried.losses.items() if m in counted}
        self.balances = dict(carried.balances)
        self.in_flight = len({microbatch for _, microbatch in carried.held})
        self._plan(left)
        for (kept, microbatch), place in carried.held.items():
            self.keep(kept, microbatch, place)

    def _plan(self, listed: Iterable[_Listed]) -> None:
        self._lanes: dict[ChunkOrder | None, list[_Listed]] = {lane: [] for lane in (*ChunkOrder, None)}
        for listed_op in listed:
            self._lanes[listed_op.op.kind.row.lane].append(listed_op)
        self.planned = {listed_op.op for lane in self._lanes.values() for listed_op in lane}

    @property
    def is_done(self) -> bool:
        return not self._lanes[ChunkOrder.SUMS]

    def due(self) -> list[_Listed]:
        """Ops that may run now: at most the next of each order, and all that keep to none."""
        if not self.arrived:
            return []
        lanes = self._lanes.items()
        return [x for lane, ops in lanes for x in (ops if lane is None else ops[:1]) if self._may_begin(x.op)]

    def _may_begin(self, op: PlannedOp) -> bool:
        row = op.kind.row
        has_slot = row.slots <= 0 or self.in_flight < self.slots
        # In a step that goes on, the gradient may be here before the activation has been made again.
        is_own_here = row.uses is None or (row.uses, op.microbatch) in self.held
        return has_slot and is_own_here and op in self.arrived

    def begin_op(self, listed_op: _Listed) -> _Place:
        """The op runs now."""
        op = listed_op.op
        if not op.kind.row.is_accumulating:
            self._lanes[op.kind.row.lane].remove(listed_op)
        if op.kind.row.slots > 0:
            self.in_flight += op.kind.row.slots
            self.peak = max(self.peak, self.in_flight)
        return self.arrived.pop(op)

    def keep(self, kept: Kept, microbatch: MicrobatchId, place: _Place) -> None:
        """An op has left something here; whatever waits for that alone is ready."""
        self.held[kept, microbatch] = place
        for kind in only_using(kept):
            op = PlannedOp(kind=kind, stage=self._stage, microbatch=microbatch)
            if op in self.planned:
                self.arrived[op] = place

    def accumulated(self, microbatch: MicrobatchId) -> None:
        """An op that adds to the gradient has ended."""
        self._lanes[ChunkOrder.SUMS].pop(0)
        self.ledger.append(microbatch)


class Occupancy(NamedTuple):
    """Numbers of microbatches at a worker: that hold a slot, held one at once in the newest step, and may.

    `pending` wait for their weight op; `peak_by_stage` has each chunk's own peak.
    """

    in_flight: int = 0
    peak: int = 0
    slots: int = 0
    pending: int = 0
    peak_by_stage: tuple[tuple[StageIndex, int], ...] = ()


class Pipeline:
    """The compute ops of one worker under one generation. It knows one step at a time, `step`.

    `kept`: older versions of which chunks here have kept parameters, for a selection.
    """

    def __init__(
        self,
        worker: WorkerId,
        chunks: Iterable[ChunkAssignment],
        schedule: Schedule,
        step: Step,
        *,
        kept: Mapping[StageIndex, Step] = NONE_KEPT,
    ) -> None:
        self.worker = worker
        self.step = step
        planned: dict[StageIndex, list[_Listed]] = {}
        for position, op in enumerate(schedule.ops):
            planned.setdefault(op.stage, []).append(_Listed(position, op))
        self._chunks = {x.stage.index: _Chunk(x, planned.get(x.stage.index, ())) for x in chunks}
        self._evaluation = Scoring(self._chunks, Phase.EVALUATE, step)
        self._kept = kept
        self._selection = self._selection_at(NEVER)
        self._selected: Step | None = None
        """Version of the newest selection that is over."""
        self._seen: set[HopKey] = set()
        self._peak = 0
        self._peak_before = 0

    def resume(self, carried: Mapping[StageIndex, Carried], schedule: Schedule) -> None:
        """Go on with a step: `carried` is what stays of each chunk's, `schedule` names the ops that are left."""
        left: dict[StageIndex, list[_Listed]] = {stage: [] for stage in self._chunks}
        for position, op in enumerate(schedule.ops):
            left[op.stage].append(_Listed(position, op))
        for stage, chunk in self._chunks.items():
            chunk.resume(carried.get(stage, NOTHING), left[stage])

    def carried(self) -> dict[StageIndex, Carried]:
        """Work that each chunk has done of the step."""
        return {
            stage: Carried(
                ledger=tuple(chunk.ledger),
                held=dict(sorted(chunk.held.items())),
                losses=dict(chunk.train_losses),
                balances=dict(chunk.balances),
            )
            for stage, chunk in self._chunks.items()
        }

    @property
    def num_in_flight(self) -> int:
        """Microbatches that hold a slot here."""
        return sum(chunk.in_flight for chunk in self._chunks.values())

    @property
    def occupancy(self) -> Occupancy:
        """Occupancy at the moment."""
        chunks = self._chunks.values()
        return Occupancy(
            in_flight=self.num_in_flight,
            peak=max(self._peak, self._peak_before),
            slots=sum(chunk.slots for chunk in chunks),
            pending=sum(len(_pending(chunk.held)) for chunk in chunks),
            peak_by_stage=tuple((stage, max(x.peak, x.peak_before)) for stage, x in self._chunks.items()),
        )

    def slots_taken(self) -> Iterator[tuple[int, int]]:
        """Numbers of slots at each chunk here: how many are taken, and how many there are."""
        return ((chunk.in_flight, chunk.slots) for chunk in self._chunks.values())

    @property
    def queue_depths(self) -> Mapping[str, int]:
        """Ready ops by kind."""
        depths = dict.fromkeys((kind.value for kind in OpKind), 0)
        for chunk in self._chunks.values():
            for op in chunk.arrived:
                depths[op.kind.value] += 1
        for scoring in (self._evaluation, self._selection):
            depths[OpKind.FORWARD.value] += scoring.num_forwards
            depths[OpKind.LOSS.value] += scoring.num_losses
        return depths

    def begin(self, phase: Phase, origins: Iterable[Origin], version: Step | None = None) -> None:
        """Make the microbatches that start here ready at their first hop; one evaluation is at a time.

        `version`: of the parameters, if that is not the step's.
        """
        step = self.step if version is None else version
        if not phase.trains:
            self._turn_to(phase, step)  # Where no path begins, what was scored before is still here.
        for origin in origins:
            self.arrive(
                HopTensor(
                    direction=Direction.FORWARD,
                    phase=phase,
                    step=step,
                    microbatch=origin.microbatch,
                    hop=0,
                    path=origin.path,
                )
            )

    def may_hold(self, tensor: HopTensor) -> bool:
        """Whether the tensor is for a chunk here, and in training for an op of its schedule."""
        if not 0 <= tensor.hop < len(tensor.path.hops):
            return False
        at = tensor.path.hops[tensor.hop]
        chunk = self._chunks.get(at.stage)
        if at.worker != self.worker or chunk is None:
            return False
        if tensor.outlasts_steps:
            is_here = tensor.step in (self.step, self._kept.get(at.stage))
            return (is_here and tensor.step > self._selection.step) or self.is_selecting(tensor.step)
        return not tensor.phase.trains or _planned(tensor) in chunk.planned

    def arrive(self, tensor: HopTensor) -> tuple[HopTensor, ...]:
        """Take a boundary tensor that is here (or, at hop 0, the data); an evaluation's release is passed upstream."""
        key = hop_key(tensor)
        if key in self._seen:
            return ()
        self._seen.add(key)
        chunk = self._chunks[tensor.path.hops[tensor.hop].stage]
        if not tensor.phase.trains:
            return self._turn_to(tensor.phase, tensor.step).arrive(tensor)
        op = _planned(tensor)
        assert op is not None, f"{tensor} is not held"
        chunk.arrived[op] = (tensor.hop, tensor.path)
        return ()

    def _selection_at(self, step: Step) -> Scoring:
        slots = {stage: OwnSlots(chunk.slots) for stage, chunk in self._chunks.items()}
        return Scoring(slots, Phase.SELECT, step)

    def _turn_to(self, phase: Phase, step: Step) -> Scoring:
        """Scoring of this purpose, of which an older one is over."""
        if not phase.outlasts_steps:
            self._evaluation.turn_to(phase)
            return self._evaluation
        if step > self._selection.step:
            self._selection = self._selection_at(step)
        return self._selection

    def is_selecting(self, version: Step) -> bool:
        """Whether a selection of the parameters at this version may go on here."""
        return version == self._selection.step and version != self._selected

    def selected(self) -> None:
        """Rows are chosen: nobody waits for any more of them."""
        self._selected = self._selection.step
        self._selection.clear()
        self._seen = {key for key in self._seen if not key.outlasts_steps}

    def next_op(self) -> VisitOp | None:
        """The op to run now, or None if nothing that is here may run."""
        due = [(listed_op, chunk) for chunk in self._chunks.values() for listed_op in chunk.due()]
        if not due:
            return self._evaluation.next_op() or self._selection.next_op()
        listed_op, chunk = min(due, key=lambda pair: pair[0].position)
        op = listed_op.op
        hop, path = chunk.begin_op(listed_op)
        self._peak = max(self._peak, self.num_in_flight)
        return COMPUTE_OPS[op.kind](
            phase=Phase.TRAIN, step=self.step, microbatch=op.microbatch, hop=hop, path=path
        )

    def end(self, op: ComputeOp, loss: Loss | None, balance: Balance | None = None) -> tuple[HopTensor, ...]:
        """Book an op that has ended; gives the headers of the tensor it made, to be sent on."""
        chunk = self._chunks[op.chunk.stage]
        row = op.kind.row
        assert (loss is not None) == row.scores, f"{op} has ended with {loss}"
        if row.leaves and op.phase.keeps_graph:
            chunk.keep(row.leaves, op.microbatch, (op.hop, op.path))
        if op.phase.trains:
            if row.uses:
                chunk.held.pop((row.uses, op.microbatch), None)
            if row.slots < 0:
                chunk.in_flight += row.slots
            if row.is_accumulating:
                chunk.accumulated(op.microbatch)
        if loss is not None:
            self._scored(op, chunk, loss)
        if balance is not None:
            # Whoever computes it again tells the same, or what counts then.
            chunk.balances[op.microbatch] = balance
        return op.outputs

    def _scored(self, op: ComputeOp, chunk: _Chunk, loss: Loss) -> None:
        if op.phase.trains:
            chunk.train_losses[op.microbatch] = loss
        else:
            self._turn_to(op.phase, op.step).scored(op.chunk.stage, op.microbatch, loss)

    def spoil(self, op: ComputeOp) -> None:
        """An op failed halfway: what was left for it is gone, and if it accumulates, all that its chunk has summed."""
        chunk = self._chunks[op.chunk.stage]
        for kept in Kept:
            chunk.held.pop((kept, op.microbatch), None)
        if op.kind.row.is_accumulating:
            chunk.ledger.clear()
            aside = _pending(chunk.held)
            chunk.train_losses = {m: loss for m, loss in chunk.train_losses.items() if m in aside}

    def advance(self, step: Step) -> None:
        """The step before `step` is committed: empty ledgers, the next step's numbers."""
        self._turn_over(step)
        self._peak, self._peak_before = 0, self._peak
        self._evaluation.clear()
        for chunk in self._chunks.values():
            chunk.peak, chunk.peak_before = 0, chunk.peak
            chunk.clear()

    def keep_on(self, step: Step) -> None:
        """The step before `step` is committed without this worker, which goes on with its own."""
        self._turn_over(step)

    def _turn_over(self, step: Step) -> None:
        self.step = self._evaluation.step = step
        self._seen = {key for key in self._seen if key.outlasts_steps}

    def ledger(self, stage: StageIndex) -> Ledger:
        """Ledger of the chunk of `stage`: what it has accumulated in this step, in that order."""
        return Ledger(stage=stage, worker=self.worker, microbatches=tuple(self._chunks[stage].ledger))

    def is_done(self, stage: StageIndex) -> bool:
        """Whether the chunk's ledger covers what was assigned."""
        return self._chunks[stage].is_done

    def train_loss_sum(self, stage: StageIndex) -> float:
        """Summed loss, in nats, of the last hops that this chunk has run in this step."""
        return exact_sum(loss.loss_sum for loss in self._chunks[stage].train_losses.values())

    def train_tokens(self, stage: StageIndex) -> tuple[int, ...]:
        """Valid tokens of each microbatch in the ledger of a chunk where paths end; nothing of another chunk."""
        chunk = self._chunks[stage]
        return tuple(chunk.train_losses[m].num_tokens for m in chunk.ledger) if chunk.train_losses else ()

    def balance(self, stage: StageIndex) -> Balance | None:
        """Balance of a chunk's experts over the microbatches in its ledger; None: it has no experts."""
        chunk = self._chunks[stage]
        return Balance.sum_of(chunk.balances.get(microbatch) for microbatch in chunk.ledger)

    def array(self, stage: StageIndex) -> ArrayRound | None:
        """Round of an array as far as its ledger goes, in that order; None of any other chunk."""
        chunk = self._chunks[stage]
        parts = (chunk.train_losses[m].array for m in chunk.ledger if m in chunk.train_losses)
        return ArrayRound.together([part for part in parts if part is not None])

    def evaluation_loss(
        self, stage: StageIndex, phase: Phase = Phase.EVALUATE
    ) -> tuple[tuple[MicrobatchId, ...], Loss]:
        """Microbatches of an evaluation or a selection whose loss this chunk has, ascending, and their sum."""
        scoring = self._selection if phase.outlasts_steps else self._evaluation
        return scoring.scores(stage)

    def expected_evaluations(self, stage: StageIndex, asked: Evaluate, num_paths: int) -> int:
        """Number of microbatches of an evaluation that visit this chunk, of those on `num_paths` paths."""
        num_visits = asked.num_visits(num_paths)
        return sum(num_visits.get(path, 0) for path in self._chunks[stage].evaluation_paths)


def evaluation_origins(assign: Assign, asked: Evaluate) -> tuple[Origin, ...]:
    """Microbatches of an evaluation that start at a worker, by the paths that they take."""
    paths = {origin.microbatch: origin.path for origin in assign.evaluation_origins}
    return tuple(
        Origin(microbatch=MicrobatchId(e), path=paths[MicrobatchId(way)])
        for e, way in enumerate(asked.ways(assign.num_evaluation_paths))
        if way in paths
    )


def _pending(held: Iterable[tuple[Kept, MicrobatchId]]) -> set[MicrobatchId]:
    """Microbatches whose weight gradients are put aside."""
    return {microbatch for kept, microbatch in held if kept is Kept.PENDING}


def _planned(tensor: HopTensor) -> PlannedOp | None:
    """The op that a training tensor is the input of; None: no op takes what a peer claims this to be."""
    kind = tensor.path.kind_taking(tensor.direction, tensor.hop)
    if kind is None:
        return None
    return PlannedOp(kind=kind, stage=tensor.path.hops[tensor.hop].stage, microbatch=tensor.microbatch)
