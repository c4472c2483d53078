"""Faults of links that are over: every stage has its holders again, and nothing is lost by what comes after."""

from itertools import pairwise, permutations, product

import pytest

from skein.config.job import JobSpec
from skein.protocol.coordinator.runs.workers import probation
from skein.protocol.coordinator.runs.workers.probation import HEARSAY_LAST_S
from skein.protocol.log.records import RolledBack, StepCommitted
from skein.sim.faults import Fault, strike
from skein.sim.judging.invariants import Violated
from skein.sim.judging.recovery import WHOLE_S
from skein.sim.lines.transport import PATIENCE_S
from skein.sim.scenario import LASTING_STEPS, disturbed, judge_lasting, make_world
from skein.sim.shapes import shape_of
from skein.sim.world import World
from skein.types import Layout, WorkerId
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import fleet_of, of_kind, plan_of, run_until, version_of, worker

JOB = small_job(steps=5000, save_every=50)
"""Longer than any test looks at it."""


def begun(job: JobSpec = JOB, num_workers: int = 4) -> World:
    """A world whose job has made a few steps."""
    world = make_world(job, fleet_of(num_workers), seed=0)
    run_until(world, lambda world: version_of(world) == 3)
    return world


def num_holders(world: World) -> list[int]:
    return [len(plan_of(world).holders(stage.index)) for stage in plan_of(world).stages]


def run_for(world: World, seconds: float) -> None:
    end = world.clock.now + seconds
    run_until(world, lambda world: world.clock.now >= end)


def cut_for(world: World, pairs: list[tuple[WorkerId, WorkerId]], seconds: float) -> None:
    for pair in pairs:
        world.network.cut(*pair)
        world.clock.after(seconds, lambda pair=pair: world.network.mend(*pair))  # type: ignore[misc]


def between(world: World, first: int, second: int) -> list[tuple[WorkerId, WorkerId]]:
    """Both directions of each pair of a holder of one stage and a holder of the other."""
    stages = plan_of(world).stages
    some, others = (plan_of(world).holders(stages[at].index) for at in (first, second))
    return [pair for pair in permutations({*some, *others}, 2) if (pair[0] in some) != (pair[1] in some)]


def pauses_s(world: World, since_s: float) -> list[float]:
    """Seconds from each step since then to the next."""
    times = [since_s, *(x.wall_s for x in of_kind(world.log, StepCommitted) if x.wall_s > since_s)]
    return [b - a for a, b in pairwise([*times, world.clock.now])]


def longest_pause_s(world: World, since_s: float) -> float:
    return max(pauses_s(world, since_s))


def num_pauses(world: World, since_s: float) -> int:
    """How often a step took longer than a sender's patience."""
    return sum(pause_s > PATIENCE_S for pause_s in pauses_s(world, since_s))


CUTS = [
    (JOB, 4),
    (small_job(stages=3, replicas=2, steps=5000, save_every=50), 6),
    (small_job(stages=2, replicas=3, microbatches=6, steps=5000, save_every=50), 6),
    (small_job(stages=2, replicas=2, steps=5000, save_every=50, layout=Layout.LOOP), 4),
]


@pytest.mark.parametrize(
    ("case", "seconds"), part(list(product(range(4), (5.0, 12.0, 20.0, 40.0, 75.0))), every=3)
)
def test_holders_of_two_stages_that_were_apart_all_have_work_again(case: int, seconds: float) -> None:
    job, num_workers = CUTS[case]
    world = begun(job, num_workers)
    cut_for(world, between(world, 0, 1), seconds)
    run_for(world, seconds + WHOLE_S)
    assert num_holders(world) == [job.parallel.replicas] * len(plan_of(world).stages)
    assert not of_kind(world.log, RolledBack)
    assert world.coordinator is not None
    assert world.coordinator.run is not None
    assert not world.coordinator.run.excluded


def test_a_death_after_a_link_fault_that_is_over_costs_no_step() -> None:
    world = begun()
    cut_for(world, between(world, 0, 1), 12.0)
    run_for(world, 60.0)
    before = plan_of(world)
    world.kill_worker(before.holders(before.stages[1].index)[0])
    run_for(world, 30.0)
    assert not of_kind(world.log, RolledBack)


