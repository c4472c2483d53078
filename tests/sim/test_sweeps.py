"""Sweeps in a simulated world: every trial comes to what its job comes to alone, whatever dies meanwhile."""

from dataclasses import replace

import pytest

from skein.config.job import JobSpec
from skein.config.sweep.rows import Fuse
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.config.sweep.trials import trials_of
from skein.errors import UserError
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    CoordinatorEvent,
    PauseAsked,
    ResumeAsked,
    SubmitAsked,
)
from skein.protocol.coordinator.lifecycle import check_resumable
from skein.protocol.coordinator.sweeping.standing import stands_of
from skein.protocol.log.history import History
from skein.protocol.log.records import JobSubmitted
from skein.sim.scenario import LIMIT_S, curve_of, make_world, with_arrays
from skein.sim.world import World
from skein.types import JobId, JobState, WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of, of_kind, run_events, run_until, undisturbed

RATES = (0.1, 0.01, 0.001, 0.0001, 0.2)
SWEEP = JobId("small-1")


def sweep(fuse: Fuse = "never") -> JobSpec:
    alone = small_job(stages=1, replicas=1, microbatches=2, steps=4, save_every=2)
    space = {"optimizer.learning_rate": ValuesSpec(values=RATES)}
    return alone.model_copy(update={"sweep": SweepSpec(space=space, fuse=fuse, round_steps=2)})


def world_of(num_workers: int = 2, fuse: Fuse = "never") -> World:
    world = make_world(sweep(fuse), fleet_of(num_workers), seed=0, new_world=with_arrays(World))
    run_until(world, lambda world: len(of_kind(world.log, JobSubmitted)) > 1)
    return world


def history_of(world: World) -> History:
    assert world.coordinator is not None
    return world.coordinator.history


def check(world: World) -> None:
    """Each trial was trained once, and made the steps of its job alone."""
    history = history_of(world)
    stands = stands_of(history.jobs[SWEEP], history)
    assert [stand.num_steps for stand in stands] == [4] * len(RATES)
    assert sum(len(array.trials) for array in history.jobs.values()) == len(RATES)
    for stand, trial in zip(stands, trials_of(sweep()), strict=True):
        assert stand.array is not None
        if stand.array.spec.rows:
            continue  # Its chain of updates was judged at each commit.
        assert curve_of(world.log, stand.array.job) == undisturbed(trial.job, 1).curve


def test_trials_train_side_by_side_on_all_workers_and_clients_see_one_job() -> None:
    world = world_of()
    most = 0
    while history_of(world).jobs[SWEEP].end is None:
        assert world.clock.step()
        view = None if world.coordinator is None else world.coordinator.view
        most = max(most, 0 if view is None else len(view.crew_of(SWEEP)))
    assert most == 2
    run = finish(world, about="calm")
    check(world)
    assert [job.job for job in run.outcome.history.listed()] == [SWEEP]
    end = run.outcome.history.jobs[SWEEP].end
    assert end is not None
    assert end.reason.startswith("5 trials: 5 trained; best: trial ")


def test_a_sweep_that_has_finished_does_not_go_on() -> None:
    world = world_of()
    finish(world, about="calm")
    assert world.coordinator is not None
    sweep = history_of(world).jobs[SWEEP]
    with pytest.raises(UserError, match="has finished, and its trials have the budget that they began with"):
        check_resumable(sweep, None, world.coordinator.view.quotas)


def test_trials_that_may_be_rows_are_shared_out_among_all_workers() -> None:
    world = world_of(fuse="auto")
    finish(world, about="fused")
    check(world)
    arrays = [x for x in of_kind(world.log, JobSubmitted) if x.sweep == SWEEP]
    assert [array.trials for array in arrays] == [(0, 1), (2, 3, 4)]


def test_rows_of_two_submitters_are_never_in_one_array_nor_at_one_worker_at_once() -> None:
    world = make_world(sweep("auto"), fleet_of(2), seed=0, new_world=with_arrays(World))
    world.tell(SubmitAsked(key="theirs", spec=sweep("auto"), namespace="theirs"))
    sweeps = (SWEEP, JobId("small-2"))
    run_until(world, lambda world: all(job in history_of(world).jobs for job in sweeps))
    shared = 0
    while any(history_of(world).jobs[job].end is None for job in sweeps):
        assert world.clock.step()
        assert world.coordinator is not None
        crews = [world.coordinator.view.crew_of(job) for job in sweeps]
        assert not set(crews[0]) & set(crews[1])
        shared += all(crews)
    assert shared
    finish(world, about="two submitters")
    arrays = [x for x in of_kind(world.log, JobSubmitted) if x.sweep]
    for job in sweeps:
        own = [array for array in arrays if array.sweep == job]
        assert sorted(trial for array in own for trial in array.trials) == [0, 1, 2, 3, 4]
        assert {array.namespace for array in own} == {
            of_kind(world.log, JobSubmitted)[sweeps.index(job)].namespace
        }


@pytest.mark.parametrize(
    ("memory_bytes", "rows", "reason"),
    [(24 << 20, (3, 2), "5 trials: "), (2 << 20, (1, 1, 1), "small-1-a1 waits: stage 0 needs")],
)
def test_arrays_have_no_more_rows_than_a_worker_has_memory_for(
    memory_bytes: int, rows: tuple[int, ...], reason: str
) -> None:
    asked = sweep("always")
    assert asked.sweep is not None
    asked = asked.model_copy(update={"sweep": asked.sweep.model_copy(update={"per_array": 5})})
    fleet = replace(fleet_of(1), memory_bytes=memory_bytes)
    world = make_world(asked, fleet, seed=0, new_world=with_arrays(World))
    run_until(world, lambda world: world.clock.now > 4.0)
    assert tuple(len(x.trials) for x in of_kind(world.log, JobSubmitted)[1:]) == rows
    assert any("no worker has memory for more" in line for line in world.lines)
    assert world.coordinator is not None
    assert reason in world.coordinator.view.reason_of(SWEEP)


