"""Everything ends and starts again; workers come late, or all want to go."""

import pytest

from skein.protocol.coordinator.coordinator_io import DrainAsked
from skein.protocol.log.records import CheckpointCommitted, GenerationOpened, RolledBack, StepCommitted
from skein.protocol.worker.worker_io import StopRequested
from skein.sim.scenario import FLOPS_PER_S, make_world
from skein.sim.world import World
from skein.types import ChunkRef, SiteId
from tests.support.extent import part
from tests.support.jobs import ROOM_FOR_ONE_STAGE, small_job
from tests.support.worlds import (
    finish,
    fleet_of,
    kill_everything,
    of_kind,
    plan_of,
    run_events,
    run_until,
    simulate,
    undisturbed,
    version_of,
    worker,
)

SITE = SiteId("site0")
ROOM_FOR_NOTHING = 2**20


def add(world: World, index: int, *, memory_bytes: int = 16 * 2**30) -> None:
    world.add_worker(worker(index), SITE, flops_per_s=FLOPS_PER_S, memory_bytes=memory_bytes)


@pytest.mark.parametrize("num_events", part(range(150, 900, 75), every=2))
def test_after_a_power_cut_the_job_goes_on_from_its_newest_checkpoint(num_events: int) -> None:
    job = small_job(steps=6, save_every=2)
    world = make_world(job, fleet_of(4), seed=3)
    run_events(world, num_events)
    saved = [record.version for record in of_kind(world.log, CheckpointCommitted)]
    reached = version_of(world)
    kill_everything(world)
    run = finish(world, about=f"seed=3, power cut after {num_events} events")
    assert [(r.from_version, r.to_version) for r in of_kind(run.world.log, RolledBack)] == (
        [(reached, saved[-1] if saved else 0)] if reached > (saved[-1] if saved else 0) else []
    )
    assert run.curve == undisturbed(job, 4).curve


def test_two_power_cuts_in_a_row_lose_no_checkpoint() -> None:
    job = small_job(steps=6, save_every=2)
    world = make_world(job, fleet_of(4), seed=3)
    run_until(world, lambda world: bool(of_kind(world.log, CheckpointCommitted)))
    kill_everything(world)
    world.clock.after(2.1, lambda: kill_everything(world))
    run = finish(world, about="seed=3")
    assert all(record.to_version == 2 for record in of_kind(run.world.log, RolledBack))
    assert run.curve == undisturbed(job, 4).curve


def test_a_job_waits_for_its_first_worker() -> None:
    run = simulate(small_job(), 0, disturb=lambda world: world.clock.at(60.0, lambda: add(world, 0)))
    [opened] = of_kind(run.world.log, GenerationOpened)
    assert opened.wall_s > 60.0


def test_workers_that_come_late_are_given_work_at_a_step_boundary() -> None:
    def add_two(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        add(world, 7)
        add(world, 8)

    job = small_job(steps=24)
    run = simulate(job, 2, disturb=add_two)
    assert run.curve == undisturbed(job, 4).curve
    assert "4 of 4 workers" in [line for line in run.world.lines if "plan:" in line][-1]
    committed = [record for record in run.world.log if isinstance(record, StepCommitted | GenerationOpened)]
    joined_at = next(
        i for i, r in enumerate(committed) if isinstance(r, GenerationOpened) and r.generation == 2
    )
    assert isinstance(committed[joined_at - 1], StepCommitted)
    assert run.num_rollbacks == 0


def test_a_worker_that_comes_while_its_job_is_planned_is_not_forgotten() -> None:
    """Alone, the first has no room for the model; the second arrives while that is being found out."""

    def start(world: World) -> None:
        world.clock.at(0.0, lambda: add(world, 0, memory_bytes=ROOM_FOR_NOTHING))
        world.clock.at(3.2, lambda: add(world, 1))

    run = simulate(small_job(steps=2), 0, disturb=start)
    assert run.outcome.seconds < 20.0


def test_when_all_workers_leave_a_checkpoint_is_saved_first() -> None:
    job = small_job(steps=6)

    def stop_all(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 3)
        for name in list(world.workers):
            world.give(name, StopRequested(reason="asked to stop"))
        run_until(world, lambda world: not world.workers)
        assert [r.version for r in of_kind(world.log, CheckpointCommitted)] == [version_of(world)]
        for index in range(4):
            add(world, index)

    run = simulate(job, 4, disturb=stop_all)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve


@pytest.mark.parametrize("save_every", [0, 2])
def test_a_drain_that_leaves_too_few_saves_first_and_lets_go(save_every: int) -> None:
    """The model fits into both, and into neither alone."""
    job = small_job(stages=2, replicas=1, steps=6, save_every=save_every)
    world = make_world(job, fleet_of(0), seed=0)
    add(world, 0, memory_bytes=ROOM_FOR_ONE_STAGE)
    add(world, 1, memory_bytes=ROOM_FOR_ONE_STAGE)
    run_until(world, lambda world: version_of(world) == 3)
    world.tell(DrainAsked(worker=worker(1)))
    run_until(world, lambda world: worker(1) not in world.workers)
    assert of_kind(world.log, CheckpointCommitted)[-1].version == version_of(world)
    add(world, 2, memory_bytes=ROOM_FOR_ONE_STAGE)
    run = finish(world, about="seed=0")
    assert run.num_rollbacks == 0
    assert [record.step for record in run.curve] == list(range(6))


def test_a_restarted_coordinator_keeps_chunks_where_they_are() -> None:
    """The first worker began with both stages and gave one to the newcomer: a fresh plan would place them otherwise."""
    world = make_world(small_job(stages=2, replicas=1, steps=20), fleet_of(0), seed=0)
    add(world, 0)
    run_until(world, lambda world: version_of(world) == 1)
    add(world, 1)
    run_until(world, lambda world: len(plan_of(world).workers) == 2)
    before, version = placement(world), version_of(world)
    world.crash_coordinator()
    run_until(world, lambda world: version_of(world) == version + 2)
    assert placement(world) == before
    assert finish(world, about="seed=0").num_rollbacks == 0


def placement(world: World) -> set[ChunkRef]:
    return {placed.chunk for placed in plan_of(world).chunks}
