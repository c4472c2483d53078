"""Op schedules whose backwards may be split, where their stages lie, and the planner's own orders in the same form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from skein.plan.ops import OpKind
from skein.plan.route import schedules


class PipelineOpKind(StrEnum):
    """What is done with one microbatch at one stage; BACKWARD is BACKWARD_INPUT and BACKWARD_WEIGHT at once.

    SCORES and TERM are those of a vocabulary shard: logits and what loss and gradient need of them, and its gradient.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SCORES = "S"
    TERM = "T"


class Op(NamedTuple):
    """One op; a tuple, for schedules hold hundreds of thousands. The last stage's forward includes the loss.

    >>> str(Op(PipelineOpKind.BACKWARD_INPUT, 3, 7))
    'I7 of stage 3'
    """

    kind: PipelineOpKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


class PipelinePlacement(StrEnum):
    """Which chunks a worker holds: `LOOP` stages r, r + p, r + 2p, …; `V` stages r, 2p - 1 - r, 2p + r, …"""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(schedules.Shape):
    """p workers, v chunks on each, m microbatches per step.

    >>> Shape(num_workers=3, num_chunks=2, num_microbatches=1, placement=PipelinePlacement.V).worker_by_stage
    (0, 1, 2, 2, 1, 0)
    """

    placement: PipelinePlacement = PipelinePlacement.LOOP

    @property
    def worker_by_stage(self) -> tuple[int, ...]:
        there = tuple(range(self.num_workers))
        back = there[::-1] if self.placement is PipelinePlacement.V else there
        return tuple(worker for i in range(self.num_chunks) for worker in (back if i % 2 else there))

    def stage(self, worker: int, chunk: int) -> int:
        turned = self.placement is PipelinePlacement.V and chunk % 2 == 1
        return chunk * self.num_workers + (self.num_workers - 1 - worker if turned else worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """Each worker's ops of one step, to be run strictly in this order, each as soon as its input is there.

    With `num_barriers` the stages behind the others are vocabulary shards, one on each worker: the last stage's output
    goes to all of them, their scores come back to it, and what it makes of them goes to all once more. Its backward
    waits for the scores of all (one barrier) or for the terms of all (two).
    """

    worker_by_stage: tuple[int, ...]
    num_microbatches: int
    ops_by_worker: tuple[tuple[Op, ...], ...]
    num_barriers: int = 0

    @property
    def num_workers(self) -> int:
        return len(self.ops_by_worker)

    @property
    def num_stages(self) -> int:
        return len(self.worker_by_stage)

    @property
    def last_stage(self) -> int:
        """The stage whose output the loss is made of."""
        return self.num_stages - len(self.shards) - 1

    @property
    def shards(self) -> range:
        """Stages that are vocabulary shards."""
        return range(self.num_stages - (self.num_workers if self.num_barriers else 0), self.num_stages)


def schedule_of(
    shape: Shape, ops_by_worker: Iterable[Iterable[Op]], *, num_barriers: int = 0
) -> PipelineSchedule:
    """The schedule of `shape` that runs these ops, with vocabulary shards on all workers if there are barriers."""
    shards = tuple(range(shape.num_workers)) if num_barriers else ()
    return PipelineSchedule(
        worker_by_stage=shape.worker_by_stage + shards,
        num_barriers=num_barriers,
        num_microbatches=shape.num_microbatches,
        ops_by_worker=tuple(tuple(ops) for ops in ops_by_worker),
    )


def whole(shape: Shape, orders: schedules.Orders) -> PipelineSchedule:
    """An order of the planner's, whose backwards are whole."""
    return schedule_of(
        shape,
        ([Op(_KINDS[op.kind], op.stage, op.microbatch) for op in ops] for ops in orders),
    )


def one_f_one_b(shape: Shape, depths: Sequence[int] | None = None) -> PipelineSchedule:
    """1F1B to these depths, or the textbook's."""
    return whole(shape, schedules.one_f_one_b(shape, depths))


_KINDS = {OpKind.FORWARD: PipelineOpKind.FORWARD, OpKind.BACKWARD: PipelineOpKind.BACKWARD}
