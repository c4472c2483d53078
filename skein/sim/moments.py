"""Single strikes amid an exchange: killed, frozen, gone, joined or begun anew between any two of its parts.

Times are drawn by what happens, not by the clock: the n-th time that some worker is at a moment of an exchange, in a
run that is undisturbed until then. So each phase is struck, however short it is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from skein import rng
from skein.config.job import JobSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import DrainAsked
from skein.protocol.log.records import Incident, Record, RolledBack, StepCommitted
from skein.protocol.messages.directives import Assign, Evaluate, Prepare
from skein.protocol.messages.reports import Report, Vote
from skein.protocol.messages.tensors import ShardKind, ShardTensor
from skein.protocol.worker.ops import ApplyOp, JoinOp, OpOutcome, SumOp
from skein.protocol.worker.worker_io import DirectiveArrived, RunOp, SendTensor, WorkerCommand
from skein.sim.compute.aggregating import AggregatingModel
from skein.sim.faults import AWAY_S
from skein.sim.judging.invariants import Violated
from skein.sim.processes.worker import SimWorker
from skein.sim.rules import RULES
from skein.sim.scenario import LIMIT_S, Outcome, make_world, run_to_end, small_fleet
from skein.sim.shapes import SimShape, shape_of
from skein.sim.world import World
from skein.topology.fleet import Fleet
from skein.types import Exchanged, JobState, SiteId, WorkerId

MOMENTS: Final = (
    "probing",
    "prepared",
    "part out",
    "summed",
    "result out",
    "joined",
    "voting",
    "voted",
    "appending",
    "appended",
    "applying",
)
"""Moments of an exchange, in order; `appending` and `appended` are the coordinator's."""
BUILDING: Final = "building"
"""A worker is told what to hold: where the second of two strikes hits."""
STRIKES: Final = ("kill", "freeze", "leave", "join", "coordinator", "kill another", "kill both")
STRUCK: Final = tuple(rule for rule in RULES if rule not in ("fp32", "trimmed"))
"""The rules that exchange anything, and may go on with a member less."""
STEPS: Final = 8
BASES: Final = ("line 1x3", "line 2x3", "line 1x4", "line 2x4 on 5", "line 3x3 on 7")
"""Shapes that seeds walk over, for every rule: one to three stages, three or four walkers or replicas."""
WHOLE_BASES: Final = ("line 1x3", "line 1x4", "line 1x4 on 5")
"""The same for rules that want models in one stage."""
UNEVEN: Final = tuple(word for word, (rule, _) in RULES.items() if rule.lateness or rule.is_eager)
"""Rules that do not wait for late walkers: with every second seed, some workers are slow for a while."""
_SLOW: Final = ((0.8, WorkerId("w0001"), 12.0, 6.0), (3.0, WorkerId("w0002"), 8.0, 4.0))
"""Slow spells: when each begins, of which worker, how many times as slow, and for how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Strike at the worker that is at a moment for the `nth` time, counted from 0 over all workers."""

    moment: str
    nth: int
    kind: str
    seconds: float
    number: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.moment} {self.nth}, {self.seconds:.2f} s, {self.number}"


