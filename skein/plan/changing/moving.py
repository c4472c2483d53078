"""Cost of bringing stages to workers that do not hold them: bytes of state over the links from their holders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skein.config.job import JobSpec
from skein.plan.balanced import pool_of
from skein.plan.changing.clauses import About, Clause
from skein.plan.load import StageLoad, moved_bytes, stage_loads
from skein.plan.place import Pool
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet
from skein.topology.links import F64
from skein.types import ChunkRef, Layout, StageSpec
from skein.units import format_bytes


def fetch_s(loads: Sequence[StageLoad], pool: Pool, held: Iterable[ChunkRef], layout: Layout) -> F64:
    """Seconds to bring each stage to each worker from its nearest holder, (num_workers, num_stages).

    0 where it is held already, and for a stage that nobody in the pool holds: wherever that goes, it comes from
    elsewhere.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    holders: dict[int, list[int]] = {}
    for chunk in held:
        if chunk.worker in position:
            holders.setdefault(chunk.stage, []).append(position[chunk.worker])
    seconds = np.zeros((len(pool.workers), len(loads)))
    for stage, num_bytes in enumerate(moved_bytes(loads, layout)):
        if stage in holders:
            seconds[:, stage] = pool.links.seconds(num_bytes)[holders[stage]].min(axis=0)
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
    seconds = fetch_s(loads, pool, held, before.layout)
    total_s = np.zeros(len(pool.workers))
    for plan in after.chunks:
        if plan.chunk not in held:
            worker = pool.workers.index(plan.chunk.worker)
            total_s[worker] += seconds[worker, plan.chunk.stage]
    return float(total_s.max(initial=0.0))


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
            own = moved_bytes(loads, plan.layout)
            state = format_bytes(sum(own[chunk.stage] for chunk in moved))
            more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
            what = f"{state} of state: stage {moved[0].stage} to {moved[0].worker}{more}"
            yield Clause(what, About.MOVES)
