"""Machines that are busy with something else make steps slow, and no worker is turned away for it."""

import pytest

from skein.protocol.log.records import Incident
from skein.sim.scenario import make_world
from skein.sim.world import World
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, of_kind, run_until, undisturbed, version_of

JOB = small_job(steps=8, save_every=0)
"""On four workers: two stages, two holders each; its ops take less than a tenth of a second."""
SLOWER = 150.0
"""So their ops run for longer than any op that ends."""


def disturbed(num_workers: int, *, is_starved: bool) -> Run:
    """Workers become slow in the middle of a job."""
    world = make_world(JOB, fleet_of(4), seed=0)
    run_until(world, lambda it: version_of(it) == 4)
    slow_down(world, num_workers, is_starved=is_starved)
    return finish(world, about=f"{num_workers} slow, starved={is_starved}")


def slow_down(world: World, num_workers: int, *, is_starved: bool) -> None:
    for name in sorted(world.workers)[:num_workers]:
        world.slow_worker(name, SLOWER, is_starved=is_starved)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_nobody_is_turned_away_whose_ops_wait_for_a_processor(num_workers: int) -> None:
    run = disturbed(num_workers, is_starved=True)
    assert of_kind(run.world.log, Incident) == []
    assert run.curve == undisturbed(JOB, 4).curve


def test_a_worker_whose_ops_take_as_long_by_themselves_is() -> None:
    run = disturbed(1, is_starved=False)
    [incident] = of_kind(run.world.log, Incident)
    assert "an op has run for 4.3 s, where 4.2 s is far too long" in incident.reason
    assert run.num_rollbacks == 0
