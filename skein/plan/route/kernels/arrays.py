"""Data of the compiled loops: a problem and a routing as flat arrays, in tuples that numba can take apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from skein.plan.ops import COSTS, OpKind, PathOp
from skein.plan.route.problem import F64, I64, Problem, Routing

U64 = npt.NDArray[np.uint64]


HOP, COST, SLOTS, SUMS = range(4)
"""Columns of `Fixed.ops`: column of the path, row of `op_s`, slots taken, and 1 where the op accumulates."""


class Fixed(NamedTuple):
    """A problem. Shapes as in `Problem`; `reduce_bytes` (num_stages,) is all zero where aggregation is left out.

    ops: (ops of each microbatch, 4) what each is, see `op_array`; one array, for each more costs the loops time.
    visit_s, last_s: (num_workers, num_stages) of all ops of a microbatch at a hop, and at the last one.
    """

    stage_of: I64
    first_chunk: I64
    ops: I64
    visit_s: F64
    last_s: F64
    op_s: F64
    transfer_s: F64
    wire_s: F64
    slots: I64
    reduce_bytes: F64
    reduce_latency_s: F64
    reduce_s_per_byte: F64
    move_s: F64
    tied_bytes: float
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
    path, sequence: as in `Routing`; op: (num_ops,) which op of its microbatch each place in the sequence is.
    way: (num_microbatches, ops of each) chunk of each op, which follows from its path.
    op_s: (ops of each, num_chunks), and slots: (num_chunks,), of each chunk at its holder.
    visit_s, last_s: (num_chunks,) of all ops of a microbatch there at a hop, and at the last one.
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
    visit_s: F64
    last_s: F64
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
        ops=op_array(problem.ops),
        visit_s=_solid(sum(problem.op_s[COSTS.index(x.row.cost)] for x in OpKind if not x.row.is_last)),
        last_s=_solid(sum(problem.op_s[COSTS.index(x.row.cost)] for x in OpKind if x.row.is_last)),
        op_s=_solid(problem.op_s),
        transfer_s=_solid(problem.transfer_s),
        wire_s=_solid(problem.wire_s),
        slots=np.ascontiguousarray(problem.slots, np.int64),
        reduce_bytes=np.zeros(problem.num_stages) if reduction is None else _solid(reduction.num_bytes),
        reduce_latency_s=np.zeros(square) if reduction is None else _solid(reduction.latency_s),
        reduce_s_per_byte=np.zeros(square) if reduction is None else _solid(1.0 / reduction.bytes_per_s),
        tied_bytes=0.0 if reduction is None else float(reduction.tied_bytes),
        least_shard_bytes=0.0 if reduction is None else float(reduction.least_shard_bytes),
        move_s=np.zeros(shape) if problem.move_s is None else _solid(problem.move_s),
        num_hops=problem.num_hops,
        max_swaps=problem.max_swaps,
        max_jump=problem.max_jump,
        is_loop=problem.num_hops == problem.path_len,
        has_wires=bool(problem.wire_s.any()),
        has_spare_visits=len({problem.visits_by_stage[stage] for stage in problem.skippable}) > 1,
    )


def op_array(ops: Sequence[PathOp]) -> I64:
    """(ops of each microbatch, 4) its ops by number, for the compiled loops: columns `HOP`, `COST`, `SLOTS`, `SUMS`.

    The loops take a microbatch's ops one after the other, each waiting for the one before.
    """
    assert all(op.inputs == ((op.number - 1,) if op.number else ()) for op in ops), "no chain"
    rows = [(x.hop, COSTS.index(x.kind.row.cost), x.kind.row.slots, x.kind.row.is_accumulating) for x in ops]
    return np.array(rows, np.int64)


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
    return problem.num_workers * (problem.chunks_per_worker or -(-problem.num_chunks // problem.num_workers))


def state(problem: Problem, worker_of: I64, path: I64) -> State:
    """A state at a placement and paths; its sequence is empty and what is derived is not filled in yet."""
    chunks, num_microbatches = problem.num_chunks, problem.num_microbatches
    return State(
        holder=_seated(problem, worker_of),
        path=path.astype(np.int64),
        sequence=np.zeros(problem.num_ops, np.int64),
        op=np.zeros(problem.num_ops, np.int64),
        way=np.zeros((num_microbatches, len(problem.ops)), np.int64),
        op_s=np.zeros((len(problem.ops), chunks)),
        visit_s=np.zeros(chunks),
        last_s=np.zeros(chunks),
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
        sequence=state.sequence.copy(),
    )


def op_numbers(sequence: I64, num_microbatches: int) -> I64:
    """Number of the op, within its microbatch, that each place in `sequence` is.

    >>> op_numbers(np.array([0, 1, 0, 0, 1]), 2).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(sequence, kind="stable")
    counts = np.bincount(sequence, minlength=num_microbatches)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(sequence), np.int64)
    numbers[order] = np.arange(len(sequence)) - firsts
    return numbers
