"""A step without time and tensors, by the rules that schedules are written for: stopped anywhere, and gone on with.

It knows nothing of how the rest of a step is found; it only carries out what it is given, and counts.
"""

import random
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skein.plan.changing.unfinished import Held
from skein.plan.ops import ChunkOrder, Direction, Kept
from skein.plan.order import PlacedOp, ops_of
from skein.plan.plan import Path, Plan, PlannedOp, Schedule
from skein.protocol.messages.directives import ChunkVersion
from skein.protocol.messages.progress import ChunkProgress
from skein.protocol.messages.reports import Ack
from skein.types import ChunkRef, Generation, MicrobatchId, StageIndex, Step, WorkerId

Contribution = tuple[MicrobatchId, StageIndex]


@dataclass(slots=True)
class Chunk:
    """What one chunk has of the step, in the order in which it came about."""

    ledger: list[MicrobatchId] = field(default_factory=list)
    held: list[MicrobatchId] = field(default_factory=list)
    pending: list[MicrobatchId] = field(default_factory=list)
    outputs: list[MicrobatchId] = field(default_factory=list)
    gradients: list[MicrobatchId] = field(default_factory=list)

    def kept(self, what: Kept) -> list[MicrobatchId]:
        """Microbatches of which it has such things."""
        return {Kept.GRAPH: self.held, Kept.PENDING: self.pending}[what]

    @property
    def num_in_flight(self) -> int:
        return len(self.held) + len(self.pending)


