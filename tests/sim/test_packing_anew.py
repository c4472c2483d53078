"""Arrays that are packed anew in a simulated world: a trial makes each of its steps once, whatever dies meanwhile."""

from functools import partial

import pytest

from skein.config.job import ArrayJob, JobSpec
from skein.config.sweep.spec import SweepSpec
from skein.plan.sweeping.packing import ROUND_S
from skein.protocol.coordinator.coordinator_io import PauseAsked, ResumeAsked
from skein.protocol.coordinator.sweeping.standing import stands_of
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import HaltAsked, JobSubmitted, StepCommitted
from skein.sim.compute.arrays import SimArrays
from skein.sim.scenario import make_world, with_arrays
from skein.sim.world import World
from skein.types import JobId, JobState, WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import finish, fleet_of, of_kind, run_events, run_until

SWEEP = JobId("small-1")
STEPS = 64
DIVERGING = (2, 10, 18)
"""Seeds of rows that the simulated executor has diverge after 21 steps."""


def sweep(*seeds: int, per_array: int | None = None) -> JobSpec:
    alone = small_job(stages=1, replicas=1, microbatches=2, steps=STEPS, save_every=2)
    trials = tuple({"seed": seed} for seed in seeds)
    spec = SweepSpec(trials=trials, fuse="auto", round_steps=4, per_array=per_array)
    return alone.model_copy(update={"sweep": spec})


def world_of(job: JobSpec, num_workers: int) -> World:
    world = make_world(job, fleet_of(num_workers), seed=0, new_world=with_arrays(World))
    run_until(world, lambda world: bool(of_kind(world.log, StepCommitted)))
    return world


def add_worker(world: World) -> None:
    known = next(iter(world.workers.values())).machine.identity
    world.add_worker(
        WorkerId("late"),
        known.site,
        flops_per_s=known.profile.flops_per_s,
        memory_bytes=known.profile.memory_bytes,
    )


def arrays_of(history: History) -> list[JobHistory]:
    return [history.jobs[job] for job in history.jobs[SWEEP].arrays]


def check(history: History, seeds: tuple[int, ...]) -> None:
    """Rows have made all steps, and those that diverge are retired where a round began; chains were judged before."""
    for seed, stand in zip(seeds, stands_of(history.jobs[SWEEP], history), strict=True):
        assert bool(stand.failure) == (seed in DIVERGING)
        assert stand.num_steps == (20 if seed in DIVERGING else STEPS)


@pytest.mark.parametrize("num_events", [0, 40, 80, 120, 160])
def test_a_late_worker_has_its_share_from_the_next_round_on_though_the_first_dies(num_events: int) -> None:
    world = world_of(sweep(0, 1, 3, 4), 1)
    first = next(iter(world.workers))
    add_worker(world)
    run_until(world, lambda world: bool(of_kind(world.log, HaltAsked)))
    run_events(world, num_events)
    world.kill_worker(first)
    history = finish(world, about=f"{num_events} events").outcome.history
    check(history, (0, 1, 3, 4))
    parted, *parts = arrays_of(history)
    assert parted.version < parted.total_steps
    assert sorted(trial for part in parts[:2] for trial in part.trials) == [0, 1, 2, 3]


def test_rounds_take_as_long_as_they_should_once_a_step_was_measured() -> None:
    job = sweep(0, 1, 3, 4)
    assert job.sweep is not None
    job = job.model_copy(update={"sweep": job.sweep.model_copy(update={"round_steps": None})})
    new_world = partial(World, new_executor=SimArrays(row_s=ROUND_S / 4).executor)
    world = make_world(job, fleet_of(1), seed=0, new_world=new_world)
    history = finish(world, about="calm").outcome.history
    check(history, (0, 1, 3, 4))
    first, second = (array.spec for array in arrays_of(history))
    assert isinstance(first, ArrayJob)
    assert isinstance(second, ArrayJob)
    # Four rows take a fourth of a round each.
    assert first.round_steps > 4
    assert second.round_steps == 1
    assert arrays_of(history)[0].version <= 2


@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_left_of_an_array_is_joined_with_what_waits(restarts: bool) -> None:
    seeds = (*DIVERGING, 0, 1, 3, 4, 5)
    world = world_of(sweep(*seeds, per_array=6), 1)
    run_until(world, lambda world: bool(of_kind(world.log, HaltAsked)))
    (halted,) = of_kind(world.log, HaltAsked)
    assert halted.state is JobState.FINISHED
    if restarts:
        world.crash_coordinator(restarts_after_s=1.0)
    history = finish(world, about="joined").outcome.history
    check(history, seeds)
    begun = [record for record in of_kind(world.log, JobSubmitted) if record.sweep == SWEEP]
    assert [record.trials for record in begun] == [(0, 1, 2, 3), (4, 5, 6, 7), (3, 4, 5, 6, 7)]
    joined = arrays_of(history)[-1].spec
    assert isinstance(joined, ArrayJob)
    assert joined.array.first_step == 0


def test_a_sweep_is_held_though_nobody_has_the_array_that_is_to_end_with_its_round() -> None:
    world = world_of(sweep(0, 1, 3, 4), 1)
    add_worker(world)
    run_until(world, lambda world: bool(of_kind(world.log, HaltAsked)))
    late = world.workers[WorkerId("late")].machine.identity
    for worker in [*world.workers]:
        world.kill_worker(worker)
    run_events(world, 60)
    assert world.coordinator is not None
    history = world.coordinator.history
    assert history.jobs[JobId("small-1-a1")].ends_with_round
    world.tell(PauseAsked(job=SWEEP))
    run_until(world, lambda _: history.state_of(SWEEP) is JobState.HELD)
    profile = late.profile
    world.add_worker(
        WorkerId("next"), late.site, flops_per_s=profile.flops_per_s, memory_bytes=profile.memory_bytes
    )
    world.tell(ResumeAsked(job=SWEEP))
    finish(world, about="held")
    check(history, (0, 1, 3, 4))
