"""Whole simulated jobs: a fleet, a job, a schedule of faults, and what must hold of the outcome."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

from skein import rng
from skein.config.job import JobSpec
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.model.rows import VocabularySplit
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import SubmitAsked
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import GenerationOpened, JobSubmitted, Record, RolledBack, StepCommitted
from skein.protocol.messages.directives import StepRecord
from skein.sim.compute.arrays import SimArrays
from skein.sim.faults import WITH_TRIALS, draw_faults, schedule_faults
from skein.sim.judging.bounds import Bounds
from skein.sim.judging.idling import Idling
from skein.sim.judging.invariants import Violated
from skein.sim.judging.recovery import Recovery
from skein.sim.judging.trials import TrialOutcome, check_trials, trial_outcomes
from skein.sim.placing import make_v_plan
from skein.sim.shapes import SimShape
from skein.sim.world import World
from skein.types import DEFAULT_NAMESPACE, JobId, JobState, SiteId, WorkerId

SUBMIT_AGAIN_S = 1.0
LIMIT_S = 900.0
"""Simulated seconds by which a job of a few steps must have ended; undisturbed ones take about ten."""
LIARS_LIMIT_S = 3600.0
"""The same where workers lie: what they should have said may be waited for, and made up for, again and again."""
QUIET_AFTER_S = 42.0
"""The longest that a fault lasts."""
STILL_S = 120.0
"""Longer than any pause of the protocol while it has workers and no reason to wait."""
FLOPS_PER_S = 2e9
"""So slow that steps of small jobs take about a second: faults strike in the middle of things."""
HORIZON_S = 9.0
"""Faults strike before; about as long as a job of eight steps takes on workers of `_SEED_FLOPS_PER_S`."""
_SEED_FLOPS_PER_S = 8e8
FEW_STEPS = 8
LASTING_STEPS = 600
"""Steps of a job that lasts until well after its faults."""
LASTING_SLOWER = 4.0
LASTING_SHARE = 1 / 12
"""Share of the seeds whose job lasts: they are judged by whether all holders are back."""
SLOW = 32.0
"""Far too slow for a microbatch of a step with two of them for each replica."""
REPEAT_EVERY = 7
"""Tensors between two that arrive twice, wherever faults are drawn; coprime to the numbers of microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Size of a fleet in workers and sites, and how unequal: speeds lie within a factor `spread` of each other."""

    num_workers: int
    num_sites: int = 4
    flops_per_s: float = 2e11
    spread: float = 2.0
    memory_bytes: int = 16 * 2**30
    num_slow: int = 0
    """Number of workers, the last ones, that are `SLOW` times slower than the others."""
    num_walled: int = 0
    """Number of workers, the first ones, whom nobody can dial; where there are any, the others relay."""
    num_meshes: int = 0
    """Number of workers, the first ones, that are meshes of `num_devices`."""
    num_devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a simulated run."""

    history: History
    seconds: float
    num_events: int
    state: JobState


NewWorld = Callable[..., World]
"""Constructor of a world, called as `World`."""


