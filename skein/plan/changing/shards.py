"""Shards of the vocabulary in a plan: which stages they are, on which workers they may be, and who holds which rows.

Rules of this file
- Who holds the layers between the ends is settled before shards are placed; they change nothing of that.
- Shards of both ends are cut alike, and those of the same rows lie on the same workers: what is tied is added up there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skein.config.job import JobSpec
from skein.model.layers import AnyModel
from skein.model.parameters import stage_shapes
from skein.model.rows import ShardScope, parse_block
from skein.plan.changing.clauses import Clause
from skein.plan.cut import cut_within
from skein.plan.place import Demand, Seating
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet
from skein.topology.links import Mask
from skein.types import StageIndex, StageSpec

_MOST_TOLD = 8

Homes = Sequence[Sequence[int]]
"""Workers of each shard of an end, by position in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedShards:
    """Stages whose shards have a place, and where all of them are."""

    stages: tuple[StageSpec, ...]
    seating: Seating


def seat_shards(
    job: JobSpec,
    fleet: Fleet,
    stages: Sequence[StageSpec],
    between: Seating,
    demand: Callable[[Sequence[StageSpec]], Demand],
    *,
    by_memory: bool,
) -> SeatedShards | Infeasible | None:
    """Shards beside the layers between the ends; None if they have too little memory.

    Args:
        job: whose `parallel.vocabulary` says where shards may be.
        fleet: in the order of the pool that `between` is on.
        stages: all of them, cut so far; by memory, shards are cut anew.
        between: who holds the stages between the ends, the first of them as stage 0.
        demand: that of such stages.
        by_memory: give each shard rows for the memory that its workers have left.
    """
    homes = _homes(job, fleet, between)
    if isinstance(homes, Infeasible):
        return homes
    cut = _cut_by_memory(job, between, homes) if by_memory else tuple(stages)
    if cut is None:
        return None
    seating = Seating(demand(cut), between.pool)
    first = job.parallel.runs[1].start
    wanted = [(first + stage, worker) for stage, held in enumerate(between.holders) for worker in held]
    for shards in (job.parallel.runs[0], job.parallel.runs[2]):
        wanted += [(shard, worker) for shard, home in zip(shards, homes, strict=False) for worker in home]
    for stage, worker in wanted:
        if not seating.has_room(stage)[worker]:
            return None
        seating.take(stage, worker)
    return SeatedShards(stages=cut, seating=seating)


def is_near(fleet: Fleet, workers: Sequence[int]) -> Mask:
    """(num_workers,) who is in a site of one of these."""
    sites = {fleet.workers[worker].site for worker in workers}
    return np.array([worker.site in sites for worker in fleet.workers], np.bool_)


def _homes(job: JobSpec, fleet: Fleet, between: Seating) -> Homes | Infeasible:
    """Workers of each shard: who holds a part of the layers between, or all of the last one's site in turn."""
    num_shards = job.parallel.stages
    if job.parallel.vocabulary.scope is ShardScope.PIPELINE:
        return between.holders[:: len(between.holders) // num_shards]
    last = between.holders[-1]
    near = np.flatnonzero(is_near(fleet, last)).tolist()
    if len(near) < 2:
        site = fleet.workers[last[0]].site
        hint = f"{site}, where the last layers are, has one worker: give pipeline, or add workers there"
        return Infeasible(reason=f"parallel.vocabulary.scope: site: {hint}")
    # Shards beside each other on one worker are crossed without a link, so runs of them go to each.
    near.sort(key=lambda worker: (min(between.held[worker], default=len(between.holders)), worker))
    most = min(len(last), len(near))
    firsts = [shard * len(near) // num_shards for shard in range(num_shards)]
    return [[near[(at + i) % len(near)] for i in range(most)] for at in firsts]


def _cut_by_memory(job: JobSpec, between: Seating, homes: Homes) -> tuple[StageSpec, ...] | None:
    """Stages with rows in proportion to what each shard's workers have left for it; None if that is too little."""
    runs, pool = job.parallel.runs, between.pool
    num_held = Counter(worker for home in homes for worker in home)
    left_bytes = [min(float(between.free_bytes[w]) / num_held[w] for w in home) for home in homes]
    if min(left_bytes) <= 0:
        return None
    speeds = [1.0] * job.parallel.num_stages
    rooms_bytes = [float(pool.memory_bytes.max())] * job.parallel.num_stages
    num_ends = sum(1 for shards in (runs[0], runs[2]) if shards)
    for shards in (runs[0], runs[2]):
        for shard, left in zip(shards, left_bytes, strict=False):
            speeds[shard], rooms_bytes[shard] = left / max(left_bytes), left / num_ends
    return cut_within(job, speeds, rooms_bytes)


def shard_clauses(model: AnyModel, plan: Plan) -> Iterator[Clause]:
    """Clauses of the ends of `plan` that are in shards, the input first; none for a vocabulary in one piece."""
    for end, stages in _ends(model, plan.stages).items():
        held = [
            f"{rows} on {' and '.join(plan.holders(x.index))}" for x in stages if (rows := _rows(model, x))
        ]
        if len(held) > 1:
            more = f" and {len(held) - _MOST_TOLD} more" if len(held) > _MOST_TOLD else ""
            yield Clause(f"rows of the {end}: {', '.join(held[:_MOST_TOLD])}{more}")


def rows_by_end(model: AnyModel, stages: Sequence[StageSpec]) -> Mapping[str, list[range]]:
    """Rows of the blocks that each end's stages hold, in the order of the stages; none of a matrix that is whole."""
    return {
        end: [
            block.rows
            for stage in held
            for name in stage_shapes(model, stage)
            if (block := parse_block(name)) is not None
        ]
        for end, held in _ends(model, stages).items()
    }


def shard_stages(model: AnyModel, stages: Sequence[StageSpec]) -> frozenset[StageIndex]:
    """Stages that hold rows of an end which several of `stages` share."""
    ends = _ends(model, stages).values()
    return frozenset(stage.index for held in ends if len(held) > 1 for stage in held)


def _ends(model: AnyModel, stages: Sequence[StageSpec]) -> Mapping[str, list[StageSpec]]:
    """Stages that hold nothing but the rows of an end, or a part of them."""
    inner = model.inner_layers
    return {
        "input": [stage for stage in stages if stage.stop <= inner.start],
        "output": [stage for stage in stages if stage.first > inner.stop],
    }


def _rows(model: AnyModel, stage: StageSpec) -> str:
    """First and last row of a stage's blocks; empty where it has none."""
    blocks = [block for name in stage_shapes(model, stage) if (block := parse_block(name)) is not None]
    return f"{blocks[0].rows.start} to {blocks[-1].rows.stop - 1}" if blocks else ""
