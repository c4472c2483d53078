"""Workers with other data than the job was trained on: never a step with both, and none in silence."""

import pytest

from skein.protocol.coordinator.coordinator_io import PauseAsked, ResumeAsked
from skein.protocol.log.records import CheckpointCommitted, DataCounted, JobHeld, JobResumed, JobSubmitted
from skein.sim.processes.data import USUAL
from skein.sim.scenario import make_world
from skein.sim.world import World
from skein.types import JobId, JobState, StageIndex, WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of, of_kind, run_until, undisturbed, version_of

JOB = small_job(steps=16, save_every=2)
SIM_1 = JobId("small-1")
HOURS = 10_000.0


def world_of(num_workers: int = 4) -> World:
    world = make_world(JOB, fleet_of(num_workers), seed=0)
    run_until(world, lambda world: any(isinstance(record, JobSubmitted) for record in world.log))
    return world


def is_saved(world: World) -> bool:
    """Whether there are steps that outlive all workers."""
    return bool(of_kind(world.log, CheckpointCommitted))


def readers(world: World) -> list[WorkerId]:
    assert world.coordinator is not None
    plan = world.coordinator.history.jobs[SIM_1].plan
    assert plan is not None
    return sorted(plan.plan.holders(StageIndex(0)))


def others(world: World) -> list[WorkerId]:
    return sorted(set(world.workers) - set(readers(world)))


def state_and_reason(world: World) -> tuple[JobState, str]:
    assert world.coordinator is not None
    return world.coordinator.view.state_of(SIM_1), world.coordinator.view.reason_of(SIM_1)


def counted(world: World) -> list[str]:
    return [record.fingerprint for record in of_kind(world.log, DataCounted)]


def test_a_worker_that_takes_over_with_other_data_is_left_out_and_the_curve_stays() -> None:
    world = world_of()
    run_until(world, lambda world: version_of(world) == 3)
    taking, reading = others(world), readers(world)
    world.replace_data(taking[0], HOURS)
    world.kill_worker(reading[0])
    run = finish(world, about="one has other data")
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(JOB, 4).curve
    assert counted(world) == [USUAL]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_job_whose_data_are_gone_everywhere_waits_and_says_so(is_restarted: bool) -> None:
    world = world_of()
    run_until(world, is_saved)
    for worker in sorted(world.workers):
        world.replace_data(worker, 400.0)
        world.restart_worker(worker)
    if is_restarted:
        world.crash_coordinator()
    run_until(world, lambda world: world.clock.now > 300)
    state, reason = state_and_reason(world)
    assert state is JobState.PAUSED
    assert "the job was trained on other data (data): give this worker the same files" in reason
    assert "skein resume JOB --new-data" in reason
    before = version_of(world)
    assert before <= 4
    # The files are back.
    run = finish(world, about="put back")
    assert counted(world) == [USUAL]
    assert len(run.curve) == JOB.budget.steps


def replaced_everywhere() -> World:
    world = world_of()
    run_until(world, is_saved)
    for worker in sorted(world.workers):
        world.replace_data(worker, HOURS)
        world.restart_worker(worker)
    run_until(world, lambda world: world.clock.now > 200)
    assert state_and_reason(world)[0] is JobState.PAUSED
    return world


@pytest.mark.parametrize("is_held", [False, True])
def test_new_data_are_taken_when_a_client_says_so(is_held: bool) -> None:
    world = replaced_everywhere()
    for worker in sorted(world.workers):  # the same new files everywhere
        world.replace_data(worker, HOURS, "new")
    if is_held:
        world.tell(PauseAsked(job=SIM_1))
        run_until(world, lambda world: bool(of_kind(world.log, JobHeld)))
    world.tell(ResumeAsked(job=SIM_1, takes_new_data=True))
    run = finish(world, about="new data")
    assert counted(world) == [USUAL, "new"]
    assert [record.takes_new_data for record in of_kind(world.log, JobResumed)] == [True]
    assert len(run.curve) == JOB.budget.steps


def test_resuming_alone_takes_no_new_data() -> None:
    world = replaced_everywhere()
    world.tell(PauseAsked(job=SIM_1))
    run_until(world, lambda world: bool(of_kind(world.log, JobHeld)))
    world.tell(ResumeAsked(job=SIM_1))
    run_until(world, lambda world: world.clock.now > 400)
    assert state_and_reason(world)[0] is JobState.PAUSED
    assert counted(world) == [USUAL]


def test_one_of_three_readers_with_other_data_does_not_end_the_job_at_its_first_plan() -> None:
    wide = small_job(steps=4, stages=1, replicas=3)
    for odd in range(3):
        world = make_world(wide, fleet_of(3), seed=0)
        world.replace_data(sorted(world.workers)[odd], HOURS)
        run = finish(world, about=f"worker {odd} has other data")
        assert len(run.curve) == 4
        assert counted(world) == [USUAL]


def test_where_two_readers_differ_a_third_worker_decides() -> None:
    wide = small_job(steps=4, stages=2, replicas=2)
    for odd in range(4):
        world = make_world(wide, fleet_of(4), seed=0)
        world.replace_data(sorted(world.workers)[odd], HOURS)
        run = finish(world, about=f"worker {odd} has other data")
        assert len(run.curve) == 4
        assert counted(world) == [USUAL]
