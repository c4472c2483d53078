"""Cost of a routing, as compiled loops: trips that never wait, a step run in sequence order, aggregation.

Rules of this file
- A step in sequence order is run in one pass: an op starts when its input is there and its worker has ended the ops
  before it in the sequence. Any sequence in which all ops can run is a schedule, so there is nothing to search.
- A transfer begins, in sequence order, when both the sender's uplink and the receiver's downlink are free.
"""

from typing import NamedTuple

import numpy as np

from skein.plan.route.kernels.arrays import (
    COST,
    END,
    FOLLOWERS,
    HOP,
    ONWARD,
    PASS,
    SLOTS,
    SUMS,
    Fixed,
    State,
    state,
)
from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.problem import F64, I64, Problem, Routing

NEVER = np.inf
BLOCKED = -1.0
"""Less than any time, so that nothing mistakes it for one."""


class Scratch(NamedTuple):
    """Working space of `run_sequence`, and what it leaves behind.

    begin_s: (num_ops,) when each op of the sequence starts; waited_s: how long its input had been there by then.
    last_s: (num_origins,) end of the last microbatch of each chunk of stage 0; reduced_s: (num_stages,) end of the
    last backward of each stage, aggregation included; input_s: (num_microbatches,) when each microbatch is back.
    The rest is of no use outside.
    """

    begin_s: F64
    waited_s: F64
    last_s: F64
    reduced_s: F64
    rest_s: F64
    input_s: F64
    free_s: F64
    up_s: F64
    down_s: F64
    held: I64


def scratch_for(fixed: Fixed, state: State) -> Scratch:
    """Working space for this problem."""
    num_workers, num_microbatches = fixed.transfer_s.shape[0], state.path.shape[0]
    return Scratch(
        begin_s=np.zeros(len(state.sequence)),
        waited_s=np.zeros(len(state.sequence)),
        last_s=np.zeros(int(fixed.first_chunk[1])),
        reduced_s=np.zeros(len(state.reduce_s)),
        rest_s=np.zeros(num_microbatches),
        input_s=np.zeros(num_microbatches),
        free_s=np.zeros(num_workers),
        up_s=np.zeros(num_workers),
        down_s=np.zeros(num_workers),
        held=np.zeros(len(state.slots), np.int64),
    )


@compiled
def fit_chunk(fixed: Fixed, state: State, chunk: int) -> None:
    """Fill in what a chunk's holder makes of it."""
    worker, stage = state.holder[chunk], fixed.stage_of[chunk]
    rows, op_s, all_s = fixed.ops, state.op_s, fixed.op_s
    for op in range(len(rows)):
        op_s[op, chunk] = all_s[rows[op, COST], worker, stage]
    for row in range(len(fixed.spent_s)):
        state.spent_s[row, chunk] = fixed.spent_s[row, worker, stage]
    state.slots[chunk] = fixed.slots[worker, stage]
    state.move_s[chunk] = fixed.move_s[worker, stage]


@compiled
def fit_way(fixed: Fixed, state: State, microbatch: int) -> None:
    """Fill in where a microbatch's ops are done, from its path."""
    rows, way, path = fixed.ops, state.way, state.path
    for op in range(len(rows)):
        way[microbatch, op] = path[microbatch, rows[op, HOP]]


@compiled
def fit_trip(fixed: Fixed, state: State, microbatch: int) -> None:
    """Fill in how long a microbatch takes if nothing waits."""
    hops = fixed.num_hops
    path, holder, spent_s, transfer_s = state.path, state.holder, state.spent_s, fixed.transfer_s
    total_s = spent_s[END, path[microbatch, hops]]
    for hop in range(hops):
        chunk = path[microbatch, hop]
        here, there = holder[chunk], holder[path[microbatch, hop + 1]]
        total_s += spent_s[PASS, chunk]
        total_s += transfer_s[here, there] + transfer_s[there, here]
    state.trip_s[microbatch] = total_s


@compiled
def fit_stage(fixed: Fixed, state: State, stage: int) -> None:
    """Fill in how long a stage's holders take to aggregate.

    What the ends share is summed by the holders of both, beside the first stage's own: its last backward comes later
    than the other's, so both begin when it ends.
    """
    begin, end = fixed.first_chunk[stage], fixed.first_chunk[stage + 1]
    took_s = among_s(fixed, state, begin, end, begin, begin, fixed.reduce_bytes[stage])
    if stage < fixed.num_tied and fixed.tied_bytes > 0.0:
        other = len(state.reduce_s) - fixed.num_tied + stage
        first, stop = fixed.first_chunk[other], fixed.first_chunk[other + 1]
        took_s = max(took_s, among_s(fixed, state, begin, end, first, stop, fixed.tied_bytes))
    state.reduce_s[stage] = took_s


