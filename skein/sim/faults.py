"""Faults of a simulated world, and seeded schedules of them. Whoever dies comes back after a while, all cuts heal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skein import rng
from skein.config.job import read_spec
from skein.protocol.coordinator.coordinator_io import CancelAsked, DrainAsked, PauseAsked, ResumeAsked
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.log.records import DataCounted, HaltAsked, JobEnded, JobHeld, JobResumed, JobSubmitted
from skein.protocol.worker.ops import COMPUTE_OPS, ApplyOp, JoinOp, Op, PackOp, SumOp
from skein.sim.lines.lies import Accuser
from skein.sim.lines.network import FAIR, Weather
from skein.sim.processes.data import USUAL
from skein.sim.world import World
from skein.types import JobId, JobState, SiteId, WorkerId

SLOWER = 4.0
"""Times as long as its profile says are the ops of a worker that is struck by "slow"."""
AWAY_S = 5.0
"""At least so long is a worker away that was killed."""
FAILING: tuple[type[Op], ...] = (*COMPUTE_OPS.values(), PackOp, SumOp, JoinOp, ApplyOp)
APART_S = (2.0, 6.0, 12.0, 20.0, 40.0)
"""Seconds for which holders of two stages, or of one, do not reach each other: below patience, and far beyond it."""
SILENCES_S = (2.0, 4.0, 8.0)
"""Seconds for which holders of a stage are cut off."""
ASK_AGAIN_S = 1.0
LOOK_AT_DATA_S = 30.0
_NUM_FLAPS = 6
_STORM = Weather(jitter_s=0.3, loss=0.1, repeats=0.1)
_MUD = Weather(slower=20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault at `at_s`: its kind, its workers and its length; `number` is for what else has to be chosen."""

    at_s: float
    kind: str
    worker: WorkerId
    other: WorkerId
    seconds: float
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.worker} {self.other} {self.seconds:.2f} s, {self.number}"


def draw_faults(
    num_workers: int,
    *,
    num_faults: int,
    horizon_s: float,
    seed: int,
    kinds: Sequence[str] | None = None,
    surely: Sequence[str] = (),
) -> list[Fault]:
    """A seeded schedule, by time; where any kind may strike, the kinds of `surely` do, in the place of others."""
    draw = rng.stream(seed, "faults")
    known = tuple(kind for kind in FAULTS if kind not in RARE) if kinds is None else kinds
    faults = [
        Fault(
            at_s=float(draw.uniform(0.0, horizon_s)),
            kind=known[int(draw.integers(len(known)))],
            worker=WorkerId(f"w{int(draw.integers(num_workers)):04d}"),
            other=WorkerId(f"w{int(draw.integers(num_workers)):04d}"),
            seconds=float(draw.uniform(0.1, 6.0)),
            number=int(draw.integers(1 << 16)),
        )
        for _ in range(num_faults)
    ]
    rare = rng.stream(seed, "rarity")
    if kinds is None and faults and rare.random() < RARE_SHARE:
        faults[0] = replace(faults[0], kind=RARE[int(rare.integers(len(RARE)))])
    if kinds is None:
        sure = faults[-len(surely) :] if surely else []
        faults[len(faults) - len(sure) :] = [
            replace(x, kind=kind) for x, kind in zip(sure, surely, strict=False)
        ]
    return sorted(faults, key=lambda fault: fault.at_s)


def schedule_faults(world: World, faults: Sequence[Fault]) -> None:
    """Have them happen, each at its time, and be told among the world's lines."""
    if any(fault.kind == "lie" for fault in faults):
        world.expect_lies()
    for fault in faults:
        world.clock.at(fault.at_s, partial(strike, world, fault))


def strike(world: World, fault: Fault) -> None:
    """Have it happen now."""
    world.lines.append(f"{world.clock.now:.3f} fault: {fault}")
    FAULTS[fault.kind](world, fault)


# --- processes ---


def _kill(world: World, fault: Fault) -> None:
    _kill_all(world, [fault.worker], fault)


def _kill_all(world: World, names: Sequence[WorkerId], fault: Fault) -> None:
    for name in names:
        world.bring_back(name, AWAY_S + fault.seconds)
        world.kill_worker(name)


