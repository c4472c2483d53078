"""Members that accuse peers which they reach: the job goes on, the accuser goes, and nobody else stays away."""

from collections.abc import Sequence

import pytest

from skein.protocol.coordinator.coordinator_io import CancelAsked
from skein.protocol.log.records import GenerationOpened, PlanAdopted, StepCommitted
from skein.protocol.messages.reports import Suspected
from skein.sim.lines.lies import Accuser
from skein.sim.scenario import disturbed, judge, make_world, run_to_end, small_fleet
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import JobState, WorkerId
from tests.support.extent import part
from tests.support.worlds import of_kind, plan_of, run_until, version_of, worker

STEPS = 30
SOON_S = 12.0
"""Simulated seconds after which nothing comes of what an accuser says any more."""


def world_of(text: str, *, seed: int = 3) -> World:
    shape = shape_of(text)
    return make_world(shape.job(steps=STEPS), small_fleet(shape), seed=seed)


def have_accuse(world: World, accusers: Sequence[WorkerId], *, num_named: int, with_every_beat: bool) -> None:
    for name in accusers:
        machine = world.workers[name].machine
        how = Accuser(machine=machine, num_named=num_named, with_every_beat=with_every_beat)
        world.have_say(name, how)


def excluded(world: World) -> set[WorkerId]:
    assert world.coordinator is not None
    assert world.coordinator.run is not None
    return set(world.coordinator.run.excluded)


@pytest.mark.parametrize("after_steps", [0, 3])
@pytest.mark.parametrize("num_named", [1, 2, 9])
@pytest.mark.parametrize("text", ["line 1x4", "line 2x2", "loop 2x3", "line 2x2 on 5"])
def test_a_member_that_accuses_for_ever_is_told_apart_within_seconds(
    text: str, num_named: int, after_steps: int
) -> None:
    world = world_of(text)
    if after_steps:
        run_until(world, lambda w: version_of(w) >= after_steps)
    else:
        run_until(world, lambda w: w.clock.now > 1.0)
    have_accuse(world, [worker(1)], num_named=num_named, with_every_beat=num_named == 2)
    run_until(world, lambda w: version_of(w) > after_steps)
    began_s = world.clock.now
    run_until(world, lambda w: w.clock.now > began_s + SOON_S)
    assert excluded(world) == {worker(1)}
    num_generations = len(of_kind(world.log, GenerationOpened))
    outcome = run_to_end(world, limit_s=300.0)
    assert outcome.state is JobState.FINISHED
    assert len(of_kind(world.log, GenerationOpened)) <= num_generations + 1


@pytest.mark.parametrize("with_every_beat", [False, True])
@pytest.mark.parametrize(("text", "num_accusers"), [("line 1x5", 2), ("line 2x4", 3), ("loop 2x3", 2)])
def test_several_accusers_all_go_and_who_they_accused_comes_back(
    text: str, num_accusers: int, with_every_beat: bool
) -> None:
    world = world_of(text)
    run_until(world, lambda w: version_of(w) >= 2)
    accusers = plan_of(world).workers[-num_accusers:]
    have_accuse(world, accusers, num_named=9, with_every_beat=with_every_beat)
    outcome = run_to_end(world, limit_s=300.0)
    assert outcome.state is JobState.FINISHED
    lines = [line for line in world.lines if "excluded=" in line]
    assert {name for name in accusers if any(f"excluded={name}" in line for line in lines)} == set(accusers)
    last = of_kind(world.log, PlanAdopted)[-1].plan
    assert set(last.workers) == set(world.workers) - set(accusers)


def test_a_report_about_a_worker_without_a_place_opens_no_generation() -> None:
    world = world_of("line 2x2 on 5")
    run_until(world, lambda w: version_of(w) >= 2)
    plan = plan_of(world)
    [spare] = set(world.workers) - set(plan.workers)
    accuser = world.workers[plan.workers[0]]
    before = len(of_kind(world.log, GenerationOpened))
    for peer in (spare, WorkerId("stranger")):
        accusation = Suspected(generation=accuser.machine.generation, peer=peer, reason="refused")
        world._send_report(accuser, accusation)
    run_until(world, lambda w: version_of(w) >= 4)
    assert len(of_kind(world.log, GenerationOpened)) == before


def test_a_worker_that_most_do_not_reach_goes_and_not_who_says_so() -> None:
    world = world_of("line 1x4")
    run_until(world, lambda w: version_of(w) >= 2)
    lost = worker(2)
    for other in (worker(0), worker(1), worker(3)):
        world.network.cut(other, lost)
    run_until(world, lambda w: bool(excluded(w)) and version_of(w) >= 5)
    assert excluded(world) == {lost}


@pytest.mark.parametrize("at", ["step", "build"])
def test_a_job_is_cancelled_whatever_an_accuser_says(at: str) -> None:
    world = world_of("line 1x4")
    run_until(world, lambda w: version_of(w) >= 3)
    have_accuse(world, [worker(1)], num_named=1, with_every_beat=at == "step")
    run_until(world, lambda w: len(of_kind(w.log, GenerationOpened)) >= 2)
    began_s = world.clock.now
    [job] = {record.job for record in of_kind(world.log, StepCommitted)}
    world.tell(CancelAsked(job=job))
    outcome = run_to_end(world, limit_s=began_s + 60.0)
    assert outcome.state is JobState.CANCELLED


@pytest.mark.parametrize("text", ["line 1x4", "line 2x2", "loop 3x2 tied skip 1/3 on 4", "line 2x3 ring"])
def test_drawn_accusers_change_no_step(text: str) -> None:
    shape = shape_of(text)
    for seed in part(range(40, 48), every=4, start=len(text)):
        for kinds in (("accuse",), ("accuse", "kill", "cut")):
            try:
                judge(shape, disturbed(shape, seed=seed, num_faults=4, kinds=kinds))
            except Exception as error:
                raise AssertionError(f"{text} {kinds} seed={seed}: {error!r}") from error
