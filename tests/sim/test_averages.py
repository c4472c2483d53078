"""All holders of a stage die at once, and its neighbours are averaged: no step is lost, and replicas stay equal."""

from dataclasses import asdict, dataclass
from itertools import product

import pytest

from skein.config.job import BackupSpec, JobSpec
from skein.protocol.log.records import Averaged, Incident, Remedy
from skein.sim.scenario import disturbed, judge, make_world
from skein.sim.shapes import SimShape, shape_of
from skein.sim.world import World
from skein.types import StageIndex, WorkerId
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, of_kind, plan_of, run_events, run_until, version_of

STEPS, AT = 8, 3
LONG_S = 100.0
"""Longer than anybody waits for holders that are silent."""
INNER = StageIndex(1)


def spec(*, every_steps: int = 0, is_allowed: bool = True, stages: int = 3, save_every: int = 0) -> JobSpec:
    job = small_job(stages=stages, replicas=2, steps=STEPS, save_every=save_every)
    backup = BackupSpec(every_steps=every_steps, neighbour_average=is_allowed)
    return job.model_copy(update={"backup": backup})


def holders_of(world: World, stage: StageIndex) -> tuple[WorkerId, ...]:
    return plan_of(world).holders(stage)


def struck(job: JobSpec, *, stage: StageIndex = INNER, seed: int = 0, later: int = 0) -> Run:
    """A job whose holders of `stage` all die in a step, so many events after it begins; they start again soon."""
    world = make_world(job, fleet_of(6), seed=seed)
    run_until(world, lambda it: version_of(it) >= AT)
    run_events(world, later)
    for name in holders_of(world, stage):
        world.restart_worker(name)
    return finish(world, about=f"seed={seed} later={later}")


def remedies(run: Run) -> list[Remedy]:
    return [incident.remedy for incident in of_kind(run.world.log, Incident)]


def test_a_lost_inner_stage_is_averaged_and_no_step_is_lost() -> None:
    run = struck(spec())
    [averaged] = of_kind(run.world.log, Averaged)
    assert [stage.index for stage in averaged.stages] == [INNER]
    assert run.num_rollbacks == 0
    assert Remedy.AVERAGED in remedies(run)
    assert [record.step for record in run.curve] == list(range(STEPS))
    assert all(incident.num_steps_lost == 0 for incident in of_kind(run.world.log, Incident))


@pytest.mark.parametrize("seed", part(range(12), every=3))
def test_whenever_the_stage_is_lost_its_holders_get_equal_state(seed: int) -> None:
    run = struck(spec(), seed=seed, later=11 * seed)
    assert run.num_rollbacks == 0
    assert of_kind(run.world.log, Averaged)


@pytest.mark.parametrize(("later", "seed"), part(list(product((0, 3, 9), range(3))), every=2))
def test_holders_that_come_back_with_the_lost_stage_do_not_bring_it_back(later: int, seed: int) -> None:
    world = make_world(spec(), fleet_of(6), seed=seed)
    run_until(world, lambda it: version_of(it) >= AT)
    lost = holders_of(world, INNER)
    for name in lost:
        world.freeze_worker(name, LONG_S)
    run_until(world, lambda it: bool(of_kind(it.log, Averaged)))
    run_events(world, later)
    for name in lost:
        world.thaw_worker(name)
    at = version_of(world)
    run_until(world, lambda it: it.coordinator is not None and lost[0] in it.coordinator.membership.live)
    assert version_of(world) == at, "the average is not committed yet, so both could count"
    world.restart_worker(holders_of(world, INNER)[-1])
    run = finish(world, about=f"seed={seed} later={later}")
    assert run.num_rollbacks == 0


@pytest.mark.parametrize("stage", [0, 2])
def test_the_first_and_the_last_stage_go_back_instead(stage: int) -> None:
    run = struck(spec(save_every=2), stage=StageIndex(stage))
    assert not of_kind(run.world.log, Averaged)
    assert run.num_rollbacks == 1


def test_a_job_that_does_not_ask_for_it_goes_back() -> None:
    run = struck(spec(save_every=2, is_allowed=False))
    assert not of_kind(run.world.log, Averaged)
    assert run.num_rollbacks == 1
    assert Remedy.ROLLED_BACK in remedies(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lenient(SimShape):
    """A shape whose jobs would rather have an average than go back."""

    def job(self, *, steps: int, every: int = 3) -> JobSpec:
        backup = BackupSpec(every_steps=2, neighbour_average=True)
        return SimShape.job(self, steps=steps, every=every).model_copy(update={"backup": backup})


KINDS = (
    "kill",
    "restart",
    "freeze",
    "op",
    "third",
    "site",
    "neighbours",
    "stream",
    "cut",
    "coordinator",
    "both",
)
"""Named, so that what these seeds draw stays as it is when other faults are made up."""
DRAWN = [*(("line 5x1", seed) for seed in (0, 5, 22)), ("loop 4x1", 0), ("loop 4x1", 5), ("line 4x2 on 5", 8)]


def test_under_drawn_faults_and_beside_backups_replicas_stay_equal() -> None:
    num_averages = 0
    for text, seed in part(DRAWN, every=2):
        shape = Lenient(**asdict(shape_of(text)))
        world = disturbed(shape, seed=seed, num_faults=8, kinds=KINDS)
        try:
            judge(shape, world)
        except Exception as error:
            raise AssertionError(f"{text} seed={seed}: {error!r}\n" + "\n".join(world.lines[-30:])) from error
        num_averages += len(of_kind(world.log, Averaged))
    assert num_averages > 0
