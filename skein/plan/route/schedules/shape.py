"""Shape of a pipeline, and what the generators of its orders share.

Workers are positions in the pipeline here, not names. In formulas p is the number of workers, r the position of one, v
its chunks and m the microbatches.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from skein.errors import UserError
from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.types import MicrobatchId, StageIndex

Orders = tuple[tuple[PlannedOp, ...], ...]
"""Ops of each worker, to be run strictly in this order; the last stage's forward includes the loss."""


class PipelinePlacement(StrEnum):
    """Chunks that a worker holds: `LOOP` stages r, r + p, r + 2p, …; `V` stages r, 2p - 1 - r, 2p + r, …"""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """p workers, v chunks on each, m microbatches per step.

    >>> Shape(num_workers=3, num_chunks=2, num_microbatches=1, placement=PipelinePlacement.V).worker_by_stage
    (0, 1, 2, 2, 1, 0)
    """

    num_workers: int
    num_microbatches: int
    num_chunks: int = 1
    placement: PipelinePlacement = PipelinePlacement.LOOP

    @property
    def num_stages(self) -> int:
        return self.num_workers * self.num_chunks

    @property
    def worker_by_stage(self) -> tuple[int, ...]:
        there = tuple(range(self.num_workers))
        back = there[::-1] if self.placement is PipelinePlacement.V else there
        return tuple(worker for i in range(self.num_chunks) for worker in (back if i % 2 else there))

    def stage(self, worker: int, chunk: int) -> int:
        """The stage that is `worker`'s chunk number `chunk`."""
        is_turned = self.placement is PipelinePlacement.V and chunk % 2 == 1
        return chunk * self.num_workers + (self.num_workers - 1 - worker if is_turned else worker)


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


def op_of(kind: OpKind, stage: int, microbatch: int) -> PlannedOp:
    """An op of a generator's order."""
    return PlannedOp(kind=kind, stage=StageIndex(stage), microbatch=MicrobatchId(microbatch))


def told(ops_by_worker: Iterable[Iterable[PlannedOp]]) -> Orders:
    """Ops of each worker as a tuple."""
    return tuple(tuple(ops) for ops in ops_by_worker)
