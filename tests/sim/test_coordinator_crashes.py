"""The coordinator dies before and after every single record that it appends: no committed step is ever lost."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest

from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.log.history import History
from skein.protocol.log.records import EpochOpened, Incident, IncidentKind, StepCommitted
from skein.sim.scenario import make_world
from skein.sim.world import World
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, of_kind, simulate, undisturbed, worker

JOB = small_job(steps=3, evaluate_every=2, save_every=2)
FULL_S = 5.0
NUM_RECORDS = len(undisturbed(JOB, 4).world.log)


def crash_once(
    world: World, *, when: str, num_records: int, also: Callable[[World], None] | None = None
) -> None:
    """Have the coordinator die when the log is about to hold, or holds, so many records."""
    crashed: list[int] = []

    def strike(num_held: int) -> None:
        if num_held == num_records and not crashed:
            crashed.append(num_held)
            world.crash_coordinator(restarts_after_s=0.5)
            if also is not None:
                also(world)

    if when == "before":
        world.before_append = strike
    else:
        world.after_append = strike


def check(run: Run) -> None:
    assert run.curve == undisturbed(JOB, 4).curve
    assert run.num_rollbacks == 0
    assert len(of_kind(run.world.log, StepCommitted)) == JOB.total_steps


@pytest.mark.parametrize("num_records", range(2, NUM_RECORDS))
def test_a_crash_before_any_append_loses_no_committed_step(num_records: int) -> None:
    run = simulate(JOB, 4, disturb=partial(crash_once, when="before", num_records=num_records))
    assert len(of_kind(run.world.log, EpochOpened)) == 2
    check(run)


@pytest.mark.parametrize("num_records", range(3, NUM_RECORDS + 1))
def test_a_crash_after_any_append_loses_no_committed_step(num_records: int) -> None:
    run = simulate(JOB, 4, disturb=partial(crash_once, when="after", num_records=num_records))
    assert len(of_kind(run.world.log, EpochOpened)) == 2
    check(run)


@pytest.mark.parametrize("num_records", range(3, NUM_RECORDS, 2))
def test_a_worker_that_dies_with_the_coordinator_costs_no_step_either(num_records: int) -> None:
    kill = partial(World.kill_worker, name=worker(num_records % 4))
    run = simulate(JOB, 4, disturb=partial(crash_once, when="after", num_records=num_records, also=kill))
    check(run)


def test_every_prefix_of_the_log_replays_to_the_state_that_was() -> None:
    world = make_world(JOB, fleet_of(4), seed=1)
    states: list[str] = []

    def note(_: int) -> None:
        assert world.coordinator is not None
        live = world.coordinator.history
        replayed = History()
        for record in world.log:
            replayed.apply(record)
        # Records of one turn change the live state together, so compare at turns' ends only.
        if state_of(replayed) == state_of(live):
            states.append(state_of(live))

    world.after_append = note
    finish(world, about="seed=1")
    replayed = Coordinator()
    replayed.replay(world.log)
    assert world.coordinator is not None
    assert state_of(replayed.history) == state_of(world.coordinator.history)
    assert len(states) > NUM_RECORDS / 2


def state_of(history: History) -> str:
    return repr((history.epoch, history.generation, history.jobs, history.job_by_key))


@pytest.mark.parametrize(
    ("turn", "num_durable"), part(list(product(range(1, NUM_RECORDS - 1, 3), range(3))), every=2)
)
def test_a_crash_in_the_middle_of_an_append_loses_no_announced_step(turn: int, num_durable: int) -> None:
    """A turn's records are torn: the first of them may be in the log, and nothing of the turn was said to anybody."""

    def disturb(world: World) -> None:
        def tear(num_held: int) -> None:
            if num_held == turn + 1:
                world.tear_append(restarts_after_s=0.5, num_durable=num_durable)

        world.after_append = tear

    run = simulate(JOB, 4, disturb=disturb)
    assert len(of_kind(run.world.log, EpochOpened)) == 2
    check(run)


@pytest.mark.parametrize("num_records", range(2, NUM_RECORDS - 1, 3))
def test_a_disk_without_room_holds_back_what_depends_on_it(num_records: int) -> None:
    def disturb(world: World) -> None:
        def fill(num_held: int) -> None:
            if num_held == num_records:
                world.fill_disk(FULL_S)

        world.after_append = fill

    run = simulate(JOB, 4, disturb=disturb)
    # What needs no record goes on meanwhile, which takes less than a second here.
    assert run.outcome.seconds > undisturbed(JOB, 4).outcome.seconds + FULL_S - 1.0
    check(run)


@pytest.mark.parametrize("skews_s", [(0.0, -3600.0), (90_000.0, 0.0), (0.0, 90_000.0)])
def test_a_wall_clock_that_steps_between_two_coordinators_costs_nothing(skews_s: tuple[float, float]) -> None:
    before_s, after_s = skews_s

    def disturb(world: World) -> None:
        world.skew_s = 1e6 + before_s
        world.crash_coordinator(restarts_after_s=0.1)

        def step(num_held: int) -> None:
            if num_held == NUM_RECORDS // 2 and world.skew_s == 1e6 + before_s:
                world.skew_s = 1e6 + after_s
                world.crash_coordinator(restarts_after_s=0.1)

        world.after_append = step

    run = simulate(JOB, 4, disturb=disturb)
    [incident] = of_kind(run.world.log, Incident)
    assert incident.kind is IncidentKind.COORDINATOR_LOST
    assert 0.0 <= incident.silent_s < 3600.0, "a clock that was set is no silence"
    assert ("a clock that may have been set" in incident.reason) is (after_s - before_s > 86_400.0)
    check(run)
