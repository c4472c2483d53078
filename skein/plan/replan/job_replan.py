"""A plan that follows another, as a routing that follows another: what it moves, for whom, and why."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skein.plan.changing.clauses import About, Clause, and_more
from skein.plan.changing.moving import fetch_s
from skein.plan.load import moved_bytes
from skein.plan.plan import Infeasible, Plan
from skein.plan.replan.before import LOST, Before
from skein.plan.replan.routing import Moving, Replanned, replan
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import Posed
from skein.plan.route.plan_routing import listed_sequence
from skein.plan.route.problem import F64
from skein.plan.route.search import Found
from skein.types import WorkerId
from skein.units import format_bytes

OPS = 1.1e8
"""Ops that replanning runs at most: about a second of one core. A fleet waits for that after a loss."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """A plan's successor: `posed` is its problem, and `why` tells what became of what."""

    posed: Posed
    found: Found
    why: tuple[Clause, ...]


def replan_job(
    posed: Posed,
    previous: Plan,
    *,
    most_chunks: int,
    steps_left: int | None,
    num_ops: float,
    seed: int,
    may_go_on: Callable[[], bool],
) -> Followed | None:
    """Successor of `previous` on the fleet of `posed`; None if its chunks cannot stay as they are.

    Args:
        posed: any plan of the same stages on the fleet as it is now.
        previous: whose chunks are in place.
        most_chunks: held together, the head of `LOOP` apart.
        steps_left: see `Moving`.
        num_ops: to be run by the annealer; at most `OPS` are.
        seed: of all draws.
        may_go_on: False ends with what there is.
    """
    before = _before(posed, previous)
    if before is None:
        return None
    layout = previous.layout
    moving = Moving(
        state_bytes=_body(np.array([moved_bytes(posed.loads, layout)], np.float64), previous)[0],
        fetch_s=_body(fetch_s(posed.loads, posed.pool, (x.chunk for x in previous.chunks), layout), previous),
        steps_left=steps_left,
        most_chunks=most_chunks,
    )
    # A move of the annealer runs each op of a step about once.
    num_moves = int(min(num_ops, OPS) / max(1, len(before.sequence)))
    after = replan(posed.problem, before, moving, num_moves=num_moves, seed=seed, may_go_on=may_go_on)
    if isinstance(after, Infeasible):
        return None
    step_s = timeline(after.problem, after.routing).step_s
    problem = replace(after.problem, move_s=posed.problem.move_s)
    return Followed(
        posed=replace(posed, problem=problem, worker_of=after.routing.worker_of, path=after.routing.path),
        found=Found(routing=after.routing, step_s=step_s, jittered_s=after.step_s),
        why=tuple(_why(after, posed, previous)),
    )


def _before(posed: Posed, previous: Plan) -> Before | None:
    """The previous plan as a routing; None if its lists are in no order."""
    is_loop = previous.layout.comes_back
    position = {worker: i for i, worker in enumerate(posed.pool.workers)}
    holders = [previous.holders(stage.index) for stage in previous.stages[: len(previous.stages) - is_loop]]
    chunks = [(stage, worker) for stage, held in enumerate(holders) for worker in held]
    number = {chunk: i for i, chunk in enumerate(chunks)}
    rows = [[number.get((int(hop.stage), hop.worker), -1) for hop in path.hops] for path in previous.paths]
    if is_loop:
        rows = [[*row[:-1], row[0]] for row in rows]
    sequence = listed_sequence(previous)
    if sequence is None or len(rows) != posed.problem.num_microbatches:
        return None
    return Before(
        stage_sizes=tuple(len(held) for held in holders),
        worker_of=np.array([position.get(worker, LOST) for _, worker in chunks], np.int64),
        path=np.array(rows, np.int64),
        sequence=sequence,
    )


def _body(by_stage: F64, previous: Plan) -> F64:
    """(…, num_stages): the head of `LOOP` goes where stage 0 goes."""
    if not previous.layout.comes_back:
        return by_stage
    together = by_stage[:, :-1].copy()
    together[:, 0] += by_stage[:, -1]
    return together


def _why(after: Replanned, posed: Posed, previous: Plan) -> Iterator[Clause]:
    """Clauses about what changed, what stays and what moves."""
    workers = posed.pool.workers
    lost = sorted(set(previous.workers) - set(workers))
    movers = {workers[worker] for _, worker in after.moved}
    held = {workers[worker] for worker in after.routing.worker_of}
    new = sorted(held - set(previous.workers))
    if lost:
        yield Clause(f"lost {_some(lost)}")
    if new:
        yield Clause(f"new {_some(new)}")
    yield Clause("as before" if after.is_as_before else f"{len(held - movers)} workers stay")
    if after.moved:
        (stage, worker), *others = after.moved
        what = f"stage {stage} to {workers[worker]}{and_more(others)}"
        state = f"{format_bytes(after.moved_bytes)} of state in {after.move_s:.2g} s"
        yield Clause(f"{state}: {what}", About.MOVES)


def _some(workers: Sequence[WorkerId]) -> str:
    """The first few by name."""
    return ", ".join(workers[:3]) + and_more(workers[3:])
