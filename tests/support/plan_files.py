"""Plan files, read back as other programs would."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter

from skein.plan.route.evaluate import sequence_of, timeline
from skein.plan.route.problem import I64, Problem, Routing


@dataclass(frozen=True, slots=True)
class _Path:
    microbatch: int
    hops: list[int]
    stages: list[int]


@dataclass(frozen=True, slots=True)
class _PlanFile:
    placement: list[list[int]]
    paths: list[_Path]
    order: dict[int, list[tuple[str, int]]]


_FILE = TypeAdapter(_PlanFile)


def routing_in(problem: Problem, document: Mapping[str, object]) -> Routing:
    """The routing in a plan file.

    Raises:
        AssertionError: its orders name other ops than its paths have, or wait for each other.
    """
    file = _FILE.validate_python(document)
    worker_of = np.array([worker for stage in file.placement for worker in stage], dtype=np.int64)
    chunk_of = {(int(w), int(s)): i for i, (w, s) in enumerate(zip(worker_of, problem.stage_of, strict=True))}
    path = np.full((problem.num_microbatches, problem.num_hops + 1), -1, dtype=np.int64)
    for entry in file.paths:
        chunks = [chunk_of[visit] for visit in zip(entry.hops, entry.stages, strict=True)]
        # In LOOP the loss is where the path began.
        path[entry.microbatch] = [*chunks, chunks[0]][: problem.num_hops + 1]
    told = Routing(worker_of=worker_of, path=path, sequence=_sequence(problem, worker_of, path, file.order))
    # Which transfer has a busy link first is not in the file: who is ready first.
    return (
        replace(told, sequence=sequence_of(timeline(problem, told).begin_s)) if problem.wire_s.any() else told
    )


def _sequence(
    problem: Problem, worker_of: I64, path: I64, order: Mapping[int, Sequence[tuple[str, int]]]
) -> I64:
    """One order of all ops that agrees with every worker's: whatever is next somewhere and can run, workers in turn."""
    queues = {worker: list(ops)[::-1] for worker, ops in order.items()}
    next_number = [0] * problem.num_microbatches
    sequence: list[int] = []

    def is_next(worker: int, kind: str, microbatch: int) -> bool:
        number = next_number[microbatch]
        if number == len(problem.ops):
            return False
        wanted = problem.ops[number]
        return wanted.kind.row.letter == kind and bool(worker_of[path[microbatch, wanted.hop]] == worker)

    num_before = -1
    while len(sequence) > num_before:
        num_before = len(sequence)
        for worker, queue in queues.items():
            while queue and is_next(worker, *queue[-1]):
                _, microbatch = queue.pop()
                sequence.append(microbatch * len(problem.ops) + next_number[microbatch])
                next_number[microbatch] += 1
    assert len(sequence) == problem.num_ops, f"{len(sequence)} of {problem.num_ops} ops can run"
    return np.array(sequence, dtype=np.int64)
