"""Walkers through a power cut, on real tensors: each goes on from what it had saved itself."""

from functools import partial

import pytest

from skein.protocol.log.records import CheckpointCommitted, RolledBack, StepCommitted
from skein.sim.compute.aggregating import AggregatingModel
from skein.sim.scenario import LIMIT_S, make_world, run_to_end, small_fleet
from skein.sim.shapes import shape_of
from skein.sim.world import World
from tests.support.worlds import kill_everything, of_kind, run_until, version_of


# Not lsgd: its leader comes first in a checkpoint, so walkers go on with each other's samples.
@pytest.mark.parametrize("rule", ["decentlam", "qg_dmsgd"])
def test_after_a_power_cut_every_walker_makes_the_same_steps_again(rule: str) -> None:
    shape = shape_of(f"line 2x3 by {rule}")
    job = shape.job(steps=8)
    new_world = partial(World, new_executor=AggregatingModel(job).executor)
    world = make_world(job, small_fleet(shape), seed=0, new_world=new_world)
    run_until(world, lambda world: bool(of_kind(world.log, CheckpointCommitted)) and version_of(world) >= 5)
    kill_everything(world)
    run_to_end(world, limit_s=LIMIT_S)
    [back] = of_kind(world.log, RolledBack)
    made = [record.record for record in of_kind(world.log, StepCommitted)]
    first, again = made[back.to_version : back.from_version], made[back.from_version :]
    assert len(first) >= 2
    # Parameters and momentum of each are as they were: of walkers without momentum the second step would differ.
    assert [record.loss for record in first] == [record.loss for record in again[: len(first)]]
