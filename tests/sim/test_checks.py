"""Workers that contribute wrongly, in simulated jobs with checks: found and quarantined, and nobody else is."""

from collections.abc import Callable
from functools import cache, partial

import pytest

from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import Quarantined
from skein.sim.compute.lying import LieKind
from skein.sim.lying import lying_world
from skein.sim.scenario import curve_of, disturbed, judge, run_to_end
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import WorkerId
from tests.support.extent import part

STEPS = 30
LIES_FROM = 4
LONG_S = 3600.0
SHAPE = "line 2x2 checked 1"
LIAR = WorkerId("w0001")


def job_of(world: World) -> JobHistory:
    assert world.coordinator is not None
    [job] = world.coordinator.history.jobs.values()
    return job


def ended(world: World) -> JobHistory:
    run_to_end(world, limit_s=LONG_S)
    return job_of(world)


@cache
def clean_loss(text: str) -> float:
    """Mean loss of the last steps where nobody lies."""
    return last_loss(lying_world(shape_of(text), steps=STEPS, seed=0))


def last_loss(world: World) -> float:
    assert not ended(world).incidents or world.has_liars
    return sum(record.loss for record in curve_of(world.log)[-10:]) / 10


@pytest.mark.parametrize("kind", LieKind)
def test_a_liar_is_quarantined_and_the_curve_is_as_without_it(kind: LieKind) -> None:
    world = lying_world(shape_of(SHAPE), steps=STEPS, seed=3, liar=LIAR, kind=kind, since=LIES_FROM)
    loss = last_loss(world)
    [found] = job_of(world).quarantined.values()
    assert found.worker == LIAR
    assert found.step < LIES_FROM + 20
    assert loss == pytest.approx(clean_loss(SHAPE), rel=0.05)


@pytest.mark.parametrize(
    "text", part(("line 2x2 checked 1", "loop 2x3 checked 1", "line 1x3 tied checked 1"), every=2)
)
def test_nobody_honest_is_quarantined(text: str) -> None:
    world = lying_world(shape_of(text), steps=STEPS, seed=1)
    job = ended(world)
    assert not job.quarantined
    assert not job.incidents
    generations_of_checks = sum("as a check" in line for line in world.lines)
    assert generations_of_checks >= STEPS // 2


def test_a_coordinator_that_starts_again_remembers_whom_it_has_convicted() -> None:
    world = lying_world(shape_of(SHAPE), steps=12, seed=3, liar=LIAR, kind=LieKind.NAN, since=2)
    run_until(world, lambda: any(isinstance(record, Quarantined) for record in world.log))
    world.crash_coordinator()
    world.restart_worker(WorkerId("w0001"))
    job = ended(world)
    assert job.version == 12
    plan = job.plan
    assert plan is not None
    assert "w0001" not in plan.plan.workers
    assert len(job.quarantined) == 1


def test_a_worker_that_comes_back_has_its_place_again_amid_checks() -> None:
    world = lying_world(shape_of(SHAPE), steps=12, seed=1)
    world.clock.after(4.0, partial(world.restart_worker, WorkerId("w0001")))
    plan = ended(world).plan
    assert plan is not None
    assert "w0001" in plan.plan.workers


def run_until(world: World, is_so: Callable[[], bool]) -> None:
    while world.coordinator is None or not world.coordinator.history.jobs or not is_so():
        assert world.clock.step()


@pytest.mark.parametrize(
    "text", ["line 2x2 checked 0.5", "loop 3x2 tied checked 0.5", "line 2x3 ring checked 0.5"]
)
def test_faults_amid_checks_change_nothing(text: str) -> None:
    shape = shape_of(text)
    for seed in part(range(700, 712), every=4, start=len(text)):
        try:
            judge(shape, disturbed(shape, seed=seed, num_faults=8))
        except Exception as error:
            raise AssertionError(f"{text} seed={seed}: {error!r}") from error
