"""Plan of one generation: placement of chunks, paths of microbatches, schedules of workers, and groups that reduce
together."""

from dataclasses import dataclass

from skein.plan.agreeing.exchange import DIRECT, Broadcast, Pattern, Row, owning_place
from skein.plan.changing.clauses import Clauses
from skein.plan.ops import Direction, OpKind, PathOp, linked_hops, path_ops, taker_of
from skein.types import ChunkRef, GroupId, Layout, MicrobatchId, StageIndex, StageSpec, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Way of one microbatch, hop by hop; its gradient comes back the same way.

    It begins at stage 0 and may leave out and reorder the stages between its ends as far as the job allows. In the
    `loop` layout the last hop is the head stage, on the worker of the first hop.
    """

    hops: tuple[ChunkRef, ...]
    split: tuple[int, ...] = ()
    """Hops whose backward is an input op and a weight op, ascending; at others it is whole."""

    @property
    def ops(self) -> tuple[PathOp, ...]:
        """All ops of a training microbatch that takes this path, by number."""
        return path_ops(len(self.hops), self.split)

    @property
    def end(self) -> ChunkRef:
        """Chunk of the hop that makes the loss."""
        return self.hops[-1]

    @property
    def links(self) -> tuple[tuple[ChunkRef, ChunkRef], ...]:
        """Pairs of chunks that pass boundary tensors to each other, each once and the one nearer to the data first."""
        pairs = linked_hops(len(self.hops), self.split)
        return tuple((self.hops[lower], self.hops[higher]) for lower, higher in pairs)

    def is_end(self, hop: int) -> bool:
        """Whether the loss is made at `hop`."""
        return hop == len(self.hops) - 1

    def takers(self, direction: Direction, hop: int) -> tuple[int, ...]:
        """Hops that take the boundary tensor of such a direction that `hop` makes."""
        return direction.takers(hop, len(self.hops))

    def makers(self, direction: Direction, hop: int) -> tuple[int, ...]:
        """Hops that make the boundary tensors of such a direction that `hop` takes; none: nothing comes that way."""
        return direction.makers(hop, len(self.hops))

    def kind_taking(self, direction: Direction, hop: int) -> OpKind | None:
        """Kind of the training op that takes such a boundary tensor at `hop`; None: none does."""
        return taker_of(direction, is_last=self.is_end(hop), is_split=hop in self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """An op of one microbatch at one stage, of the worker whose schedule it is in."""

    kind: OpKind
    stage: StageIndex
    microbatch: MicrobatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that `worker` does for training microbatches in one step, in planned order.

    Of one chunk, forwards are taken strictly in this order, and so are losses and backwards; between them, and between
    chunks, what has arrived may go first (docs/adr/0005).
    """

    worker: WorkerId
    ops: tuple[PlannedOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternates:
    """Other holders of a chunk's stage, best first; none if it is alone."""

    chunk: ChunkRef
    others: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """A chunk and how many microbatches it may hold between forward and backward."""

    chunk: ChunkRef
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Seconds of a chunk's ops for one microbatch: a loss where paths end, else forward and backward; 0: no such op.

    Of a split backward, or loss, weight ops take `weight_s`; 0 where it is whole.
    """

    chunk: ChunkRef
    forward_s: float
    backward_s: float
    loss_s: float
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All that a visit takes of the worker's time."""
        return self.forward_s + self.backward_s + self.loss_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """Seconds for a boundary tensor of so many bytes from one worker to another."""

    sender: WorkerId
    receiver: WorkerId
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Chunks that reduce the same tensors, and which way shards go. `owner(i)` makes the result of shard i.

    `weights` has for each shard whose parts make it, with which weight and in which order; none: those of all members,
    1 each. Only where the owner sees all parts may there be any.
    """

    group: GroupId
    members: tuple[ChunkRef, ...]
    num_shards: int
    pattern: Pattern = DIRECT
    weights: tuple[Row, ...] = ()
    fragment: int = 0
    """Piece of a walker that the group is about, where a rule cuts it into several."""

    def owner(self, shard: int) -> ChunkRef:
        """The member that makes the result of `shard`: owners are workers in turn."""
        workers = self.workers
        worker = workers[owning_place(self.pattern, len(workers), shard)]
        return next(member for member in self.members if member.worker == worker)

    def contributors(self, shard: int) -> tuple[ChunkRef, ...]:
        """Members whose parts make `shard`, in order of summation."""
        if self.weights:
            return tuple(self.members[i] for i in self.weights[shard].members)
        if isinstance(self.pattern, Broadcast):
            return (self.owner(shard),)
        return self.members

    @property
    def weights_by_shard(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Weights of the parts of each shard, with their members by position, in order; of a leader, its own alone."""
        if isinstance(self.pattern, Broadcast):
            return (((self.pattern.leader, 1.0),),) * self.num_shards
        return tuple(row.pairs for row in self.weights)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Each worker once, in member order."""
        return tuple(dict.fromkeys(member.worker for member in self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions of one generation.

    `paths[m]` is training microbatch m's. Evaluation microbatch e takes `evaluation_paths[e % len(evaluation_paths)]`;
    those visit every stage once, in order. `schedules` has one entry per worker, sorted by worker, and `alternates` one
    per chunk, in the order of `chunks`. `chunk_times` and `transfer_times` are what the prediction rests on, sorted.
    """

    layout: Layout
    stages: tuple[StageSpec, ...]
    chunks: tuple[ChunkPlan, ...]
    paths: tuple[Path, ...]
    evaluation_paths: tuple[Path, ...]
    schedules: tuple[Schedule, ...]
    alternates: tuple[Alternates, ...]
    groups: tuple[Group, ...]
    predicted_step_s: float
    lower_bound_s: float
    reason: Clauses
    """Reason for this plan and not another."""
    chunk_times: tuple[ChunkTime, ...] = ()
    transfer_times: tuple[TransferTime, ...] = ()

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Every worker that holds a chunk, sorted."""
        return tuple(sorted({plan.chunk.worker for plan in self.chunks}))

    def holders(self, stage: StageIndex) -> tuple[WorkerId, ...]:
        """Workers that hold `stage`, in plan order."""
        return tuple(plan.chunk.worker for plan in self.chunks if plan.chunk.stage == stage)

    def microbatches_by_chunk(self) -> dict[ChunkRef, tuple[MicrobatchId, ...]]:
        """E(s) cut by holder: which microbatches each chunk accumulates in a step, in the order of its schedule."""
        visits: dict[ChunkRef, list[MicrobatchId]] = {plan.chunk: [] for plan in self.chunks}
        for schedule in self.schedules:
            for op in schedule.ops:
                if op.kind.row.is_accumulating:
                    visits[ChunkRef(stage=op.stage, worker=schedule.worker)].append(op.microbatch)
        return {chunk: tuple(ids) for chunk, ids in visits.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan exists for this job on this fleet; `reason` says what lacks, of memory also how many bytes (else 0)."""

    reason: str
    missing_bytes: int = 0
