"""The searching planner: starts from the balanced plan, and looks for a shorter step until its effort is spent.

Rules of this file
- What is found is taken only if it is legal and predicted to be shorter than what it started from.
- The effort is counted in moves, so equal inputs give equal plans wherever there is time enough; `may_go_on` only ends
  a search on a machine that is too slow for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from skein.config.job import JobSpec
from skein.plan.balanced import balanced_on, make_balanced_plan, pool_of
from skein.plan.changing.clauses import Clause, Clauses, and_more, held_by
from skein.plan.changing.leeway import beginning_ops, by_promise, settled, settlings, weighed_s
from skein.plan.changing.moving import Held
from skein.plan.changing.reasons import NUM_LOST, doubted, fullest, manner, searched_from, settled_so
from skein.plan.changing.recut import recut, widths
from skein.plan.changing.shards import shard_clauses
from skein.plan.changing.silent import slower_s, with_silent, working
from skein.plan.check import violations
from skein.plan.clock.timing import op_times, with_times
from skein.plan.groups import alternates_of, groups_of
from skein.plan.load import stage_loads
from skein.plan.mesh.room import fullest_devices, has_mesh, within_devices
from skein.plan.paths import find_paths
from skein.plan.place import Pool
from skein.plan.plan import ChunkPlan, Infeasible, Path, Plan, PlannedOp, Schedule
from skein.plan.replan.job_replan import replan_job
from skein.plan.replan.routing import always
from skein.plan.route.bounds.bound import Effort, lower_bound
from skein.plan.route.evaluate import jittered_mean_s
from skein.plan.route.job_problem import Posed, pose, resized
from skein.plan.route.orders import NamedStart, named_orders
from skein.plan.route.plan_routing import routing_of
from skein.plan.route.problem import I64, Problem, Routing
from skein.plan.route.room import Crowded, with_room
from skein.plan.route.rounds import slices
from skein.plan.route.search import NUM_JITTERS, Found, Search
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId
from skein.units import counted

OPS_PER_S = 5e7
"""Ops that a search runs in a second, on a slow core: what a budget in seconds is worth."""

_NUM_CLOSE, _CLOSE = 2, 1.1
"""Ways to settle what a job leaves open that share the budget: so many, if they begin so near to the shortest.

An order with slots of its own shares it too, if it is so near to those in even slots."""
_Started = Sequence[tuple[float, str]]
"""Seconds and names of what a search began with, the best first."""


def num_moves_in(budget_s: float, num_ops: int) -> int:
    """Moves that a budget is worth on a problem of so many ops."""
    return int(budget_s * OPS_PER_S / max(1, num_ops))


def make_searched_plan(
    job: JobSpec,
    fleet: Fleet,
    previous: Plan | None,
    seed: int,
    *,
    may_go_on: Callable[[], bool] = always,
    steps_left: int | None = None,
) -> Plan | Infeasible:
    """The best plan found for `job` on `fleet` within `job.plan.budget_s`; equal inputs give an equal plan.

    Args:
        job: what to train; `job.plan.method` says how to plan. What it leaves open is settled by what a search would
            begin with: the budget goes to the shortest, or is shared with the next if that is close.
        fleet: who may be given work.
        previous: the plan so far, if any: its cut stays, and its chunks stay where they are if they can. A job without
            one is also cut by the speeds of who would hold what.
        seed: of all draws.
        may_go_on: asked between two annealings; False ends the search with what it has.
        steps_left: over which the cost of moving what `previous` placed is spread; None: moving costs nothing.
    """
    # The search lets microbatches go through any holder; walkers keep to their own.
    is_final = job.plan.method == "balanced" or job.plan.budget_s == 0 or job.aggregation.walkers.are_lines
    if is_final:
        return make_balanced_plan(job, fleet, previous, seed)
    held = None if previous is None else Held(plan=previous, steps_left=steps_left)
    draws = _Draws(seed=seed, may_go_on=may_go_on)
    begun = _begun_ways(job, fleet, previous, draws, held, job.plan.budget_s)
    if not begun.ways:
        return _nearest(begun.refused)
    if len(begun.ways) == 1:
        [(hunt, plan)] = begun.ways
        return begun.telling(hunt.spending(begun.left_s).found(plan, previous))
    ranked = begun.ranked
    close = [x for x in ranked[:_NUM_CLOSE] if x.weighed_s <= _CLOSE * ranked[0].weighed_s]
    share_s = begun.left_s / len(close)
    found = [x._replace(plan=x.hunt.spending(share_s).found(x.plan, previous)) for x in close]
    best = min(found, key=lambda x: x.weighed_s)
    others = [x for x in ranked if x.hunt is not best.hunt]
    return begun.telling(replace(best.plan, reason=best.plan.reason.then(_settled_so(best, others))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A job that leaves nothing open, a plan of it, and why it is this way: no clause where nothing was open."""

    job: JobSpec
    plan: Plan
    why: tuple[Clause, ...] = ()


