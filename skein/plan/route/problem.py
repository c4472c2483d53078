"""The path-scheduling problem, as arrays: who computes what in how long, what a transfer takes, what is allowed.

Words of this package: stages are cut already; a *chunk* is a place in a stage that some worker fills (chunks are
numbered stage by stage); a *routing* fills the places, gives each microbatch its way over chunks, and puts all ops in
one order.

Source: SkipPipe (arXiv 2502.19913) and its code; unequal workers, directed links that can be busy, several chunks per
worker, the line layout and aggregation are added.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from skein.plan.ops import COSTS, Direction, OpKind, PathOp, kinds_at, path_ops
from skein.types import Layout

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduction:
    """Exchange of a stage's holders after its last backward.

    Args:
        num_bytes: (num_stages,) gradient of one stage.
        latency_s: (num_workers, num_workers) one way; row sends to column.
        bytes_per_s: same shape, infinite diagonal.
        tied_bytes: of tensors that the first and the last stage share, which the holders of both sum up together.
        num_tied: pairs of stages that share so many bytes each: the first so many stages, and as many last ones.
        least_shard_bytes: no part of a gradient is cut smaller, so small ones have fewer owners than holders; 0: each
            holder owns a part.
    """

    num_bytes: F64
    latency_s: F64
    bytes_per_s: F64
    tied_bytes: float = 0.0
    num_tied: int = 1
    least_shard_bytes: float = 0.0

    def tied_to(self, stage: int) -> int | None:
        """The later stage that `stage` shares tensors with, if any."""
        return (
            len(self.num_bytes) - self.num_tied + stage if self.tied_bytes and stage < self.num_tied else None
        )

    def part_bytes(self, num_bytes: float, num_holders: int) -> float:
        """Bytes that an owner receives, and then sends, if so many holders sum so much: a shard from and to each."""
        num_shards = num_holders
        if self.least_shard_bytes > 0:
            num_shards = min(num_holders, max(1, math.ceil(num_bytes / self.least_shard_bytes)))
        return (num_holders - 1) * num_bytes / num_shards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedMemory:
    """Memory that the chunks of a worker share, in bytes.

    Args:
        memory_bytes: (num_workers,)
        fixed_bytes: (num_stages,) of a chunk without its slots.
        slot_bytes: (num_stages,) of each of its slots.
        spared_bytes: what two stages take less on one worker than on two, where that is anything.
    """

    memory_bytes: I64
    fixed_bytes: I64
    slot_bytes: I64
    spared_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def fixed_by_worker(self, worker_of: I64, stage_of: I64) -> I64:
        """(num_workers,) bytes of the chunks of each worker without their slots."""
        fixed = np.zeros(len(self.memory_bytes), np.int64)
        np.add.at(fixed, worker_of, self.fixed_bytes[stage_of])
        for (one, other), num_bytes in self.spared_bytes.items():
            fixed[np.intersect1d(worker_of[stage_of == one], worker_of[stage_of == other])] -= num_bytes
        return fixed


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A step to be planned. Times in seconds; workers are numbered 0 ... num_workers - 1.

    Args:
        name: for messages.
        layout: LOOP: the loss is computed by the origin's worker, the path has `path_len` hops and returns there.
            LINE: the last hop is on the last stage, always, and computes the loss.
        stage_sizes: chunks of each stage; stage 0 holds the origins.
        path_len: stages that a microbatch visits, stage 0 included (LINE: the last one too).
        num_by_origin: microbatches that start at each chunk of stage 0.
        max_swaps: hops of one path that may land below the highest stage so far, and then exactly one below it.
        max_jump: how far above the highest stage so far a hop may land.
        forward_s: (num_workers, num_stages) forward of one microbatch.
        backward_s: same shape.
        loss_s: (num_workers,) the op at the path's end. LINE: forward, loss and backward of the last stage together.
        transfer_s: (num_workers, num_workers) one boundary tensor from row to column, latency included, zero diagonal.
        wire_s: same shape, seconds of it that sender's uplink and receiver's downlink carry nothing else; all zero:
            links carry any number of transfers at once.
        slots: (num_workers, num_stages) microbatches that a chunk may hold between forward and backward.
        memory: what an order may have slots of its own out of; None: it may not.
        reduction: None if aggregation is left out.
        move_s: (num_workers, num_stages) what it costs to bring a stage to a worker, spread over the steps to come; 0
            where it is held already. None: all 0.
        apart: runs of stages of which a worker holds one chunk at most; of any stage it holds one.
        barred: (num_workers, num_stages) where no chunk of a stage may be; None: nowhere.
        chunks_per_worker: at most so many; None: as many as are needed if all hold equally many.
        is_split: backwards are an input op and a weight op each, but that of the loss of a LOOP.
        weight_s: (num_workers, num_stages) part of `backward_s` that weight ops take; None: a usual share of it.
    """

    name: str
    layout: Layout
    stage_sizes: tuple[int, ...]
    path_len: int
    num_by_origin: tuple[int, ...]
    max_swaps: int
    max_jump: int
    forward_s: F64
    backward_s: F64
    loss_s: F64
    transfer_s: F64
    wire_s: F64
    slots: I64
    memory: SharedMemory | None = None
    reduction: Reduction | None = None
    move_s: F64 | None = None
    apart: tuple[range, ...] = ()
    barred: Mask | None = None
    chunks_per_worker: int | None = None
    is_split: bool = False
    weight_s: F64 | None = None

    @property
    def num_workers(self) -> int:
        return len(self.loss_s)

    @property
    def num_stages(self) -> int:
        return len(self.stage_sizes)

    @property
    def num_chunks(self) -> int:
        return sum(self.stage_sizes)

    @property
    def most_chunks(self) -> int:
        """Chunks that a worker may hold."""
        return self.chunks_per_worker or -(-self.num_chunks // self.num_workers)

    @property
    def num_microbatches(self) -> int:
        return sum(self.num_by_origin)

    @property
    def num_hops(self) -> int:
        """Hops that run forward and backward; the loss apart."""
        return self.path_len + 1 - self.layout.num_ends

    @property
    def ops(self) -> tuple[PathOp, ...]:
        """The ops of each microbatch, by number; `hop` is the column of its path."""
        return path_ops(self.num_hops + 1, self.split)

    @property
    def split(self) -> tuple[int, ...]:
        """Hops whose backward is split, as of a `Path`."""
        return tuple(range(self.path_len)) if self.is_split else ()

    @property
    def num_ops(self) -> int:
        """Ops of all microbatches."""
        return self.num_microbatches * len(self.ops)

    @cached_property
    def op_s(self) -> F64:
        """(num_costs, num_workers, num_stages) seconds of an op, by whose seconds it takes (`skein.plan.ops.COSTS`)."""
        loss_s = np.broadcast_to(np.asarray(self.loss_s, np.float64)[:, None], self.forward_s.shape)
        times = self.forward_s, self.backward_s, loss_s, self.weight_s
        return np.array([cost.seconds(*times) for cost in COSTS], np.float64)

    @cached_property
    def visit_s(self) -> F64:
        """(num_workers, num_stages) of all ops of a microbatch at a hop, the last one apart."""
        return self.seconds_of(kinds_at(is_last=False, is_split=self.is_split))

    @cached_property
    def last_visit_s(self) -> F64:
        """(num_workers, num_stages) of all ops of a microbatch at its last hop."""
        return self.seconds_of(self._last_kinds)

    @cached_property
    def end_s(self) -> F64:
        """(num_workers, num_stages) of those at its last hop that its gradient waits for."""
        return self.seconds_of(kind for kind in self._last_kinds if kind.row.is_onward)

    @property
    def _last_kinds(self) -> tuple[OpKind, ...]:
        return kinds_at(is_last=True, is_split=self.num_hops in self.split)

    @cached_property
    def out_s(self) -> F64:
        """(num_workers, num_stages) of those that it passes through on its way to its loss."""
        return self._passed_s(Direction.FORWARD)

    @cached_property
    def home_s(self) -> F64:
        """(num_workers, num_stages) of those that it passes through on its way back."""
        return self._passed_s(Direction.BACKWARD)

    def _passed_s(self, gives: Direction) -> F64:
        kinds = kinds_at(is_last=False, is_split=self.is_split)
        return self.seconds_of(kind for kind in kinds if kind.row.gives is gives)

    def seconds_of(self, kinds: Iterable[OpKind]) -> F64:
        """(num_workers, num_stages) of one op of each of these kinds together."""
        return np.asarray(sum(self.op_s[COSTS.index(kind.row.cost)] for kind in kinds), np.float64)

    @cached_property
    def first_chunk(self) -> I64:
        """(num_stages + 1,) chunk numbers at which stages begin, and their end."""
        return np.concatenate([[0], np.cumsum(self.stage_sizes)]).astype(np.int64)

    @cached_property
    def stage_of(self) -> I64:
        """(num_chunks,) stage of each chunk."""
        return np.repeat(np.arange(self.num_stages), self.stage_sizes).astype(np.int64)

    @cached_property
    def apart_chunks(self) -> I64:
        """(num_stages, 2) of each stage the first chunk, and the end, of those of which a worker holds one at most."""
        runs = [range(stage, stage + 1) for stage in range(self.num_stages)]
        for run in self.apart:
            runs[run.start : run.stop] = [run] * len(run)
        return np.array([[self.first_chunk[run.start], self.first_chunk[run.stop]] for run in runs], np.int64)

    @cached_property
    def skippable(self) -> tuple[int, ...]:
        """Stages that a path may leave out: all but the first, and in LINE the last."""
        return tuple(self.layout.inner(self.num_stages))

    @cached_property
    def visits_by_stage(self) -> tuple[int, ...]:
        """Visits of each stage in a step: skippable ones equally, the lower ones once more if need be."""
        total = self.num_microbatches
        fixed = self.num_stages - len(self.skippable)
        each, rest = divmod(total * (self.path_len - fixed), max(1, len(self.skippable)))
        return tuple(
            each + (self.skippable.index(stage) < rest) if stage in self.skippable else total
            for stage in range(self.num_stages)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """An answer to a `Problem`.

    Args:
        worker_of: (num_chunks,) who fills each chunk.
        path: (num_microbatches, num_hops + 1) chunk of each hop; the last column is where the loss is computed.
        sequence: (num_ops,) every op, as `microbatch * ops of each + number`, in an order in which all can run. What a
            worker does is the part of the sequence that is on its chunks, in this order.
    """

    worker_of: I64
    path: I64
    sequence: I64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Times of all that happens in a routing, in seconds from the step's start.

    Args:
        begin_s: (num_microbatches, ops of each) start of each op, by its number.
        end_s: (num_microbatches,) end of the microbatch's last backward.
        reduced_s: (num_stages,) when each stage's aggregation ends (its last backward's end if there is none).
        makespan_s: the last of `end_s`.
        step_s: the last of `end_s` and `reduced_s`.
    """

    begin_s: F64
    end_s: F64
    reduced_s: F64
    makespan_s: float
    step_s: float
