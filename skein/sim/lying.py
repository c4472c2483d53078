"""Simulated jobs on real numbers in which one worker contributes wrongly."""

from functools import partial

from skein.sim.compute.aggregating import AggregatingExecutor, AggregatingModel
from skein.sim.compute.lying import LieKind, LyingExecutor
from skein.sim.compute.numeric import NumericExecutor
from skein.sim.scenario import make_world, small_fleet
from skein.sim.shapes import SimShape
from skein.sim.world import World
from skein.types import StageIndex, Step, WorkerId


def lying_world(
    shape: SimShape,
    *,
    steps: int,
    seed: int,
    liar: WorkerId | None = None,
    kind: LieKind = LieKind.SIGN_FLIP,
    since: int = 0,
) -> World:
    """World of a shape whose `liar`, if there is one, contributes wrongly from step `since` on."""
    job = shape.job(steps=steps, every=0)
    model = AggregatingModel(job)
    worlds: list[World] = []

    def another(stage: StageIndex) -> NumericExecutor:
        found = (process.executor for name, process in worlds[0].workers.items() if name != liar)
        return next(x for x in found if isinstance(x, NumericExecutor) and stage in x.chunks)

    def executor(name: WorkerId, flops_per_s: float) -> AggregatingExecutor:
        if name != liar:
            return model.executor(name, flops_per_s)
        return LyingExecutor(model, name, flops_per_s, kind=kind, since=Step(since), another=another)

    world = make_world(job, small_fleet(shape), seed=seed, new_world=partial(World, new_executor=executor))
    world.has_liars = liar is not None
    worlds.append(world)
    return world
