"""Whole simulated jobs: a fleet, a job, a schedule of faults, and what must hold of the outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from skein import rng
from skein.config.job import JobSpec
from skein.protocol.coordinator import Coordinator
from skein.protocol.coordinator_io import DrainAsked, SubmitAsked
from skein.protocol.history import History
from skein.protocol.records import GenerationOpened, JobSubmitted, RolledBack, StepCommitted
from skein.sim.invariants import Violated
from skein.sim.world import World
from skein.types import JobId, JobState, SiteId, WorkerId


SUBMIT_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """How many workers in how many sites, and how unequal: speeds lie within a factor `spread` of each other."""

    num_workers: int
    num_sites: int = 4
    flops_per_s: float = 2e11
    spread: float = 2.0
    memory_bytes: int = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated run came to."""

    history: History
    seconds: float
    num_events: int
    state: JobState


def make_world(job: JobSpec, fleet: FleetShape, *, seed: int) -> World:
    """A world with a coordinator, `fleet`, and `job` submitted."""
    sites = tuple(SiteId(f"site{index}") for index in range(fleet.num_sites))
    world = World(job, sites, seed=seed)
    world.start_coordinator()
    for index in range(fleet.num_workers):
        name = WorkerId(f"w{index:04d}")
        factor = fleet.spread ** float(rng.stream(seed, "speed", name).uniform(-0.5, 0.5))
        speed = fleet.flops_per_s * factor
        site = sites[index * fleet.num_sites // fleet.num_workers]
        world.add_worker(name, site, flops_per_s=speed, memory_bytes=fleet.memory_bytes)
    _submit(world, job)
    return world


def _submit(world: World, job: JobSpec) -> None:
    """Ask, and again as a client does that has no answer: the key makes it one job."""
    if not any(isinstance(record, JobSubmitted) for record in world.log):
        world.tell(SubmitAsked(key="sim", spec=job))
        world.clock.after(SUBMIT_AGAIN_S, partial(_submit, world, job))


Fault = Callable[[World], None]

FAULTS = ("kill", "restart", "freeze", "mute", "stream", "drain", "cut", "coordinator", "slow")
SLOWER = 4.0
"""Times as long as its profile says are the ops of a worker that is struck by "slow"."""


def draw_faults(
    fleet: FleetShape, *, num_faults: int, horizon_s: float, seed: int, kinds: Sequence[str] = FAULTS
) -> list[tuple[float, str, Fault]]:
    """A seeded schedule of (time in seconds, words, fault). Killed and drained workers come back after a while."""
    draw = rng.stream(seed, "faults")
    faults: list[tuple[float, str, Fault]] = []
    for _ in range(num_faults):
        at = float(draw.uniform(0.0, horizon_s))
        kind = kinds[int(draw.integers(len(kinds)))]
        name = WorkerId(f"w{int(draw.integers(fleet.num_workers)):04d}")
        other = WorkerId(f"w{int(draw.integers(fleet.num_workers)):04d}")
        seconds = float(draw.uniform(0.1, 6.0))
        faults.append(
            (at, f"{kind} {name} {other} {seconds:.2f}", fault_of(kind, name, other=other, seconds=seconds))
        )
    return faults


def fault_of(kind: str, name: WorkerId, *, other: WorkerId, seconds: float) -> Fault:
    """One fault: what happens to `name` (and to its link to `other`), and for how long."""
    return partial(_strike, kind, name, other, seconds)


def _strike(kind: str, name: WorkerId, other: WorkerId, seconds: float, world: World) -> None:
    worker = world.workers.get(name)
    match kind:
        case "kill" | "drain" if worker is not None:
            identity = worker.machine.identity
            if kind == "kill":
                world.kill_worker(name)
            else:
                world.tell(DrainAsked(worker=name))
            back = partial(_come_back, world, name, identity.site, identity.profile.flops_per_s)
            world.clock.after(5.0 + seconds, back)
        case "restart":
            world.restart_worker(name)
        case "freeze":
            world.freeze_worker(name, seconds)
        case "mute":
            world.mute_worker(name, seconds)
        case "slow":
            world.slow_worker(name, SLOWER, seconds=4 * seconds)
        case "stream":
            world.break_stream(name)
        case "cut" if name != other:
            world.network.cut(name, other)
            world.clock.after(seconds, world.network.heal)
        case "coordinator":
            world.crash_coordinator(restarts_after_s=seconds / 3)
        case _:
            pass


def _come_back(world: World, name: WorkerId, site: SiteId, flops_per_s: float) -> None:
    if name not in world.workers:
        world.add_worker(name, site, flops_per_s=flops_per_s, memory_bytes=16 * 2**30)


def run_to_end(world: World, *, limit_s: float) -> Outcome:
    """Run until the job has ended.

    Raises:
        Violated: an invariant broke, or the job had not ended by `limit_s` of simulated time.
    """
    job = _submitted(world)
    while True:
        if not world.clock.step() or world.clock.now > limit_s:
            tail = "\n".join(world.lines[-12:])
            raise Violated(f"no end after {world.clock.now:.0f} simulated seconds:\n{tail}")
        coordinator = world.coordinator
        state = None if coordinator is None else coordinator.history.state_of(job)
        if state is not None and not world.is_appending:
            break
    check_replay(world)
    check_log(world, job)
    return Outcome(
        history=_history(world), seconds=world.clock.now, num_events=world.clock.num_run, state=state
    )


def _submitted(world: World) -> JobId:
    """The job, once its record is durable."""
    while True:
        for record in world.log:
            if isinstance(record, JobSubmitted):
                return record.job
        assert world.clock.step(), "nothing happens any more"


def _history(world: World) -> History:
    assert world.coordinator is not None
    return world.coordinator.history


def check_replay(world: World) -> None:
    """The log alone gives the hard state that the live coordinator has."""
    replayed = Coordinator()
    replayed.replay(world.log)
    live = _history(world)
    if (replayed.history.epoch, replayed.history.generation, replayed.history.jobs) != (
        live.epoch,
        live.generation,
        live.jobs,
    ):
        raise Violated("replaying the log gives another state")


def check_log(world: World, job: JobId) -> None:
    """Steps are committed once each, in order, except after a recorded roll-back; generations only grow."""
    version, generation = 0, 0
    for record in world.log:
        match record:
            case StepCommitted() if record.job == job:
                if record.record.step != version:
                    raise Violated(f"step {record.record.step} committed at version {version}")
                version += 1
            case RolledBack() if record.job == job:
                version = record.to_version
            case GenerationOpened():
                if record.generation <= generation:
                    raise Violated(f"generation {record.generation} after {generation}")
                generation = record.generation
            case _:
                pass