def make_world(
    job: JobSpec,
    fleet: FleetShape,
    *,
    seed: int,
    new_world: NewWorld = World,
    others: Sequence[JobSpec] = (),
    after_s: Mapping[int, float] = MappingProxyType({}),
    quotas: QuotasSpec = UNBOUNDED,
) -> World:
    """A world with a coordinator, `fleet`, and `job` and `others` submitted, by number some of them later."""
    sites = tuple(SiteId(f"site{index}") for index in range(fleet.num_sites))
    world = new_world(sites, seed=seed)
    world.quotas = quotas
    world.start_coordinator()
    names = [WorkerId(f"w{index:04d}") for index in range(fleet.num_workers)]
    if fleet.num_walled:
        world.network.walled |= {*names[: fleet.num_walled]}
        world.relays = frozenset(names[fleet.num_walled :])
    for index, name in enumerate(names):
        factor = fleet.spread ** float(rng.stream(seed, "speed", name).uniform(-0.5, 0.5))
        factor /= SLOW if index >= fleet.num_workers - fleet.num_slow else 1.0
        speed = fleet.flops_per_s * factor
        site = sites[index * fleet.num_sites // fleet.num_workers]
        world.add_worker(
            name,
            site,
            flops_per_s=speed,
            memory_bytes=fleet.memory_bytes,
            num_devices=fleet.num_devices if index < fleet.num_meshes else 1,
        )
    for number, spec in enumerate((job, *others)):
        key = f"sim-{number}" if number else "sim"
        world.submitted[key] = spec
        if number in after_s:
            world.clock.at(after_s[number], partial(_submit, world, spec, key))
        else:
            _submit(world, spec, key)
    return world


def _submit(world: World, job: JobSpec, key: str) -> None:
    """Ask, and again as a client does that has no answer: the key makes it one job."""
    if not any(isinstance(record, JobSubmitted) and record.key == key for record in world.log):
        world.tell(SubmitAsked(key=key, spec=job))
        world.clock.after(SUBMIT_AGAIN_S, partial(_submit, world, job, key))


def run_to_end(
    world: World, *, limit_s: float, quiet_s: float | None = None, is_to_last: bool = False
) -> Outcome:
    """Run until all jobs have ended; the outcome is that of the first.

    Args:
        world: to be run.
        limit_s: simulated time by which the jobs must have ended.
        quiet_s: when the last fault is over, if that is known; progress must go on then.
        is_to_last: whether to stop as soon as, after `quiet_s`, every stage has its holders again.

    Raises:
        Violated: an invariant broke, a job had not ended by `limit_s` of simulated time, or nothing was recorded for
            `STILL_S` although nothing failed any more.
    """
    job = _submitted(world)
    idling, bounds = Idling(), Bounds()
    recovery = Recovery(quiet_s=limit_s if quiet_s is None else quiet_s)
    num_records, num_judged, moved_s = 0, 0, 0.0
    while True:
        now = world.clock.now
        if len(world.log) != num_records:
            num_records, moved_s = len(world.log), now
        is_still = quiet_s is not None and now > max(quiet_s, moved_s) + STILL_S
        if now > limit_s and _waits(world, job):
            return _outcome(world, JobState.PAUSED)
        if is_still or now > limit_s or not world.clock.step():
            tail = "\n".join(world.lines[-12:])
            raise Violated(f"no end after {now:.0f} simulated seconds:\n{tail}")
        if len(world.submitted) > 1:
            idling.look(world)
            bounds.look(world)
        coordinator = world.coordinator
        if recovery.is_whole(world) and is_to_last and not world.is_appending:
            break
        if len(world.log) == num_judged or coordinator is None or world.is_appending:
            continue  # Jobs end by what is recorded.
        num_judged = len(world.log)
        if _have_ended(world, coordinator.history):
            break
    check_replay(world)
    for one in _history(world).jobs:
        check_log(world, one)
    assert world.coordinator is not None
    return _outcome(world, world.coordinator.view.state_of(job))


def _have_ended(world: World, history: History) -> bool:
    """Whether as many jobs have ended as the world submits by itself; a test may submit more, which go on."""
    asked = (job for job in history.jobs.resident() if job.sweep is None)
    ended = [job for job in asked if job.end is not None and not _goes_on(world, job)]
    return len(ended) >= len(world.submitted)


def _goes_on(world: World, job: JobHistory) -> bool:
    """Whether somebody has cancelled a job and is going to have it go on."""
    return job.job in world.to_resume and job.end is not None and job.end.state is JobState.CANCELLED


def _outcome(world: World, state: JobState) -> Outcome:
    return Outcome(
        history=_history(world), seconds=world.clock.now, num_events=world.clock.num_run, state=state
    )


def _waits(world: World, job: JobId) -> bool:
    """Whether it waits for workers and says why: what liars may bring a job to."""
    coordinator = world.coordinator
    if coordinator is None or not world.has_liars:
        return False
    return coordinator.view.state_of(job) is JobState.PAUSED and bool(coordinator.view.reason_of(job))


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


# --- seeds ---


def curve_of(log: Sequence[Record], job: JobId | None = None) -> tuple[StepRecord, ...]:
    """The loss curve of the only job, or of this one, and all numbers behind it, without what was rolled back."""
    steps: list[StepRecord] = []
    for record in log:
        match record:
            case StepCommitted() if job in (None, record.job):
                steps.append(replace(record.record, results=()))
            case RolledBack() if job in (None, record.job):
                del steps[record.to_version :]
            case _:
                pass
    return tuple(steps)


def disturbed(
    shape: SimShape,
    *,
    seed: int,
    num_faults: int,
    kinds: Sequence[str] | None = None,
    steps: int = FEW_STEPS,
    new_world: NewWorld = World,
) -> World:
    """A world of this shape that the faults of a seed are going to strike."""
    job, *others = (part.job(steps=steps) for part in shape.each)
    later = {number: part.after_s for number, part in enumerate(shape.each) if part.after_s}
    fleet = small_fleet(shape, is_to_last=steps >= LASTING_STEPS)
    has_rows = any(part.num_rows or part.num_trials for part in shape.each)
    new_world = with_arrays(new_world) if has_rows else new_world
    if kinds is None and any(part.num_trials for part in shape.each):
        kinds = WITH_TRIALS
    world = make_world(
        job, fleet, seed=seed, new_world=new_world, others=others, after_s=later, quotas=shape.quotas
    )
    if shape.is_in_v:
        world.planner = make_v_plan
    world.transport.repeat_every = REPEAT_EVERY
    schedule_faults(
        world,
        draw_faults(
            shape.num_workers,
            num_faults=num_faults,
            horizon_s=HORIZON_S,
            seed=seed,
            kinds=kinds,
            surely=("device", "device") if shape.num_meshes else (),
        ),
    )
    return world


def with_arrays(new_world: NewWorld) -> NewWorld:
    """Makes worlds whose workers count local steps where a job is an array."""
    return partial(new_world, new_executor=SimArrays().executor)


def num_steps_of(seed: int) -> int:
    """Steps of the jobs of a seed: few, or of a share of the seeds so many that they last until the faults are over."""
    return LASTING_STEPS if rng.stream(seed, "lasting").random() < LASTING_SHARE else FEW_STEPS


def judge(shape: SimShape, world: World, *, steps: int = FEW_STEPS) -> Outcome:
    """Run a disturbed world to its end; its curve must be that of the undisturbed one, unless somebody lied.

    Raises:
        Violated: it is not, or an invariant broke.
    """
    if world.has_liars:
        return run_to_end(world, limit_s=LIARS_LIMIT_S)
    outcome = run_to_end(world, limit_s=LIMIT_S, quiet_s=HORIZON_S + QUIET_AFTER_S)
    for part, key in zip(shape.each, world.submitted, strict=True):
        job = outcome.history.job_by_key[DEFAULT_NAMESPACE, key]
        state = outcome.history.state_of(job)
        if state is not JobState.FINISHED:
            raise Violated(f"{job} {state}")
        if part.num_trials:
            check_trials(outcome.history, job, undisturbed_trials(part, steps))
        elif _told(part, curve_of(world.log, job)) != _told(part, undisturbed_curve(part, steps)):
            raise Violated(f"the loss curve of {job} is not the undisturbed one")
    return outcome


def judge_lasting(shape: SimShape, world: World, *, steps: int = LASTING_STEPS) -> None:
    """Run a disturbed world of jobs that last until every stage has its holders again after the faults.

    The curves up to there must be those of the undisturbed jobs, where they can be compared step by step.

    Raises:
        Violated: a stage lacks holders for too long, a curve is another, or an invariant broke.
    """
    if world.has_liars:
        return
    run_to_end(world, limit_s=LIMIT_S, quiet_s=HORIZON_S + QUIET_AFTER_S, is_to_last=True)
    assert world.coordinator is not None
    for part, key in zip(shape.each, world.submitted, strict=True):
        job = world.coordinator.history.job_by_key.get((DEFAULT_NAMESPACE, key))
        if job is None or part.num_trials or (part.num_rows and part.coreset is not None):
            continue
        curve = _told(part, curve_of(world.log, job))
        if curve != _told(part, undisturbed_steps(part, steps, len(curve))):
            raise Violated(f"the loss curve of {job} is not the undisturbed one")


def _told(shape: SimShape, curve: tuple[StepRecord, ...]) -> tuple[object, ...]:
    """A curve without what follows from the cut, where a planner chooses that: the model of costs has the same norm
    for every group.

    How long rounds are follows from how long choosing took, where an array's rows are chosen for; and where a row is
    put back to, from that. So of these only what rows came to is told.
    """
    if shape.num_rows and shape.coreset is not None:
        return tuple((0 if row.retired else row.num_updates, row.retired) for row in curve[-1].rows)
    if shape.rows is not VocabularySplit.AUTO:
        return curve
    return tuple(replace(record, gradient_norm=0.0) for record in curve)


@cache
def undisturbed_curve(shape: SimShape, steps: int) -> tuple[StepRecord, ...]:
    """Curve that the only job of this shape comes to when nothing happens."""
    return curve_of(_undisturbed(shape, steps).log)


def undisturbed_steps(shape: SimShape, steps: int, num_wanted: int) -> tuple[StepRecord, ...]:
    """The first steps of the only job of this shape when nothing happens, of as many as it has at all."""
    world = _undisturbed_begun(shape, steps)
    while (num_made := len([x for x in world.log if isinstance(x, StepCommitted)])) < num_wanted:
        assert num_made < steps and world.clock.step(), "nothing happens any more"
    return curve_of(world.log)[:num_wanted]


@cache
def _undisturbed_begun(shape: SimShape, steps: int) -> World:
    """A world that is run as far as anybody asks."""
    return make_world(shape.job(steps=steps), small_fleet(shape), seed=0, new_world=with_arrays(World))


@cache
def undisturbed_trials(shape: SimShape, steps: int) -> tuple[TrialOutcome, ...]:
    """Outcomes of the trials of a sweep of this shape when nothing happens and nothing is beside it."""
    world = _undisturbed(shape, steps)
    return trial_outcomes(_history(world), _submitted(world))


def _undisturbed(shape: SimShape, steps: int) -> World:
    world = _undisturbed_begun(shape, steps)
    run_to_end(world, limit_s=LIMIT_S)
    return world


def small_fleet(shape: SimShape, *, is_to_last: bool = False) -> FleetShape:
    """Fleet of as many workers as the shape has, in two sites, so slow that faults strike in the middle of things.

    Where jobs are to last, workers are slower still, so that few steps are simulated for many seconds; not where some
    are far slower anyhow.
    """
    return FleetShape(
        num_workers=shape.num_workers,
        num_sites=2,
        flops_per_s=_SEED_FLOPS_PER_S / (LASTING_SLOWER if is_to_last and not shape.num_slow else 1.0),
        num_slow=shape.num_slow,
        num_walled=shape.num_walled,
        num_meshes=shape.num_meshes,
        num_devices=shape.num_devices,
    )
