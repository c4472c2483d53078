"""The orders that the field has names for, as starting points: each is simulated for the problem at hand.

Pipelines in which every microbatch visits all stages fall into chains; the ops of a chain are put in order by the
generators of `skein.plan.route.schedules`, for the placement that is given and for others of the same stages: adjacent
ones on each worker, in a loop, or in a V. A whole backward of theirs is an input op and a weight op at once where the
problem's are split. Where paths skip stages there are no chains, and first come, first served remains. An order that
the problem's slots are too few for has slots of its own, where memory has room for these.
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
from skein.plan.route.room import Crowded, may_hold, with_room
from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.schedules.shape import Orders, PipelinePlacement, Shape
from skein.plan.route.schedules.split import one_f_one_i
from skein.plan.route.schedules.whole import one_f_one_b
from skein.units import counted

FIRST_COME, DEEP = "first come, first served", "one_f_one_b with warm-up by latency"
ZB_DEEP = "zb_deep"
_LONG = 5_000
"""Ops of a step beyond which other placements and depths would cost the search its time."""

_AT_LOSS = {OpKind.BACKWARD: OpKind.LOSS, OpKind.INPUT: OpKind.LOSS_INPUT, OpKind.WEIGHT: OpKind.WEIGHT}
"""Kinds that the ops of a generator are at the last stage of a line."""

_Chains = Mapping[tuple[int, ...], Sequence[int]]
"""Microbatches by the chunks that they visit."""
_Ways = Mapping[int, Sequence[tuple[int, int]]]
"""Ops of each worker, in order, as (microbatch, number)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedStart:
    """A routing by the name of its order, in a problem that has slots for it, or else who is too crowded for it."""

    name: str
    routing: Routing
    within: Problem | Crowded


def fitting_orders(problem: Problem, worker_of: I64, path: I64) -> Iterator[tuple[str, Routing]]:
    """Routings of these paths by name, in every order for which the slots of `problem` itself suffice."""
    for start in named_orders(problem, worker_of, path):
        if start.within is problem:
            yield start.name, start.routing


def named_orders(problem: Problem, worker_of: I64, path: I64) -> Iterator[NamedStart]:
    """Starts of these paths, in every order that can be made, at this placement first."""
    chains = _chains(problem, path)
    for where, placed in _placements(problem, worker_of, chains):
        first = ordered(problem, placed, path)
        if first is not None:
            yield NamedStart(name=FIRST_COME + where, routing=first, within=problem)
        for name, ways in _named_ways(problem, placed, chains):
            sequence = _sequence(problem, ways)
            if sequence is None:
                continue
            routing = Routing(worker_of=placed, path=path, sequence=sequence)
            room = with_room(problem, routing)
            found = routing if isinstance(room, Crowded) else in_time(room, routing)
            if found is not None:
                yield NamedStart(name=name + where, routing=found, within=room)


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
        most_held = num_seats(problem) // problem.num_workers
        is_new = placed.tobytes() not in known
        if is_new and np.bincount(placed).max() <= most_held and may_hold(problem, placed):
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
    for workers_of in (own, [sorted(x) for x in own], every) if problem.is_split else ():
        if not any(problem.num_stages % (2 * len(workers)) for workers in workers_of):
            placed = worker_of.copy()
            for chain, workers in zip(chains, workers_of, strict=True):
                there_and_back = [*workers, *reversed(workers)]
                placed[list(chain)] = np.repeat(there_and_back, problem.num_stages // len(there_and_back))
            yield f", in a V of {counted(len(workers_of[0]), 'worker')}", placed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """A chain as its workers see it: adjacent stages with one worker are a run, as one stage of the generators.

    At the turn of a V they are two runs. `shape` is None where the runs are neither a loop nor a V.
    """

    runs: tuple[tuple[int, tuple[int, ...]], ...]
    microbatches: Sequence[int]

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(worker for worker, _ in self.runs))

    @property
    def shape(self) -> Shape | None:
        num_chunks, rest = divmod(len(self.runs), len(self.workers))
        places = [self.workers.index(worker) for worker, _ in self.runs]
        for placement in PipelinePlacement if not rest else ():
            shape = Shape(
                num_workers=len(self.workers),
                num_microbatches=len(self.microbatches),
                num_chunks=num_chunks,
                placement=placement,
            )
            if [*shape.worker_by_stage] == places:
                return shape
        return None


