"""The orders that the field has names for, of pipelines whose backwards are whole: where a search begins.

GPipe, 1F1B to any depth, interleaved, breadth-first. Workers are positions in the pipeline here, not names. In the
formulas p is the number of workers, r the position of one, v its chunks and m the microbatches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skein.errors import UserError
from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.types import MicrobatchId, StageIndex

Orders = tuple[tuple[PlannedOp, ...], ...]
"""Ops of each worker, to be run strictly in this order; the last stage's forward includes the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """p workers, v chunks on each in a loop (worker r holds stages r, r + p, r + 2p, …), m microbatches per step."""

    num_workers: int
    num_microbatches: int
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_workers * self.num_chunks

    @property
    def worker_by_stage(self) -> tuple[int, ...]:
        return tuple(range(self.num_workers)) * self.num_chunks

    def stage(self, worker: int, chunk: int) -> int:
        """The stage that is `worker`'s chunk number `chunk`."""
        return chunk * self.num_workers + worker


def gpipe(shape: Shape) -> Orders:
    """All forwards, then all backwards: 1F1B of depth m. Holds m microbatches.

    Source: GPipe, arXiv 1811.06965, Figure 2; backwards in the order of the forwards, as torch runs them.
    """
    return one_f_one_b(shape, [shape.num_microbatches] * shape.num_workers)


def textbook_depths(num_workers: int) -> tuple[int, ...]:
    """K_r = p - r: enough to keep everybody busy when transfers take no time."""
    return tuple(range(num_workers, 0, -1))


def one_f_one_b(shape: Shape, depths: Sequence[int] | None = None) -> Orders:
    """Worker r runs K_r forwards, then backward and forward in turn. Holds min(K_r, m) microbatches.

    Args:
        shape: one chunk on each worker.
        depths: K of each worker, never growing along the pipeline; the textbook's K_r = p - r if None.

    Raises:
        UserError: a depth below 1, or one above the depth before it, which would wait for itself.

    Source: Megatron-LM, arXiv 2104.04473, Section 2.2, for the textbook's depths.
    """
    given = textbook_depths(shape.num_workers) if depths is None else tuple(depths)
    if len(given) != shape.num_workers or min(given) < 1 or any(a < b for a, b in pairwise(given)):
        raise UserError(
            "depths", given, f"give {shape.num_workers} depths of at least 1, none above the last"
        )
    return _told(_alternating(r, depth, shape.num_microbatches) for r, depth in enumerate(given))


def interleaved(shape: Shape) -> Orders:
    """1F1B over v chunks per worker, microbatches in groups of p. Worker r holds min(mv, (v-1)p + 2(p-1-r) + 1) chunks.

    Without p | m the groups have m / max(1, m // p) microbatches, which must be a whole number.

    Source: Megatron-LM, arXiv 2104.04473, Section 2.2; groups as torch.distributed.pipelining 2.13 makes them.
    """
    group = group_size(shape)
    units = shape.num_chunks * shape.num_microbatches
    warm = [
        min(units, (shape.num_chunks - 1) * group + 2 * (shape.num_workers - 1 - r))
        for r in range(shape.num_workers)
    ]
    return _told(_interleaved(shape, r, min(units, warm[r] + 1)) for r in range(shape.num_workers))


def looped_bfs(shape: Shape) -> Orders:
    """Each chunk's forwards of all microbatches, chunk by chunk; then the backwards, in reverse. Holds m v chunks.

    Source: Breadth-First Pipeline Parallelism, arXiv 2211.05953, Section 4.
    """
    microbatches = range(shape.num_microbatches)
    stages = [[shape.stage(r, chunk) for chunk in range(shape.num_chunks)] for r in range(shape.num_workers)]
    return _told(
        [
            *(_op(OpKind.FORWARD, stage, i) for stage in own for i in microbatches),
            *(_op(OpKind.BACKWARD, stage, i) for stage in reversed(own) for i in reversed(microbatches)),
        ]
        for own in stages
    )


def group_size(shape: Shape) -> int:
    """Microbatches that an interleaved order takes through one chunk before it turns to the next: p if p | m.

    Raises:
        UserError: the microbatches do not fall into equal groups.
    """
    rounds = max(1, shape.num_microbatches // shape.num_workers)
    if shape.num_microbatches % rounds:
        hint = f"give a multiple of {rounds}, or of the {shape.num_workers} workers"
        raise UserError("num_microbatches", shape.num_microbatches, hint)
    return shape.num_microbatches // rounds


def grouped(shape: Shape, worker: int, *, is_home: bool) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of all visits of `worker`, there or home, in interleaved order.

    Groups, chunks in them, microbatches in those.
    """
    group = group_size(shape)
    chunks = range(shape.num_chunks)
    for first in range(0, shape.num_microbatches, group):
        for chunk in reversed(chunks) if is_home else chunks:
            for microbatch in range(first, first + group):
                yield shape.stage(worker, chunk), microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A way to order ops, for one chunk on each worker or for several."""

    make: Callable[[Shape], Orders]
    is_chunked: bool = False


NAMED_ORDERS: Mapping[str, Named] = {
    "one_f_one_b": Named(make=one_f_one_b),
    "gpipe": Named(make=gpipe),
    "interleaved": Named(make=interleaved, is_chunked=True),
    "looped_bfs": Named(make=looped_bfs, is_chunked=True),
}


def _alternating(stage: int, depth: int, num_microbatches: int) -> Iterator[PlannedOp]:
    warm = min(depth, num_microbatches)
    for i in range(warm):
        yield _op(OpKind.FORWARD, stage, i)
    for i in range(num_microbatches):
        yield _op(OpKind.BACKWARD, stage, i)
        if warm + i < num_microbatches:
            yield _op(OpKind.FORWARD, stage, warm + i)


def _interleaved(shape: Shape, worker: int, warm: int) -> Iterator[PlannedOp]:
    forwards = [_op(OpKind.FORWARD, *visit) for visit in grouped(shape, worker, is_home=False)]
    yield from forwards[:warm]
    for i, visit in enumerate(grouped(shape, worker, is_home=True)):
        yield _op(OpKind.BACKWARD, *visit)
        yield from forwards[warm + i : warm + i + 1]


def _op(kind: OpKind, stage: int, microbatch: int) -> PlannedOp:
    return PlannedOp(kind=kind, stage=StageIndex(stage), microbatch=MicrobatchId(microbatch))


def _told(ops_by_worker: Iterable[Iterable[PlannedOp]]) -> Orders:
    return tuple(tuple(ops) for ops in ops_by_worker)
