"""The best routing of a tiny problem, by trying them all: placements, paths, and orders by branch and bound.

Meant for up to about six workers and six microbatches; an oracle for what is faster. Rules of this file
- Chunks of one stage are alike, and so are microbatches with one path: only one of the ways to number them is tried.
- Ops are put in order of their starts. An op is not tried if another could end before it starts and take nothing from
  anybody by being done at once: any but a forward, or a forward of a chunk that has slots for all.
- What is left of a microbatch's trip, and of a worker's ops between the soonest start and the least time after them,
  bounds a beginning from below; what is no better than the best known by a margin is left.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from skein.plan.route.kernels.arrays import HOP, SLOTS, op_array, op_seconds
from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.problem import F64, I64, Problem, Routing
from skein.types import Layout

MARGIN = 1e-9
"""Seconds by which a better order must be better."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The least makespan, a routing that has it, and how many steps the search for orders took."""

    makespan_s: float
    routing: Routing
    num_steps: int


class TooLongError(ValueError):
    """A search for orders that did not end."""


def optimum(problem: Problem, *, most_steps: int = 50_000_000) -> Optimum | None:
    """The routing with the least makespan; None if there is none. Aggregation is left out.

    Args:
        problem: with links that carry any number of transfers at once.
        most_steps: of the search for orders, over all placements and paths.

    Raises:
        ValueError: links can be busy.
        TooLongError: `most_steps` do not suffice.
    """
    if problem.wire_s.any():
        raise ValueError("links that can be busy are not searched exactly")
    cases = sorted(_cases(problem), key=lambda case: case[0])
    best_s, best, num_steps = np.inf, None, 0
    for low_s, worker_of, path in cases:
        if low_s >= best_s - MARGIN:
            break
        makespan_s, sequence, steps = _best_order(problem, worker_of, path, best_s, most_steps - num_steps)
        num_steps += steps
        if num_steps >= most_steps:
            raise TooLongError(f"{most_steps} steps do not suffice")
        if makespan_s < best_s:
            best_s = makespan_s
            best = Routing(worker_of=worker_of, path=path, sequence=sequence)
    return None if best is None else Optimum(makespan_s=best_s, routing=best, num_steps=num_steps)


def _cases(problem: Problem) -> Iterator[tuple[float, I64, I64]]:
    """Placements with paths, and a bound on each."""
    paths = list(_all_paths(problem))
    for worker_of in _placements(problem):
        for path in paths:
            yield _low_s(problem, worker_of, path), worker_of, path