def settled_for_search(job: JobSpec, fleet: Fleet, seed: int, *, budget_s: float) -> Settled | Infeasible:
    """A job settled in the way whose search begins shortest, with the plan that this begins with.

    Args:
        job: what to train.
        fleet: who may be given work.
        seed: of all draws.
        budget_s: of the whole search; ways are begun with a part of it.
    """
    draws = _Draws(seed=seed, may_go_on=always)
    begun = _begun_ways(job, fleet, None, draws, None, budget_s)
    if not begun.ways:
        return _nearest(begun.refused)
    best, *others = begun.ranked
    told = (_settled_so(best, others),) if others else ()
    return Settled(job=best.hunt.job, plan=best.plan, why=(*told, *begun.clauses()))


class _Draws(NamedTuple):
    """Seed of all draws, and who may end them."""

    seed: int
    may_go_on: Callable[[], bool]


class _Way(NamedTuple):
    """Way to settle a job: its hunt, and the plan that this begins with, or has found."""

    hunt: "_Hunt"
    plan: Plan

    @property
    def weighed_s(self) -> float:
        return weighed_s(self.hunt.job, self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """Ways to settle a job that were begun, those that do not fit, how many there was no budget for; what is left."""

    ways: Sequence[_Way]
    refused: Sequence[tuple[JobSpec, Infeasible]]
    num_left_out: int
    left_s: float

    @property
    def ranked(self) -> list[_Way]:
        """The ways, the shortest first."""
        return sorted(self.ways, key=lambda x: x.weighed_s)

    def telling(self, plan: Plan) -> Plan:
        """The plan with what became of the other ways."""
        for clause in self.clauses():
            plan = replace(plan, reason=plan.reason.saying(clause))
        return plan

    def clauses(self) -> Iterator[Clause]:
        """Clauses about ways that do not fit, with the first one's reason, and about those that were left out."""
        if self.refused:
            (job, first), *others = self.refused
            yield Clause(f"not {manner(job)}{and_more(others)}: {first.reason}")
        if self.num_left_out:
            only = f"{manner(self.ways[0].hunt.job)}, for " if len(self.ways) == 1 else ""
            yield Clause(f"{only}the budget is too short to try {counted(self.num_left_out, 'more way')}")


def _begun_ways(
    job: JobSpec, fleet: Fleet, previous: Plan | None, draws: _Draws, held: Held | None, budget_s: float
) -> _Begun:
    """Ways to settle the job, the most promising first, as many as half of the budget is enough for: at least one."""
    ways: list[_Way] = []
    refused: list[tuple[JobSpec, Infeasible]] = []
    every = by_promise(settlings(job, previous), fleet)
    most_ops, spent_ops, num_left_out = budget_s * OPS_PER_S / 2, 0.0, 0
    for spec in every:
        if ways and (spent_ops + beginning_ops(spec) > most_ops or not draws.may_go_on()):
            num_left_out += 1
            continue
        balanced = make_balanced_plan(spec, fleet, previous, draws.seed)
        if isinstance(balanced, Infeasible):
            refused.append((spec, balanced))
            continue
        pool = pool_of(spec, _roomy(spec, fleet, previous))
        hunt = _Hunt(job=spec, fleet=fleet, pool=pool, seed=draws.seed, may_go_on=draws.may_go_on, held=held)
        # Of a job that leaves nothing open nothing is compared.
        plan = hunt.improved(balanced, 0.0) if len(every) > 1 else balanced
        spent_ops += beginning_ops(spec) if len(every) > 1 else 0.0
        ways.append(_Way(hunt=hunt, plan=plan))
    left_s = max(0.0, budget_s - spent_ops / OPS_PER_S)
    return _Begun(ways=ways, refused=refused, num_left_out=num_left_out, left_s=left_s)


def _roomy(job: JobSpec, fleet: Fleet, previous: Plan | None) -> Fleet:
    """The fleet with meshes as large as the balanced plan may take them for."""
    return within_devices(job, fleet, partial(balanced_on, job, previous))[0] if has_mesh(fleet) else fleet


def _nearest(refused: Sequence[tuple[JobSpec, Infeasible]]) -> Infeasible:
    """The refusal that lacks the fewest bytes."""
    return min((x for _, x in refused), key=lambda x: x.missing_bytes or math.inf)


def _settled_so(best: _Way, others: Sequence[_Way]) -> Clause:
    nexts = [(x.hunt.job, x.plan.predicted_step_s) for x in others[:NUM_LOST]]
    return settled_so(best.hunt.job, nexts)


def _begun_s(search: Search) -> float:
    return math.inf if search.best is None else search.best.cost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beginning:
    """Searches that have a start, each with its problem; how long the starts are, and who lacks room for others.

    The second search, if any, has slots of its own for one order, and begins close to the first one or below.
    """

    searches: tuple[tuple[Posed, Search], ...]
    started: _Started
    lacking: Mapping[str, Crowded]

    def crowded(self, pool: Pool) -> Iterator[Clause]:
        """Clause about the orders that lack least."""
        nearest = sorted(self.lacking.items(), key=lambda x: (x[1].needed - x[1].has, x[0]))[:NUM_LOST]
        told = " and ".join(
            f"{name} (needs {counted(x.needed, 'slot')} on {pool.workers[x.worker]}, has {x.has})"
            for name, x in nearest
        )
        if told:
            yield Clause(f"no memory for {told}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hunt:
    """Plan that is asked for; all but `held`, the plan that is in place, as in `make_searched_plan`."""

    job: JobSpec
    fleet: Fleet
    pool: Pool
    seed: int
    may_go_on: Callable[[], bool]
    held: Held | None

    def spending(self, budget_s: float) -> "_Hunt":
        """The same with another budget."""
        plan = self.job.plan.model_copy(update={"budget_s": budget_s})
        return replace(self, job=self.job.model_copy(update={"plan": plan}))

    def found(self, balanced: Plan, previous: Plan | None) -> Plan:
        """A plan from nothing, or the one that follows `previous`."""
        plan = self.begun(balanced) if previous is None else self.followed(balanced, previous)
        devices = fullest_devices(self.job, self.fleet, plan.stages, plan.chunks)
        if not any(device.is_short for device in devices):
            return plan
        roomy = make_balanced_plan(self.job, self.fleet, previous, self.seed)
        return roomy if isinstance(roomy, Plan) else plan

    def begun(self, balanced: Plan) -> Plan:
        """A plan from nothing, with equal stages or with those that suit who holds them."""
        budget_s = self.job.plan.budget_s
        if recut(self.job, self.fleet, balanced) is None:
            return self.improved(balanced, budget_s)
        # Half of the budget for each cut: which is better shows only once both are searched.
        even = self.improved(balanced, budget_s / 2)
        uneven = recut(self.job, self.fleet, even)
        if uneven is None:
            return even
        uneven = self.improved(uneven, budget_s / 2)
        if uneven.predicted_step_s >= even.predicted_step_s or violations(uneven, self.job, self.fleet):
            return even
        better = f"{uneven.predicted_step_s / even.predicted_step_s:.0%} of the step with equal stages"
        return replace(
            uneven, reason=uneven.reason.then(Clause(f"{widths(uneven)} layers a stage: {better}"))
        )

    def followed(self, balanced: Plan, previous: Plan) -> Plan:
        """The plan that follows `previous`: after a loss as little moved as pays, for who is left waits for it."""
        alive = set(self.pool.workers)
        is_loss = not set(previous.workers) <= alive
        if is_loss and previous.stages == balanced.stages:
            follower = self._follower(balanced, previous)
            if follower is not None:
                return follower
        # The previous one is improved if it could run on and has a chunk for every worker that is of use.
        has_fewer = len(working(previous, alive).chunks) < len(working(balanced, alive).chunks)
        base = balanced if has_fewer or violations(previous, self.job, self.fleet) else previous
        return self.improved(base, self.job.plan.budget_s)

    def _follower(self, balanced: Plan, previous: Plan) -> Plan | None:
        """The plan that goes on from what is held; None if that cannot stay as it is."""
        posed = pose(self.job, self.fleet, balanced, self.pool)
        if (posed.problem.slots < 1).all(axis=0).any():
            return None
        followed = replan_job(
            posed,
            working(previous, set(self.pool.workers)),
            most_chunks=posed.problem.num_chunks,
            steps_left=None if self.held is None else self.held.steps_left,
            num_ops=self.job.plan.budget_s * OPS_PER_S,
            seed=self.seed,
            may_go_on=self.may_go_on,
        )
        if followed is None:
            return None
        started = ((previous.predicted_step_s, "the plan before"),)
        plan = plan_of(self.job, balanced, followed.posed, followed.found, started=started)
        plan = replace(plan, reason=plan.reason.then(*followed.why))
        return self._timed(self._joined(plan, previous, followed.posed), followed.posed)

    def improved(self, plan: Plan, budget_s: float) -> Plan:
        """`plan` with placement, paths and order from a search; itself if its problem cannot be posed."""
        held, loads = self.held, stage_loads(self.job, plan.stages)
        move_s = None if held is None else held.move_s(plan.stages, loads, self.pool)
        posed = pose(self.job, self.fleet, plan, self.pool, move_s=move_s)
        beginning = self._begun(posed, plan)
        if not beginning.searches:
            return plan
        searches = list(beginning.searches)
        # Other numbers of holders would move state, so they are tried only where nothing is held.
        other = None if held is not None else resized(posed)
        if other is not None:
            searches.append((other, Search(other.problem, seed=self.seed)))
            searches[-1][1].begin()
        num_moves = num_moves_in(budget_s, posed.problem.num_ops) // len(searches)
        founds = [(at, self._searched(search, num_moves)) for at, search in searches]
        posed, best = min(
            ((at, found) for at, found in founds if found is not None), key=lambda x: x[1].cost_s
        )
        better = plan_of(self.job, plan, posed, best, started=beginning.started)
        better = replace(better, reason=better.reason.then(*beginning.crowded(posed.pool)))
        better = self._joined(better, plan if held is None else held.plan, posed)
        moved = () if held is None else held.moved(better, loads)
        doubts = doubted(posed.problem.transfer_s, self.fleet, posed.pool)
        better = replace(better, reason=better.reason.then(*moved, *doubts))
        return self._timed(better, posed) or plan

    def _begun(self, posed: Posed, plan: Plan) -> "_Beginning":
        """Beginning of a search of `posed`: orders by name, and that of `plan` itself."""
        own, problem = routing_of(plan, posed), posed.problem
        starts = [*named_orders(problem, posed.worker_of, posed.path)]
        if own is not None:
            starts.append(NamedStart(name="its own", routing=own, within=with_room(problem, own)))
        searches = [even := Search(problem, seed=self.seed)]
        least_s: dict[str, float] = {}
        crowded: dict[str, Crowded] = {}
        for start in starts:
            if isinstance(start.within, Crowded):
                crowded.setdefault(start.name, start.within)
                continue
            search = even if start.within is problem else Search(start.within, seed=self.seed)
            found = search.consider(start.routing)
            if found is not None:
                least_s[start.name] = min(found.jittered_s, least_s.get(start.name, found.jittered_s))
                searches += [] if search is even else [search]
        roomy = sorted(searches[1:], key=_begun_s)[:1]
        return _Beginning(
            searches=tuple(
                (replace(posed, problem=search.problem), search)
                for search in (even, *roomy)
                if search.best is not None and _begun_s(search) <= _CLOSE * _begun_s(even)
            ),
            started=tuple(sorted((seconds, name) for name, seconds in least_s.items())),
            lacking={name: x for name, x in crowded.items() if name not in least_s},
        )

    def _searched(self, search: Search, num_moves: int) -> Found | None:
        for slice_ in slices(num_moves, search.problem.num_ops):
            if not self.may_go_on():
                break
            search.run(slice_)
        return search.best

    def _joined(self, plan: Plan, before: Plan, posed: Posed) -> Plan:
        """`plan` with silent holders, where they are already in `before` if that is of use."""
        return with_silent(plan, self.job, posed.loads, self.pool, [x.chunk for x in before.chunks])

    def _timed(self, plan: Plan, posed: Posed) -> Plan | None:
        """`plan` with the times that it was made by, and with who holds most; None if it is not legal."""
        if violations(plan, self.job, self.fleet):
            return None
        timed = with_times(plan, posed.loads, self.pool, *op_times(self.fleet, posed.loads, self.pool))
        return replace(timed, reason=timed.reason.saying(fullest(timed, self.job)))


def searched_step_s(job: JobSpec, fleet: Fleet, plan: Plan) -> float | None:
    """Predicted seconds of a step of `plan` on `fleet`, by the measure of searches; None if it cannot run there."""
    if violations(plan, job, fleet):
        return None
    job = settled(job, plan)
    pool = pool_of(job, fleet)
    posed = pose(job, fleet, plan, pool)
    routing = routing_of(plan, posed)
    if routing is None:
        return None
    at_work = working(plan, set(pool.workers))
    silent_s = slower_s(at_work, job, pool, [x.chunk for x in plan.chunks])
    room = with_room(posed.problem, routing)
    assert isinstance(room, Problem), "it is a routing of the plan"
    return jittered_mean_s(room, routing, num_draws=NUM_JITTERS) + silent_s


def plan_of(job: JobSpec, base: Plan, posed: Posed, found: Found, *, started: _Started) -> Plan:
    """The plan that a routing of `posed` describes, with the stages of `base`."""
    problem, pool, routing = posed.problem, posed.pool, found.routing
    refs = _refs(posed, routing.worker_of)
    holders = [
        sorted(int(w) for w in routing.worker_of[problem.stage_of == stage])
        for stage in range(problem.num_stages)
    ]
    everywhere = [*holders, holders[0]] if base.layout.comes_back else holders
    chunks = tuple(
        ChunkRef(stage=stage.index, worker=pool.workers[worker])
        for stage, held in zip(base.stages, everywhere, strict=True)
        for worker in held
    )
    num_held = np.bincount(routing.worker_of, minlength=problem.num_workers)
    full = find_paths(
        base.stages,
        base.layout,
        holders,
        problem.num_microbatches,
        pool.speeds / np.maximum(num_held, 1),
        pool,
    )
    # Slots of the order's own are no reason why another order could not be shorter.
    widest = replace(problem, slots=np.maximum(problem.slots, posed.even_slots))
    bound = lower_bound(widest, effort=Effort.SIMPLE)
    slots = _slots(problem, routing, refs)
    plan = replace(
        base,
        chunks=tuple(ChunkPlan(chunk=chunk, slots=slots.get(chunk, 1)) for chunk in chunks),
        paths=tuple(_path(refs, base, row, problem.split) for row in routing.path),
        evaluation_paths=tuple(dict.fromkeys(full)),
        schedules=_schedules(problem, base, routing, refs),
        alternates=tuple(alternates_of(chunks, pool)),
        groups=tuple(group for group, _ in groups_of(job, base.stages, chunks, pool)),
        predicted_step_s=found.jittered_s,
        lower_bound_s=bound.seconds,
        reason=Clauses((held_by(holders, len(pool.workers)),)).then(
            Clause(f"paths of {problem.path_len} of {counted(problem.num_stages, 'stage')}"),
            searched_from(found.jittered_s, started),
            Clause(f"bounded by {bound.binding}"),
        ),
    )
    return replace(plan, reason=plan.reason.then(*shard_clauses(job.model, plan)))


def _refs(posed: Posed, worker_of: I64) -> list[ChunkRef]:
    """Each chunk of the problem as the plan calls it."""
    stages = posed.problem.stage_of
    return [
        ChunkRef(stage=StageIndex(int(stage)), worker=posed.pool.workers[worker])
        for stage, worker in zip(stages, worker_of, strict=True)
    ]


def _path(refs: Sequence[ChunkRef], base: Plan, row: I64, split: tuple[int, ...]) -> Path:
    hops = [refs[chunk] for chunk in row]
    if base.layout.comes_back:
        hops[-1] = ChunkRef(stage=base.stages[-1].index, worker=hops[0].worker)
    return Path(hops=tuple(hops), split=split)


def _schedules(
    problem: Problem, base: Plan, routing: Routing, refs: Sequence[ChunkRef]
) -> tuple[Schedule, ...]:
    """Every worker's part of the sequence."""
    last = base.stages[-1].index
    ops: dict[WorkerId, list[PlannedOp]] = {ref.worker: [] for ref in sorted(refs, key=lambda x: x.worker)}
    for m, number in zip(*np.divmod(routing.sequence, len(problem.ops)), strict=True):
        op = problem.ops[number]
        ref = refs[routing.path[m, op.hop]]
        stage = last if op.kind.row.is_last else ref.stage
        ops[ref.worker].append(PlannedOp(kind=op.kind, stage=stage, microbatch=MicrobatchId(int(m))))
    return tuple(Schedule(worker=worker, ops=tuple(planned)) for worker, planned in ops.items())


def _slots(problem: Problem, routing: Routing, refs: Sequence[ChunkRef]) -> dict[ChunkRef, int]:
    """Slots of each chunk: as many as fit, but no more than ever take one there."""
    num_hops = max(problem.num_hops, len(problem.split))
    visits = np.bincount(routing.path[:, :num_hops].ravel(), minlength=problem.num_chunks)
    fitting = problem.slots[routing.worker_of, problem.stage_of]
    return {ref: max(1, int(slots)) for ref, slots in zip(refs, np.minimum(visits, fitting), strict=True)}
