"""A fleet with workers too slow for work of their own: they hold stages up to date, so that a death costs no step."""

from functools import partial

import pytest

from skein.plan.changing.redundancy import num_missing
from skein.plan.changing.silent import silent_chunks
from skein.plan.plan import Plan
from skein.protocol.log.records import Incident, PlanAdopted
from skein.sim.scenario import LIMIT_S, curve_of, make_world, run_to_end, small_fleet, undisturbed_curve
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import JobState, WorkerId
from tests.support.worlds import of_kind, plan_of, run_until, version_of, worker

STEPS = 6


def begun(text: str, *, steps: int = STEPS) -> tuple[World, Plan]:
    """A world of this shape after two steps, and its plan."""
    shape = shape_of(text)
    world = make_world(shape.job(steps=steps, every=0), small_fleet(shape), seed=0)
    run_until(world, lambda w: version_of(w) >= 2)
    return world, plan_of(world)


def ended(world: World, text: str, *, steps: int = STEPS) -> None:
    """The job runs to its end; its curve is the undisturbed one, and no incident cost a step."""
    outcome = run_to_end(world, limit_s=LIMIT_S)
    assert outcome.state is JobState.FINISHED
    assert curve_of(world.log) == undisturbed_curve(shape_of(text), steps)
    assert sum(incident.num_steps_lost for incident in of_kind(world.log, Incident)) == 0


@pytest.mark.parametrize("text", ["line 2x2 on 3 slow 2", "loop 2x2 tied on 3 slow 2", "line 2x2 slow 1"])
def test_the_death_of_the_fast_holder_of_a_stage_costs_no_step(text: str) -> None:
    world, plan = begun(text)
    assert num_missing(plan, asked=2) == 0
    silent = {chunk.worker for chunk in silent_chunks(plan)}
    assert silent
    stage = next(iter(silent_chunks(plan))).stage
    fast = next(holder for holder in plan.holders(stage) if holder not in silent)
    world.kill_worker(fast)
    ended(world, text)
    assert len(of_kind(world.log, Incident)) == 1


def test_the_death_of_a_silent_holder_costs_no_step_and_another_takes_its_stage_as_well() -> None:
    text, steps = "line 2x2 on 3 slow 2", 40
    world, plan = begun(text, steps=steps)
    world.kill_worker(min(chunk.worker for chunk in silent_chunks(plan)))
    ended(world, text, steps=steps)
    last = of_kind(world.log, PlanAdopted)[-1].plan
    assert len(last.workers) == 2
    assert num_missing(last, asked=2) == 0


def test_a_slow_worker_that_comes_later_fetches_what_it_is_to_hold_beside_the_steps() -> None:
    text = "line 1x2 slow 1"
    shape = shape_of(text)
    world = make_world(shape.job(steps=STEPS, every=0), small_fleet(shape), seed=0)
    slow: WorkerId = worker(1)
    profile = world.workers[slow].machine.identity.profile
    site = world.workers[slow].machine.identity.site
    world.kill_worker(slow)
    run_until(world, lambda w: version_of(w) >= 1)
    assert plan_of(world).workers == (worker(0),)
    join = partial(world.add_worker, slow, site)
    join(flops_per_s=profile.flops_per_s, memory_bytes=profile.memory_bytes)
    ended(world, text)
    assert of_kind(world.log, PlanAdopted)[-1].plan.workers == (worker(0), slow)
