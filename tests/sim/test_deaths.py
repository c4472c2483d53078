"""With two holders of each stage, any worker may die at any moment: the loss curve is the undisturbed one."""

import pytest

from skein.config.job import JobSpec
from skein.sim.scenario import make_world
from skein.types import Layout
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of, plan_of, run_events, undisturbed, worker

JOBS = {
    "line": small_job(steps=3, evaluate_every=2, save_every=2),
    "loop": small_job(steps=3, layout=Layout.LOOP, save_every=2),
    "tied": small_job(steps=3, is_tied=True, evaluate_every=2),
}
STRIDE = 3
"""Events between two deaths that are tried; coprime to the number of workers, so that each dies in every phase."""


@pytest.mark.parametrize("spec", JOBS.values(), ids=JOBS)
def test_no_death_of_one_worker_costs_a_step(spec: JobSpec) -> None:
    expected = undisturbed(spec, 4)
    for num_events in range(1, expected.outcome.num_events, STRIDE):
        name = worker(num_events % 4)
        world = make_world(spec, fleet_of(4), seed=0)
        run_events(world, num_events)
        world.kill_worker(name)
        run = finish(world, about=f"seed=0, {name} killed after {num_events} events")
        assert run.num_rollbacks == 0, (num_events, name)
        assert run.curve == expected.curve, (num_events, name)


@pytest.mark.parametrize("spec", JOBS.values(), ids=JOBS)
def test_a_process_that_starts_again_at_once_costs_no_step(spec: JobSpec) -> None:
    expected = undisturbed(spec, 4)
    for num_events in range(7, expected.outcome.num_events, 3 * STRIDE):
        name = worker(num_events % 4)
        world = make_world(spec, fleet_of(4), seed=0)
        run_events(world, num_events)
        world.restart_worker(name)
        run = finish(world, about=f"seed=0, {name} restarted after {num_events} events")
        assert run.num_rollbacks == 0, (num_events, name)
        assert run.curve == expected.curve, (num_events, name)


def test_one_worker_after_the_other_dies_and_comes_back() -> None:
    spec = small_job(steps=8)
    world = make_world(spec, fleet_of(4), seed=0)
    for turn in range(4):
        world.clock.at(1.0 + 2.5 * turn, lambda turn=turn: world.restart_worker(worker(turn)))  # type: ignore[misc]
    run = finish(world, about="seed=0")
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(spec, 4).curve


def test_the_death_of_all_holders_of_a_stage_costs_the_steps_since_the_checkpoint() -> None:
    spec = small_job(steps=6, save_every=2)
    for num_events in range(300, undisturbed(spec, 4).outcome.num_events, 40):
        world = make_world(spec, fleet_of(4), seed=0)
        run_events(world, num_events)
        plan = plan_of(world)
        for holder in plan.holders(plan.stages[-1].index):
            world.kill_worker(holder)
        run = finish(world, about=f"seed=0, holders of the last stage killed after {num_events} events")
        assert run.curve == undisturbed(spec, 4).curve, num_events
        assert run.num_rollbacks <= 1, num_events
