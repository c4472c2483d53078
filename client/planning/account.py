"""Account of a routing, for whoever reports on it: ops one by one, memory held, bytes on links, the critical way.

The critical way is the chain of ops and transfers without a gap that ends with the step: nothing that is not on it
makes the step shorter.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np

from skein.plan.ops import COSTS, OpKind
from skein.plan.route.problem import F64, I64, Problem, Routing, Timeline

_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedOp:
    """An op of a microbatch, `number` as in `Timeline.begin_s`, where it runs and when it begins; NaN without times."""

    microbatch: int
    number: int
    kind: OpKind
    chunk: int
    stage: int
    worker: int
    begin_s: float
    takes_s: float

    @property
    def end_s(self) -> float:
        """Seconds at which it ends; NaN without times."""
        return self.begin_s + self.takes_s


def placed_ops(problem: Problem, routing: Routing, times: Timeline | None = None) -> tuple[RoutedOp, ...]:
    """All ops, in the order of the routing's sequence."""
    pairs = (divmod(op, len(problem.ops)) for op in routing.sequence.tolist())
    return tuple(_placed(problem, routing, times, microbatch, number) for microbatch, number in pairs)


def _placed(
    problem: Problem, routing: Routing, times: Timeline | None, microbatch: int, number: int
) -> RoutedOp:
    op = problem.ops[number]
    chunk = int(routing.path[microbatch, op.hop])
    worker, stage = int(routing.worker_of[chunk]), int(problem.stage_of[chunk])
    takes_s = problem.op_s[COSTS.index(op.kind.row.cost), worker, stage]
    return RoutedOp(
        microbatch=microbatch,
        number=number,
        kind=op.kind,
        chunk=chunk,
        stage=stage,
        worker=worker,
        begin_s=math.nan if times is None else float(times.begin_s[microbatch, number]),
        takes_s=float(takes_s),
    )


def transfer_counts(problem: Problem, routing: Routing) -> I64:
    """(num_workers, num_workers) boundary tensors from row to column in a step, activations and gradients."""
    counts = np.zeros((problem.num_workers, problem.num_workers), dtype=np.int64)
    workers = routing.worker_of[routing.path]
    for op in problem.ops:
        for maker in op.inputs:
            np.add.at(counts, (workers[:, problem.ops[maker].hop], workers[:, op.hop]), 1)
    np.fill_diagonal(counts, 0)
    return counts


def reduction_bytes(problem: Problem, routing: Routing) -> F64:
    """(num_workers, num_workers) bytes of aggregation from row to column in a step.

    Of k holders each sums one of k parts and hands the sum out, so each link carries two parts. What the ends share is
    summed by the holders of both.
    """
    num_bytes = np.zeros((problem.num_workers, problem.num_workers))
    if problem.reduction is None:
        return num_bytes
    held = [holders_of(problem, routing, stage) for stage in range(problem.num_stages)]
    sums = [*zip(held, problem.reduction.num_bytes.tolist(), strict=True)]
    for stage, holders in enumerate(held):
        other = problem.reduction.tied_to(stage)
        if other is not None:
            sums.append((list(dict.fromkeys(holders + held[other])), problem.reduction.tied_bytes))
    for holders, summed_bytes in sums:
        if len(holders) > 1:
            num_bytes[np.ix_(holders, holders)] += 2 * summed_bytes / len(holders)
    np.fill_diagonal(num_bytes, 0.0)
    return num_bytes


def holders_of(problem: Problem, routing: Routing, stage: int) -> list[int]:
    """Holders of a stage, in the order of its chunks."""
    begin, end = problem.first_chunk[stage : stage + 2]
    return [int(worker) for worker in routing.worker_of[begin:end]]


def visited(problem: Problem, routing: Routing) -> I64:
    """(num_microbatches, path_len) chunks that count as visits: in LOOP, the way back to the origin does not."""
    return routing.path[:, : problem.path_len]


# --- the critical way ---