def _placements(problem: Problem) -> Iterator[I64]:
    def fill(stage: int, seats: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if stage == problem.num_stages:
            yield ()
            return
        size = problem.stage_sizes[stage]
        alike = stage > 0 or len(set(problem.num_by_origin)) == 1
        left = [worker for worker, count in enumerate(seats) if count]
        for chosen in itertools.combinations(left, size) if alike else itertools.permutations(left, size):
            rest = tuple(count - (worker in chosen) for worker, count in enumerate(seats))
            for others in fill(stage + 1, rest):
                yield (*chosen, *others)

    for found in fill(0, (problem.most_chunks,) * problem.num_workers):
        worker_of = np.array(found, np.int64)
        holds = problem.slots[worker_of, problem.stage_of] > 0
        is_loss_only = (problem.stage_of == problem.num_stages - 1) & (problem.layout is Layout.LINE)
        if (holds | is_loss_only).all():
            yield worker_of


def stage_walks(problem: Problem) -> list[tuple[int, ...]]:
    """The stages of every legal path, hop by hop; in a `LINE` with the last stage."""
    is_line = problem.layout is Layout.LINE
    last = problem.num_stages - 1
    found = []
    for walk in itertools.permutations(problem.skippable, problem.num_hops - 1):
        full = (0, *walk, *([last] if is_line else []))
        front, swaps = 0, 0
        for stage in full[1:]:
            if stage < front:
                swaps += 1 if front - stage == 1 else problem.max_swaps + 1
            elif stage - front > problem.max_jump:
                swaps = problem.max_swaps + 1
            front = max(front, stage)
        if swaps <= problem.max_swaps:
            found.append(full)
    return found


def _all_paths(problem: Problem) -> Iterator[I64]:
    """Paths of all microbatches, each set of them once."""
    ways = []
    for walk in stage_walks(problem):
        chunks = [
            range(int(problem.first_chunk[stage]), int(problem.first_chunk[stage + 1])) for stage in walk[1:]
        ]
        ways += list(itertools.product(*chunks))
    ways.sort()
    by_origin = [
        list(itertools.combinations_with_replacement(ways, count)) for count in problem.num_by_origin
    ]
    for picked in itertools.product(*by_origin):
        visits = Counter(int(problem.stage_of[chunk]) for lot in picked for way in lot for chunk in way)
        counts = [visits[stage] for stage in problem.skippable]
        if counts and max(counts) - min(counts) > (1 if sum(counts) % len(counts) else 0):
            continue
        is_loop = problem.layout is Layout.LOOP
        rows = [
            (origin, *way, *([origin] if is_loop else [])) for origin, lot in enumerate(picked) for way in lot
        ]
        yield np.array(rows, np.int64)


def _low_s(problem: Problem, worker_of: I64, path: I64) -> float:
    """The longest trip, and each worker's ops between the soonest arrival and the least time after them."""
    lines = _lines(problem, worker_of, path)
    low_s = 0.0
    before_s, after_s = np.zeros_like(lines.takes_s), np.zeros_like(lines.takes_s)
    for row, length in enumerate(lines.length):
        through_s = np.cumsum((lines.lag_s + lines.takes_s)[row, :length])
        if lines.after_row[row] >= 0:
            waits_for = lines.after_row[row], lines.after_op[row]
            through_s += before_s[waits_for] + lines.takes_s[waits_for]
        before_s[row, :length] = through_s - lines.takes_s[row, :length]
        after_s[row, :length] = through_s[-1] - through_s
        low_s = max(low_s, float(through_s[-1]))
    is_op = np.arange(lines.takes_s.shape[1]) < lines.length[:, None]
    for w in np.unique(lines.worker[is_op]):
        here = is_op & (lines.worker == w)
        low_s = max(low_s, float(before_s[here].min() + lines.takes_s[here].sum() + after_s[here].min()))
    return low_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lines:
    """Ops of all microbatches as lines: a microbatch's way there and back, then each of its weight ops as one more.

    Args:
        takes_s: (lines, ops of the longest) seconds of each op; `lag_s`: of the transfer before it; `worker`, `chunk`,
            `slots` (taken or given back) alike; `number`: of the op, as in a `Routing`.
        length: (lines,) ops of each; `after_row`, `after_op`: what its first op waits for, or -1.
    """

    takes_s: F64
    lag_s: F64
    worker: I64
    chunk: I64
    slots: I64
    number: I64
    length: I64
    after_row: I64
    after_op: I64


def _lines(problem: Problem, worker_of: I64, path: I64) -> _Lines:
    onward = [op.number for op in problem.ops if op.kind.row.is_onward]
    others = [op for op in problem.ops if not op.kind.row.is_onward]
    each = [onward, *([op.number] for op in others)]
    numbers = np.array([[*line, *[line[-1]] * (len(onward) - len(line))] for line in each], np.int64)
    num_microbatches, num_lines = len(path), len(each)
    table = op_array(problem.ops)
    chunk = path[:, table[numbers, HOP]].reshape(-1, len(onward))
    seconds = op_seconds(problem, worker_of, path)
    worker = worker_of[chunk]
    lag_s = np.zeros(worker.shape)
    lag_s[:, 1:] = problem.transfer_s[worker[:, :-1], worker[:, 1:]]
    firsts = np.repeat(np.arange(num_microbatches) * num_lines, num_lines)
    is_way = np.arange(len(chunk)) == firsts
    waits_for = [-1, *(onward.index(op.own[0]) for op in others)]
    of_step = np.arange(num_microbatches)[:, None, None] * len(problem.ops)
    return _Lines(
        takes_s=seconds[:, numbers].reshape(worker.shape),
        lag_s=lag_s,
        worker=worker,
        chunk=chunk,
        slots=np.tile(table[numbers, SLOTS], (num_microbatches, 1)),
        number=(of_step + numbers).reshape(worker.shape),
        length=np.tile([len(line) for line in each], num_microbatches),
        after_row=np.where(is_way, -1, firsts),
        after_op=np.tile(waits_for, num_microbatches),
    )


def _best_order(
    problem: Problem, worker_of: I64, path: I64, most_s: float, most_steps: int
) -> tuple[float, I64, int]:
    lines = _lines(problem, worker_of, path)
    slots = problem.slots[worker_of, problem.stage_of]
    is_op = np.arange(lines.takes_s.shape[1]) < lines.length[:, None]
    taken = lines.chunk[is_op & (lines.slots > 0)]
    is_ample = np.bincount(taken, minlength=problem.num_chunks) <= slots
    lines_of_each = len(lines.length) // len(path)
    twin = np.full(len(lines.length), -1)
    for m in range(1, len(path)):
        alike = [n for n in range(m) if np.array_equal(path[n], path[m])]
        twin[m * lines_of_each] = alike[-1] * lines_of_each if alike else -1
    order = np.zeros(int(lines.length.sum()), np.int64)
    best_s, steps = search_orders(
        lines.takes_s,
        lines.lag_s,
        lines.worker,
        lines.chunk,
        lines.slots,
        lines.length,
        lines.after_row,
        lines.after_op,
        slots,
        is_ample,
        twin,
        most_s,
        most_steps,
        order,
    )
    done = [0] * len(lines.length)
    sequence = np.zeros_like(order)
    for i, line in enumerate(order.tolist()):
        sequence[i] = lines.number[line, done[line]]
        done[line] = min(done[line] + 1, int(lines.length[line]) - 1)
    return float(best_s), sequence, int(steps)


@compiled
def search_orders(
    takes_s: F64,
    lag_s: F64,
    worker: I64,
    chunks: I64,
    slots_of: I64,
    length: I64,
    after_row: I64,
    after_op: I64,
    slots: I64,
    is_ample: np.ndarray,
    twin: I64,
    most_s: float,
    most_steps: int,
    sequence: I64,
) -> tuple[float, int]:
    """The least makespan below `most_s` (infinite if there is none) and steps taken; its order is left in `sequence`.

    Args:
        takes_s: (lines, ops of the longest), and so on to `after_op`: see `_Lines`.
        slots: (num_chunks,); `is_ample`: whether they are enough for all visits there.
        twin: (lines,) an earlier one with the same path that starts first, or -1.
        most_s: what is looked for is better by a margin.
        most_steps: when to give up.
        sequence: out, (num_ops,) line of each op, in order.
    """
    num_lines, num_ops = takes_s.shape
    num_workers = worker.max() + 1
    depth_end = length.sum()
    rest_s = np.zeros((num_lines, num_ops + 1))
    for m in range(num_lines):
        for op in range(length[m] - 1, -1, -1):
            rest_s[m, op] = rest_s[m, op + 1] + takes_s[m, op] + lag_s[m, op]
    # One row for each op that is in order already.
    done = np.zeros((depth_end + 1, num_lines), np.int64)
    ready_s = np.zeros((depth_end + 1, num_lines))
    free_s = np.zeros((depth_end + 1, num_workers))
    held = np.zeros((depth_end + 1, len(slots)), np.int64)
    begun_s = np.zeros(depth_end + 1)
    options = np.zeros((depth_end + 1, num_lines), np.int64)
    num_options = np.zeros(depth_end + 1, np.int64)
    next_option = np.zeros(depth_end + 1, np.int64)
    chosen = np.zeros(depth_end + 1, np.int64)
    start_s = np.zeros(num_lines)
    can = np.zeros(num_lines, np.bool_)
    load_s, head_s, tail_s = np.zeros(num_workers), np.zeros(num_workers), np.zeros(num_workers)
    best_s = np.inf
    limit_s = most_s
    depth, num_steps, is_new = 0, 0, True
    while depth >= 0:
        if is_new:
            is_new = False
            num_steps += 1
            if num_steps > most_steps:
                return best_s, num_steps
            num_options[depth] = 0
            next_option[depth] = 0
            if depth == depth_end:
                best_s = ready_s[depth].max()
                limit_s = best_s
                for at in range(depth_end):
                    sequence[at] = chosen[at]
                depth -= 1
                continue
            load_s[:] = 0.0
            head_s[:] = np.inf
            tail_s[:] = np.inf
            low_s = 0.0
            for m in range(num_lines):
                time_s = ready_s[depth, m]
                for op in range(done[depth, m], length[m]):
                    w = worker[m, op]
                    time_s = max(time_s + lag_s[m, op], free_s[depth, w])
                    head_s[w] = min(head_s[w], time_s)
                    time_s += takes_s[m, op]
                    load_s[w] += takes_s[m, op]
                    tail_s[w] = min(tail_s[w], rest_s[m, op + 1])
                low_s = max(low_s, time_s)
            for w in range(num_workers):
                if load_s[w] > 0.0:
                    low_s = max(low_s, head_s[w] + load_s[w] + tail_s[w])
            if low_s >= limit_s - MARGIN:
                depth -= 1
                continue
            soonest_s = np.inf
            for m in range(num_lines):
                op = done[depth, m]
                can[m] = op < length[m] and (after_row[m] < 0 or done[depth, after_row[m]] > after_op[m])
                if not can[m]:
                    continue
                takes_slot, chunk = slots_of[m, op] > 0, chunks[m, op]
                if takes_slot and held[depth, chunk] >= slots[chunk]:
                    can[m] = False
                    continue
                if op == 0 and twin[m] >= 0 and done[depth, twin[m]] == 0:
                    can[m] = False
                    continue
                start_s[m] = max(ready_s[depth, m] + lag_s[m, op], free_s[depth, worker[m, op]])
                if not takes_slot or is_ample[chunk]:
                    soonest_s = min(soonest_s, start_s[m] + takes_s[m, op])
                # Its turn in the order of starts may be over, until its worker has done something else.
                can[m] = start_s[m] >= begun_s[depth]
            for m in range(num_lines):
                if can[m] and start_s[m] <= soonest_s:
                    # Soonest first, so that good orders are met early.
                    at = num_options[depth]
                    while at > 0 and start_s[options[depth, at - 1]] > start_s[m]:
                        options[depth, at] = options[depth, at - 1]
                        at -= 1
                    options[depth, at] = m
                    num_options[depth] += 1
        if next_option[depth] == num_options[depth]:
            depth -= 1
            continue
        m = options[depth, next_option[depth]]
        next_option[depth] += 1
        op = done[depth, m]
        w = worker[m, op]
        begin_s = max(ready_s[depth, m] + lag_s[m, op], free_s[depth, w])
        chosen[depth] = m
        done[depth + 1] = done[depth]
        ready_s[depth + 1] = ready_s[depth]
        free_s[depth + 1] = free_s[depth]
        held[depth + 1] = held[depth]
        begun_s[depth + 1] = begin_s
        done[depth + 1, m] += 1
        ready_s[depth + 1, m] = begin_s + takes_s[m, op]
        for other in range(num_lines):
            if after_row[other] == m and after_op[other] == op:
                ready_s[depth + 1, other] = begin_s + takes_s[m, op]
        free_s[depth + 1, w] = begin_s + takes_s[m, op]
        held[depth + 1, chunks[m, op]] += slots_of[m, op]
        depth += 1
        is_new = True
    return best_s, num_steps
