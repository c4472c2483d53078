"""A coordinator whose disk has forgotten the newest records: workers that know better end it, an operator decides."""

from functools import partial

import pytest

from skein.protocol.log.records import EpochOpened, JobSubmitted, StepCommitted
from skein.sim.scenario import make_world
from skein.sim.world import World
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of, of_kind, run_until, undisturbed

JOB = small_job(steps=4, save_every=2)


def world_that_lost(num_records: int, *, seed: int, loses_key: bool = False) -> World:
    """A job on four workers, three of its steps done, whose log then loses its end and is opened again."""
    world = make_world(JOB, fleet_of(4), seed=seed)
    run_until(world, lambda w: len(of_kind(w.log, StepCommitted)) == 3)
    # Until everybody has heard of it.
    until_s = world.clock.now + 0.5
    run_until(world, lambda w: w.clock.now > until_s and not w.is_appending)
    world.lose_tail(num_records, restarts_after_s=0.5, loses_key=loses_key)
    return world


@pytest.mark.parametrize("num_records", [1, 2, 3, 5])
def test_workers_that_heard_of_lost_records_end_the_coordinator(num_records: int) -> None:
    world = world_that_lost(num_records, seed=num_records)
    num_left = len(world.log)
    run_until(world, lambda w: w.halted is not None)
    assert world.halted is not None
    assert f"the run log ended at entry {num_left} of epoch 1, but worker w0" in world.halted
    # It had opened its epoch, and decided nothing.
    assert [type(record) for record in world.log[num_left:]] == [EpochOpened]


def test_another_start_on_the_same_log_is_ended_too() -> None:
    world = world_that_lost(2, seed=1)
    for _ in range(3):
        run_until(world, lambda w: w.halted is not None)
        world.start_coordinator()
    run_until(world, lambda w: w.halted is not None)


def test_workers_that_cannot_prove_what_they_know_are_turned_away_and_end_nobody() -> None:
    world = world_that_lost(2, seed=1, loses_key=True)
    run_until(world, lambda w: not w.workers)
    assert world.halted is None
    assert world.is_up
    assert any("as it says without a signature of this run log" in line for line in world.lines)


def test_an_accepted_loss_costs_the_lost_steps_and_the_workers_that_know_them() -> None:
    world = world_that_lost(2, seed=1)
    run_until(world, lambda w: w.halted is not None)
    machines = [(name, w.machine.identity) for name, w in world.workers.items()]
    world.accepts_loss = True
    world.start_coordinator()
    run_until(world, lambda w: not w.workers)
    assert any("which is not in the run log" in line for line in world.lines)
    for name, identity in machines:
        world.clock.after(
            1.0,
            partial(
                world.add_worker,
                name,
                identity.site,
                flops_per_s=identity.profile.flops_per_s,
                memory_bytes=identity.profile.memory_bytes,
            ),
        )
    run = finish(world, about="accepted")
    assert [record.loss for record in run.curve] == [record.loss for record in undisturbed(JOB, 4).curve]
    # Once accepted it is no news: nobody ends the next coordinator.
    assert world.halted is None
    assert len(of_kind(world.log, JobSubmitted)) == 1


def test_a_log_that_lost_what_nobody_has_heard_of_goes_on() -> None:
    world = make_world(JOB, fleet_of(4), seed=5)
    run_until(world, lambda w: len(of_kind(w.log, StepCommitted)) == 2)
    world.crash_coordinator(restarts_after_s=0.5)
    run = finish(world, about="whole")
    assert run.world.halted is None
    assert [record.loss for record in run.curve] == [record.loss for record in undisturbed(JOB, 4).curve]
