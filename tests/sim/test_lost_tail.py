"""A coordinator whose disk has forgotten the newest records: workers that know better end it, an operator decides."""

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


def test_workers_that_cannot_prove_what_they_know_keep_it_and_end_no_coordinator() -> None:
    world = world_that_lost(2, seed=1, loses_key=True)
    held = [sorted(w.executor.chunks) for w in world.workers.values()]
    until_s = world.clock.now + 30.0
    run_until(world, lambda w: w.clock.now > until_s)
    assert world.halted is None
    assert world.is_up
    assert any("as it says without a signature of this run log" in line for line in world.lines)
    assert [sorted(w.executor.chunks) for w in world.workers.values()] == held
    assert world.coordinator is not None
    assert not world.coordinator.membership.live


def test_an_accepted_loss_costs_the_lost_steps_and_workers_forget_them() -> None:
    world = world_that_lost(2, seed=1)
    run_until(world, lambda w: w.halted is not None)
    world.accepts_loss = True
    world.start_coordinator()
    run = finish(world, about="accepted")
    assert any("whose loss was accepted" in line for line in world.lines)
    assert [record.loss for record in run.curve] == [record.loss for record in undisturbed(JOB, 4).curve]
    # The loss is accepted once: no worker ends the next coordinator.
    assert world.halted is None
    assert len(of_kind(world.log, JobSubmitted)) == 1


def test_a_log_that_lost_what_nobody_has_heard_of_goes_on() -> None:
    world = make_world(JOB, fleet_of(4), seed=5)
    run_until(world, lambda w: len(of_kind(w.log, StepCommitted)) == 2)
    world.crash_coordinator(restarts_after_s=0.5)
    run = finish(world, about="whole")
    assert run.world.halted is None
    assert [record.loss for record in run.curve] == [record.loss for record in undisturbed(JOB, 4).curve]