def _named_ways(problem: Problem, worker_of: I64, chains: _Chains) -> Iterator[tuple[str, _Ways]]:
    """Ops of each worker in every order that all chains have the shape for."""
    pipelines = [_pipeline(worker_of, chain, microbatches) for chain, microbatches in chains.items()]
    shapes = [x.shape for x in pipelines if x.shape is not None]
    workers = [worker for x in pipelines for worker in x.workers]
    if not pipelines or len(shapes) < len(pipelines) or len(workers) > len(set(workers)):
        return
    for name, makes in _makes(problem, pipelines, shapes):
        try:
            orders = [make() for make in makes]
        except UserError:
            continue
        yield name, _joined(problem, pipelines, orders)


def _makes(
    problem: Problem, pipelines: Sequence[_Pipeline], shapes: Sequence[Shape]
) -> Iterator[tuple[str, list[Callable[[], Orders]]]]:
    """Names, and how the order of each pipeline is made."""
    if all(shape.num_chunks == 1 for shape in shapes):
        depths = [_depths(problem, pipeline) for pipeline in pipelines]
        for number in range(max(map(len, depths)) if problem.num_ops <= _LONG else 1):
            chosen = [options[number % len(options)] for options in depths]
            yield DEEP, [partial(one_f_one_b, *pair) for pair in zip(shapes, chosen, strict=True)]
            if problem.is_split:
                kept = [_kept(problem, *pair) for pair in zip(pipelines, chosen, strict=True)]
                both = zip(shapes, chosen, kept, strict=True)
                yield ZB_DEEP, [partial(one_f_one_i, *three) for three in both]
    for name, named in NAMED_ORDERS.items():
        is_carried_out = problem.is_split or not named.is_split
        if is_carried_out and all(named.does(shape.num_chunks, shape.placement) for shape in shapes):
            yield name, [partial(named.make, shape) for shape in shapes]


def _pipeline(worker_of: I64, chain: Sequence[int], microbatches: Sequence[int]) -> _Pipeline:
    held = groupby(range(len(chain)), key=lambda stage: int(worker_of[chain[stage]]))
    runs = [(worker, tuple(stages)) for worker, stages in held]
    at = len(runs) // 2
    worker, turn = runs[at]
    workers = [worker for worker, _ in runs]
    if len(runs) > 1 and workers == workers[::-1] and len(turn) % 2 == 0:
        runs[at : at + 1] = [(worker, turn[: len(turn) // 2]), (worker, turn[len(turn) // 2 :])]
    return _Pipeline(runs=tuple(runs), microbatches=microbatches)


def _depths(problem: Problem, pipeline: _Pipeline) -> Sequence[tuple[int, ...]]:
    """Forwards before the first backward, as many as latency asks for, there are, and memory holds."""
    there, op_s = problem.transfer_s, problem.forward_s + problem.backward_s
    return depth_options(
        [float(op_s[worker, list(stages)].sum()) for worker, stages in pipeline.runs],
        [float(there[a, b] + there[b, a]) for (a, _), (b, _) in pairwise(pipeline.runs)],
        [int(problem.slots[worker, list(stages)].min()) for worker, stages in pipeline.runs],
        len(pipeline.microbatches),
    )


def _kept(problem: Problem, pipeline: _Pipeline, depths: Sequence[int]) -> tuple[int, ...]:
    """Weight ops that each worker may put off so that all hold as much as the first one, and no more than fits."""
    most = min(depths[0], len(pipeline.microbatches))
    held = [int(problem.slots[worker, list(stages)].min()) for worker, stages in pipeline.runs]
    return tuple(max(0, min(most, slots) - depth) for slots, depth in zip(held, depths, strict=True))


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
    number_of = op_numbers_at(problem.num_hops + 1, problem.split)
    is_home = kind is not OpKind.FORWARD
    parts = (OpKind.INPUT, OpKind.WEIGHT) if problem.is_split and kind is OpKind.BACKWARD else (kind,)
    for part, stage in product(parts, reversed(stages) if is_home else stages):
        at = _AT_LOSS.get(part) if stage == problem.num_hops else part
        if at is not None:
            yield number_of[at, stage]


def _sequence(problem: Problem, ways: _Ways) -> I64 | None:
    """An order of all ops that keeps each worker's; None if they run in a circle. What none lists goes when it may."""
    queues = {worker: deque(ops) for worker, ops in ways.items()}
    listed = {op for queue in queues.values() for op in queue}
    ops = problem.ops
    done: dict[tuple[int, int], None] = {}

    def may_go(m: int, number: int) -> bool:
        return all((m, x) in done for x in ops[number].awaited)

    def end(m: int, number: int) -> None:
        done[m, number] = None
        for x in ops[number].followers:
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
    return np.array([m * len(ops) + number for m, number in done], np.int64)