class WatchedWorld(World):
    """Says at which moment of an exchange some worker is; the coordinator's are told without a worker."""

    def __init__(
        self,
        sites: tuple[SiteId, ...],
        *,
        seed: int,
        model: AggregatingModel,
        is_finely_cut: bool,
    ) -> None:
        super().__init__(sites, seed=seed, new_executor=model.executor)
        self.model = model
        self.counts: Counter[str] = Counter()
        self.on_moment: Callable[[str, int, WorkerId | None], None] = lambda _moment, _nth, _worker: None
        if is_finely_cut:
            self.planner = finely_cut

    def _at(self, moment: str, worker: SimWorker | None) -> None:
        nth, self.counts[moment] = self.counts[moment], self.counts[moment] + 1
        self.on_moment(moment, nth, None if worker is None else worker.machine.identity.worker)

    def _take_directive(self, worker: SimWorker, event: DirectiveArrived) -> None:
        super()._take_directive(worker, event)
        match event.directive:
            case Prepare(exchange=terms) if terms is not None:
                self._at("prepared", worker)
            case Evaluate(phase=phase) if phase.scores_walkers:
                self._at("probing", worker)
            case Assign():
                self._at(BUILDING, worker)
            case _:
                pass

    def _do(self, worker: SimWorker, command: WorkerCommand) -> None:
        if not worker.is_alive:
            return
        super()._do(worker, command)
        match command:
            case SendTensor(envelope=envelope) if isinstance(envelope.header, ShardTensor):
                if isinstance(envelope.header.group, Exchanged):
                    is_part = envelope.header.kind is ShardKind.PART
                    self._at("part out" if is_part else "result out", worker)
            case RunOp(op=ApplyOp(record=record)) if any(
                isinstance(x.group, Exchanged) for x in record.results
            ):
                self._at("applying", worker)
            case _:
                pass

    def _outcome(self, worker: SimWorker, command: RunOp) -> OpOutcome:
        outcome = super()._outcome(worker, command)
        if isinstance(command.op, SumOp | JoinOp) and command.op.exchange is not None:
            self._at("summed" if isinstance(command.op, SumOp) else "joined", worker)
        return outcome

    def _send_report(self, worker: SimWorker, report: Report) -> None:
        is_vote = isinstance(report, Vote) and isinstance(report.group, Exchanged)
        if is_vote:
            self._at("voting", worker)
        if worker.is_alive:
            super()._send_report(worker, report)
        if is_vote:
            self._at("voted", worker)

    def _append(self, record: Record) -> None:
        results = record.record.results if isinstance(record, StepCommitted) else ()
        is_exchanged = any(isinstance(x.group, Exchanged) for x in results)
        if is_exchanged:
            self._at("appending", None)
        if self.is_up:
            super()._append(record)
        if is_exchanged:
            self._at("appended", None)


def finely_cut(job: JobSpec, fleet: Fleet, previous: Plan | None, seed: int) -> Plan | Infeasible:
    """The balanced plan with a shard for every worker, however small they are."""
    made = make_balanced_plan(job, fleet, previous, seed)
    if isinstance(made, Infeasible):
        return made
    groups = tuple(replace(group, num_shards=len(group.workers)) for group in made.groups)
    return replace(made, groups=groups)


# --- strikes ---


def shape_by_rule(rule: str, seed: int) -> SimShape:
    """The shape that a seed is judged on."""
    bases = WHOLE_BASES if RULES[rule][0].is_eager else BASES
    return shape_of(f"{bases[seed % len(bases)]} by {rule}")


def draw_strike(rule: str, seed: int) -> Strike:
    """Strike that a run comes to: all moments of the rule's exchanges alike, and all times that they come."""
    draw = rng.stream(seed, "strike", rule)
    counts = dict(
        _undisturbed(shape_by_rule(rule, seed), is_fine=_is_fine(seed), is_uneven=_is_uneven(rule, seed))
    )
    known = [moment for moment in MOMENTS if counts.get(moment)]
    moment = known[int(draw.integers(len(known)))]
    return Strike(
        moment=moment,
        nth=int(draw.integers(counts[moment])),
        kind=STRIKES[int(draw.integers(len(STRIKES)))],
        seconds=float(draw.uniform(0.2, 5.0)),
        number=int(draw.integers(1 << 16)),
    )


def struck(rule: str, seed: int) -> WatchedWorld:
    """A world that the strike of a seed is going to hit."""
    strike = draw_strike(rule, seed)
    world = _world(shape_by_rule(rule, seed), is_fine=_is_fine(seed), is_uneven=_is_uneven(rule, seed))

    def on_moment(moment: str, nth: int, worker: WorkerId | None) -> None:
        if (moment, nth) == (strike.moment, strike.nth):
            name = worker or sorted(world.workers)[strike.number % len(world.workers)]
            world.lines.append(f"{world.clock.now:.3f} strike: {strike} {name}")
            _STRIKES[strike.kind](world, name, strike)

    world.on_moment = on_moment
    return world


