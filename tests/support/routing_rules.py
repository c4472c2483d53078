"""What makes a routing legal, checked from scratch: whoever made it and however."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from skein.plan.route.problem import I64, Problem, Routing
from skein.types import Layout


def violations(problem: Problem, routing: Routing) -> tuple[str, ...]:
    """Each rule that `routing` breaks, in words; empty if it is legal.

    Rules: every chunk has a worker, no worker holds a stage twice or more chunks than it may; paths begin at an origin,
    visit `path_len` stages once each, within the limits on swaps and jumps; origins send what they shall; skippable
    stages are visited equally often, to within one where the numbers do not divide; the sequence has every op once,
    and run one by one in that order no chunk ever holds more than its slots.
    """
    shapes = tuple(_shapes(problem, routing))
    if shapes:
        return shapes
    return (
        *_holders(problem, routing),
        *_paths(problem, routing),
        *_totals(problem, routing),
        *_sequence(problem, routing),
    )


def _shapes(problem: Problem, routing: Routing) -> Iterator[str]:
    """Later checks index by these."""
    num_microbatches, num_hops = problem.num_microbatches, problem.num_hops
    wanted = (
        ("worker_of", routing.worker_of, (problem.num_chunks,), problem.num_workers),
        ("path", routing.path, (num_microbatches, num_hops + 1), problem.num_chunks),
        ("sequence", routing.sequence, (problem.num_ops,), problem.num_ops),
    )
    for name, array, shape, stop in wanted:
        if array.shape != shape:
            yield f"{name} has shape {array.shape}, expected {shape}"
        elif array.size and not (array.min() >= 0 and array.max() < stop):
            yield f"{name} has values outside 0 ... {stop - 1}"


def _holders(problem: Problem, routing: Routing) -> Iterator[str]:
    held = Counter(zip(problem.stage_of.tolist(), routing.worker_of.tolist(), strict=True))
    for (stage, worker), count in sorted(held.items()):
        if count > 1:
            yield f"worker {worker} holds stage {stage} {count} times"
    most = problem.most_chunks
    for worker, count in enumerate(np.bincount(routing.worker_of, minlength=problem.num_workers)):
        if count > most:
            yield f"worker {worker} holds {count} chunks, may hold {most}"


def _paths(problem: Problem, routing: Routing) -> Iterator[str]:
    for microbatch, chunks in enumerate(routing.path.tolist()):
        if problem.layout is Layout.LOOP and chunks[-1] != chunks[0]:
            yield f"microbatch {microbatch} has its loss at chunk {chunks[-1]}, not at its origin"
        visited = chunks[:-1] if problem.layout is Layout.LOOP else chunks
        for what in _stages(problem, [int(problem.stage_of[chunk]) for chunk in visited]):
            yield f"microbatch {microbatch} {what}"


def _stages(problem: Problem, stages: list[int]) -> Iterator[str]:
    """What is wrong with visiting these stages in this order."""
    if stages[0] != 0:
        yield f"begins at stage {stages[0]}"
    if problem.layout is Layout.LINE and stages[-1] != problem.num_stages - 1:
        yield f"ends at stage {stages[-1]}"
    if len(set(stages)) != len(stages):
        yield f"visits a stage twice: {stages}"
    highest, num_swaps = stages[0], 0
    for stage in stages[1:]:
        if stage < highest - 1:
            yield f"goes back to stage {stage} from {highest}"
        if stage > highest + problem.max_jump:
            yield f"jumps from stage {highest} to {stage}"
        num_swaps += stage < highest
        highest = max(highest, stage)
    if num_swaps > problem.max_swaps:
        yield f"swaps {num_swaps} times"


def _totals(problem: Problem, routing: Routing) -> Iterator[str]:
    sent = np.bincount(routing.path[:, 0], minlength=problem.num_chunks)
    for origin, wanted in enumerate(problem.num_by_origin):
        if sent[origin] != wanted:
            yield f"origin {origin} sends {sent[origin]} microbatches, expected {wanted}"
    hops = routing.path[:, : problem.num_hops]
    visits = np.bincount(problem.stage_of[hops].ravel(), minlength=problem.num_stages)
    skippable = visits[list(problem.skippable)]
    if skippable.size and np.ptp(skippable) > (1 if skippable.sum() % skippable.size else 0):
        yield f"stages are visited unequally: {visits.tolist()}"


def _sequence(problem: Problem, routing: Routing) -> Iterator[str]:
    if len(set(routing.sequence.tolist())) < problem.num_ops:
        yield f"the sequence does not have {len(problem.ops)} ops of each microbatch"
        return
    held = np.zeros(problem.num_chunks, np.int64)
    slots = problem.slots[routing.worker_of, problem.stage_of]
    done: set[int] = set()
    for place in routing.sequence.tolist():
        microbatch, number = divmod(place, len(problem.ops))
        op = problem.ops[number]
        if any(place - number + x not in done for x in op.awaited):
            yield f"op {number} of microbatch {microbatch} comes before what it waits for"
            return
        done.add(place)
        chunk = routing.path[microbatch, op.hop]
        held[chunk] += op.kind.row.slots
        if held[chunk] > slots[chunk]:
            yield f"chunk {chunk} holds {held[chunk]} microbatches, has {slots[chunk]} slots"
            return


def in_turn(microbatches: I64, num_ops: int) -> I64:
    """(num_ops,) a sequence as in `Routing`, of microbatches whose ops come one after the other by number.

    >>> in_turn(np.array([0, 1, 0, 0, 1]), 3).tolist()
    [0, 3, 1, 2, 4]
    """
    done = [0] * (int(microbatches.max()) + 1)
    sequence = []
    for m in microbatches.tolist():
        sequence.append(m * num_ops + done[m])
        done[m] += 1
    return np.array(sequence, np.int64)
