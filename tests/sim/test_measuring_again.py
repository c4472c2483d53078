"""First measurements that were wrong: they are taken again, and plans follow."""

from skein.plan.changing.redundancy import num_missing
from skein.plan.changing.silent import busy_workers, silent_chunks
from skein.protocol.coordinator.coordinator_io import MeasureAsked
from skein.protocol.coordinator.remeasuring import FIRST_PAUSE_S
from skein.protocol.log.records import GenerationOpened, PlanAdopted, RolledBack
from skein.sim.scenario import make_world, small_fleet
from skein.sim.shapes import shape_of
from skein.sim.world import World
from tests.support.jobs import small_job
from tests.support.worlds import fleet_of, of_kind, plan_of, run_until, version_of, worker


def speed_known(world: World, index: int) -> float:
    assert world.coordinator is not None
    return world.coordinator.membership.live[worker(index)].hello.profile.flops_per_s


def misjudged(factor: float, *, text: str = "line 2x2 slow 1", steps: int = 400) -> World:
    """The last worker of this shape says that it is slow, and is so many times as fast."""
    shape = shape_of(text)
    world = make_world(shape.job(steps=steps, every=0), small_fleet(shape), seed=0)
    world.slow_worker(worker(3), 1 / factor)
    run_until(world, lambda w: version_of(w) >= 2)
    assert busy_workers(plan_of(world)) == {worker(0), worker(1), worker(2)}
    return world


def test_a_worker_that_was_taken_for_slow_measures_itself_again_when_idle_and_gets_work() -> None:
    world = misjudged(32.0)
    run_until(world, lambda w: worker(3) in busy_workers(plan_of(w)))
    assert FIRST_PAUSE_S <= world.clock.now < 3 * FIRST_PAUSE_S
    assert any(f"worker={worker(3)} measured" in line for line in world.lines)
    reasons = [record.reason for record in of_kind(world.log, GenerationOpened)]
    assert reasons[1:] == [f"{worker(3)} measured another speed"]
    assert not silent_chunks(plan_of(world))
    assert num_missing(plan_of(world), 2) == 0
    assert not of_kind(world.log, RolledBack)


def test_on_command_it_is_measured_at_once() -> None:
    world = misjudged(32.0)
    world.tell(MeasureAsked(worker=worker(3)))
    run_until(world, lambda w: worker(3) in busy_workers(plan_of(w)))
    assert world.clock.now < FIRST_PAUSE_S


def test_a_speed_that_is_as_before_changes_no_plan() -> None:
    world = misjudged(1.0)
    run_until(world, lambda w: w.clock.now > 2 * FIRST_PAUSE_S)
    assert len(of_kind(world.log, PlanAdopted)) == 1


def test_where_ops_take_much_longer_than_planned_everybody_measures_again() -> None:
    world = make_world(small_job(steps=60, microbatches=8), fleet_of(4), seed=0)
    for index in range(4):
        world.slow_worker(worker(index), 50.0)
    run_until(world, lambda w: all(f"worker={worker(i)} measured" in "".join(w.lines) for i in range(4)))
    first, said = speed_known(world, 0), world.workers[worker(0)].executor.nominal_flops_per_s
    assert first == said / 50.0
    counts = [sum(f"worker={worker(i)} measured" in line for line in world.lines) for i in range(4)]
    assert counts == [1] * 4
