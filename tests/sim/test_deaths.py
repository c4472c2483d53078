"""With two holders of each stage, anything may die at any moment, alone or in the pairs that the protocol names: no
step is lost, none begins anew, only what the dead had done is done again, and the curve is the undisturbed one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import pytest

from skein.protocol.log.records import Incident, Remedy
from skein.sim.faults import FAILING
from skein.sim.scenario import make_world
from skein.sim.shapes import SimShape, shape_of
from skein.sim.world import World
from skein.types import MicrobatchId, StageIndex, WorkerId
from tests.support.extent import part
from tests.support.jobs import small_job
from tests.support.worlds import (
    Run,
    finish,
    fleet_of,
    of_kind,
    plan_of,
    run_events,
    simulate,
    undisturbed,
    worker,
)

SHAPES = {
    text: shape_of(text)
    for text in (
        "line 2x2",
        "loop 2x2",
        "line 3x2 tied",
        "loop 4x2 skip 1/4",
        "line 2x3 ring",
        "line 2x3 tree",
    )
}
STEPS, EVERY = 3, 2
POINTS = 31
"""Moments of each job, spread evenly over its events; coprime to the numbers of workers."""
AT_ONCE_S, BEYOND_LEASE_S, WITHIN_LEASE_S = 0.5, 3.5, 1.0

Strike = Callable[[World, int], set[WorkerId]]
"""Does something to a world after so many events; gives whose work may be lost."""


def kill(world: World, number: int) -> set[WorkerId]:
    name = worker(number % len(world.workers))
    world.kill_worker(name)
    return {name}


def restart(world: World, number: int) -> set[WorkerId]:
    name = worker(number % len(world.workers))
    world.restart_worker(name)
    return {name}


def freeze(world: World, number: int) -> set[WorkerId]:
    name = worker(number % len(world.workers))
    world.freeze_worker(name, BEYOND_LEASE_S)
    return {name}


def blink(world: World, number: int) -> set[WorkerId]:
    world.freeze_worker(worker(number % len(world.workers)), WITHIN_LEASE_S)
    return set()


def crash(world: World, _: int) -> set[WorkerId]:
    world.crash_coordinator(restarts_after_s=AT_ONCE_S)
    return set()


def both(world: World, number: int) -> set[WorkerId]:
    return kill(world, number) | crash(world, number)


def neighbours(world: World, number: int) -> set[WorkerId]:
    """Two who pass tensors to each other."""
    run = None if world.coordinator is None else world.coordinator.run
    if run is None or run.plan is None:
        return set()
    hops = run.plan.paths[number % len(run.plan.paths)].hops
    found = list(dict.fromkeys(hop.worker for hop in hops))
    start = number % (len(found) - 1)
    for name in found[start : start + 2]:
        world.kill_worker(name)
    return set(found[start : start + 2])


def fail(world: World, number: int) -> set[WorkerId]:
    """The next op of some kind fails halfway."""
    name, kind = worker(number % len(world.workers)), FAILING[number % len(FAILING)]
    world.workers[name].to_fail = lambda op: isinstance(op, kind)
    return {name}


STRIKES: Mapping[str, Strike] = {
    "dies": kill,
    "starts again at once": restart,
    "is frozen and wakes": freeze,
    "blinks": blink,
    "coordinator dies": crash,
    "dies with the coordinator": both,
    "dies with a neighbour": neighbours,
    "has an op fail": fail,
}


@dataclass(frozen=True, slots=True)
class Struck:
    """A job that something happened to, and whose it was to do what, by the plan of that moment."""

    run: Run
    owned: frozenset[tuple[MicrobatchId, StageIndex]]
    about: str

    def check(self, expected: Run) -> None:
        """Nothing is lost but work of the dead, and that is done again."""
        assert self.run.num_rollbacks == 0, self.about
        assert self.run.curve == expected.curve, self.about
        for incident in of_kind(self.run.world.log, Incident):
            assert incident.remedy in (Remedy.RESUMED, Remedy.UNTOUCHED), (self.about, incident)
            assert (incident.num_steps_lost, incident.num_retried) == (0, 0), (self.about, incident)
            again = {(m, part.stage) for part in incident.replayed for m in part.microbatches}
            assert again <= self.owned, (self.about, incident)


def struck(shape: SimShape, strike: Strike, num_events: int) -> Struck:
    world = make_world(shape.job(steps=STEPS, every=EVERY), fleet_of(shape.num_workers), seed=0)
    run_events(world, num_events)
    run = None if world.coordinator is None else world.coordinator.run
    held = {} if run is None or run.plan is None else run.plan.microbatches_by_chunk()
    dead = strike(world, num_events)
    about = f"seed=0, {shape.text}: {sorted(dead)} struck after {num_events} events"
    owned = frozenset((m, chunk.stage) for chunk, ids in held.items() if chunk.worker in dead for m in ids)
    return Struck(finish(world, about=about), owned, about)


@pytest.mark.parametrize(("text", "name"), part(list(product(SHAPES, STRIKES)), every=3))
def test_no_moment_is_a_wrong_one(text: str, name: str) -> None:
    shape, strike = SHAPES[text], STRIKES[name]
    row, column = list(SHAPES).index(text), list(STRIKES).index(name)
    expected = undisturbed(shape.job(steps=STEPS, every=EVERY), shape.num_workers)
    num_events = expected.outcome.num_events
    for moment in part(range(POINTS), every=POINTS, start=5 * row + 4 * column):
        struck(shape, strike, 1 + moment * num_events // POINTS).check(expected)


@pytest.mark.parametrize(
    ("second", "num_events"),
    part(list(product(("dies", "coordinator dies", "is frozen and wakes"), (120, 150, 180))), every=4),
)
def test_a_second_death_while_the_first_is_made_up_for_costs_no_more(num_events: int, second: str) -> None:
    """Three holders of each stage; the second strike comes later by ever more events, a replay's first to its last."""
    shape = shape_of("line 2x3")
    expected = undisturbed(shape.job(steps=STEPS, every=EVERY), shape.num_workers)

    def strike_twice(later: int) -> Strike:
        def strike(world: World, _: int) -> set[WorkerId]:
            dead = kill(world, 0)
            run_events(world, later)
            return dead | STRIKES[second](world, 1)

        return strike

    for later in part(range(1, 100, 7), every=8, start=num_events // 30):
        struck(shape, strike_twice(later), num_events).check(expected)


def test_a_death_after_the_boundary_log_has_forgotten_costs_no_step() -> None:
    """It is a cache: what it lacks costs time. Here the step may begin anew."""
    shape = SHAPES["line 3x2 tied"]
    job = shape.job(steps=STEPS, every=EVERY)
    expected = undisturbed(job, shape.num_workers)
    remedies = set()
    for moment in part(range(POINTS), every=4):
        num_events = 1 + moment * expected.outcome.num_events // POINTS
        world = make_world(job, fleet_of(shape.num_workers), seed=0)
        run_events(world, num_events)
        for name in sorted(world.workers):
            world.shorten_log(name, num_kept=moment % 3)
        world.kill_worker(worker(moment % shape.num_workers))
        run = finish(world, about=f"seed=0, log shortened after {num_events} events")
        assert run.num_rollbacks == 0, num_events
        assert run.curve == expected.curve, num_events
        remedies |= {incident.remedy for incident in of_kind(world.log, Incident)}
    assert Remedy.RETRIED in remedies


def test_one_worker_after_the_other_dies_and_comes_back() -> None:
    spec = small_job(steps=8)

    def strike(world: World) -> None:
        for turn in range(4):
            world.clock.at(1.0 + 2.5 * turn, lambda turn=turn: world.restart_worker(worker(turn)))  # type: ignore[misc]

    run = simulate(spec, 4, disturb=strike)
    assert run.num_rollbacks == 0
    assert run.curve == undisturbed(spec, 4).curve


def test_the_death_of_all_holders_of_a_stage_costs_the_steps_since_the_checkpoint() -> None:
    spec = small_job(steps=6, save_every=2)
    for num_events in range(300, undisturbed(spec, 4).outcome.num_events, 40):
        world = make_world(spec, fleet_of(4), seed=0)
        run_events(world, num_events)
        plan = plan_of(world)
        for holder in plan.holders(plan.stages[-1].index):
            world.kill_worker(holder)
        run = finish(world, about=f"seed=0, holders of the last stage killed after {num_events} events")
        assert run.curve == undisturbed(spec, 4).curve, num_events
        assert run.num_rollbacks <= 1, num_events