class Wait(StrEnum):
    """Cause that an op's start waited for last."""

    START = "start"
    INPUT = "input"
    WORKER = "worker"
    SLOT = "slot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """An op of the critical way and what came just before it.

    Where `wait` is INPUT, its input took `transfer_s` from worker `sender`, after `queued_s` for a free link.
    """

    op: RoutedOp
    wait: Wait
    sender: int
    transfer_s: float
    queued_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalWay:
    """The stretches of a step, first to last; `compute_s + transfer_s + queued_s + reduction_s` is the step."""

    stretches: tuple[Stretch, ...]
    reduction_s: float
    reduced_stage: int | None

    @property
    def compute_s(self) -> float:
        return sum(x.op.takes_s for x in self.stretches)

    @property
    def transfer_s(self) -> float:
        return sum(x.transfer_s for x in self.stretches)

    @property
    def queued_s(self) -> float:
        return sum(x.queued_s for x in self.stretches)

    def compute_s_by_worker(self) -> dict[int, float]:
        """The longest first."""
        return _summed((x.op.worker, x.op.takes_s) for x in self.stretches)

    def transfer_s_by_link(self) -> dict[tuple[int, int], float]:
        """By (sender, receiver), queueing included, the longest first."""
        across = (x for x in self.stretches if x.sender != x.op.worker)
        return _summed(((x.sender, x.op.worker), x.transfer_s + x.queued_s) for x in across)

    def num_slot_waits_by_chunk(self) -> dict[int, int]:
        """Number of forwards of each chunk that had to wait until a microbatch left it, the most often first."""
        counts = _summed((x.op.chunk, 1.0) for x in self.stretches if x.wait is Wait.SLOT)
        return {chunk: int(count) for chunk, count in counts.items()}


def critical_way(problem: Problem, routing: Routing, timeline: Timeline) -> CriticalWay:
    """The critical way of a routing's step, aggregation included if the problem has it."""
    ops = placed_ops(problem, routing, timeline)
    by_number = {(op.microbatch, op.number): op for op in ops}
    before = _before_on_worker(problem, ops)
    last, reduced_stage = _last(ops, timeline)
    stretches: list[Stretch] = []
    op: RoutedOp | None = last
    while op is not None:
        awaited = [by_number[op.microbatch, number] for number in problem.ops[op.number].awaited]
        previous = max(awaited, key=partial(_there_s, problem, op.worker), default=None)
        stretch = _stretch(problem, op, previous, before.get((op.microbatch, op.number)))
        stretches.append(stretch)
        if stretch.wait is Wait.INPUT:
            op = previous
        elif stretch.wait is Wait.START:
            op = None
        else:
            op = before[op.microbatch, op.number].op
    return CriticalWay(
        stretches=tuple(reversed(stretches)),
        reduction_s=timeline.step_s - last.end_s,
        reduced_stage=reduced_stage,
    )


@dataclass(frozen=True, slots=True)
class _Before:
    """The op before another in its worker's order, and whether it made the room that the other takes."""

    op: RoutedOp
    makes_room: bool


def _before_on_worker(problem: Problem, ops: Iterable[RoutedOp]) -> dict[tuple[int, int], _Before]:
    """By (microbatch, number)."""
    found: dict[tuple[int, int], _Before] = {}
    latest: dict[int, RoutedOp] = {}
    held: defaultdict[int, int] = defaultdict(int)
    for op in ops:
        if op.worker in latest:
            other = latest[op.worker]
            frees = other.kind.row.slots < 0 < op.kind.row.slots and other.chunk == op.chunk
            was_full = held[op.chunk] + 1 >= problem.slots[op.worker, op.stage]
            found[op.microbatch, op.number] = _Before(other, frees and was_full)
        latest[op.worker] = op
        held[op.chunk] += op.kind.row.slots
    return found


def _last(ops: Iterable[RoutedOp], timeline: Timeline) -> tuple[RoutedOp, int | None]:
    """The op that the step ends with, and the stage whose aggregation ends it if one does."""
    if timeline.step_s > timeline.makespan_s:
        stage = int(timeline.reduced_s.argmax())
        own = [op for op in ops if op.stage == stage and op.kind.row.is_accumulating]
        return max(own, key=lambda op: op.end_s), stage
    return max(ops, key=lambda op: op.end_s), None


def _there_s(problem: Problem, worker: int, op: RoutedOp) -> float:
    """Seconds at which what an op makes is at a worker, if it need not wait for a link."""
    return op.end_s + float(problem.transfer_s[op.worker, worker])


def _stretch(problem: Problem, op: RoutedOp, previous: RoutedOp | None, before: _Before | None) -> Stretch:
    free_s = 0.0 if before is None else before.op.end_s
    transfer_s, input_s, sender = 0.0, 0.0, op.worker
    if previous is not None:
        sender = previous.worker
        transfer_s = float(problem.transfer_s[sender, op.worker])
        input_s = _there_s(problem, op.worker, previous)
    queued_s = 0.0
    if previous is not None and (op.begin_s > free_s or input_s >= free_s):
        wait, queued_s = Wait.INPUT, max(0.0, op.begin_s - input_s)
    elif before is None:
        wait = Wait.START
    else:
        wait = Wait.SLOT if before.makes_room else Wait.WORKER
    if wait is not Wait.INPUT:
        sender, transfer_s = op.worker, 0.0
    return Stretch(op=op, wait=wait, sender=sender, transfer_s=transfer_s, queued_s=queued_s)


def _summed(pairs: Iterable[tuple[_K, float]]) -> dict[_K, float]:
    """Sums by key, the largest first; of equal ones, the key that came first."""
    sums: defaultdict[_K, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return dict(sorted(sums.items(), key=lambda pair: -pair[1]))
