"""Room for the order of a routing: slots of each chunk, out of the memory that its worker has for all of them.

Every placement can do with an equal part of the memory for each chunk. An order that holds more on one chunk and less
on another than that has slots of its own: of each chunk as many as it ever holds there. In them the order as it is
listed never waits for a slot, so no step halts (docs/adr/0005).
"""

from dataclasses import dataclass, replace

import numpy as np

from skein.plan.route.problem import I64, Problem, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowded:
    """The worker that lacks most for an order: slots that it needs on all of its chunks, and that it has room for."""

    worker: int
    needed: int
    has: int


def peak_held(problem: Problem, routing: Routing) -> I64:
    """(num_chunks,) the most microbatches that each chunk holds at once, between forward and what ends it there."""
    hops = np.array([op.hop for op in problem.ops])
    taken = np.array([op.kind.row.slots for op in problem.ops])
    microbatches, numbers = np.divmod(routing.sequence, len(problem.ops))
    chunks, peaks = routing.path[microbatches, hops[numbers]], np.zeros(problem.num_chunks, np.int64)
    # Each chunk gives back all that it takes, so one sum over all, chunk by chunk, begins each at 0.
    by_chunk = np.argsort(chunks, kind="stable")
    np.maximum.at(peaks, chunks[by_chunk], taken[numbers[by_chunk]].cumsum())
    return peaks


def with_room(problem: Problem, routing: Routing) -> Problem | Crowded:
    """A problem that has slots for the routing's order: `problem` if that has, else one for this placement alone."""
    peaks = np.maximum(1, peak_held(problem, routing))
    chunks = routing.worker_of, problem.stage_of
    if (peaks <= problem.slots[chunks]).all():
        return problem
    if problem.memory is None:
        return _crowded(routing.worker_of, peaks, problem.slots[chunks].astype(np.float64))
    memory = problem.memory
    free_bytes = memory.memory_bytes - memory.fixed_by_worker(routing.worker_of, problem.stage_of)
    needed_bytes = np.zeros(problem.num_workers)
    np.add.at(needed_bytes, routing.worker_of, peaks * memory.slot_bytes[problem.stage_of])
    if (needed_bytes > free_bytes).any():
        part = np.maximum(0.0, free_bytes) / np.maximum(1.0, needed_bytes)
        return _crowded(routing.worker_of, peaks, peaks * np.minimum(1.0, part)[routing.worker_of])
    slots = np.zeros_like(problem.slots)
    slots[chunks] = peaks
    return replace(problem, slots=slots)


def may_hold(problem: Problem, worker_of: I64) -> bool:
    """Whether each worker has a slot for each of its chunks, and all are where they may be."""
    if not are_placed(problem, worker_of):
        return False
    if problem.memory is None:
        return bool((problem.slots[worker_of, problem.stage_of] > 0).all())
    least_bytes = problem.memory.fixed_by_worker(worker_of, problem.stage_of)
    np.add.at(least_bytes, worker_of, problem.memory.slot_bytes[problem.stage_of])
    return bool((least_bytes <= problem.memory.memory_bytes).all())


def are_placed(problem: Problem, worker_of: I64) -> bool:
    """Whether no chunk is where it is barred, or on a worker with another that it is to be apart from."""
    if problem.barred is not None and problem.barred[worker_of, problem.stage_of].any():
        return False
    runs = (worker_of[problem.first_chunk[x.start] : problem.first_chunk[x.stop]] for x in problem.apart)
    return all(len(set(held.tolist())) == len(held) for held in runs)


def _crowded(worker_of: I64, peaks: I64, fitting: np.ndarray) -> Crowded:
    needed = np.bincount(worker_of, peaks)
    has = np.floor(np.bincount(worker_of, np.minimum(peaks, fitting)) + 1e-9)
    worker = int((needed - has).argmax())
    return Crowded(worker=worker, needed=int(needed[worker]), has=int(has[worker]))
