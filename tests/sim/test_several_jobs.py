"""Several jobs beside each other on one fleet: each ends with the curve that it has alone, whatever fails."""

from functools import partial

import pytest

from skein.protocol.log.records import GenerationOpened, StepCommitted
from skein.sim.judging.invariants import Violated
from skein.sim.scenario import LIMIT_S, curve_of, disturbed, judge, make_world, run_to_end, small_fleet
from skein.sim.shapes import GUARDED, SEVERAL, SimShape, shape_of
from skein.sim.world import World
from skein.types import JobId
from tests.support.extent import part

JOBS = tuple(JobId(f"sim-{number}") for number in (1, 2, 3))


@pytest.mark.parametrize("shape", SEVERAL, ids=lambda shape: shape.text)
def test_faults_bend_no_curve_of_several_jobs_and_leave_nobody_idle(shape: SimShape) -> None:
    for seed in part(range(6), every=3, start=SEVERAL.index(shape)):
        judge(shape, disturbed(shape, seed=seed, num_faults=8))


@pytest.mark.parametrize("shape", GUARDED, ids=lambda shape: shape.text)
def test_faults_bend_no_curve_below_quotas_or_over_relays(shape: SimShape) -> None:
    for seed in part(range(6), every=3, start=GUARDED.index(shape)):
        judge(shape, disturbed(shape, seed=seed, num_faults=8))


def test_who_was_called_away_counts_until_it_has_been_let_go() -> None:
    """A free worker joins that suits better than one that was called away."""
    world = disturbed(GUARDED[0], seed=1000, num_faults=0)
    most = 0
    while not any(isinstance(record, StepCommitted) for record in world.log):
        assert world.coordinator is not None
        most = max(most, sum(len(run.crew) for run in world.coordinator.view.runs.values()))
        assert world.clock.step()
    assert most == 5


def test_a_quota_that_is_not_held_is_found() -> None:
    shape = shape_of("line 2x2 on 8 quota 5 + loop 2x2")
    [one, other] = (part.job(steps=100) for part in shape.each)
    world = make_world(one, small_fleet(shape), seed=0, others=[other], quotas=shape.quotas)
    world.quotas = shape_of("line 2x2 quota 3").quotas
    with pytest.raises(Violated, match="namespace default has workers 5 of 3 for"):
        run_to_end(world, limit_s=LIMIT_S)


def test_a_death_in_one_job_costs_the_others_nothing() -> None:
    shape = shape_of("line 2x2 on 8 + line 2x2")
    [one, other] = (part.job(steps=24) for part in shape.each)
    world = make_world(one, small_fleet(shape), seed=0, others=[other])
    world.clock.at(6.0, partial(_kill_one_of, world, JOBS[0]))
    run_to_end(world, limit_s=LIMIT_S)
    opened = [r for r in world.log if isinstance(r, GenerationOpened)]
    assert any("lost" in r.reason for r in opened if r.job == JOBS[0])
    assert not any("lost" in r.reason for r in opened if r.job == JOBS[1])


def test_a_job_of_a_higher_priority_leaves_nobody_idle_while_those_it_called_cannot_be_spared() -> None:
    """The store is full, so that the job that is set aside cannot be saved."""
    shape = shape_of("line 2x2 + line 2x2 + line 4x1 priority 1 after 4")
    judge(shape, disturbed(shape, seed=14, num_faults=8))


def test_a_job_that_cannot_be_saved_goes_on_with_who_comes() -> None:
    """The store hangs when the last workers of a job lose their data, and others are given to it."""
    shape = shape_of("line 2x2 on 5 + line 2x2 + line 2x2")
    judge(shape, disturbed(shape, seed=91003207, num_faults=8))


def test_who_comes_and_goes_without_work_keeps_nobody_from_a_job_that_waits() -> None:
    """Two processes of one name take it from each other, again and again."""
    shape = shape_of("line 3x2 tied on 8 + line 2x2 + loop 2x1")
    judge(shape, disturbed(shape, seed=92000669, num_faults=8))


def test_a_job_that_waits_for_who_was_lost_lets_others_go_meanwhile() -> None:
    """Going back would cost steps, so the job waits for those who hold its stages; others hold nothing of it."""
    shape = shape_of("line 3x2 tied on 8 + line 2x2 + loop 2x1")
    judge(shape, disturbed(shape, seed=92001425, num_faults=8))


def test_losses_one_after_the_other_do_not_keep_workers_from_who_waits() -> None:
    # The second is noticed some hundredths of a second after things have settled from the start of a coordinator.
    shape = shape_of("line 3x2 tied on 8 + line 2x2 + loop 2x1")
    judge(shape, disturbed(shape, seed=98009997, num_faults=8))


def test_a_gang_that_waits_with_its_run_for_who_was_lost_is_not_idle() -> None:
    shape = shape_of("line 3x2 tied on 8 + line 2x2 + loop 2x1")
    judge(shape, disturbed(shape, seed=92009765, num_faults=8))


def _kill_one_of(world: World, job: JobId) -> None:
    assert world.coordinator is not None
    plan = world.coordinator.view.runs[job].plan
    assert plan is not None
    world.kill_worker(plan.workers[0])


def test_a_second_job_begins_while_the_first_goes_on_with_fewer_workers() -> None:
    shape = shape_of("line 2x2 + line 2x2")
    [one, other] = (part.job(steps=8) for part in shape.each)
    world = make_world(one, small_fleet(shape), seed=0, others=[other])
    run_to_end(world, limit_s=LIMIT_S)
    steps = [record.job for record in world.log if isinstance(record, StepCommitted)]
    assert steps.index(JOBS[1]) < len(steps) - 1 - steps[::-1].index(JOBS[0])
    assert curve_of(world.log, JOBS[0]) == curve_of(world.log, JOBS[1])
