"""Holders that are cut off, stand still or come late are no dead ones: nothing that they hold is given up for it."""

from collections.abc import Callable
from itertools import product

import pytest

from skein.protocol.coordinator.coordinator_io import PauseAsked
from skein.protocol.log.records import CheckpointCommitted, HaltAsked, Incident, JobHeld, RolledBack
from skein.sim.faults import SILENCES_S
from skein.sim.scenario import disturbed, judge, make_world
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import JobId, StageIndex, WorkerId
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import (
    Run,
    finish,
    fleet_of,
    of_kind,
    plan_of,
    run_events,
    run_until,
    undisturbed,
    version_of,
)

JOB = small_job(steps=12, save_every=0)
"""On four workers: two stages, two holders each, and nothing to go back to but the beginning."""
SIM_1 = JobId("small-1")
AT_ONCE_S = 1.5
"""From deaths that peers see to the record of what they cost."""
KNOWN = (
    "kill",
    "restart",
    "flap",
    "freeze",
    "slow",
    "drain",
    "op",
    "forget",
    "third",
    "site",
    "neighbours",
    "join",
    "stream",
    "mute",
    "half_mute",
    "cut",
    "partition",
    "one_way",
    "delay",
    "storm",
    "coordinator",
    "both",
    "torn",
    "disk",
    "clock",
)
"""Kinds of faults, in the order that the seeds below were drawn from."""

Silence = Callable[[World, tuple[WorkerId, ...], float], None]


def mute(world: World, holders: tuple[WorkerId, ...], seconds: float) -> None:
    for name in holders:
        world.mute_worker(name, seconds)


def freeze(world: World, holders: tuple[WorkerId, ...], seconds: float) -> None:
    for name in holders:
        world.freeze_worker(name, seconds)


def come_late(world: World, holders: tuple[WorkerId, ...], seconds: float) -> None:
    """To a coordinator that is started again."""
    world.crash_coordinator(restarts_after_s=1.0)
    mute(world, holders, 1.0 + seconds)


def struck(silence: Silence, seconds: float, *, later: int, stage: int = 1) -> Run:
    """All holders of a stage fall silent, so many events after a version; nobody dies."""
    world = make_world(JOB, fleet_of(4), seed=0)
    run_until(world, lambda it: version_of(it) == 3)
    run_events(world, later)
    silence(world, plan_of(world).holders(StageIndex(stage)), seconds)
    return finish(world, about=f"{silence.__name__} {seconds} s, {later} events later")


@pytest.mark.parametrize(
    ("silence", "seconds", "stage", "later"),
    part(list(product((mute, freeze, come_late), SILENCES_S, (0, 1), (0, 29))), every=7),
)
def test_no_step_is_lost_when_all_holders_of_a_stage_are_silent_and_nobody_is_dead(
    silence: Silence, seconds: float, stage: int, later: int
) -> None:
    run = struck(silence, seconds, later=later, stage=stage)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(JOB, 4).curve


def test_a_coordinator_that_serves_for_seven_seconds_before_holders_reach_it_loses_nothing() -> None:
    run = struck(come_late, 7.0, later=5)
    assert any("waiting for" in line and "going back would cost 3 steps" in line for line in run.world.lines)
    assert run.num_rollbacks == 0


@pytest.mark.parametrize(("silence", "seconds"), part(list(product((mute, come_late), SILENCES_S)), every=2))
def test_a_job_that_is_paused_meanwhile_loses_nothing_either(silence: Silence, seconds: float) -> None:
    world = make_world(JOB, fleet_of(4), seed=0)
    run_until(world, lambda it: version_of(it) == 3)
    silence(world, tuple(sorted(world.workers)), seconds)
    while not of_kind(world.log, HaltAsked):
        world.tell(PauseAsked(job=SIM_1))
        run_events(world, 5)
    run_until(world, lambda it: bool(of_kind(it.log, JobHeld)))
    assert [saved.version for saved in of_kind(world.log, CheckpointCommitted)] == [version_of(world)]
    assert version_of(world) >= 3


def test_deaths_that_somebody_sees_are_not_waited_for() -> None:
    world = make_world(JOB, fleet_of(4), seed=0)
    run_until(world, lambda it: version_of(it) == 3)
    died_at = world.clock.now
    for name in plan_of(world).holders(StageIndex(1)):
        world.restart_worker(name)
    run = finish(world, about="both holders die")
    [back] = of_kind(run.world.log, RolledBack)
    assert back.wall_s - died_at < AT_ONCE_S
    assert not any("waiting for" in line for line in run.world.lines)


def test_deaths_that_nobody_sees_are_waited_for_once() -> None:
    """Machines lose their power: no stream breaks, nothing refuses."""
    world = make_world(JOB, fleet_of(4), seed=0)
    run_until(world, lambda it: version_of(it) == 3)
    for name in plan_of(world).holders(StageIndex(1)):
        world.freeze_worker(name, 600.0)
    run = finish(world, about="both holders lose their power")
    [back] = of_kind(run.world.log, RolledBack)
    assert "did not come back within 15 s" in back.reason
    [lost] = [incident for incident in of_kind(run.world.log, Incident) if incident.num_steps_lost]
    assert 15.0 < lost.seconds < 20.0


@pytest.mark.parametrize(
    ("shape", "num_faults", "seed"),
    part(
        [
            ("loop 3x2 tied", 8, 7000323),
            ("line 4x2 skip 1/4", 8, 7000969),
            ("loop 4x2 tied skip 1/2", 8, 8002378),
            ("line 2x3 tied tree", 20, 5001359),
        ],
        every=3,
    ),
)
def test_who_comes_back_while_steps_are_given_up_is_asked_first(
    shape: str, num_faults: int, seed: int
) -> None:
    world = disturbed(shape_of(shape), seed=seed, num_faults=num_faults, kinds=KNOWN)
    judge(shape_of(shape), world)


def test_what_workers_hold_that_went_away_before_the_newest_steps_is_not_given_up_either() -> None:
    """A partition leaves a whole model at version 1 on the other side; those who went on to 3 die."""
    world = disturbed(shape_of("line 2x3 tied tree"), seed=20000815, num_faults=8)
    judge(shape_of("line 2x3 tied tree"), world)
