"""The orders that the field has names for, as starting points: each is simulated for the problem at hand.

Pipelines in which every microbatch visits all stages fall into chains; the ops of a chain are put in order by the
generators of `skein.plan.route.schedules`. Where paths skip stages there are no chains, and first come, first served
remains.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from skein.errors import UserError
from skein.plan.clock.timing import warm_up_depths
from skein.plan.ops import OpKind, op_numbers_at
from skein.plan.plan import PlannedOp
from skein.plan.route.evaluate import ordered
from skein.plan.route.problem import I64, Problem, Routing
from skein.plan.route.schedules import NAMED_ORDERS, Shape, one_f_one_b
from skein.types import MicrobatchId

FIRST_COME, DEEP = "first come, first served", "one_f_one_b with warm-up by latency"

_Ways = Mapping[int, Sequence[PlannedOp]]
"""Ops of each worker, in order."""


def named_orders(problem: Problem, worker_of: I64, path: I64) -> dict[str, Routing]:
    """The routing of placement and paths in every order that can be made for it, by name.

    Whether an order keeps to the slots is left to who runs it.
    """
    found: dict[str, Routing] = {}
    first = ordered(problem, worker_of, path)
    if first is not None:
        found[FIRST_COME] = first
    chains = _chains(problem, path)
    for name in (DEEP, *NAMED_ORDERS) if chains else ():
        ways = _ways(problem, worker_of, chains, name)
        sequence = None if ways is None else _sequence(problem, ways)
        if sequence is not None:
            found[name] = Routing(worker_of=worker_of, path=path, sequence=sequence)
    return found


def _chains(problem: Problem, path: I64) -> dict[tuple[int, ...], list[int]]:
    """Microbatches by the chunks they visit; nothing if stages are skipped or chunks are on several chains."""
    if problem.path_len < problem.num_stages:
        return {}
    chains: dict[tuple[int, ...], list[int]] = {}
    for m, row in enumerate(path):
        chains.setdefault(tuple(int(chunk) for chunk in row[: problem.path_len]), []).append(m)
    visited = [chunk for chain in chains for chunk in chain]
    return chains if len(visited) == len(set(visited)) else {}


def _ways(
    problem: Problem, worker_of: I64, chains: Mapping[tuple[int, ...], list[int]], name: str
) -> _Ways | None:
    """Ops of each worker in the order called `name`; None if some chain has not the shape for it."""
    ways: dict[int, list[PlannedOp]] = {}
    for chain, microbatches in chains.items():
        workers = list(dict.fromkeys(int(worker_of[chunk]) for chunk in chain))
        if ways.keys() & set(workers):
            return None
        ops_by_worker = _ops(
            problem, [int(worker_of[chunk]) for chunk in chain], workers, len(microbatches), name
        )
        if ops_by_worker is None:
            return None
        for worker, ops in zip(workers, ops_by_worker, strict=True):
            ways[worker] = [replace(op, microbatch=MicrobatchId(microbatches[op.microbatch])) for op in ops]
    return ways


def _ops(
    problem: Problem, holders: Sequence[int], workers: Sequence[int], num_microbatches: int, name: str
) -> Sequence[Sequence[PlannedOp]] | None:
    num_chunks, rest = divmod(len(holders), len(workers))
    shape = Shape(num_workers=len(workers), num_microbatches=num_microbatches, num_chunks=num_chunks)
    is_chunked = name != DEEP and NAMED_ORDERS[name].is_chunked
    if rest or [workers[w] for w in shape.worker_by_stage] != list(holders) or is_chunked != (num_chunks > 1):
        return None
    if name == DEEP:
        return one_f_one_b(shape, _depths(problem, holders, num_microbatches))
    try:
        return NAMED_ORDERS[name].make(shape)
    except UserError:
        return None


def _depths(problem: Problem, holders: Sequence[int], num_microbatches: int) -> tuple[int, ...]:
    """Forwards before the first backward, as many as latency asks for, there are, and memory holds."""
    stages = range(len(holders))
    op_s = [
        float(problem.forward_s[w, s] + problem.backward_s[w, s])
        for s, w in zip(stages, holders, strict=True)
    ]
    there = problem.transfer_s
    hop_s = [float(there[a, b] + there[b, a]) for a, b in pairwise(holders)]
    asked = warm_up_depths(op_s, hop_s, [max(op_s)] * len(op_s))
    # More than there are is no want of memory: without this one far hop would make all others shallow.
    depths = [min(depth, num_microbatches) for depth in asked]
    slots = [int(problem.slots[w, s]) for s, w in zip(stages, holders, strict=True)]
    # All go down together: a deep worker before a shallow one fills up with what cannot go on.
    share = min(1.0, *(slot / depth for slot, depth in zip(slots, depths, strict=True)))
    return tuple(max(1, int(share * depth)) for depth in depths)


def _sequence(problem: Problem, ways: _Ways) -> I64 | None:
    """An order of all ops that keeps each worker's; None if they run in a circle. What none lists goes when it may."""
    queues = {worker: deque(_own_ops(problem, ops)) for worker, ops in ways.items()}
    listed = {op for queue in queues.values() for op in queue}
    done: dict[tuple[int, int], None] = {}

    def may_go(m: int, number: int) -> bool:
        return all((m, x) in done for x in problem.ops[number].awaited)

    def end(m: int, number: int) -> None:
        done[m, number] = None
        for x in problem.ops[number].followers:
            if (m, x) not in listed and may_go(m, x):
                end(m, x)

    is_moving = True
    while is_moving:
        is_moving = False
        for queue in queues.values():
            while queue and may_go(*queue[0]):
                end(*queue.popleft())
                is_moving = True
    if len(done) < problem.num_ops:
        return None
    return np.array([m * len(problem.ops) + number for m, number in done], np.int64)


def _own_ops(problem: Problem, ops: Sequence[PlannedOp]) -> Iterator[tuple[int, int]]:
    """(microbatch, number of the op) of what a generator lists. A line's last stage does all in its loss."""
    hops = problem.num_hops
    numbers = op_numbers_at(hops + 1)
    for op in ops:
        if op.stage < hops:
            yield op.microbatch, numbers[op.kind, op.stage]
        elif op.kind.row.is_accumulating:
            yield op.microbatch, numbers[OpKind.LOSS, hops]
