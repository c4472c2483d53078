"""The orders that the field has names for, as starting points: each is simulated for the problem at hand.

Pipelines in which every microbatch visits all stages fall into chains; the ops of a chain are put in order by the
generators of `skein.plan.route.schedules`, for the placement that is given and for others of the same stages: adjacent
ones on each worker, or in a loop. Where paths skip stages there are no chains, and first come, first served remains.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise, product

import numpy as np

from skein.errors import UserError
from skein.plan.ops import OpKind, op_numbers_at
from skein.plan.route.depths import depth_options
from skein.plan.route.evaluate import ordered
from skein.plan.route.kernels.arrays import num_seats
from skein.plan.route.plan_routing import in_time
from skein.plan.route.problem import I64, Problem, Routing
from skein.plan.route.schedules import NAMED_ORDERS, Orders, Shape, one_f_one_b
from skein.units import counted

FIRST_COME, DEEP = "first come, first served", "one_f_one_b with warm-up by latency"
_LONG = 5_000
"""Ops of a step beyond which other placements and depths would cost the search its time."""

_Chains = Mapping[tuple[int, ...], Sequence[int]]
"""Microbatches by the chunks that they visit."""
_Ways = Mapping[int, Sequence[tuple[int, int]]]
"""Ops of each worker, in order, as (microbatch, number)."""


def named_orders(problem: Problem, worker_of: I64, path: I64) -> Iterator[tuple[str, Routing]]:
    """Routings of these paths by name, in every order that can be made, at this placement first.

    Whether first come, first served keeps to the slots is left to who runs it.
    """
    chains = _chains(problem, path)
    for where, placed in _placements(problem, worker_of, chains):
        first = ordered(problem, placed, path)
        if first is not None:
            yield FIRST_COME + where, first
        for name, ways in _named_ways(problem, placed, chains):
            sequence = _sequence(problem, ways)
            if sequence is not None:
                found = in_time(problem, Routing(worker_of=placed, path=path, sequence=sequence))
                if found is not None:
                    yield name + where, found


def _chains(problem: Problem, path: I64) -> _Chains:
    """Microbatches by the chunks they visit; nothing if stages are skipped or chunks are on several chains."""
    if problem.path_len < problem.num_stages:
        return {}
    chains: dict[tuple[int, ...], list[int]] = {}
    for m, row in enumerate(path):
        chains.setdefault(tuple(int(chunk) for chunk in row[: problem.path_len]), []).append(m)
    visited = [chunk for chain in chains for chunk in chain]
    return chains if len(visited) == len(set(visited)) else {}


def _placements(problem: Problem, worker_of: I64, chains: _Chains) -> Iterator[tuple[str, I64]]:
    """This placement, and others of the same chains: equally many adjacent stages in turn, once or several times."""
    yield "", worker_of
    known = {worker_of.tobytes()}
    for where, placed in _others(problem, worker_of, chains) if chains and problem.num_ops <= _LONG else ():
        has_room = (problem.slots[placed, problem.stage_of] > 0).all()
        most_held = num_seats(problem) // problem.num_workers
        if has_room and np.bincount(placed).max() <= most_held and placed.tobytes() not in known:
            known.add(placed.tobytes())
            yield where, placed


def _others(problem: Problem, worker_of: I64, chains: _Chains) -> Iterator[tuple[str, I64]]:
    """Placements in the order of the chains, in that of the fleet, and of a single chain with all of the fleet."""
    own = [[*dict.fromkeys(int(worker_of[chunk]) for chunk in chain)] for chain in chains]
    every = [[*range(problem.num_workers)]] if len(chains) == 1 else own
    for workers_of, num_chunks in product(
        (own, [sorted(x) for x in own], every), range(1, problem.num_stages + 1)
    ):
        num_runs = [len(workers) * num_chunks for workers in workers_of]
        if not any(problem.num_stages % count for count in num_runs):
            placed = worker_of.copy()
            for chain, workers, count in zip(chains, workers_of, num_runs, strict=True):
                placed[list(chain)] = np.repeat(np.resize(workers, count), problem.num_stages // count)
            yield f", {counted(num_chunks, 'turn')} of {counted(len(workers_of[0]), 'worker')}", placed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """A chain as its workers see it: adjacent stages with one worker are a run, as one stage of the generators.

    `shape` is None where the runs are no loop.
    """

    runs: tuple[tuple[int, tuple[int, ...]], ...]
    microbatches: Sequence[int]

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(worker for worker, _ in self.runs))

    @property
    def shape(self) -> Shape | None:
        num_chunks, rest = divmod(len(self.runs), len(self.workers))
        shape = Shape(
            num_workers=len(self.workers), num_microbatches=len(self.microbatches), num_chunks=num_chunks
        )
        is_loop = not rest and [self.workers[w] for w in shape.worker_by_stage] == [w for w, _ in self.runs]
        return shape if is_loop else None


def _named_ways(problem: Problem, worker_of: I64, chains: _Chains) -> Iterator[tuple[str, _Ways]]:
    """Ops of each worker in every order that all chains have the shape for."""
    pipelines = [_pipeline(worker_of, chain, microbatches) for chain, microbatches in chains.items()]
    shapes = [x.shape for x in pipelines if x.shape is not None]
    workers = [worker for x in pipelines for worker in x.workers]
    if not pipelines or len(shapes) < len(pipelines) or len(workers) > len(set(workers)):
        return
    is_chunked = [shape.num_chunks > 1 for shape in shapes]
    for name, makes in _makes(problem, pipelines, shapes, is_chunked):
        try:
            orders = [make() for make in makes]
        except UserError:
            continue
        yield name, _joined(problem, pipelines, orders)


def _makes(
    problem: Problem, pipelines: Sequence[_Pipeline], shapes: Sequence[Shape], is_chunked: Sequence[bool]
) -> Iterator[tuple[str, list[Callable[[], Orders]]]]:
    """Names, and how the order of each pipeline is made."""
    if not any(is_chunked):
        depths = [_depths(problem, pipeline) for pipeline in pipelines]
        for number in range(max(map(len, depths)) if problem.num_ops <= _LONG else 1):
            chosen = (options[number % len(options)] for options in depths)
            yield DEEP, [partial(one_f_one_b, *pair) for pair in zip(shapes, chosen, strict=True)]
    for name, named in NAMED_ORDERS.items():
        if is_chunked == [named.is_chunked] * len(shapes):
            yield name, [partial(named.make, shape) for shape in shapes]


def _pipeline(worker_of: I64, chain: Sequence[int], microbatches: Sequence[int]) -> _Pipeline:
    held = groupby(range(len(chain)), key=lambda stage: int(worker_of[chain[stage]]))
    return _Pipeline(
        runs=tuple((worker, tuple(stages)) for worker, stages in held), microbatches=microbatches
    )


def _depths(problem: Problem, pipeline: _Pipeline) -> Sequence[tuple[int, ...]]:
    """Forwards before the first backward, as many as latency asks for, there are, and memory holds."""
    there, op_s = problem.transfer_s, problem.forward_s + problem.backward_s
    return depth_options(
        [float(op_s[worker, list(stages)].sum()) for worker, stages in pipeline.runs],
        [float(there[a, b] + there[b, a]) for (a, _), (b, _) in pairwise(pipeline.runs)],
        [int(problem.slots[worker, list(stages)].min()) for worker, stages in pipeline.runs],
        len(pipeline.microbatches),
    )


def _joined(problem: Problem, pipelines: Sequence[_Pipeline], orders: Sequence[Orders]) -> _Ways:
    return {
        worker: [
            (pipeline.microbatches[op.microbatch], number)
            for op in ops
            for number in _numbers(problem, pipeline.runs[op.stage][1], op.kind)
        ]
        for pipeline, listed in zip(pipelines, orders, strict=True)
        for worker, ops in zip(pipeline.workers, listed, strict=True)
    }


def _numbers(problem: Problem, stages: Sequence[int], kind: OpKind) -> Iterator[int]:
    """Numbers of the ops that a generator's op at these stages is. A line's last stage does all in its loss."""
    hops = problem.num_hops
    numbers = op_numbers_at(hops + 1)
    for stage in reversed(stages) if kind.row.is_accumulating else stages:
        if stage < hops:
            yield numbers[kind, stage]
        elif kind.row.is_accumulating:
            yield numbers[OpKind.LOSS, hops]


def _sequence(problem: Problem, ways: _Ways) -> I64 | None:
    """An order of all ops that keeps each worker's; None if they run in a circle. What none lists goes when it may."""
    queues = {worker: deque(ops) for worker, ops in ways.items()}
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
