"""Plan files: a routing as JSON that other programs can judge and run, and back.

`placement` has the workers of each stage, `paths` the workers that each microbatch visits, `order` what each worker
does: ["F" | "L" | "B", microbatch], strictly in turn. Microbatches ascend, for a reader without `order` hands them
to their origins as they are listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from client.planning.account import holders_of, placed_ops
from skein.config.explain import Words
from skein.errors import UserError
from skein.plan.ops import OpKind
from skein.plan.route.evaluate import ordered, sequence_of, timeline
from skein.plan.route.problem import I64, Problem, Routing

Document = Mapping[str, object]
_LETTERS = [kind.row.letter for kind in OpKind]


def plan_document(
    problem: Problem, routing: Routing, *, predicted_s: float, lower_bound_s: float | None
) -> dict[str, object]:
    """A plan file's content.

    Args:
        problem: what was planned.
        routing: the plan.
        predicted_s: seconds of its step, as the instance's rules count them.
        lower_bound_s: no plan is faster; None if unknown.
    """
    order: dict[str, list[list[str | int]]] = {str(worker): [] for worker in range(problem.num_workers)}
    for op in placed_ops(problem, routing):
        order[str(op.worker)].append([op.kind.row.letter, op.microbatch])
    return {
        "instance": problem.name,
        "placement": [holders_of(problem, routing, stage) for stage in range(problem.num_stages)],
        "paths": [
            {
                "microbatch": microbatch,
                "hops": routing.worker_of[chunks].tolist(),
                "stages": problem.stage_of[chunks].tolist(),
            }
            for microbatch, chunks in enumerate(_hops(problem, routing))
        ],
        "order": order,
        "predicted_s": predicted_s,
        "lower_bound_s": lower_bound_s,
    }


def _hops(problem: Problem, routing: Routing) -> I64:
    """(num_microbatches, path_len) chunks that count as visits: in LOOP, the way back to the origin does not."""
    return routing.path[:, : problem.path_len]


# --- back ---


def routing_in(problem: Problem, document: Document) -> Routing:
    """The routing in a plan file. Without an `order`, workers take ops first come, first served.

    `stages` of a path may be missing where nobody on it holds two stages.

    Raises:
        UserError: the file does not fit the problem; whether its paths keep the rules is not looked at.
    """
    worker_of = _worker_of(problem, document)
    path = _path(problem, document, worker_of)
    order = document.get("order")
    if order is not None:
        told = Routing(worker_of=worker_of, path=path, sequence=_sequence(problem, worker_of, path, order))
        # Which transfer has a busy link first is not in the file: who is ready first.
        return (
            replace(told, sequence=sequence_of(timeline(problem, told).begin_s))
            if problem.wire_s.any()
            else told
        )
    found = ordered(problem, worker_of, path)
    if found is None:
        raise UserError(
            "paths", Words("a deadlock"), "microbatches wait for each other's slots: give an order"
        )
    return found


def _worker_of(problem: Problem, document: Document) -> I64:
    placement = document.get("placement")
    sizes = list(problem.stage_sizes)
    if not isinstance(placement, list) or [_length(x) for x in placement] != sizes:
        raise UserError(
            "placement", Words("other sizes"), f"give lists of {sizes} workers, one for each stage"
        )
    workers = [worker for stage in placement for worker in stage]
    for worker in workers:
        if not isinstance(worker, int) or not 0 <= worker < problem.num_workers:
            raise UserError("placement", worker, f"give workers from 0 to {problem.num_workers - 1}")
    return np.array(workers, dtype=np.int64)


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) else -1


def _path(problem: Problem, document: Document, worker_of: I64) -> I64:
    entries = document.get("paths")
    if not isinstance(entries, list) or len(entries) != problem.num_microbatches:
        hint = f"give a list of {problem.num_microbatches}, one for each microbatch"
        raise UserError("paths", Words(f"{_length(entries)} paths"), hint)
    path = np.full((problem.num_microbatches, problem.num_hops + 1), -1, dtype=np.int64)
    for i, entry in enumerate(entries):
        field = f"paths[{i}]"
        microbatch = entry.get("microbatch") if isinstance(entry, dict) else None
        if not isinstance(microbatch, int) or not 0 <= microbatch < len(path) or path[microbatch, 0] >= 0:
            hint = f"give each number from 0 to {len(path) - 1} once"
            raise UserError(f"{field}.microbatch", microbatch, hint)
        chunks = _chunks(problem, field, entry, worker_of)
        # In LOOP the loss is where the path began.
        path[microbatch] = [*chunks, chunks[0]][: problem.num_hops + 1]
    return path


def _chunks(problem: Problem, field: str, entry: Document, worker_of: I64) -> list[int]:
    """The chunks of one path."""
    hops, stages = entry.get("hops"), entry.get("stages")
    if not isinstance(hops, list) or len(hops) != problem.path_len:
        raise UserError(f"{field}.hops", hops, f"give {problem.path_len} workers")
    if stages is not None and _length(stages) != len(hops):
        raise UserError(f"{field}.stages", stages, "give one stage for each hop")
    chunks = []
    for i, worker in enumerate(hops):
        held = [int(x) for x in np.flatnonzero(worker_of == worker)]
        if isinstance(stages, list):
            held = [chunk for chunk in held if problem.stage_of[chunk] == stages[i]]
        if len(held) != 1:
            found = "holds no such stage" if not held else "holds several stages: give stages too"
            raise UserError(f"{field}.hops[{i}]", worker, f"this worker {found}")
        chunks += held
    return chunks


def _sequence(problem: Problem, worker_of: I64, path: I64, order: object) -> I64:
    """One order of all ops that agrees with every worker's: whatever is next somewhere and can run, workers in turn."""
    queues = _queues(problem, order)
    next_number = [0] * problem.num_microbatches
    sequence: list[int] = []
    is_moving = True
    while is_moving:
        is_moving = False
        for worker, queue in enumerate(queues):
            while queue and _is_next(problem, worker_of, path, worker, queue[-1], next_number):
                _, microbatch = queue.pop()
                next_number[microbatch] += 1
                sequence.append(microbatch)
                is_moving = True
    if len(sequence) != problem.num_ops:
        hint = "list every op of every path once, on its worker, so that none waits for ever"
        raise UserError("order", Words(f"{len(sequence)} ops can run"), hint)
    return np.array(sequence, dtype=np.int64)