def test_a_worker_with_one_broken_link_costs_one_time_out_for_each_pause() -> None:
    """The link is never mended: pauses grow to 40 s, and each try costs the patience of one sender."""
    world = begun()
    plan = plan_of(world)
    hops = plan.paths[0].hops
    sender, receiver = hops[0].worker, hops[1].worker
    cut_for(world, [(sender, receiver), (receiver, sender)], 3000.0)
    run_for(world, 30.0)
    since_s = world.clock.now
    run_for(world, 200.0)
    assert longest_pause_s(world, since_s) < 4.0
    assert num_pauses(world, since_s) <= 200.0 / HEARSAY_LAST_S + 1


def test_of_two_workers_that_do_not_reach_each_other_the_last_holder_of_a_stage_keeps_its_work() -> None:
    job = small_job(stages=2, replicas=2, steps=5000, save_every=50)
    world = begun(job, 3)
    plan = plan_of(world)
    (few, [last]), (_, more) = sorted(
        ((len(plan.holders(x.index)), list(plan.holders(x.index))) for x in plan.stages), key=lambda x: x[0]
    )
    assert (few, len(more)) == (1, 2)
    cut_for(world, [(more[0], last), (last, more[0])], 30.0)
    run_for(world, 15.0)
    assert last in plan_of(world).workers
    assert more[0] not in plan_of(world).workers
    run_for(world, 15.0 + WHOLE_S)
    assert sum(num_holders(world)) == 3
    assert not of_kind(world.log, RolledBack)


@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_gets_no_large_messages_stops_nobody_for_long(number: int) -> None:
    """Its stage has another holder; a worker of the other stage starts again, so that a plan has to be told."""
    world = begun()
    plan = plan_of(world)
    choked = plan.holders(plan.stages[number].index)[0]
    started_again = plan.holders(plan.stages[1 - number].index)[0]
    since_s = world.clock.now
    strike(
        world, Fault(at_s=since_s, kind="choke", worker=choked, other=started_again, seconds=0.0, number=4)
    )
    run_for(world, 40.0)
    assert longest_pause_s(world, since_s) < 9.0
    assert choked not in plan_of(world).workers
    run_for(world, WHOLE_S)
    assert num_holders(world) == [2, 2]
    assert not of_kind(world.log, RolledBack)


def test_a_worker_that_gets_no_large_messages_and_holds_the_last_copy_is_waited_for() -> None:
    """Where going on without it would give steps up, it is asked as long as the rule has it, and nothing is lost."""
    job = small_job(stages=2, replicas=1, steps=5000, save_every=0)
    world = begun(job, 2)
    strike(world, Fault(at_s=0.0, kind="choke", worker=worker(0), other=worker(0), seconds=0.0, number=1))
    world.break_stream(worker(1))
    run_for(world, 40.0)
    assert not of_kind(world.log, RolledBack)
    assert version_of(world) > 10


# --- the judge ---


def test_exclusions_that_do_not_end_violate_the_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of("line 2x2")
    assert judged(shape.text) is None
    for kind in ("HEARSAY", "CONTRADICTED"):
        monkeypatch.setattr(probation, f"{kind}_FIRST_S", 1e6)
        monkeypatch.setattr(probation, f"{kind}_LAST_S", 1e6)
    found = judged(shape.text)
    assert found is not None
    assert "workers for more exist; excluded: [Exclusion(worker='w" in found


def judged(text: str) -> str | None:
    """What is wrong with a lasting job of this shape whose holders were apart for 20 s; None: nothing."""
    shape = shape_of(text)
    world = disturbed(shape, seed=1, num_faults=0, steps=LASTING_STEPS)
    fault = Fault(at_s=3.0, kind="apart", worker=worker(0), other=worker(1), seconds=0.0, number=10)
    world.clock.at(fault.at_s, lambda: strike(world, fault))
    try:
        judge_lasting(shape, world)
    except Violated as violated:
        return str(violated)
    return None