def test_a_worker_that_has_no_memory_for_any_row_parts_no_array() -> None:
    world = make_world(sweep("auto"), fleet_of(1), seed=0, new_world=with_arrays(World))
    other = next(iter(world.workers.values())).machine.identity
    world.add_worker(
        WorkerId("tiny"), other.site, flops_per_s=other.profile.flops_per_s, memory_bytes=2 << 20
    )
    finish(world, about="tiny")
    check(world)
    arrays = [x for x in of_kind(world.log, JobSubmitted) if x.sweep == SWEEP]
    assert [array.trials for array in arrays] == [tuple(range(len(RATES)))]


def test_no_more_arrays_wait_than_workers_could_take() -> None:
    world = world_of(1)
    run_until(world, lambda world: bool(curve_of(world.log, JobId("small-1-a1"))))
    assert len(history_of(world).jobs[SWEEP].arrays) == 3


@pytest.mark.parametrize("num_events", range(60, 700, 160))
@pytest.mark.parametrize("fuse", ["never", "auto"])
def test_deaths_of_workers_and_of_the_coordinator_cost_no_trial(num_events: int, fuse: Fuse) -> None:
    world = world_of(fuse=fuse)
    run_events(world, num_events)
    victim = next(iter(world.workers))
    profile = world.workers[victim].machine.identity
    world.kill_worker(victim)
    world.clock.after(
        2.0,
        lambda: world.add_worker(
            victim,
            profile.site,
            flops_per_s=profile.profile.flops_per_s,
            memory_bytes=profile.profile.memory_bytes,
        ),
    )
    run_events(world, 20)
    world.crash_coordinator(restarts_after_s=1.0)
    finish(world, about=f"{num_events} events")
    check(world)


def insist(world: World, wish: CoordinatorEvent, state: JobState | None) -> None:
    """Ask as a client does that has no answer, until the sweep is in a state; None: in none of rest."""
    assert world.coordinator is None or history_of(world).state_of(SWEEP) is not JobState.FINISHED
    while world.coordinator is None or world.is_appending or history_of(world).state_of(SWEEP) is not state:
        world.tell(wish)
        run_events(world, 20)
        assert world.clock.now < LIMIT_S, "never done"


@pytest.mark.parametrize("num_events", range(40, 240, 50))
def test_a_sweep_that_is_paused_or_cancelled_goes_on_where_it_was(num_events: int) -> None:
    world = world_of()
    run_events(world, num_events)
    insist(world, PauseAsked(job=SWEEP), JobState.HELD)
    assert history_of(world).pending() == []
    world.crash_coordinator(restarts_after_s=1.0)
    insist(world, ResumeAsked(job=SWEEP), None)
    run_events(world, 20)
    insist(world, CancelAsked(job=SWEEP, reason="enough"), JobState.CANCELLED)
    assert history_of(world).pending() == []
    insist(world, ResumeAsked(job=SWEEP), None)
    finish(world, about=f"{num_events} events")
    check(world)


def test_a_held_sweep_can_be_cancelled() -> None:
    world = world_of()
    insist(world, PauseAsked(job=SWEEP), JobState.HELD)
    insist(world, CancelAsked(job=SWEEP), JobState.CANCELLED)
    history = history_of(world)
    assert {history.state_of(job) for job in history.jobs[SWEEP].arrays} == {JobState.CANCELLED}


@pytest.mark.parametrize("num_durable", range(1, 4))
def test_a_resumption_that_is_recorded_in_part_only_goes_on_with_all_arrays(num_durable: int) -> None:
    world = world_of()
    run_until(world, lambda world: bool(curve_of(world.log, JobId("small-1-a1"))))
    insist(world, PauseAsked(job=SWEEP), JobState.HELD)
    run_until(world, lambda world: not world.is_appending)
    world.tear_append(restarts_after_s=1.0, num_durable=num_durable)
    world.tell(ResumeAsked(job=SWEEP))
    run_until(world, lambda world: history_of(world).state_of(SWEEP) is None if world.is_up else False)
    finish(world, about=f"{num_durable} durable")
    check(world)


@pytest.mark.parametrize("wish", [PauseAsked, CancelAsked])
@pytest.mark.parametrize("num_durable", [1, 2])
def test_a_wish_that_is_recorded_in_part_only_loses_no_step(
    wish: type[PauseAsked | CancelAsked], num_durable: int
) -> None:
    world = world_of()
    run_events(world, 60)
    run_until(world, lambda world: world.is_up and not world.is_appending)
    world.tell(wish(job=SWEEP))
    world.crash_coordinator(restarts_after_s=1.0, num_durable=num_durable)
    state = JobState.HELD if wish is PauseAsked else JobState.CANCELLED
    run_until(world, lambda world: world.is_up and history_of(world).state_of(SWEEP) is state)
    begun = [job for job in history_of(world).jobs.values() if job.sweep and job.version]
    assert begun
    assert all(job.newest_checkpoint and job.newest_checkpoint.version == job.version for job in begun)
