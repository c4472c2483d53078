"""Plans whose paths swap stages and whose schedules follow no rule: the protocol works by them, whatever strikes."""

import random
from dataclasses import replace
from functools import cache

import pytest

from skein.config.job import JobSpec, SkipSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Path, Plan
from skein.sim.faults import draw_faults, schedule_faults
from skein.sim.world import World
from skein.topology.fleet import Fleet
from skein.types import Layout
from tests.support.drawn import carried_out
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import Run, simulate


def spec(layout: Layout) -> JobSpec:
    job = small_job(stages=4, microbatches=6, steps=6, layout=layout, evaluate_every=3, save_every=2)
    return job.model_copy(update={"skip": SkipSpec(max_swaps=1)})


JOBS = {layout: spec(layout) for layout in Layout}


def wild_plan(job: JobSpec, fleet: Fleet, previous: Plan | None, seed: int) -> Plan | Infeasible:
    """The balanced plan, but every other path takes stage 2 before 1, and ops come in an order once carried out."""
    plan = make_balanced_plan(job, fleet, previous, seed)
    if isinstance(plan, Infeasible):
        return plan
    paths = tuple(swapped(path) if m % 2 else path for m, path in enumerate(plan.paths))
    slots = {x.chunk: x.slots for x in plan.chunks}
    luck = random.Random(len(fleet.workers))
    schedules = next(filter(None, (carried_out(paths, slots, luck) for _ in range(100))))
    wild = replace(plan, paths=paths, schedules=schedules)
    assert violations(wild, job, fleet) == ()
    return wild


def swapped(path: Path) -> Path:
    first, second, third, *rest = path.hops
    return Path(hops=(first, third, second, *rest))


@cache
def calm(layout: Layout) -> Run:
    return run(JOBS[layout], seed=None)


def run(job: JobSpec, *, seed: int | None) -> Run:
    """The job under wild plans, with the faults of a seed if there is one."""

    def disturb(world: World) -> None:
        world.planner = wild_plan
        num_faults = 0 if seed is None else 6
        schedule_faults(world, draw_faults(8, num_faults=num_faults, horizon_s=12.0, seed=seed or 0))

    return simulate(job, 8, seed=seed or 0, disturb=disturb)


@pytest.mark.parametrize("layout", Layout)
def test_orders_that_follow_no_rule_are_carried_out(layout: Layout) -> None:
    undisturbed = calm(layout)
    assert [record.step for record in undisturbed.curve] == list(range(6))
    plans = [line for line in undisturbed.world.lines if "plan:" in line]
    assert len(plans) == 1


@pytest.mark.parametrize("layout", Layout)
def test_faults_leave_the_curve_of_such_plans_as_it_was(layout: Layout) -> None:
    undisturbed = calm(layout)
    for seed in part(range(12), every=6):
        assert run(JOBS[layout], seed=seed).curve == undisturbed.curve, f"seed={seed}"
