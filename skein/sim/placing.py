"""Planners of simulated worlds: the balanced one, and one that lays each worker's chunks there and back, in a V."""

from dataclasses import replace
from itertools import groupby

from skein.config.job import JobSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible, Path, Plan
from skein.plan.route.schedules.shape import PipelinePlacement, Shape
from skein.topology.fleet import Fleet
from skein.types import ChunkRef


def make_v_plan(job: JobSpec, fleet: Fleet, previous: Plan | None, seed: int) -> Plan | Infeasible:
    """The balanced plan of what is placed in a V at first; later ones leave chunks where they are, if they can."""
    made = make_balanced_plan(job, fleet, previous, seed)
    if previous is not None or isinstance(made, Infeasible):
        return made
    return make_balanced_plan(job, fleet, _in_v(made), seed)


def _in_v(plan: Plan) -> Plan:
    """A plan's stages laid there and back over the workers of each path; no more of it than a placement.

    Paths whose workers hold an odd number of stages stay as they are.
    """
    paths = tuple(dict.fromkeys(_turned(path) for path in plan.paths))
    placed = {hop for path in paths for hop in path.hops}
    by_chunk = {x.chunk: x for x in plan.chunks}
    some = plan.chunks[0]
    chunks = tuple(by_chunk.get(chunk) or replace(some, chunk=chunk) for chunk in sorted(placed))
    return replace(plan, chunks=chunks, paths=(), evaluation_paths=(), schedules=(), alternates=(), groups=())


def _turned(path: Path) -> Path:
    runs = [(worker, len([*hops])) for worker, hops in groupby(hop.worker for hop in path.hops)]
    if len({count for _, count in runs}) > 1 or runs[0][1] % 2:
        return path
    shape = Shape(num_workers=len(runs), num_microbatches=1, num_chunks=2, placement=PipelinePlacement.V)
    workers = [runs[at][0] for at in shape.worker_by_stage for _ in range(runs[0][1] // 2)]
    hops = tuple(
        ChunkRef(stage=hop.stage, worker=worker) for hop, worker in zip(path.hops, workers, strict=True)
    )
    return replace(path, hops=hops)