@compiled
def among_s(
    fixed: Fixed, state: State, begin: int, end: int, more: int, stop: int, num_bytes: float
) -> float:
    """Seconds to sum so many bytes among the holders of chunks `begin` ... `end`, and of chunks `more` ... `stop`.

    Each owner sums one part of the gradient and hands the sum out, over the worst link among all.
    """
    chunks = stop - more
    num_holders = end - begin
    for b in range(chunks):
        # A worker at both ends has one part of the sum, not two.
        is_new = True
        for a in range(begin, end):
            if state.holder[a] == state.holder[more + b]:
                is_new = False
        num_holders += 1 if is_new else 0
    if num_holders < 2 or num_bytes <= 0.0:
        return 0.0
    num_shards = num_holders
    if fixed.least_shard_bytes > 0.0:
        num_shards = min(num_holders, max(1, int(np.ceil(num_bytes / fixed.least_shard_bytes))))
    part_bytes = (num_holders - 1) * num_bytes / num_shards
    latency_s, s_per_byte = 0.0, 0.0
    for a in range(end - begin + chunks):
        for b in range(end - begin + chunks):
            u = state.holder[begin + a if a < end - begin else more + a - (end - begin)]
            v = state.holder[begin + b if b < end - begin else more + b - (end - begin)]
            if u != v:
                latency_s = max(latency_s, fixed.reduce_latency_s[u, v])
                s_per_byte = max(s_per_byte, fixed.reduce_s_per_byte[u, v])
    return float(2.0 * (latency_s + part_bytes * s_per_byte))


@compiled
def fit(fixed: Fixed, state: State) -> None:
    """Fill in all that follows from placement and paths."""
    for chunk in range(len(state.slots)):
        fit_chunk(fixed, state, chunk)
    for microbatch in range(len(state.trip_s)):
        fit_way(fixed, state, microbatch)
        fit_trip(fixed, state, microbatch)
    for stage in range(len(state.reduce_s)):
        fit_stage(fixed, state, stage)


def fitted(problem: Problem, arrays: Fixed, routing: Routing) -> State:
    """The state that `routing` is, all filled in; `arrays` are those of `problem`."""
    here = state(problem, routing.worker_of, routing.path, routing.sequence)
    fit(arrays, here)
    return here


@compiled
def run_sequence(fixed: Fixed, state: State, work: Scratch, graph: I64 | None, limit_s: float) -> float:
    """Seconds of the step in sequence order; NEVER if that is above `limit_s`, BLOCKED if a chunk would hold too much.

    Gives up as soon as one microbatch, going on without waiting, would be back after `limit_s`. `graph` is that of
    `fixed`, by itself so that only the loop is compiled that is needed.
    """
    # A line of ops has one input at a time: keeping one for each op, and asking who follows, takes longer. Loops that
    # run many sequences choose themselves, for a call more costs them 5 % of their moves.
    if graph is not None:
        return run_graph(fixed, state, work, limit_s)
    return run_line(fixed, state, work, limit_s)


@compiled
def run_line(fixed: Fixed, state: State, work: Scratch, limit_s: float) -> float:
    """Seconds as `run_sequence` has them, where each op waits for the one before alone."""
    # Taken out of their tuples once: that is a third of the time.
    holder, way, sequence, ops = state.holder, state.way, state.sequence, state.op
    op_s, slots, rows = state.op_s, state.slots, fixed.ops
    last_op = len(rows) - 1
    transfer_s, wire_s, stage_of, has_wires = fixed.transfer_s, fixed.wire_s, fixed.stage_of, fixed.has_wires
    input_s, free_s, rest_s, held = work.input_s, work.free_s, work.rest_s, work.held
    up_s, down_s, last_s, reduced_s = work.up_s, work.down_s, work.last_s, work.reduced_s
    begins_s, waited_s = work.begin_s, work.waited_s
    for worker in range(len(free_s)):
        free_s[worker] = up_s[worker] = down_s[worker] = 0.0
    for chunk in range(len(held)):
        held[chunk] = 0
    for m in range(len(rest_s)):
        input_s[m] = 0.0
        rest_s[m] = state.trip_s[m]
    for origin in range(len(last_s)):
        last_s[origin] = 0.0
    for stage in range(len(reduced_s)):
        reduced_s[stage] = 0.0
    step_s = 0.0
    for at in range(len(sequence)):
        m, op = sequence[at], ops[at]
        chunk = way[m, op]
        takes_s = op_s[op, chunk]
        taken = rows[op, SLOTS]
        if taken != 0:
            held[chunk] += taken
            # Waiting would not help: the backward that frees a slot is the same worker's, later in the sequence.
            if held[chunk] > slots[chunk]:
                return BLOCKED
        worker = holder[chunk]
        begin_s = max(input_s[m], free_s[worker])
        begins_s[at] = begin_s
        waited_s[at] = begin_s - input_s[m]
        end_s = begin_s + takes_s
        free_s[worker] = end_s
        rest_s[m] -= takes_s
        # The rest of a trip without waiting is the least that can follow, so no good step ends here.
        if end_s + rest_s[m] > limit_s:
            return NEVER
        if rows[op, SUMS]:
            stage = stage_of[chunk]
            reduced_s[stage] = max(reduced_s[stage], end_s)
        if op == last_op:
            input_s[m] = end_s
            step_s = max(step_s, end_s)
            last_s[chunk] = max(last_s[chunk], end_s)
        else:
            target = holder[way[m, op + 1]]
            rest_s[m] -= transfer_s[worker, target]
            # Both ends are taken for the wire's time alone; latency holds up nobody else.
            if has_wires and worker != target:
                end_s = max(end_s, up_s[worker], down_s[target])
                up_s[worker] = down_s[target] = end_s + wire_s[worker, target]
            input_s[m] = end_s + transfer_s[worker, target]
    for stage in range(len(reduced_s)):
        if reduced_s[stage] > 0.0:
            reduced_s[stage] += state.reduce_s[stage]
        step_s = max(step_s, reduced_s[stage])
    return step_s if step_s <= limit_s else NEVER


