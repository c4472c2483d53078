"""What links do to tensors and to control streams, and what of it the protocol may notice."""

from itertools import permutations

import pytest

from skein.protocol.log.records import GenerationOpened, Incident, IncidentKind
from skein.sim.lines.network import COORDINATOR, Weather
from skein.sim.lines.transport import PATIENCE_S
from skein.sim.world import World
from skein.types import WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import Run, of_kind, plan_of, run_until, simulate, undisturbed, version_of, worker

JOB = small_job(steps=8)
WORKERS = [worker(index) for index in range(4)]


def num_generations(run: Run) -> int:
    return len(of_kind(run.world.log, GenerationOpened))


def neighbours(world: World) -> tuple[WorkerId, WorkerId]:
    """Sender and receiver of an activation."""
    run_until(world, lambda world: version_of(world) == 2)
    sender, receiver, *_ = dict.fromkeys(hop.worker for hop in plan_of(world).paths[0].hops)
    return sender, receiver


@pytest.mark.parametrize(
    "weather", [Weather(loss=0.3), Weather(jitter_s=0.4), Weather(repeats=0.5), Weather(slower=5.0)], ids=str
)
def test_what_is_lost_late_repeated_or_overtaken_costs_time_only(weather: Weather) -> None:
    def disturb(world: World) -> None:
        for sender, receiver in permutations(WORKERS, 2):
            world.network.set_weather(sender, receiver, weather)

    run = simulate(JOB, 4, disturb=disturb)
    assert run.curve == undisturbed(JOB, 4).curve
    assert num_generations(run) == 1
    assert run.outcome.num_events != undisturbed(JOB, 4).outcome.num_events


@pytest.mark.parametrize("is_back", [False, True])
def test_a_link_that_is_cut_for_less_than_patience_is_nobodys_failure(is_back: bool) -> None:
    """Forwards nothing arrives; backwards no acceptance does, so that the tensor comes again and again."""

    def disturb(world: World) -> None:
        pair = neighbours(world)
        cut = tuple(reversed(pair)) if is_back else pair
        world.network.cut(*cut)
        world.clock.after(PATIENCE_S / 2, lambda: world.network.mend(*cut))

    run = simulate(JOB, 4, disturb=disturb)
    assert run.curve == undisturbed(JOB, 4).curve
    assert num_generations(run) == 1


def test_a_link_that_stays_cut_is_noticed_as_soon_as_patience_ends() -> None:
    cut_at_s: list[float] = []

    def disturb(world: World) -> None:
        world.network.cut(*neighbours(world))
        cut_at_s.append(world.clock.now)

    run = simulate(JOB, 4, disturb=disturb)
    assert run.curve == undisturbed(JOB, 4).curve
    first, *_ = of_kind(run.world.log, Incident)
    assert first.kind is IncidentKind.LINK_FAILED
    # A tensor is on this link at least once a step; one step and a retry's pause come on top.
    assert first.wall_s - cut_at_s[0] < PATIENCE_S + 1.0


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_control_stream_that_stands_still_within_the_lease_costs_no_generation(is_heard: bool) -> None:
    def disturb(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        world.mute_worker(worker(1), 1.0, is_heard=is_heard, hears=not is_heard)

    run = simulate(JOB, 4, disturb=disturb)
    assert run.curve == undisturbed(JOB, 4).curve
    assert num_generations(run) == 1


@pytest.mark.parametrize("is_two_way", [False, True])
def test_a_site_that_is_cut_off_comes_back(is_two_way: bool) -> None:
    """The coordinator is in the other one."""

    def disturb(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        here, there = world.network.site_of(COORDINATOR), world.network.sites[-1]
        for pair in ((there, here), (here, there))[: 2 if is_two_way else 1]:
            world.network.cut(*pair)
            world.clock.after(6.0, lambda pair=pair: world.network.mend(*pair))  # type: ignore[misc]

    job = small_job(steps=40)
    run = simulate(job, 4, disturb=disturb)
    assert run.curve == undisturbed(job, 4).curve
    members = [{m.worker for m in record.members} for record in of_kind(run.world.log, GenerationOpened)]
    assert min(map(len, members)) == 2
    assert members[-1] == set(WORKERS)
