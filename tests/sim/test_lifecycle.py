"""Jobs that are paused, cancelled and had go on in a simulated world: at any moment, whatever dies with it."""

from collections.abc import Callable

import pytest

from skein.config.job import BudgetSpec, JobSpec
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    CoordinatorEvent,
    PauseAsked,
    ResumeAsked,
    SubmitAsked,
)
from skein.protocol.log.records import (
    CheckpointCommitted,
    DataCounted,
    HaltAsked,
    Incident,
    JobEnded,
    JobSubmitted,
    RolledBack,
)
from skein.sim.scenario import LIMIT_S, make_world
from skein.sim.world import World
from skein.types import JobId, JobState
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import (
    Run,
    finish,
    fleet_of,
    kill_everything,
    of_kind,
    run_events,
    run_until,
    undisturbed,
    version_of,
)

JOB = small_job(steps=4, evaluate_every=2, save_every=2)
LONG = small_job(steps=16, save_every=2)
POINTS = 13
NUM_EVENTS = undisturbed(JOB, 4).outcome.num_events
SIM_1 = JobId("small-1")

AT_ANY_MOMENT = pytest.mark.parametrize(
    "num_events", part(range(40, NUM_EVENTS, NUM_EVENTS // POINTS), every=2)
)


def world_of(job: JobSpec = JOB) -> World:
    world = make_world(job, fleet_of(4), seed=0)
    run_until(world, lambda world: any(isinstance(record, JobSubmitted) for record in world.log))
    return world


def insist(world: World, wish: CoordinatorEvent, is_done: Callable[[World], bool]) -> None:
    """Ask as a client does that has no answer, until it is done."""
    while not is_done(world):
        world.tell(wish)
        run_events(world, 20)
        assert world.clock.now < LIMIT_S, "never done"


def is_at_rest(world: World) -> bool:
    state = None if world.coordinator is None else world.coordinator.history.state_of(SIM_1)
    return state is not None and not world.is_appending


def goes_on(world: World) -> bool:
    return world.coordinator is not None and not is_at_rest(world)


def check(run: Run, job: JobSpec = JOB) -> None:
    """Nothing is lost, and the curve is the undisturbed one."""
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(job, 4).curve


@AT_ANY_MOMENT
def test_a_job_that_is_paused_and_goes_on_loses_nothing(num_events: int) -> None:
    world = world_of()
    run_events(world, num_events)
    insist(world, PauseAsked(job=SIM_1), is_at_rest)
    run_until(world, lambda world: world.clock.now > 40)
    insist(world, ResumeAsked(job=SIM_1), goes_on)
    run = finish(world, about="paused")
    check(run)
    assert of_kind(world.log, Incident) == []


@AT_ANY_MOMENT
def test_a_pause_outlives_the_coordinator(num_events: int) -> None:
    world = world_of()
    run_events(world, num_events)
    world.tell(PauseAsked(job=SIM_1))
    at = {len(world.log) + 1, len(world.log) + 4, len(world.log) + 8}
    world.after_append = lambda num_held: world.crash_coordinator() if num_held in at else None
    insist(world, PauseAsked(job=SIM_1), is_at_rest)
    insist(world, ResumeAsked(job=SIM_1), goes_on)
    check(finish(world, about="paused"))


@AT_ANY_MOMENT
def test_a_cancelled_job_keeps_its_newest_step_and_may_go_on(num_events: int) -> None:
    world = world_of()
    run_events(world, num_events)
    world.tell(CancelAsked(job=SIM_1))
    cancelled = finish(world, about="cancelled", state=JobState.CANCELLED)
    saved = cancelled.saved[-1] if cancelled.saved else 0
    assert saved == version_of(world)
    world.tell(ResumeAsked(job=SIM_1))
    check(finish(world, about="resumed"))


def saved_once() -> World:
    """A world whose job has a checkpoint, and steps that are in none."""
    world = world_of(LONG)
    run_until(world, lambda world: bool(of_kind(world.log, CheckpointCommitted)))
    run_until(world, lambda world: version_of(world) % 2 == 1)
    return world


def test_a_cancelled_job_that_discards_ends_at_once() -> None:
    world = saved_once()
    before, num_saved = world.clock.now, len(of_kind(world.log, CheckpointCommitted))
    world.tell(CancelAsked(job=SIM_1, discards=True))
    run = finish(world, about="discarded", state=JobState.CANCELLED)
    assert world.clock.now - before < 0.1
    assert len(run.saved) == num_saved


def test_a_cancelled_job_whose_workers_are_gone_ends_and_says_what_is_lost() -> None:
    world = saved_once()
    for name in sorted(world.workers):
        world.kill_worker(name)
    world.tell(CancelAsked(job=SIM_1, reason="enough"))
    run = finish(world, about="cancelled", state=JobState.CANCELLED)
    [end] = of_kind(world.log, JobEnded)
    assert end.reason == (
        f"enough; the steps after {run.saved[-1]} are with no worker that is here; "
        "w0000, w0001, w0002, w0003 did not come back within 15 s"
    )


def test_a_cancelled_job_ends_though_everything_dies_with_it() -> None:
    world = saved_once()
    world.tell(CancelAsked(job=SIM_1))
    run_until(world, lambda world: bool(of_kind(world.log, HaltAsked)))
    kill_everything(world)
    finish(world, about="cancelled", state=JobState.CANCELLED)


def test_a_finished_job_goes_on_to_more_steps() -> None:
    world = world_of()
    short = finish(world, about="finished")
    world.tell(ResumeAsked(job=SIM_1, steps=7))
    longer = finish(world, about="resumed")
    assert longer.saved[-1] == 7
    assert longer.curve[:4] == short.curve[:4]
    assert [step.step for step in longer.curve] == list(range(7))
    assert of_kind(world.log, RolledBack) == []


def test_a_finished_job_without_more_steps_stays_finished() -> None:
    world = world_of()
    finish(world, about="finished")
    num_records = len(world.log)
    world.tell(ResumeAsked(job=SIM_1))
    world.tell(ResumeAsked(job=SIM_1, steps=4))
    assert len(world.log) == num_records


def test_a_held_job_keeps_no_other_waiting() -> None:
    world = world_of()
    run_until(world, lambda world: version_of(world) == 2)
    insist(world, PauseAsked(job=SIM_1), is_at_rest)
    world.tell(SubmitAsked(key="other", spec=JOB.model_copy(update={"name": "other"})))
    run_until(world, lambda world: bool(of_kind(world.log, JobEnded)))
    [end] = of_kind(world.log, JobEnded)
    assert (end.job, end.state) == ("other-2", JobState.FINISHED)
    assert len([saved for saved in of_kind(world.log, CheckpointCommitted) if saved.job == "other-2"]) == 2


def test_a_job_works_for_its_hours_however_long_it_is_held() -> None:
    hours = LONG.model_copy(update={"budget": BudgetSpec(steps=400, hours=8 / 3600)})
    calm = finish(world_of(hours), about="hours").curve
    assert 8 < len(calm) < 40
    world = world_of(hours)
    run_until(world, lambda world: version_of(world) == 4)
    insist(world, PauseAsked(job=SIM_1), is_at_rest)
    run_until(world, lambda world: world.clock.now > 100)
    insist(world, ResumeAsked(job=SIM_1), goes_on)
    assert abs(len(finish(world, about="hours").curve) - len(calm)) <= 1


EPOCHS = BudgetSpec(epochs=40 / 10**6)
"""Five steps: simulated workers find a million samples."""


def test_a_job_sees_its_data_so_often_and_a_restarted_coordinator_knows() -> None:
    world = world_of(LONG.model_copy(update={"budget": EPOCHS}))
    run_until(world, lambda world: version_of(world) == 2)
    world.crash_coordinator()
    assert len(finish(world, about="epochs").curve) == 5
    (counted,) = of_kind(world.log, DataCounted)
    assert (counted.num_train_samples, counted.num_steps) == (10**6, 5)


def test_epochs_too_few_for_the_warm_up_end_the_job_before_its_first_step() -> None:
    warm = LONG.optimizer.model_copy(update={"warmup_steps": 6})
    world = world_of(LONG.model_copy(update={"budget": EPOCHS, "optimizer": warm}))
    assert not finish(world, about="warm-up", state=JobState.FAILED).curve
    insist(world, ResumeAsked(job=SIM_1), goes_on)
    assert not finish(world, about="resumed as it was", state=JobState.FAILED).curve
    first, second = (ended.reason for ended in of_kind(world.log, JobEnded))
    assert (
        first
        == second
        == (
            "budget.epochs: 4e-05: optimizer.warmup_steps: 6: the job has 5 steps: give at most 5, or a larger budget"
        )
    )