@compiled
def run_graph(fixed: Fixed, state: State, work: Scratch, limit_s: float) -> float:
    """`run_sequence` where an op may wait for several, and several for it."""
    holder, way, sequence, ops = state.holder, state.way, state.sequence, state.op
    op_s, slots, rows = state.op_s, state.slots, fixed.ops
    transfer_s, wire_s, stage_of = fixed.transfer_s, fixed.wire_s, fixed.stage_of
    ready_s, free_s, rest_s, held = np.zeros(way.shape), work.free_s, work.rest_s, work.held
    up_s, down_s, reduced_s = work.up_s, work.down_s, work.reduced_s
    for zeroed in (free_s, up_s, down_s, work.input_s, work.last_s, reduced_s):
        zeroed[:] = 0.0
    held[:] = 0
    rest_s[:] = state.trip_s
    for at in range(len(sequence)):
        m, op = sequence[at], ops[at]
        chunk = way[m, op]
        worker, stage, takes_s = holder[chunk], stage_of[chunk], op_s[op, chunk]
        held[chunk] += rows[op, SLOTS]
        # Waiting would not help: what frees a slot is the same worker's, later in the sequence.
        if held[chunk] > slots[chunk]:
            return BLOCKED
        begin_s = max(ready_s[m, op], free_s[worker])
        work.begin_s[at] = begin_s
        work.waited_s[at] = begin_s - ready_s[m, op]
        end_s = begin_s + takes_s
        free_s[worker] = end_s
        # What is off the way there and back shortens no trip, so only itself may be too late.
        if rows[op, ONWARD]:
            rest_s[m] -= takes_s
        if end_s + (rest_s[m] if rows[op, ONWARD] else 0.0) > limit_s:
            return NEVER
        if rows[op, SUMS]:
            reduced_s[stage] = max(reduced_s[stage], end_s)
        origin = way[m, 0]
        work.input_s[m] = max(work.input_s[m], end_s)
        work.last_s[origin] = max(work.last_s[origin], end_s)
        for column in range(FOLLOWERS, rows.shape[1]):
            follower = rows[op, column]
            if follower < 0:
                break
            target = holder[way[m, follower]]
            leaves_s = end_s
            if fixed.has_wires and worker != target:
                leaves_s = max(end_s, up_s[worker], down_s[target])
                up_s[worker] = down_s[target] = leaves_s + wire_s[worker, target]
            if rows[op, ONWARD] and rows[follower, ONWARD]:
                rest_s[m] -= transfer_s[worker, target]
            ready_s[m, follower] = max(ready_s[m, follower], leaves_s + transfer_s[worker, target])
    step_s = work.input_s.max()
    for stage in range(len(reduced_s)):
        if reduced_s[stage] > 0.0:
            reduced_s[stage] += state.reduce_s[stage]
        step_s = max(step_s, reduced_s[stage])
    return float(step_s) if step_s <= limit_s else NEVER


@compiled
def smoothness(work: Scratch) -> float:
    """Measure that tells two routings of one length apart: when microbatches and origins end on average.

    The step's length alone is flat almost everywhere.
    """
    return float(0.65 * work.input_s.mean() + 0.5 * work.last_s.mean())


@compiled
def sort_sequence(state: State, work: Scratch) -> None:
    """Put the sequence in order of starts; each worker's own order stays as it is."""
    # By insertion, for after one move nearly all is in order.
    for at in range(1, len(state.sequence)):
        begin_s, waited_s = work.begin_s[at], work.waited_s[at]
        m, op = state.sequence[at], state.op[at]
        to = at - 1
        while to >= 0 and work.begin_s[to] > begin_s:
            work.begin_s[to + 1], work.waited_s[to + 1] = work.begin_s[to], work.waited_s[to]
            state.sequence[to + 1], state.op[to + 1] = state.sequence[to], state.op[to]
            to -= 1
        work.begin_s[to + 1], work.waited_s[to + 1] = begin_s, waited_s
        state.sequence[to + 1], state.op[to + 1] = m, op