def _queues(problem: Problem, order: object) -> list[list[tuple[str, int]]]:
    """Each worker's ops, the first one last."""
    queues: list[list[tuple[str, int]]] = [[] for _ in range(problem.num_workers)]
    if not isinstance(order, dict):
        raise UserError("order", order, "give an object: ops by worker")
    for key, ops in order.items():
        if not str(key).isdecimal() or int(key) >= problem.num_workers or not isinstance(ops, list):
            raise UserError(
                "order", key, f"give lists of ops for workers from 0 to {problem.num_workers - 1}"
            )
        queues[int(key)] = [_op(problem, f"order.{key}[{i}]", op) for i, op in enumerate(ops)][::-1]
    return queues


def _op(problem: Problem, field: str, op: object) -> tuple[str, int]:
    kind, microbatch = op if isinstance(op, list) and len(op) == 2 else (None, None)
    if not isinstance(kind, str) or kind not in _LETTERS or not isinstance(microbatch, int):
        raise UserError(field, Words("no op"), 'give ["F", "L" or "B", microbatch]')
    if not 0 <= microbatch < problem.num_microbatches:
        raise UserError(field, microbatch, f"give a microbatch from 0 to {problem.num_microbatches - 1}")
    return kind, microbatch


def _is_next(
    problem: Problem, worker_of: I64, path: I64, worker: int, op: tuple[str, int], next_number: Sequence[int]
) -> bool:
    """Whether `op` is what its microbatch does next, and on this worker."""
    kind, microbatch = op
    number = next_number[microbatch]
    if number == len(problem.ops):
        return False
    wanted = problem.ops[number]
    chunk = path[microbatch, wanted.hop]
    return wanted.kind.row.letter == kind and bool(worker_of[chunk] == worker)
