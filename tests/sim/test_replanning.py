"""Plans that follow what is measured: worth their change, explained, few, and without a step lost."""

from functools import cache, partial
from itertools import pairwise

import pytest

from skein.config.job import JobSpec, PlanSpec
from skein.plan.plan import Infeasible, Plan
from skein.plan.searched import make_searched_plan
from skein.protocol.coordinator.runs.improving.replanning import FIRST_PAUSE_S
from skein.protocol.log.records import GenerationOpened, PlanAdopted, StepCommitted
from skein.sim.scenario import make_world
from skein.sim.world import World
from skein.topology.fleet import Fleet
from skein.types import Layout
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import Run, finish, fleet_of, of_kind, run_until, simulate, version_of, worker

MANY_STEPS = 60
JOB = small_job(steps=MANY_STEPS, microbatches=8)
"""On four workers: two stages, two holders each; a step takes about a second."""


def plans(run: Run) -> list[Plan]:
    return [record.plan for record in of_kind(run.world.log, PlanAdopted)]


def last_steps_s(run: Run, count: int = 10) -> float:
    """Mean seconds of the last steps."""
    times = [record.wall_s for record in of_kind(run.world.log, StepCommitted)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gaps[-count:]) / count


@cache
def slowed() -> Run:
    """The job with a worker that is four times slower than it said."""
    return simulate(JOB, 4, disturb=partial(slow, factor=4.0))


def slow(world: World, *, factor: float, at_version: int = 3) -> None:
    """One worker is slower than it said, for good."""
    run_until(world, lambda world: version_of(world) == at_version)
    world.slow_worker(worker(1), factor)


@pytest.mark.parametrize(
    "job",
    part(
        [small_job(stages=4, skip_ratio=0.5, layout=Layout.LOOP, microbatches=8, steps=MANY_STEPS), JOB],
        every=2,
    ),
)
def test_a_run_of_many_steps_keeps_its_plan_where_nothing_better_is_found(job: JobSpec) -> None:
    run = simulate(job, job.parallel.stages * job.parallel.replicas)
    assert len(plans(run)) <= 2
    assert [record.step for record in run.curve] == list(range(MANY_STEPS))
    for before, after in pairwise(plans(run)):
        assert "replanned for" in str(after.reason)
        assert after.predicted_step_s != before.predicted_step_s


def test_a_worker_that_is_slower_than_it_said_is_given_less_to_do() -> None:
    run = slowed()
    first, *others = plans(run)
    assert 1 <= len(others) <= 2
    assert "measured" in str(others[-1].reason)
    assert "replanned for" in str(others[-1].reason)

    def share(plan: Plan) -> int:
        return sum(
            len(ids) for chunk, ids in plan.microbatches_by_chunk().items() if chunk.worker == worker(1)
        )

    assert share(others[-1]) < share(first)
    assert run.num_rollbacks == 0


def test_steps_are_shorter_after_replanning_than_without_and_the_curve_is_the_same() -> None:
    stubborn = JOB.model_copy(update={"plan": PlanSpec(replan_if_off_by=10.0)})
    run, without = slowed(), simulate(stubborn, 4, disturb=partial(slow, factor=4.0))
    assert len(plans(without)) == 1
    assert last_steps_s(run) < 0.9 * last_steps_s(without)
    assert run.curve == without.curve


def test_a_change_between_steps_costs_no_work() -> None:
    run = slowed()
    # Nothing failed: every generation after the first was opened for the sake of a plan.
    reasons = [record.reason for record in of_kind(run.world.log, GenerationOpened)]
    assert all("replanned for" in reason for reason in reasons[1:])
    assert len(reasons) > 1
    steps = [record.record.step for record in of_kind(run.world.log, StepCommitted)]
    assert steps == list(range(MANY_STEPS))


def most_plans(seconds: float) -> int:
    """Pauses that double, of which the first is free."""
    count, pause_s, end_s = 1, FIRST_PAUSE_S, 0.0
    while end_s + pause_s <= seconds:
        count, end_s, pause_s = count + 1, end_s + pause_s, 2 * pause_s
    return count


def test_a_worker_whose_speed_swings_causes_few_plans() -> None:
    job = small_job(steps=150, microbatches=8)

    def swing(world: World) -> None:
        for turn in range(20):
            factor = 4.0 if turn % 2 else 1.0
            world.clock.at(10.0 * turn, partial(world.slow_worker, worker(1), factor))

    run = simulate(job, 4, disturb=swing)
    assert len(plans(run)) <= most_plans(run.outcome.seconds)
    assert len(plans(run)) < run.outcome.seconds / 40


def test_a_worker_that_comes_and_goes_is_let_in_less_and_less_often() -> None:
    job = small_job(steps=100, microbatches=8)
    world = make_world(job, fleet_of(4), seed=0)
    identity = world.workers[worker(3)].machine.identity

    def come() -> None:
        profile = identity.profile
        world.add_worker(
            worker(3),
            identity.site,
            flops_per_s=profile.flops_per_s,
            memory_bytes=profile.memory_bytes,
        )

    num_turns = 20
    for turn in range(num_turns):
        world.clock.at(5.0 + 6.0 * turn, partial(world.kill_worker, worker(3)))
        world.clock.at(8.0 + 6.0 * turn, come)
    run = finish(world, about="flapping")
    let_in = [x for x in of_kind(world.log, GenerationOpened) if x.reason == f"with {worker(3)} again"]
    assert 1 <= len(let_in) < num_turns / 4
    assert [record.step for record in run.curve] == list(range(100))


def test_an_idle_worker_that_comes_and_goes_changes_nothing() -> None:
    job = small_job(steps=60, microbatches=8)

    def flap(world: World) -> None:
        site = world.workers[worker(0)].machine.identity.site
        for turn in range(20):
            come = partial(world.add_worker, worker(9), site, flops_per_s=2e9, memory_bytes=2**34)
            world.clock.at(4.0 + 4.0 * turn, come)
            world.clock.at(6.0 + 4.0 * turn, partial(world.kill_worker, worker(9)))

    run = simulate(job, 4, disturb=flap)
    assert len(of_kind(run.world.log, GenerationOpened)) <= most_plans(run.outcome.seconds)


def searched(job: JobSpec, fleet: Fleet, previous: Plan | None, seed: int) -> Plan | Infeasible:
    return make_searched_plan(job, fleet, previous, seed, steps_left=job.total_steps)


@pytest.mark.parametrize("layout", part(list(Layout), every=2))
def test_searched_plans_are_carried_out_and_follow_a_slow_worker(layout: Layout) -> None:
    job = small_job(stages=3, layout=layout, microbatches=6, steps=40).model_copy(
        update={"plan": PlanSpec(budget_s=0.01)}
    )

    def disturb(world: World) -> None:
        world.planner = searched
        slow(world, factor=4.0)

    run = simulate(job, 6, disturb=disturb)
    assert [record.step for record in run.curve] == list(range(40))
    assert len(plans(run)) <= 3
    assert run.num_rollbacks == 0
