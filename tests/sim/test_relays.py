"""Jobs of workers that nobody can dial: tensors take the ways that probes found, and relays die meanwhile."""

from collections.abc import Collection

import pytest

from skein.protocol.messages.ways import COORDINATOR_RELAY
from skein.sim.faults import AWAY_S, draw_faults, schedule_faults
from skein.sim.scenario import FLOPS_PER_S, make_world
from skein.sim.world import World
from skein.types import JobState, WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, run_until, undisturbed, version_of, worker

JOB = small_job(steps=8)
WORKERS = tuple(worker(index) for index in range(6))
RELAY = WORKERS[-1]
"""In the second site, with two of the others; the coordinator is in the first."""
HOMES = tuple(name for name in WORKERS if name != RELAY)
KINDS = ("kill", "restart", "coordinator", "freeze", "cut", "delay", "op")


def walled(*, relays: Collection[WorkerId] = (), walls: Collection[WorkerId] = HOMES, seed: int = 0) -> World:
    """Six workers, of whom those within walls dial out only, before anything happens."""
    world = make_world(JOB, fleet_of(6), seed=seed)
    world.network.walled |= set(walls)
    world.relays = frozenset(relays)
    for name in WORKERS:
        # Those that the fleet began with know nothing of it.
        site = world.network.site_of(name)
        world.add_worker(name, site, flops_per_s=FLOPS_PER_S, memory_bytes=1 << 40)
    return world


def relays_of(world: World) -> set[WorkerId]:
    """Relays of pairs that are both within walls."""
    assert world.coordinator is not None
    known = world.coordinator.view.relays
    return {relay for pair, relay in known.items() if set(pair) <= set(HOMES)}


def ended(world: World, *, seed: int = 0) -> Run:
    run = finish(world, about=f"seed={seed}", state=JobState.FINISHED)
    assert run.curve == undisturbed(JOB, 6).curve, f"seed={seed}"
    return run


@pytest.mark.parametrize("walls", [HOMES, WORKERS])
def test_a_job_of_workers_that_nobody_can_dial_ends_as_any_other(walls: Collection[WorkerId]) -> None:
    world = walled(walls=walls)
    run_until(world, lambda world: version_of(world) == 2)
    assert relays_of(world) == {COORDINATOR_RELAY}
    assert ended(world).num_rollbacks == 0


def test_a_relay_that_dies_amid_a_job_costs_no_step() -> None:
    world = walled(relays=[RELAY])
    run_until(world, lambda world: version_of(world) == 2)
    assert RELAY in relays_of(world)
    world.bring_back(RELAY, AWAY_S)
    world.kill_worker(RELAY)
    run_until(world, lambda world: version_of(world) == 4)
    assert ended(world).num_rollbacks == 0


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_around_them_the_curve_stays(seed: int) -> None:
    world = walled(relays=[RELAY] if seed % 2 else [], seed=seed)
    schedule_faults(world, draw_faults(6, num_faults=4, horizon_s=12.0, seed=seed, kinds=KINDS))
    ended(world, seed=seed)
