"""Data of the compiled loops: a problem and a routing as flat arrays, in tuples that numba can take apart."""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skein.plan.ops import COSTS, OpKind, PathOp
from skein.plan.route.problem import F64, I64, Problem, Routing

U64 = npt.NDArray[np.uint64]


HOP, COST, SLOTS, SUMS, ONWARD, LATE, AWAITED, FOLLOWERS = range(8)
"""Columns of `Fixed.ops`: column of the path, row of `op_s`, slots taken, 1 where the op accumulates, 1 where it is on
the way there or back, its rank among what is ready (what goes home first, then what goes out, then the rest), how many
ops it waits for, and from there on who waits for it, padded with -1."""
VISIT, LAST, PASS, END = range(4)
"""Rows of `spent_s`: all ops of a microbatch at a hop, at the last one, and of both those that are on its way."""


class Fixed(NamedTuple):
    """A problem. Shapes as in `Problem`; `reduce_bytes` (num_stages,) is all zero where aggregation is left out.

    ops: (ops of each microbatch, columns) what each is, see `op_array`; one array, for each more costs the loops time.
    graph: the same, None where each op waits for the one before alone.
    spent_s: (4, num_workers, num_stages) rows `VISIT`, `LAST`, `PASS`, `END`.
    """

    stage_of: I64
    first_chunk: I64
    apart_chunks: I64
    ops: I64
    graph: I64 | None
    spent_s: F64
    op_s: F64
    transfer_s: F64
    wire_s: F64
    slots: I64
    reduce_bytes: F64
    reduce_latency_s: F64
    reduce_s_per_byte: F64
    move_s: F64
    tied_bytes: float
    num_tied: int
    least_shard_bytes: float
    num_hops: int
    max_swaps: int
    max_jump: int
    is_loop: bool
    has_wires: bool
    has_spare_visits: bool


class State(NamedTuple):
    """A routing under change, and what follows from its placement.

    holder: (num_seats,) worker in each seat; the first num_chunks seats are the chunks, the rest is idle.
    path: as in `Routing`; sequence, op: (num_ops,) microbatch and number of each op, in order.
    way: (num_microbatches, ops of each) chunk of each op, which follows from its path.
    op_s: (ops of each, num_chunks), and slots: (num_chunks,), of each chunk at its holder.
    spent_s: (4, num_chunks) as in `Fixed`, of each chunk at its holder.
    trip_s: (num_microbatches,) each microbatch's way there and back if nothing waits.
    reduce_s: (num_stages,) aggregation among a stage's holders.
    move_s: (num_chunks,) what it costs to bring each chunk to its holder.
    """

    holder: I64
    path: I64
    sequence: I64
    op: I64
    way: I64
    op_s: F64
    spent_s: F64
    slots: I64
    trip_s: F64
    reduce_s: F64
    move_s: F64


def fixed(problem: Problem) -> Fixed:
    """The arrays of `problem`."""
    square = (problem.num_workers, problem.num_workers)
    reduction, shape = problem.reduction, (problem.num_workers, problem.num_stages)
    # What a problem leaves out costs nothing: zeros instead of None, which would need loops of another type.
    return Fixed(
        stage_of=problem.stage_of,
        first_chunk=problem.first_chunk,
        apart_chunks=problem.apart_chunks,
        ops=op_array(problem.ops),
        graph=None if is_line(problem.ops) else op_array(problem.ops),
        spent_s=_spent_s(problem),
        op_s=_solid(problem.op_s),
        transfer_s=_solid(problem.transfer_s),
        wire_s=_solid(problem.wire_s),
        slots=np.ascontiguousarray(problem.slots, np.int64),
        reduce_bytes=np.zeros(problem.num_stages) if reduction is None else _solid(reduction.num_bytes),
        reduce_latency_s=np.zeros(square) if reduction is None else _solid(reduction.latency_s),
        reduce_s_per_byte=np.zeros(square) if reduction is None else _solid(1.0 / reduction.bytes_per_s),
        tied_bytes=0.0 if reduction is None else float(reduction.tied_bytes),
        num_tied=1 if reduction is None else reduction.num_tied,
        least_shard_bytes=0.0 if reduction is None else float(reduction.least_shard_bytes),
        move_s=np.zeros(shape) if problem.move_s is None else _solid(problem.move_s),
        num_hops=problem.num_hops,
        max_swaps=problem.max_swaps,
        max_jump=problem.max_jump,
        is_loop=problem.num_hops == problem.path_len,
        has_wires=bool(problem.wire_s.any()),
        has_spare_visits=len({problem.visits_by_stage[stage] for stage in problem.skippable}) > 1,
    )


