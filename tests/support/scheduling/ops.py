"""Op schedules whose backwards may be split: the planner's orders, with where their stages lie."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from skein.plan.ops import OpKind
from skein.plan.plan import PlannedOp
from skein.plan.route.schedules import whole
from skein.plan.route.schedules.shape import Orders, Shape


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


def schedule_of(shape: Shape, orders: Orders) -> PipelineSchedule:
    """The schedule of `shape` that runs the ops of a planner's order."""
    return listed(shape, (map(told_op, ops) for ops in orders))


def told_op(op: PlannedOp) -> Op:
    """An op of a planner's order."""
    return Op(_KINDS[op.kind], op.stage, op.microbatch)


def listed(shape: Shape, ops_by_worker: Iterable[Iterable[Op]], *, num_barriers: int = 0) -> PipelineSchedule:
    """The schedule of `shape` that runs these ops, with vocabulary shards on all workers if there are barriers."""
    shards = tuple(range(shape.num_workers)) if num_barriers else ()
    return PipelineSchedule(
        worker_by_stage=shape.worker_by_stage + shards,
        num_barriers=num_barriers,
        num_microbatches=shape.num_microbatches,
        ops_by_worker=tuple(tuple(ops) for ops in ops_by_worker),
    )


def one_f_one_b(shape: Shape, depths: Sequence[int] | None = None) -> PipelineSchedule:
    """1F1B to these depths, or the textbook's."""
    return schedule_of(shape, whole.one_f_one_b(shape, depths))


_KINDS = {
    OpKind.FORWARD: PipelineOpKind.FORWARD,
    OpKind.BACKWARD: PipelineOpKind.BACKWARD,
    OpKind.INPUT: PipelineOpKind.BACKWARD_INPUT,
    OpKind.WEIGHT: PipelineOpKind.BACKWARD_WEIGHT,
}
