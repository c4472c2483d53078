"""Simulated worlds: small jobs on small fleets, disturbed or not, and what came of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from skein.config.job import JobSpec
from skein.plan.plan import Plan
from skein.protocol.log.records import CheckpointCommitted, Record, RolledBack
from skein.protocol.messages.directives import StepRecord
from skein.sim.scenario import FLOPS_PER_S, LIMIT_S, FleetShape, Outcome, curve_of, make_world, run_to_end
from skein.sim.world import World
from skein.topology.fleet import Profile
from skein.types import JobState, SiteId, WorkerId

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A world whose job has ended."""

    world: World
    outcome: Outcome

    @property
    def curve(self) -> tuple[StepRecord, ...]:
        """The steps that count, each with every number but how it was reduced."""
        return curve_of(self.world.log)

    @property
    def num_rollbacks(self) -> int:
        return len(of_kind(self.world.log, RolledBack))

    @property
    def saved(self) -> list[int]:
        """Versions of checkpoints, as they were committed."""
        return [record.version for record in of_kind(self.world.log, CheckpointCommitted)]


def of_kind(log: Sequence[Record], kind: type[R]) -> list[R]:
    """Records of one kind, in log order."""
    return [record for record in log if isinstance(record, kind)]


def fleet_of(num_workers: int, *, num_sites: int = 2) -> FleetShape:
    return FleetShape(num_workers=num_workers, num_sites=num_sites, flops_per_s=FLOPS_PER_S)


def worker(index: int) -> WorkerId:
    """The name of a simulated fleet's worker."""
    return WorkerId(f"w{index:04d}")


def finish(world: World, *, about: str, state: JobState = JobState.FINISHED) -> Run:
    """Run a world until its job ends in `state`; whatever goes wrong is told with `about`, which names the seed."""
    try:
        outcome = run_to_end(world, limit_s=LIMIT_S)
    except Exception as error:
        raise AssertionError(f"{about}: {error!r}\n" + "\n".join(world.lines[-30:])) from error
    assert outcome.state is state, (about, world.lines[-30:])
    return Run(world=world, outcome=outcome)


def simulate(
    job: JobSpec, num_workers: int, *, seed: int = 0, disturb: Callable[[World], None] | None = None
) -> Run:
    """A whole job on a small fleet; `disturb` sees the world before anything happens."""
    world = make_world(job, fleet_of(num_workers), seed=seed)
    if disturb is not None:
        disturb(world)
    return finish(world, about=f"seed={seed}")


@cache
def undisturbed(job: JobSpec, num_workers: int) -> Run:
    """The same job with nothing happening to it."""
    return simulate(job, num_workers)


def run_events(world: World, num_events: int) -> None:
    """Let so many things happen."""
    for _ in range(num_events):
        world.clock.step()


def run_until(world: World, is_reached: Callable[[World], bool]) -> None:
    """Let things happen until `is_reached`."""
    while not is_reached(world):
        assert world.clock.step(), "nothing happens any more"
        assert world.clock.now < LIMIT_S, "never reached"


def version_of(world: World) -> int:
    """Steps that the log says count."""
    return len(curve_of(world.log))


def plan_of(world: World) -> Plan:
    """The plan that is in place."""
    assert world.coordinator is not None
    assert world.coordinator.run is not None
    assert world.coordinator.run.plan is not None
    return world.coordinator.run.plan


def kill_everything(world: World) -> None:
    """Power cut: every process dies; the same machines start again, the coordinator too."""
    machines = [
        (name, w.machine.identity.site, w.machine.identity.profile) for name, w in world.workers.items()
    ]
    for name, _, _ in machines:
        world.kill_worker(name)
    world.crash_coordinator(restarts_after_s=1.0)
    world.clock.after(2.0, lambda: start_workers(world, machines))


def start_workers(world: World, machines: Sequence[tuple[WorkerId, SiteId, Profile]]) -> None:
    for name, site, profile in machines:
        world.add_worker(name, site, flops_per_s=profile.flops_per_s, memory_bytes=profile.memory_bytes)