def with_times_of(arrays: Fixed, problem: Problem) -> Fixed:
    """The arrays of `problem`, given those of another that differs from it in how long ops and links take."""
    return arrays._replace(
        spent_s=_spent_s(problem),
        op_s=_solid(problem.op_s),
        transfer_s=_solid(problem.transfer_s),
        wire_s=_solid(problem.wire_s),
    )


def _spent_s(problem: Problem) -> F64:
    rows = problem.visit_s, problem.last_visit_s, problem.out_s + problem.home_s, problem.end_s
    return _solid(np.stack(rows))


@cache
def op_array(ops: tuple[PathOp, ...]) -> I64:
    """(ops of each microbatch, columns) its ops by number, for the compiled loops: columns `HOP` ... `FOLLOWERS`."""
    onward = [op for op in ops if op.kind.row.is_onward]
    assert all(b.inputs == (a.number,) for a, b in itertools.pairwise(onward)), (
        "a microbatch goes several ways at once"
    )
    awaited = _awaited(ops)
    followers = [[op.number for op in ops if x.number in awaited[op.number]] for x in ops]
    table = np.full((len(ops), FOLLOWERS + max(map(len, followers)) + 1), -1, np.int64)
    for x in ops:
        row = x.kind.row
        does = (
            x.hop,
            COSTS.index(row.cost),
            row.slots,
            row.is_accumulating,
            row.is_onward,
            max(0, row.urgency - OpKind.LOSS.row.urgency),
            len(awaited[x.number]),
        )
        table[x.number, : FOLLOWERS + len(followers[x.number])] = (*does, *followers[x.number])
    return table


@cache
def is_line(ops: tuple[PathOp, ...]) -> bool:
    """Whether each op waits for the one before it and nothing else, so that one thing at a time happens.

    >>> from skein.plan.ops import path_ops
    >>> is_line(path_ops(3))
    True
    """
    return all(awaited == list(range(number)[-1:]) for number, awaited in enumerate(_awaited(ops)))


def _awaited(ops: Sequence[PathOp]) -> list[list[int]]:
    """Ops that each waits for; not those at its own chunk that ended before something else that it waits for."""
    before: list[set[int]] = []
    for op in ops:
        before.append(set(op.awaited).union(*(before[x] for x in op.awaited)))
    return [
        [*op.inputs, *(x for x in op.own if not any(x in before[other] for other in op.awaited))]
        for op in ops
    ]


def op_seconds(problem: Problem, worker_of: I64, path: I64) -> F64:
    """(num_microbatches, ops of each) seconds of each op at its holder, by number."""
    ops = op_array(problem.ops)
    chunks = path[:, ops[:, HOP]]
    seconds: F64 = problem.op_s[ops[:, COST], worker_of[chunks], problem.stage_of[chunks]]
    return seconds


def _solid(values: F64) -> F64:
    """The form that the loops are compiled for: any other would have them compiled anew."""
    return np.array(values, np.float64, order="C")


def num_seats(problem: Problem) -> int:
    """Seats for chunks: equally many on each worker."""
    return problem.num_workers * problem.most_chunks


def state(problem: Problem, worker_of: I64, path: I64, sequence: I64 | None = None) -> State:
    """A state at a placement and paths, in an order if there is one; what is derived is not filled in yet."""
    order = np.zeros(problem.num_ops, np.int64) if sequence is None else sequence
    microbatches, ops = np.divmod(order, len(problem.ops))
    chunks, num_microbatches = problem.num_chunks, problem.num_microbatches
    return State(
        holder=_seated(problem, worker_of),
        path=path.astype(np.int64),
        sequence=microbatches,
        op=ops,
        way=np.zeros((num_microbatches, len(problem.ops)), np.int64),
        op_s=np.zeros((len(problem.ops), chunks)),
        spent_s=np.zeros((4, chunks)),
        slots=np.zeros(chunks, np.int64),
        trip_s=np.zeros(num_microbatches),
        reduce_s=np.zeros(problem.num_stages),
        move_s=np.zeros(chunks),
    )


def _seated(problem: Problem, worker_of: I64) -> I64:
    per_worker = num_seats(problem) // problem.num_workers
    left = np.full(problem.num_workers, per_worker) - np.bincount(worker_of, minlength=problem.num_workers)
    if (left < 0).any():
        raise ValueError(f"worker {int(left.argmin())} holds more than {per_worker} chunks")
    return np.concatenate([worker_of, np.repeat(np.arange(problem.num_workers), left)]).astype(np.int64)


def routing(problem: Problem, state: State) -> Routing:
    """The routing that a state describes, as a copy."""
    return Routing(
        worker_of=state.holder[: problem.num_chunks].copy(),
        path=state.path.copy(),
        sequence=state.sequence * len(problem.ops) + state.op,
    )
