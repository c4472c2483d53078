"""Walkers of a plan: which chunks hold one trajectory of parameters, and how holders are put together to such lines.

Under a rule of many walkers each walker has exactly one holder of each stage, and its microbatches never leave it. The
members of every stage's group are in the order of the walkers, so member i of each group is walker i.
"""

from collections.abc import Collection, Sequence

from skein.plan.place import Pool
from skein.plan.plan import Path, Plan
from skein.types import ChunkRef, Layout, StageSpec, WorkerId

Line = tuple[int, ...]
"""A walker as planned: the position of its worker in the pool, by body stage."""


def walkers_of(plan: Plan) -> tuple[tuple[ChunkRef, ...], ...]:
    """The chunks of each walker, by stage, for a plan under a rule of many walkers."""
    by_stage = [[x.chunk for x in plan.chunks if x.chunk.stage == stage.index] for stage in plan.stages]
    return tuple(zip(*by_stage, strict=True))


def lines_of(
    holders: Sequence[Collection[int]], pool: Pool, before: Sequence[Sequence[WorkerId]] = ()
) -> tuple[Line, ...]:
    """Walkers, as many as the stage with the fewest holders allows, near workers together; other holders are left out.

    Args:
        holders: positions in the pool, by body stage.
        pool: the fleet; round trips decide who is near.
        before: workers of earlier walkers by stage; walkers that are still complete stay together.
    """
    position = {worker: i for i, worker in enumerate(pool.workers)}
    left = [sorted(held) for held in holders]
    num_walkers = min(len(held) for held in left)
    lines: list[Line] = []
    for walker in before:
        line = tuple(position.get(worker, -1) for worker in walker)
        if len(line) == len(left) and all(at in held for at, held in zip(line, left, strict=True)):
            lines.append(line)
            for at, held in zip(line, left, strict=True):
                held.remove(at)
    for _ in range(num_walkers - len(lines)):
        lines.append(_next_line(left, pool))
    return tuple(lines[:num_walkers])


def _next_line(left: Sequence[list[int]], pool: Pool) -> Line:
    """The shortest line that greedily goes on from the first holder left; takes its workers out."""
    at = left[0].pop(0)
    line = [at]
    for held in left[1:]:
        here = line[-1]
        nearest = min(held, key=lambda i: (0.0 if i == here else float(pool.round_trip_s[here, i]), i))
        held.remove(nearest)
        line.append(nearest)
    return tuple(line)


def paths_within(
    lines: Sequence[Line], stages: Sequence[StageSpec], layout: Layout, num_microbatches: int, pool: Pool
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Each walker's microbatches in turn, and one path for each to evaluate on."""
    ways = []
    for line in lines:
        workers = [pool.workers[at] for at in line]
        if layout.comes_back:
            workers.append(workers[0])
        hops = (
            ChunkRef(stage=stage.index, worker=worker) for stage, worker in zip(stages, workers, strict=True)
        )
        ways.append(Path(hops=tuple(hops)))
    return tuple(ways[m % len(ways)] for m in range(num_microbatches)), tuple(ways)
