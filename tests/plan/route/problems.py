"""Random problems, and the execution model written a second time, plainly."""

import heapq
from collections.abc import Collection
from itertools import permutations
from math import ceil

import numpy as np

from skein.plan.route.problem import Problem, Reduction, Routing
from skein.types import Layout


def drawn(
    seed: int, *, layout: Layout = Layout.LOOP, has_wires: bool = False, has_reduction: bool = False
) -> Problem:
    """A small problem with unequal workers and directed links."""
    luck = np.random.default_rng(seed)
    num_stages = int(luck.integers(2, 6))
    sizes = tuple(int(n) for n in luck.integers(1, 4, num_stages))
    num_workers = sum(sizes) + int(luck.integers(0, 2))
    links = luck.uniform(0.1, 3.0, (num_workers, num_workers))
    np.fill_diagonal(links, 0.0)
    forward_s = luck.uniform(0.5, 2.0, (num_workers, num_stages))
    fixed = 1 if layout is Layout.LOOP else 2
    reduction = Reduction(
        num_bytes=luck.uniform(1e6, 1e7, num_stages),
        latency_s=luck.uniform(0, 0.1, (num_workers, num_workers)),
        bytes_per_s=luck.uniform(1e6, 1e7, (num_workers, num_workers)),
        tied_bytes=2e7 if layout is Layout.LINE and seed % 2 else 0.0,
        num_tied=2 if num_stages > 3 and seed % 4 == 1 else 1,
        least_shard_bytes=3e6 if seed % 3 else 0.0,
    )
    return Problem(
        name=f"drawn {seed}",
        layout=layout,
        stage_sizes=sizes,
        path_len=int(luck.integers(fixed, num_stages + 1)),
        num_by_origin=tuple(int(n) for n in luck.integers(1, 5, sizes[0])),
        max_swaps=int(luck.integers(0, 3)),
        max_jump=num_stages,
        forward_s=forward_s,
        backward_s=1.5 * forward_s,
        loss_s=luck.uniform(0.1, 2.0, num_workers),
        transfer_s=links,
        wire_s=0.8 * links if has_wires else np.zeros_like(links),
        slots=luck.integers(1, 4, (num_workers, num_stages)),
        reduction=reduction if has_reduction else None,
    )


def ops_of(problem: Problem, routing: Routing, m: int) -> list[tuple[int, int, float]]:
    """(chunk, worker, seconds) of each op of a microbatch."""
    *body, last = (int(chunk) for chunk in routing.path[m])
    found = []
    for kind, chunks in (("F", body), ("L", [last]), ("B", body[::-1])):
        for chunk in chunks:
            worker, stage = int(routing.worker_of[chunk]), int(problem.stage_of[chunk])
            times = {
                "F": problem.forward_s[worker, stage],
                "B": problem.backward_s[worker, stage],
                "L": problem.loss_s[worker],
            }
            found.append((chunk, worker, float(times[kind])))
    return found


def served_first_come(problem: Problem, routing: Routing) -> dict[tuple[int, int], float] | None:
    """Start of each (microbatch, op) if workers take what is ready, backwards and losses first; None if it halts.

    Links carry any number at once.
    """
    ops = [ops_of(problem, routing, m) for m in range(problem.num_microbatches)]
    free = {
        c: int(problem.slots[routing.worker_of[c], problem.stage_of[c]]) for c in range(problem.num_chunks)
    }
    ready: list[list[tuple[bool, float, int, int, int]]] = [[] for _ in range(problem.num_workers)]
    is_busy = [False] * problem.num_workers
    events: list[tuple[float, int, bool, int, int]] = []
    began: dict[tuple[int, int], float] = {}
    number = 0
    for m in range(problem.num_microbatches):
        number += 1
        heapq.heappush(events, (0.0, number, False, m, 0))
    while events:
        now, touched = events[0][0], set()
        while events and events[0][0] == now:
            _, its, is_end, m, op = heapq.heappop(events)
            chunk, worker, _ = ops[m][op]
            touched.add(worker)
            if not is_end:
                ready[worker].append((op < problem.num_hops, now, its, m, op))
                continue
            is_busy[worker] = False
            if op > problem.num_hops:
                free[chunk] += 1
            if op < 2 * problem.num_hops:
                number += 1
                arrives = now + problem.transfer_s[worker, ops[m][op + 1][1]]
                heapq.heappush(events, (arrives, number, False, m, op + 1))
        for worker in sorted(touched):
            fit = [x for x in ready[worker] if not x[0] or free[ops[x[3]][x[4]][0]] > 0]
            if is_busy[worker] or not fit:
                continue
            best = min(fit)
            ready[worker].remove(best)
            is_forward, _, _, m, op = best
            free[ops[m][op][0]] -= is_forward
            is_busy[worker] = True
            began[m, op] = now
            number += 1
            heapq.heappush(events, (now + ops[m][op][2], number, True, m, op))
    return began if len(began) == sum(map(len, ops)) else None


def in_sequence(problem: Problem, routing: Routing) -> float:
    """Seconds of a step in sequence order, aggregation included."""
    ops = [ops_of(problem, routing, m) for m in range(problem.num_microbatches)]
    worker_free: dict[int, float] = {}
    line_free: dict[tuple[str, int], float] = {}
    arrived = [0.0] * len(ops)
    last = [0.0] * problem.num_stages
    for m, op in zip(*np.divmod(routing.sequence, len(problem.ops)), strict=True):
        chunk, worker, seconds = ops[m][op]
        end = max(arrived[m], worker_free.get(worker, 0.0)) + seconds
        worker_free[worker] = end
        if op >= problem.num_hops:
            stage = int(problem.stage_of[chunk])
            last[stage] = max(last[stage], end)
        if op + 1 < len(ops[m]):
            target = ops[m][op + 1][1]
            busy = problem.wire_s[worker, target]
            if busy > 0:
                lines = [("up", worker), ("down", target)]
                end = max([end, *(line_free.get(line, 0.0) for line in lines)])
                line_free.update(dict.fromkeys(lines, end + busy))
            arrived[m] = end + problem.transfer_s[worker, target]
    return max(end + _reduced_s(problem, routing, stage) for stage, end in enumerate(last) if end > 0)


def _reduced_s(problem: Problem, routing: Routing, stage: int) -> float:
    if problem.reduction is None:
        return 0.0
    held = [
        {int(w) for w, s in zip(routing.worker_of, problem.stage_of, strict=True) if s == x}
        for x in range(problem.num_stages)
    ]
    own_s = group_s(problem.reduction, held[stage], float(problem.reduction.num_bytes[stage]))
    if stage >= problem.reduction.num_tied:
        return own_s
    other = held[stage - problem.reduction.num_tied]
    return max(own_s, group_s(problem.reduction, held[stage] | other, problem.reduction.tied_bytes))


def group_s(reduction: Reduction, group: Collection[int], num_bytes: float) -> float:
    """Parts to their owners and sums back, over the worst of the group's links."""
    if len(group) < 2 or num_bytes == 0:
        return 0.0
    pairs = list(permutations(group, 2))
    slowest = min(float(reduction.bytes_per_s[pair]) for pair in pairs)
    num_shards = len(group)
    if reduction.least_shard_bytes:
        num_shards = min(num_shards, ceil(num_bytes / reduction.least_shard_bytes))
    sent_s = num_bytes / num_shards * (len(group) - 1) / slowest
    return 2 * (max(float(reduction.latency_s[pair]) for pair in pairs) + sent_s)
