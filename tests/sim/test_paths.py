"""Paths between workers that pass nothing, or small packets only: relays lead around, and are left once they heal."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from skein.protocol.coordinator.reprobing import FIRST_PAUSE_S, GROWTH
from skein.protocol.log.records import GenerationOpened
from skein.protocol.messages.ways import COORDINATOR_RELAY
from skein.sim.lines.network import VANISHED_S, Network, Weather
from skein.sim.lines.transport import PATIENCE_S
from skein.sim.world import World
from skein.types import WorkerId
from tests.support.jobs import small_job
from tests.support.worlds import of_kind, plan_of, run_until, simulate, undisturbed, version_of

NUM_STEPS = 60
Pair = tuple[WorkerId, WorkerId]


@dataclass(frozen=True)
class PathFault:
    """A fault of the path between two workers, and its end."""

    begin: Callable[[Network, Pair], None]
    end: Callable[[Network, Pair], None]


def _both(change: Callable[[Network, WorkerId, WorkerId], None]) -> Callable[[Network, Pair], None]:
    def changed(network: Network, pair: Pair) -> None:
        change(network, *pair)
        change(network, *pair[::-1])

    return changed


FAULTS = {
    "small packets only": PathFault(_both(Network.drop_large), _both(Network.pass_large)),
    "small packets there": PathFault(
        lambda network, pair: network.drop_large(*pair), lambda network, pair: network.pass_large(*pair)
    ),
    "small packets back": PathFault(
        lambda network, pair: network.drop_large(*pair[::-1]),
        lambda network, pair: network.pass_large(*pair[::-1]),
    ),
    "nothing": PathFault(
        lambda network, pair: network.block(*pair), lambda network, pair: network.unblock(*pair)
    ),
}
NOTICED_S = 2 * (PATIENCE_S + VANISHED_S)
"""Seconds from the fault to the next step: a tensor is in vain, a probe finds out, and the step is built again."""


def relays_of(world: World) -> dict[Pair, WorkerId]:
    assert world.coordinator is not None
    return dict(world.coordinator.view.relays)


def pairs_of(world: World, *, num: int) -> list[Pair]:
    """Pairs of holders of the first two stages, all or the first few."""
    first, second, *_ = plan_of(world).stages
    there, back = (plan_of(world).holders(stage.index) for stage in (first, second))
    return [(one, other) for one in there for other in back if one != other][:num]


def slowest(world: World) -> float:
    """Bytes per second of the slowest link that the coordinator knows."""
    assert world.coordinator is not None
    return min(link.bytes_per_s for link in world.coordinator.view.links.values())


def excluded(world: World) -> list[str]:
    return [line for line in world.lines if "excluded=" in line]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize(
    ("num_workers", "replicas", "num_pairs"), [(2, 1, 1), (4, 2, 1), (4, 2, 4), (5, 2, 2)]
)
@pytest.mark.parametrize("seconds", [4.0, 15.0])
def test_a_relay_leads_around_a_path_that_fails_and_is_left_once_it_heals(
    fault: PathFault, num_workers: int, replicas: int, num_pairs: int, seconds: float
) -> None:
    job = small_job(steps=NUM_STEPS, replicas=replicas)

    def disturb(world: World) -> None:
        run_until(world, lambda world: version_of(world) == 2)
        pairs, began_s = pairs_of(world, num=num_pairs), world.clock.now
        for pair in pairs:
            fault.begin(world.network, pair)
        run_until(world, lambda world: world.clock.now >= began_s + seconds)
        if seconds > NOTICED_S:
            assert version_of(world) > 3, "no step while the fault lasts"
            assert set(relays_of(world).values()) == {COORDINATOR_RELAY}
        for pair in pairs:
            fault.end(world.network, pair)
        run_until(world, lambda world: version_of(world) > 3)
        assert world.clock.now < began_s + seconds + NOTICED_S
        patient_s = FIRST_PAUSE_S + GROWTH * seconds + 2 * VANISHED_S
        run_until(world, lambda world: not relays_of(world))
        assert world.clock.now < began_s + patient_s

    run = simulate(job, num_workers, disturb=disturb)
    assert run.curve == undisturbed(job, num_workers).curve
    assert run.num_rollbacks == 0
    assert excluded(run.world) == []


def test_a_path_that_fails_again_and_again_is_tried_ever_more_seldom() -> None:
    """Each return to a path that fails at once costs a fence."""
    job = small_job(steps=400, replicas=1)
    num_returns = 0

    def disturb(world: World) -> None:
        nonlocal num_returns
        run_until(world, lambda world: version_of(world) == 2)
        [pair] = pairs_of(world, num=1)
        until_s = world.clock.now + 200.0
        while world.clock.now < until_s:
            FAULTS["small packets only"].begin(world.network, pair)
            run_until(world, lambda world: bool(relays_of(world)) or world.clock.now >= until_s)
            FAULTS["small packets only"].end(world.network, pair)
            run_until(world, lambda world: not relays_of(world) or world.clock.now >= until_s)
            num_returns += 1

    run = simulate(job, 2, disturb=disturb)
    assert run.curve == undisturbed(job, 2).curve
    assert num_returns <= 7
    assert len(of_kind(run.world.log, GenerationOpened)) <= 4 * num_returns


def test_a_link_that_was_measured_amid_a_slow_moment_is_measured_again() -> None:
    """The links are slow while workers join, so that the first probes see a thousandth of what they carry."""
    slow = Weather(slower=2000.0)

    def disturb(world: World) -> None:
        pairs = [(one, other) for one in world.workers for other in world.workers if one != other]
        for pair in pairs:
            world.network.set_weather(*pair, slow)
        run_until(world, lambda world: world.clock.now >= 2.0)
        assert slowest(world) < 1e6
        for pair in pairs:
            world.network.set_weather(*pair, Weather())
        healed_s = world.clock.now
        run_until(world, lambda world: slowest(world) > 1e6)
        assert world.clock.now - healed_s < 3 * FIRST_PAUSE_S

    job = small_job(steps=20)
    assert simulate(job, 4, disturb=disturb).curve == undisturbed(job, 4).curve
