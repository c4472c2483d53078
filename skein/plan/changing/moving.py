"""Cost of bringing stages to workers that do not hold them: bytes of state over the links from their holders."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skein.config.job import JobSpec
from skein.plan.balanced import pool_of
from skein.plan.changing.clauses import About, Clause
from skein.plan.load import StageLoad, arriving_bytes, brought_bytes, moved_bytes, stage_loads
from skein.plan.place import Pool
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet
from skein.topology.links import F64
from skein.types import ChunkRef, Layout, StageSpec
from skein.units import format_bytes


def fetch_s(loads: Sequence[StageLoad], pool: Pool, held: Iterable[ChunkRef], layout: Layout) -> F64:
    """Seconds to bring each stage to each worker from its nearest holder, (num_workers, num_stages).

    0 where it is held already, and for a stage that nobody in the pool holds: wherever that goes, it comes from
    elsewhere. What a worker has in a lower stage that is tied to it does not come again.
    """
    holders = _holders(pool, held)
    seconds = np.zeros((len(pool.workers), len(loads)))
    own = moved_bytes(loads, layout)
    for stage, held_by in holders.items():
        seconds[:, stage] = pool.links.seconds(own[stage])[held_by].min(axis=0)
        tied = [x for x in holders if x < stage and arriving_bytes(loads, stage, [x]) < own[stage]]
        for other in tied:
            rest_s = pool.links.seconds(arriving_bytes(loads, stage, [other]))[held_by].min(axis=0)
            seconds[holders[other], stage] = rest_s[holders[other]]
    return seconds


def move_s(before: Plan, after: Plan, loads: Sequence[StageLoad], pool: Pool) -> float:
    """Seconds until every worker of `after` has what `before` did not give it; workers fetch side by side.

    Args:
        before: whose chunks are held.
        after: of the same stages.
        loads: of these stages.
        pool: has every worker of `after`.
    """
    held = {plan.chunk for plan in before.chunks}
    holders, own = _holders(pool, held), moved_bytes(loads, before.layout)
    position = {worker: i for i, worker in enumerate(pool.workers)}
    total_s, there = np.zeros(len(pool.workers)), defaultdict[int, list[int]](list)
    # What is tied comes with the first of its stages.
    for chunk in sorted(plan.chunk for plan in after.chunks):
        stage, worker = chunk.stage, position[chunk.worker]
        if chunk not in held and stage in holders:
            num_bytes = min(own[stage], arriving_bytes(loads, stage, there[worker]))
            total_s[worker] += min(pool.links.seconds_of(x, worker, num_bytes) for x in holders[stage])
        there[worker].append(stage)
    return float(total_s.max(initial=0.0))


def _holders(pool: Pool, held: Iterable[ChunkRef]) -> dict[int, list[int]]:
    """Positions in the pool of the holders of each stage."""
    position = {worker: i for i, worker in enumerate(pool.workers)}
    holders = defaultdict[int, list[int]](list)
    for chunk in held:
        if chunk.worker in position:
            holders[chunk.stage].append(position[chunk.worker])
    return dict(holders)


def between_s(job: JobSpec, fleet: Fleet, before: Plan | None, after: Plan) -> float:
    """`move_s` on `fleet`; 0 if nothing was before, or other stages: then all of it comes from elsewhere."""
    if before is None or before.stages != after.stages:
        return 0.0
    return move_s(before, after, stage_loads(job, after.stages), pool_of(job, fleet))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Plan that is in place, and for how many steps the one after it will be; None: moving costs nothing."""

    plan: Plan
    steps_left: int | None

    def move_s(self, stages: Sequence[StageSpec], loads: Sequence[StageLoad], pool: Pool) -> F64 | None:
        """`Problem.move_s` of body stages; None if other stages are in place, for then everything moves."""
        if self.steps_left is None or self.plan.stages != tuple(stages):
            return None
        layout = self.plan.layout
        seconds = fetch_s(loads, pool, (placed.chunk for placed in self.plan.chunks), layout)
        seconds /= max(1, self.steps_left)
        if layout.comes_back:
            # The head goes where stage 0 goes.
            seconds[:, 0] += seconds[:, -1]
            return seconds[:, :-1]
        return seconds

    def moved(self, plan: Plan, loads: Sequence[StageLoad]) -> Iterator[Clause]:
        """Clause about what `plan` moves; none if everything stays where it is."""
        before = {placed.chunk for placed in self.plan.chunks}
        moved = sorted(placed.chunk for placed in plan.chunks if placed.chunk not in before)
        if moved:
            there = [placed.chunk for placed in plan.chunks]
            state = format_bytes(brought_bytes(loads, plan.layout, moved, there))
            more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
            what = f"{state} of state: stage {moved[0].stage} to {moved[0].worker}{more}"
            yield Clause(what, About.MOVES)