def _flap(world: World, fault: Fault) -> None:
    """Start again and again, faster than any lease ends."""
    for turn in range(_NUM_FLAPS):
        world.clock.after(turn * fault.seconds / _NUM_FLAPS, partial(world.restart_worker, fault.worker))


def _device(world: World, fault: Fault) -> None:
    """A device hangs, or at odd numbers ends. A mesh comes back without it, and is started again whole later."""
    hangs = fault.number % 2 == 0
    world.lose_device(fault.worker, fault.number // 2, AWAY_S + 4 * fault.seconds, hangs=hangs)


def _impostor(world: World, fault: Fault) -> None:
    """A stranger comes under a worker's name. Where that one is lost already it ends when it speaks, and comes back."""
    world.add_impostor(fault.worker, fault.seconds)
    world.bring_back(fault.worker, AWAY_S + fault.seconds)


def _drain(world: World, fault: Fault) -> None:
    if fault.worker in world.workers:
        world.tell(DrainAsked(worker=fault.worker))
        world.bring_back(fault.worker, AWAY_S + fault.seconds)


def _op(world: World, fault: Fault) -> None:
    """The next op of some kind fails halfway."""
    worker = world.workers.get(fault.worker)
    kind = FAILING[fault.number % len(FAILING)]
    if worker is not None:
        worker.to_fail = lambda op: isinstance(op, kind)


def _forget(world: World, fault: Fault) -> None:
    """The boundary log has room for a few entries only."""
    world.shorten_log(fault.worker, num_kept=fault.number % 4)


def _crowd(world: World, fault: Fault) -> None:
    """A worker hears late of commits, and has hardly any room for what others send it of the next step."""
    world.crowd_worker(fault.worker, fault.number % 3, 2 * fault.seconds)
    world.mute_worker(fault.worker, fault.seconds / 3, is_heard=True)


def _lie(world: World, fault: Fault) -> None:
    """Mutate the reports of one or two workers for a while."""
    liars = [fault.worker] if fault.number % 3 else [fault.worker, fault.other]
    for name in liars:
        world.have_lie(name, rng.stream(fault.number, "lies", name), 2 * fault.seconds)
        world.bring_back(name, AWAY_S + 2 * fault.seconds)


def _accuse(world: World, fault: Fault) -> None:
    """Have a worker, or two, accuse peers that they reach, in every generation: one peer, or several in turn."""
    for name in [fault.worker] if fault.number % 3 else [fault.worker, fault.other]:
        if name in world.workers:
            how = Accuser(
                machine=world.workers[name].machine,
                num_named=1 + fault.number // 3 % 3,
                with_every_beat=fault.number % 2 == 0,
            )
            world.have_say(name, how, 4 * fault.seconds)


# --- several at once ---


def _third(world: World, fault: Fault) -> None:
    """A third of all workers dies at once."""
    _kill_all(world, _some(world, fault, len(world.workers) // 3), fault)


def _some(world: World, fault: Fault, count: int) -> list[WorkerId]:
    names = sorted(world.workers)
    start = fault.number % max(1, len(names))
    return (names[start:] + names[:start])[:count]


def _site(world: World, fault: Fault) -> None:
    """A whole site dies."""
    site = _some_site(world, fault)
    _kill_all(world, [name for name in sorted(world.workers) if world.network.site_of(name) == site], fault)


def _some_site(world: World, fault: Fault) -> SiteId:
    sites = world.network.sites
    return sites[fault.number % len(sites)]


def _neighbours(world: World, fault: Fault) -> None:
    """Two workers die that pass tensors to each other."""
    run = _some_run(world, fault)
    if run is None or run.plan is None:
        return
    path = run.plan.paths[fault.number % len(run.plan.paths)]
    pairs = [(a.worker, b.worker) for a, b in path.links if a.worker != b.worker]
    if pairs:
        _kill_all(world, pairs[fault.number % len(pairs)], fault)


def _some_run(world: World, fault: Fault) -> Run | None:
    runs = () if world.coordinator is None else world.coordinator.runs
    return runs[fault.number // 7 % len(runs)] if runs else None


def _join(world: World, fault: Fault) -> None:
    """Have as many workers join at once as make two thirds of the fleet; they are told to go a while later."""
    names = [WorkerId(f"n{fault.number}-{index}") for index in range(2 * len(world.workers))]
    for index, name in enumerate(names):
        site = world.network.sites[index % len(world.network.sites)]
        world.add_worker(name, site, flops_per_s=2e9, memory_bytes=16 * 2**30)
        world.clock.after(4 * fault.seconds, partial(world.tell, DrainAsked(worker=name)))


# --- clients ---


def _pause(world: World, fault: Fault) -> None:
    """Have a job held, or at every second number a sweep cancelled, and go on a while later."""
    submitted = [x for x in world.log if isinstance(x, JobSubmitted) and x.sweep is None]
    if submitted:
        found = submitted[fault.number % len(submitted)]
        is_cancelled = fault.number // len(submitted) % 2 and read_spec(found.spec).sweep is not None
        world.tell(CancelAsked(job=found.job) if is_cancelled else PauseAsked(job=found.job))
        world.to_resume.add(found.job)
        world.clock.after(fault.seconds, partial(_resume, world, found.job))


def _resume(world: World, job: JobId) -> None:
    """Ask, and again whenever the log has it held: what was asked on a full disk may never have been written."""
    world.tell(ResumeAsked(job=job))
    world.clock.after(ASK_AGAIN_S, partial(_look_again, world, job))


def _look_again(world: World, job: JobId) -> None:
    newest = next(
        (
            r
            for r in reversed(world.log)
            if isinstance(r, HaltAsked | JobHeld | JobResumed | JobEnded) and r.job == job
        ),
        None,
    )
    match newest:
        case HaltAsked() | JobHeld() | JobEnded(state=JobState.CANCELLED):
            _resume(world, job)
        case JobEnded():
            pass
        case _:
            world.clock.after(ASK_AGAIN_S, partial(_look_again, world, job))


# --- links ---


def _half_mute(world: World, fault: Fault) -> None:
    """Let messages between the worker and the coordinator pass in one direction only."""
    world.mute_worker(
        fault.worker, fault.seconds, is_heard=fault.number % 2 == 0, hears=fault.number % 2 == 1
    )


def _cut(world: World, fault: Fault) -> None:
    """Make one directed link a black hole."""
    _cut_pair(world, fault.worker, fault.other, fault.seconds)


def _apart(world: World, fault: Fault) -> None:
    """Holders of two stages do not reach each other, or at every third number those of one; the coordinator does."""
    run = _some_run(world, fault)
    if run is None or run.plan is None:
        return
    stages, number = run.plan.stages, fault.number
    first = number % len(stages)
    second = first if number % 3 == 0 else (first + 1) % len(stages)
    seconds = APART_S[number // 3 % len(APART_S)]
    for sender in run.plan.holders(stages[first].index):
        for receiver in run.plan.holders(stages[second].index):
            _cut_pair(world, sender, receiver, seconds)
            if first != second:
                _cut_pair(world, receiver, sender, seconds)


def _cut_pair(world: World, sender: WorkerId, receiver: WorkerId, seconds: float) -> None:
    if sender != receiver:
        world.network.cut(sender, receiver)
        world.clock.after(seconds, partial(world.network.mend, sender, receiver))


def _choke(world: World, fault: Fault) -> None:
    """The coordinator's large messages to a worker are lost, and another worker starts again: a plan is to be told."""
    world.choke_worker(fault.worker, APART_S[fault.number % len(APART_S)])
    if fault.other != fault.worker:
        world.restart_worker(fault.other)


def _partition(world: World, fault: Fault) -> None:
    """A site is cut off from all others, and from the coordinator if that is elsewhere."""
    _cut_off(world, fault, is_two_way=True)


def _one_way(world: World, fault: Fault) -> None:
    """A site hears all others and reaches none."""
    _cut_off(world, fault, is_two_way=False)


def _cut_off(world: World, fault: Fault, *, is_two_way: bool) -> None:
    site = _some_site(world, fault)
    for other in world.network.sites:
        if other == site:
            continue
        for pair in ((site, other), (other, site))[: 2 if is_two_way else 1]:
            world.network.cut(*pair)
            world.clock.after(fault.seconds, partial(world.network.mend, *pair))


def _delay(world: World, fault: Fault) -> None:
    """The links between two workers are slow for a while."""
    _weather(world, fault, [(fault.worker, fault.other), (fault.other, fault.worker)], _MUD)


def _storm(world: World, fault: Fault) -> None:
    """A worker's tensors overtake each other, are lost on the way, and arrive twice."""
    others = [name for name in sorted(world.workers) if name != fault.worker]
    there = [(fault.worker, name) for name in others]
    _weather(world, fault, there + [(name, fault.worker) for name in others], _STORM)


def _drop_large(world: World, fault: Fault) -> None:
    """The path between two workers passes small messages only, by turns both ways, one way, or to all other workers."""
    others = sorted(world.workers) if fault.number % 3 == 2 else [fault.other]
    pairs = [(fault.worker, other) for other in others if other != fault.worker]
    if fault.number % 3 != 1:
        pairs += [(other, worker) for worker, other in pairs]
    for pair in pairs:
        world.network.drop_large(*pair)
        world.clock.after(2 * fault.seconds, partial(world.network.pass_large, *pair))


def _block(world: World, fault: Fault) -> None:
    """Two workers cannot dial each other for a while; relays lead around."""
    if fault.worker != fault.other:
        world.network.block(fault.worker, fault.other)
        unblock = partial(world.network.unblock, fault.worker, fault.other)
        world.clock.after(2 * fault.seconds, unblock)


def _weather(
    world: World, fault: Fault, pairs: Sequence[tuple[WorkerId, WorkerId]], weather: Weather
) -> None:
    for sender, receiver in pairs:
        world.network.set_weather(sender, receiver, weather)
        world.clock.after(2 * fault.seconds, partial(world.network.set_weather, sender, receiver, FAIR))


def _silence(world: World, fault: Fault) -> None:
    """All holders of one stage are cut off from the coordinator, and not from each other."""
    for name in _holders(world, fault):
        world.mute_worker(name, SILENCES_S[fault.number % len(SILENCES_S)])


def _late(world: World, fault: Fault) -> None:
    """The same while the coordinator starts again: they reach it long after the others."""
    holders = _holders(world, fault)
    _coordinator(world, fault)
    for name in holders:
        world.mute_worker(name, fault.seconds / 3 + SILENCES_S[fault.number % len(SILENCES_S)])


def _holders(world: World, fault: Fault) -> tuple[WorkerId, ...]:
    run = _some_run(world, fault)
    if run is None or run.plan is None:
        return ()
    stage = run.plan.stages[fault.number % len(run.plan.stages)]
    return run.plan.holders(stage.index)


# --- checkpoints ---


def _damage(world: World, fault: Fault) -> None:
    """The newest checkpoint is damaged, at odd numbers with the death of all workers; it is put back a while later."""
    world.damage_checkpoint(fault.number, 4 * fault.seconds)
    if fault.number % 2:
        _kill_all(world, sorted(world.workers), fault)


def _hidden(world: World, fault: Fault) -> None:
    """Checkpoints are not there for a while, all or the newest alone; at odd numbers all workers die with that."""
    newest_only = fault.number // 2 % 2 == 1
    # The newest is waited for while others are there; all of them without end.
    world.hide_checkpoints(2 * fault.seconds if newest_only else 4 * fault.seconds, newest_only=newest_only)
    if fault.number % 2:
        _kill_all(world, sorted(world.workers), fault)


def _store_hangs(world: World, fault: Fault) -> None:
    """Leave reads and writes of checkpoints without an answer."""
    world.store.hang(4 * fault.seconds)


# --- the coordinator ---


def _coordinator(world: World, fault: Fault) -> None:
    world.crash_coordinator(restarts_after_s=fault.seconds / 3)


def _both(world: World, fault: Fault) -> None:
    """A worker dies with the coordinator."""
    _coordinator(world, fault)
    _kill(world, fault)


def _torn(world: World, fault: Fault) -> None:
    """The coordinator dies in the middle of its next append: none or some of a turn's records are in the log."""
    world.tear_append(restarts_after_s=fault.seconds / 3, num_durable=fault.number % 3)


def _no_data(world: World, fault: Fault) -> None:
    """A worker, or at odd numbers each, does not see data that are not open yet; in a third of draws it sees others."""
    seconds = 4 * fault.seconds
    others = fault.number // 2 % 3 == 2 and not any(
        read_spec(x.spec).sweep is not None for x in _submitted(world)
    )
    chooses = {x.job for x in _submitted(world) if read_spec(x.spec).data.coreset.follows_model}
    counted = frozenset(x.job for x in world.log if isinstance(x, DataCounted)) - chooses
    for name in sorted(world.workers) if fault.number % 2 else [fault.worker]:
        if others:
            # Where no record says which are the job's, two workers that differ end it; where rows are chosen, no new
            # data are taken. In both cases people have to mend it.
            world.replace_data(name, seconds, "other data", jobs=counted)
        else:
            world.lose_data(name, seconds)
    if others:
        world.clock.after(seconds, partial(_take_data_back, world))


def _submitted(world: World) -> list[JobSubmitted]:
    return [x for x in world.log if isinstance(x, JobSubmitted)]


def _take_data_back(world: World) -> None:
    """Have jobs that began with files which are no more go on with the usual ones: a client asks until they do."""
    jobs = () if world.coordinator is None else tuple(world.coordinator.history.jobs.values())
    for job in jobs:
        if job.end is None and job.counted is not None and _is_other(job.counted):
            world.tell(ResumeAsked(job=job.job, takes_new_data=True))
    if world.coordinator is None or any(job.end is None for job in jobs):
        world.clock.after(LOOK_AT_DATA_S, partial(_take_data_back, world))


def _is_other(counted: DataCounted) -> bool:
    return counted.fingerprint not in ("", USUAL)


def _clock(world: World, fault: Fault) -> None:
    """The coordinator starts again where the wall clock is another, earlier or later, by up to a day."""
    world.skew_s = fault.number * 1.3
    _coordinator(world, fault)


def _misplaced(world: World, fault: Fault) -> None:
    """The coordinator starts on an empty state directory, and a while later on its own again."""
    world.misplace_log(3 * fault.seconds)


FAULTS: Mapping[str, Callable[[World, Fault], None]] = {
    "kill": _kill,
    "restart": lambda world, fault: world.restart_worker(fault.worker),
    "flap": _flap,
    "shrink": lambda world, fault: world.shrink_worker(fault.worker, 0.5, AWAY_S + fault.seconds),
    "device": _device,
    "impostor": _impostor,
    "freeze": lambda world, fault: world.freeze_worker(fault.worker, fault.seconds),
    "slow": lambda world, fault: world.slow_worker(fault.worker, SLOWER, seconds=4 * fault.seconds),
    "drain": _drain,
    "op": _op,
    "forget": _forget,
    "crowd": _crowd,
    "lie": _lie,
    "accuse": _accuse,
    "third": _third,
    "site": _site,
    "neighbours": _neighbours,
    "join": _join,
    "stream": lambda world, fault: world.break_stream(fault.worker),
    "mute": lambda world, fault: world.mute_worker(fault.worker, fault.seconds),
    "half_mute": _half_mute,
    "cut": _cut,
    "apart": _apart,
    "choke": _choke,
    "partition": _partition,
    "one_way": _one_way,
    "drop_large": _drop_large,
    "block": _block,
    "silence": _silence,
    "late": _late,
    "delay": _delay,
    "storm": _storm,
    "damage": _damage,
    "hidden": _hidden,
    "store_full": lambda world, fault: world.store.fill(4 * fault.seconds),
    "store_hangs": _store_hangs,
    "no_data": _no_data,
    "coordinator": _coordinator,
    "both": _both,
    "torn": _torn,
    "disk": lambda world, fault: world.fill_disk(fault.seconds),
    "clock": _clock,
    "misplaced": _misplaced,
    "pause": _pause,
}
"""By name."""
RARE = ("crowd", "shrink", "device", "accuse", "accuse", "apart", "apart", "choke", "choke")
"""Faults that strike in `RARE_SHARE` of the schedules, in the place of another; by how often, each."""
RARE_SHARE = 1 / 4
DEADLY = frozenset(
    [
        "kill",
        "restart",
        "flap",
        "shrink",
        "device",
        "op",
        "lie",
        "third",
        "site",
        "neighbours",
        "choke",
        "join",
        "damage",
        "hidden",
        "no_data",
        "both",
    ]
)
WITH_TRIALS = (*FAULTS, *("kill", "coordinator", "torn", "pause") * 3)
"""Kinds that sweeps are struck by: wishes, and deaths amid what is decided, more often than others."""
GENTLE = tuple(kind for kind in FAULTS if kind not in DEADLY)
"""Faults in which nobody dies: no state is ever lost."""