def judge_struck(world: WatchedWorld) -> Outcome:
    """Run a world to its end: nothing hangs, no step is lost, and what was committed was exchanged without loss.

    Raises:
        Violated: something of that does not hold, or an invariant broke.
    """
    outcome = run_to_end(world, limit_s=LIMIT_S)
    num_struck = sum(" strike: " in line for line in world.lines)
    if outcome.state is not JobState.FINISHED:
        raise Violated(f"the job {outcome.state.value}")
    for record in world.log:
        match record:
            case RolledBack() if num_struck < 2:
                raise Violated(f"one strike, and committed steps are lost: {record.reason}")
            case Incident() if record.num_steps_lost and num_struck < 2:
                raise Violated(f"an incident lost {record.num_steps_lost} steps")
            case StepCommitted():
                named = {
                    (x.group, x.attempt) for x in record.record.results if isinstance(x.group, Exchanged)
                }
                if not named <= world.model.checked:
                    raise Violated(f"step {record.record.step} has exchanges that not all took part in")
            case _:
                pass
    return outcome


def _is_fine(seed: int) -> bool:
    return seed // len(BASES) % 2 == 1


def _is_uneven(rule: str, seed: int) -> bool:
    return rule in UNEVEN and seed % 2 == 1


def _world(shape: SimShape, *, is_fine: bool, is_uneven: bool) -> WatchedWorld:
    job = shape.job(steps=STEPS, every=4)
    new_world = partial(WatchedWorld, model=AggregatingModel(job), is_finely_cut=is_fine)
    world = make_world(job, small_fleet(shape), seed=0, new_world=new_world)
    assert isinstance(world, WatchedWorld)
    for at_s, name, factor, seconds in _SLOW if is_uneven else ():
        world.clock.at(at_s, partial(world.slow_worker, name, factor, seconds=seconds))
    return world


@cache
def _undisturbed(shape: SimShape, *, is_fine: bool, is_uneven: bool) -> tuple[tuple[str, int], ...]:
    """Number of times that an undisturbed run comes to each moment."""
    world = _world(shape, is_fine=is_fine, is_uneven=is_uneven)
    judge_struck(world)
    return tuple(sorted(world.counts.items()))


def _kill(world: World, name: WorkerId, strike: Strike) -> None:
    # Some come back while the run goes on, others when it is nearly over.
    world.bring_back(name, strike.seconds)
    world.kill_worker(name)


def _kill_another(world: World, name: WorkerId, strike: Strike) -> None:
    others = [other for other in sorted(world.workers) if other != name]
    _kill(world, others[strike.number % len(others)], strike)


def _kill_both(world: WatchedWorld, name: WorkerId, strike: Strike) -> None:
    """Kill a worker, and while that is healed one that builds, or the coordinator: some have built, some have not."""
    left = strike.number % len(world.workers)

    def on_moment(moment: str, _: int, worker: WorkerId | None) -> None:
        nonlocal left
        left -= moment == BUILDING
        if moment == BUILDING and worker is not None and left < 0:
            world.lines.append(f"{world.clock.now:.3f} strike: and {worker} that builds")
            world.on_moment = lambda _moment, _nth, _worker: None
            second = _coordinator if strike.number % 3 == 1 else _kill
            # A build takes fifty milliseconds and more.
            world.clock.after(0.02 * strike.seconds, partial(second, world, worker, strike))

    _kill(world, name, strike)
    world.on_moment = on_moment


def _leave(world: World, name: WorkerId, strike: Strike) -> None:
    world.clock.after(0.0, partial(world.tell, DrainAsked(worker=name)))
    world.bring_back(name, AWAY_S + strike.seconds)


def _join(world: World, name: WorkerId, strike: Strike) -> None:
    """A worker more, and the one that was at the moment dies somewhat later."""
    identity = world.workers[name].machine.identity
    profile = identity.profile
    world.add_worker(
        WorkerId("w9999"),
        identity.site,
        flops_per_s=profile.flops_per_s,
        memory_bytes=profile.memory_bytes,
    )
    world.clock.after(strike.seconds, partial(world.kill_worker, name))


def _coordinator(world: World, name: WorkerId, strike: Strike) -> None:  # noqa: ARG001 - strikes are alike
    world.crash_coordinator(num_durable=strike.number % 2)


_STRIKES: Final[dict[str, Callable[[WatchedWorld, WorkerId, Strike], None]]] = {
    "kill": _kill,
    "freeze": lambda world, name, strike: world.freeze_worker(name, strike.seconds),
    "leave": _leave,
    "join": _join,
    "coordinator": _coordinator,
    "kill another": _kill_another,
    "kill both": _kill_both,
}