class Halfway:
    """How far the workers have come. Whatever may run does so in an order that `luck` draws."""

    def __init__(self, chunks: Iterable[ChunkRef], luck: random.Random) -> None:
        self.chunks = {chunk: Chunk() for chunk in chunks}
        self.ran: list[PlacedOp] = []
        self._luck = luck

    def ledger(self) -> dict[Contribution, WorkerId]:
        """Who has accumulated what; fails if anything was accumulated twice."""
        pairs = [((m, at.stage), at.worker) for at, x in self.chunks.items() for m in x.ledger]
        owners = dict(pairs)
        assert len(owners) == len(pairs), f"accumulated twice: {sorted(pairs)}"
        return owners

    def held(self, paths: Sequence[Path]) -> frozenset[Held]:
        """What waits where its path goes."""
        visits = {(MicrobatchId(m), hop) for m, path in enumerate(paths) for hop in path.hops}
        return frozenset(
            (m, at.stage, kept)
            for at, x in self.chunks.items()
            for kept in Kept
            for m in x.kept(kept)
            if (m, at) in visits
        )

    def lose(self, workers: Collection[str]) -> None:
        """All that these had is gone."""
        self.chunks = {at: x for at, x in self.chunks.items() if at.worker not in workers}

    def keep(self, held: Collection[Held]) -> None:
        """All else that waits is given up, as if it had never been made."""
        given_up: set[tuple[MicrobatchId, ChunkRef]] = set()
        for at, x in self.chunks.items():
            for kept in Kept:
                gone = {m for m in x.kept(kept) if (m, at.stage, kept) not in held}
                given_up |= {(m, at) for m in gone}
                x.kept(kept)[:] = [m for m in x.kept(kept) if m not in gone]
        self.ran = [
            x for x in self.ran if not x.op.kind.row.leaves or (x.op.microbatch, x.chunk) not in given_up
        ]

    def run(
        self,
        paths: Sequence[Path],
        schedules: Iterable[Schedule],
        slots: Mapping[ChunkRef, int],
        *,
        given: Iterable[PlacedOp] = (),
        most: int | None = None,
    ) -> tuple[PlannedOp, ...]:
        """Carry out schedules, at most so many ops; gives the next op of each chunk that is not through.

        Args:
            given: ops whose input is sent again. All others get theirs from the ops before, which must be run too;
                what a path begins with, or what is here already, needs none.
        """
        queues: defaultdict[tuple[ChunkRef, ChunkOrder | PlannedOp], deque[PlannedOp]] = defaultdict(deque)
        for schedule in schedules:
            for op in schedule.ops:
                at = ChunkRef(stage=op.stage, worker=schedule.worker)
                queues[at, op.kind.row.lane or op].append(op)
        following: dict[PlannedOp, PlacedOp] = {}
        arrived = {placed.op: placed for placed in given}
        for m, path in enumerate(paths):
            way = list(ops_of(MicrobatchId(m), path))
            arrived |= {placed.op: placed for placed in way if not placed.at.inputs}
            following |= {way[number].op: placed for placed in way for number in placed.at.inputs}
        while most is None or most > 0:
            able = [
                queue
                for (at, _), queue in queues.items()
                if queue and self._may_run(queue[0], at, arrived, slots)
            ]
            if not able:
                break
            placed = arrived.pop(self._luck.choice(able).popleft())
            self.end(placed)
            most = None if most is None else most - 1
            if placed.op in following:
                arrived[following[placed.op].op] = following[placed.op]
        return tuple(queue[0] for queue in queues.values() if queue)

    def _may_run(
        self,
        op: PlannedOp,
        at: ChunkRef,
        arrived: Mapping[PlannedOp, PlacedOp],
        slots: Mapping[ChunkRef, int],
    ) -> bool:
        if op not in arrived or arrived[op].chunk != at:
            return False
        row, chunk = op.kind.row, self.chunks[at]
        has_slot = row.slots <= 0 or chunk.num_in_flight < slots[at]
        return has_slot and (row.uses is None or op.microbatch in chunk.kept(row.uses))

    def end(self, placed: PlacedOp) -> None:
        """An op is done."""
        chunk, m = self.chunks[placed.chunk], placed.op.microbatch
        row = placed.op.kind.row
        self.ran.append(placed)
        if row.uses:
            chunk.kept(row.uses).remove(m)
        if row.leaves:
            assert m not in chunk.kept(row.leaves), f"{placed} is here already"
            chunk.kept(row.leaves).append(m)
        if row.is_accumulating:
            chunk.ledger.append(m)
        if row.gives is Direction.FORWARD:
            chunk.outputs.append(m)
        elif row.gives is Direction.BACKWARD and placed.hop > 0:
            chunk.gradients.append(m)

    def acks(self, plan: Plan, *, version: int = 0) -> dict[WorkerId, Ack]:
        """What the workers say when a generation stops them here."""
        told: defaultdict[WorkerId, list[ChunkProgress]] = defaultdict(list)
        for at in sorted(self.chunks):
            told[at.worker].append(progress(at.stage, self.chunks[at]))
        stages = {stage.index: stage for stage in plan.stages}
        return {
            worker: Ack(
                generation=Generation(2),
                chunks=tuple(ChunkVersion(stage=stages[x.stage], version=Step(version)) for x in done),
                progress=tuple(done),
                backups=(),
            )
            for worker, done in told.items()
        }


def progress(stage: StageIndex, chunk: Chunk) -> ChunkProgress:
    """A chunk as its worker tells of it."""
    return ChunkProgress(
        stage=stage,
        ledger=tuple(chunk.ledger),
        forwards=tuple(sorted(chunk.held)),
        pending=tuple(sorted(chunk.pending)),
        outputs=tuple(sorted(set(chunk.outputs))),
        gradients=tuple(sorted(set(chunk.gradients))),
    )


def slots_of(plan: Plan) -> dict[ChunkRef, int]:
    return {x.chunk: x.slots for x in plan.chunks}


def num_ops(plan: Plan) -> int:
    return sum(len(schedule.ops) for schedule in plan.schedules)


def visits(plan: Plan) -> set[Contribution]:
    """Every contribution of a step."""
    return {(MicrobatchId(m), hop.stage) for m, path in enumerate(plan.paths) for hop in path.hops}
