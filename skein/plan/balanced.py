"""The balanced planner: stages of equal work, holders in proportion, near ones together, nothing moved without need.

It settles each question once, in this order: cut, placement, paths, slots, schedules. Nothing is searched, so it
answers in about a second for a thousand workers; its plan is what a searching planner has to beat.

Rules of this file
- Where memory allows it, the cut follows from the job alone. So stages that workers hold, or a checkpoint has, still
  fit after a restart with other workers; unequal speeds are met by placement and by shares of microbatches.
- What a plan says depends on placement and fleet, not on how the placement came about: planning again with nothing
  changed gives the same plan.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from skein.config.job import JobSpec
from skein.errors import UserError
from skein.model.rows import RowCut, ShardScope
from skein.plan.agreeing.walkers import lines_of, paths_within, walkers_of
from skein.plan.changing.clauses import About, Clause, Clauses, and_more, held_by
from skein.plan.changing.easing import with_cure
from skein.plan.changing.leeway import is_settled, settled, settlings, weighed_s
from skein.plan.changing.redundancy import num_missing
from skein.plan.changing.shards import SeatedShards, is_near, seat_shards, shard_clauses
from skein.plan.changing.silent import slower_s, with_silent, working
from skein.plan.check import too_few, violations
from skein.plan.clock.listed import timed_schedules
from skein.plan.clock.timing import (
    Traffic,
    depths,
    estimate_s,
    lower_bound_s,
    op_times,
    reduction_s,
    stage_speeds,
    traffic,
    with_times,
)
from skein.plan.clock.walked import MOST_OPS, Pace, pace_of, sums_of, walked_s
from skein.plan.cut import cut_job, cut_under_memory
from skein.plan.groups import alternates_of, groups_of
from skein.plan.load import (
    StageLoad,
    brought_bytes,
    slots_within,
    spared_bytes,
    split_stages,
    stage_loads,
    together_bytes,
)
from skein.plan.mesh.room import refused_without_mesh, within_devices
from skein.plan.order import ascending_schedules
from skein.plan.paths import find_paths, find_skipping_paths, split_at, widest_jump
from skein.plan.place import Demand, Pool, Seating, of_use, reseat, seat
from skein.plan.plan import ChunkPlan, Group, Infeasible, Path, Plan, Schedule
from skein.topology.fleet import Fleet
from skein.topology.links import F64, link_cost_s
from skein.types import ChunkRef, Layout, StageSpec, WorkerId
from skein.units import counted, format_bytes


def make_balanced_plan(
    job: JobSpec,
    fleet: Fleet,
    previous: Plan | None,
    seed: int,
) -> Plan | Infeasible:
    """The balanced plan of `job` on `fleet`. Equal inputs give an equal plan.

    With fewer workers than stages times replicas, some stages have one holder less; with fewer than stages, workers
    hold several adjacent ones. Workers beyond what the job asks for stay idle. Those too slow to be of use get no
    microbatches, and hold silently what lacks holders.

    Args:
        job: what to train; assumed to have passed `skein.plan.cut.check_job`.
        fleet: who may be given work.
        previous: the plan so far, if any: its cut stays, and its chunks stay where they are if they can.
        seed: not used by this planner.
    """
    if not fleet.workers:
        return Infeasible(reason="no worker is alive")
    if previous is None and (refused := refused_without_mesh(job, fleet)) is not None:
        return refused
    if not is_settled(job):
        plans = [(x, make_balanced_plan(x, fleet, previous, seed)) for x in settlings(job, previous)]
        _, best = min(plans, key=lambda x: weighed_s(x[0], x[1]) if isinstance(x[1], Plan) else math.inf)
        return best
    most, jump = job.skip.max_jump, _widest_jump(job)
    if most is not None and jump > most:
        return Infeasible(
            reason=f"leaving stages out in rotation jumps {jump} at once: skip.max_jump is {most}"
        )
    return within_devices(job, fleet, partial(balanced_on, job, previous))[1]


def balanced_on(job: JobSpec, previous: Plan | None, fleet: Fleet) -> Plan | Infeasible:
    """The balanced plan of a settled job, whatever devices of meshes have room for."""
    try:
        even = cut_job(job)
    except UserError as error:
        return Infeasible(reason=str(error))
    setting = Setting(job=job, fleet=fleet, pool=pool_of(job, fleet))
    if previous is not None and _has_same_cut(previous, even, job.parallel.layout):
        plan = _replan(setting, previous)
        if plan is not None:
            return _with_enough(plan, job)
    made = _plan_afresh(setting, even)
    return made if isinstance(made, Infeasible) else _with_enough(made, job)


def _with_enough(plan: Plan, job: JobSpec) -> Plan | Infeasible:
    """The plan, if those whom a robust combiner compares are as many as it needs."""
    reason = too_few(plan, job)
    return plan if reason is None else Infeasible(reason=reason)


def balanced_step_s(job: JobSpec, fleet: Fleet, plan: Plan) -> float | None:
    """Predicted seconds of a step of `plan` on `fleet`, by this planner; None if it cannot run there."""
    if violations(plan, job, fleet):
        return None
    job = settled(job, plan)
    setting = Setting(job=job, fleet=fleet, pool=pool_of(job, fleet))
    at_work = working(plan, set(setting.pool.workers))
    chunks = tuple(placed.chunk for placed in at_work.chunks)
    slots = {placed.chunk: placed.slots for placed in at_work.chunks}
    groups = setting.groups(plan.stages, chunks)
    silent_s = slower_s(at_work, job, setting.pool, [placed.chunk for placed in plan.chunks])
    return setting.predicted_s(plan.stages, plan.paths, at_work.schedules, slots, groups) + silent_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Job, fleet and pool, which do not change while one plan is made."""

    job: JobSpec
    fleet: Fleet
    pool: Pool

    def loads(self, stages: Sequence[StageSpec]) -> tuple[StageLoad, ...]:
        return stage_loads(self.job, stages)

    def groups(
        self, stages: Sequence[StageSpec], chunks: Sequence[ChunkRef]
    ) -> tuple[tuple[Group, int], ...]:
        """Groups of the plan, each with the bytes that it reduces."""
        return tuple(groups_of(self.job, stages, chunks, self.pool))

    def pace(self, stages: Sequence[StageSpec]) -> Pace:
        """The pace of these stages on the pool."""
        loads = self.loads(stages)
        return pace_of(self.pool, loads, *op_times(self.fleet, loads, self.pool))

    def schedules(
        self, stages: Sequence[StageSpec], paths: Sequence[Path], slots: Mapping[ChunkRef, int]
    ) -> tuple[Schedule, ...]:
        """Orders by the clock, as workers take what is there; by microbatch where a step is too long for that."""
        workers = (chunk.worker for chunk in slots)
        if sum(len(path.ops) for path in paths) <= MOST_OPS:
            return timed_schedules(paths, slots, workers, self.pace(stages))
        return ascending_schedules(paths, slots, workers)

    def predicted_s(
        self,
        stages: Sequence[StageSpec],
        paths: Sequence[Path],
        schedules: Sequence[Schedule],
        slots: Mapping[ChunkRef, int],
        groups: Sequence[tuple[Group, int]],
    ) -> float:
        """Seconds of a step, walked through where it is short enough for that; estimated otherwise."""
        pool = self.pool
        # An exchange is no part of every step; what it costs is told by client.planning.estimates.
        summed = groups if self.job.aggregation.walkers.sum_every_step else ()
        sums = sums_of(summed, self.job.parallel.layout, pool)
        walk_s = walked_s(paths, schedules, sums, self.pace(stages))
        if walk_s is not None:
            return walk_s
        reductions_s = [reduction_s(group, num_bytes, pool) for group, num_bytes in summed]
        return estimate_s(self.timed(stages, paths), slots, reductions_s)

    def lower_bound_s(self, stages: Sequence[StageSpec], paths: Sequence[Path]) -> float:
        """Seconds that no schedule of these paths can beat, by the times that `predicted_s` goes by."""
        loads, of = self.loads(stages), self.timed(stages, paths)
        if any(path.split for path in paths):
            # Weight ops need not lie within a trip.
            of = replace(of, trips=())
        return lower_bound_s(of, loads, self.pool, stage_speeds(self.fleet, loads, self.pool))

    def timed(self, stages: Sequence[StageSpec], paths: Sequence[Path]) -> Traffic:
        loads = self.loads(stages)
        return traffic(paths, loads, self.pool, stage_speeds(self.fleet, loads, self.pool))

    def demand(self, stages: Sequence[StageSpec]) -> Demand:
        """Demand of the body stages; stage 0 carries the head stage of `LOOP`."""
        loads = self.loads(stages)
        flops = np.array([x.flops for x in loads], dtype=np.float64)
        memory_bytes = np.array([x.memory_bytes(1) for x in loads], dtype=np.int64)
        spared = spared_bytes(loads)
        if self.job.parallel.layout.comes_back:
            flops[0] += flops[-1]
            memory_bytes[0] = together_bytes([loads[0], loads[-1]], [1, 1])
            flops, memory_bytes, spared = flops[:-1], memory_bytes[:-1], {}
        num_microbatches = self.job.batch.num_microbatches
        return Demand(
            flops=flops * self._visited_share(),
            memory_bytes=memory_bytes,
            spared_bytes=spared,
            replicas=min(self.job.parallel.replicas, num_microbatches),
            num_microbatches=num_microbatches,
        )

    def _visited_share(self) -> F64:
        """Share of the microbatches that visits each body stage, (num_stages,)."""
        parallel, num_fixed = self.job.parallel, self.job.num_fixed_stages
        share = np.ones(parallel.num_stages)
        if parallel.num_stages > num_fixed:
            share[list(parallel.layout.inner(parallel.num_stages))] = (
                self.job.num_visited_stages - num_fixed
            ) / (parallel.num_stages - num_fixed)
        return share

    def paths(
        self, stages: Sequence[StageSpec], holders: Sequence[Sequence[int]], speeds: F64
    ) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
        """Paths of a step's microbatches, and the distinct full ones."""
        job, layout = self.job, self.job.parallel.layout
        num_microbatches, num_visited = job.batch.num_microbatches, job.num_visited_stages
        full = find_paths(stages, layout, holders, num_microbatches, speeds, self.pool)
        distinct = tuple(dict.fromkeys(full))
        if num_visited == job.parallel.num_stages:
            return full, distinct
        skipping = find_skipping_paths(
            stages, layout, holders, num_microbatches, num_visited, speeds, self.pool
        )
        return skipping, distinct


def pool_of(job: JobSpec, fleet: Fleet) -> Pool:
    """The fleet as arrays; its round trips are of the largest boundary tensor."""
    links = link_cost_s(fleet)
    return Pool(
        workers=tuple(worker.worker for worker in fleet.workers),
        # A worker that measured nothing is the slowest there is, not a division by zero.
        speeds=np.array([max(worker.profile.flops_per_s, 1.0) for worker in fleet.workers]),
        memory_bytes=np.array([worker.profile.memory_bytes for worker in fleet.workers], dtype=np.int64),
        links=links,
        round_trip_s=links.round_trip_s(
            job.batch.microbatch_samples * max(x.output_bytes for x in job.layers)
        ),
    )


def _widest_jump(job: JobSpec) -> int:
    return widest_jump(job.parallel.num_stages, job.num_visited_stages, job.parallel.layout)


def _has_same_cut(previous: Plan, even: Sequence[StageSpec], layout: Layout) -> bool:
    """Whether the previous plan was made for this model and number of stages; where it cut them does not matter."""
    if previous.layout is not layout or len(previous.stages) != len(even):
        return False
    return previous.stages[-1].stop == even[-1].stop


def _replan(setting: Setting, previous: Plan) -> Plan | None:
    """The plan nearest to the previous one; None if its stages fit nowhere any more.

    Where a plan that moves more gives stages more of the holders that the job asks for, it is that one: holders come
    before speed.
    """
    near = _near(setting, previous)
    replicas = setting.job.parallel.replicas
    if near is None or not num_missing(near, replicas):
        return near
    seating = _seated_anywhere(setting, previous.stages)
    anywhere = None if seating is None else _finish(setting, previous.stages, seating, previous)
    if anywhere is None or num_missing(anywhere, replicas) >= num_missing(near, replicas):
        return near
    return anywhere


def _seated_anywhere(setting: Setting, stages: Sequence[StageSpec]) -> Seating | None:
    """Holders of these stages, wherever they were before."""
    parallel, vocabulary = setting.job.parallel, setting.job.parallel.vocabulary
    if not parallel.num_shards or vocabulary.scope is ShardScope.PIPELINE:
        return _seated(setting, stages)
    found = _with_places(setting, stages, by_memory=False)
    return found.seating if isinstance(found, SeatedShards) else None


def _near(setting: Setting, previous: Plan) -> Plan | None:
    """The plan that leaves as much as it can where it is."""
    demand = setting.demand(previous.stages)
    position = {worker: i for i, worker in enumerate(setting.pool.workers)}
    held = [
        (int(x.chunk.stage), position[x.chunk.worker])
        for x in working(previous, position).chunks
        if x.chunk.worker in position and x.chunk.stage < len(demand.flops)
    ]
    # Who is too slow for a microbatch holds silently, where that can be.
    kept = of_use(demand, setting.pool, held) if setting.job.aggregation.is_additive else held
    seating = reseat(demand, setting.pool, kept) or seat(demand, setting.pool)
    if seating is not None and not _is_in_scope(setting, seating):
        found = _with_places(setting, previous.stages, by_memory=False)
        seating = found.seating if isinstance(found, SeatedShards) else seating
    return None if seating is None else _finish(setting, previous.stages, seating, previous)


def _is_in_scope(setting: Setting, seating: Seating) -> bool:
    """Whether shards that are to be in the site of the last layers between the ends are there."""
    _, between, outputs = setting.job.parallel.runs
    if setting.job.parallel.vocabulary.scope is ShardScope.PIPELINE or not outputs:
        return True
    near = is_near(setting.fleet, seating.holders[between[-1]])
    shards = [stage for run in setting.job.parallel.runs[::2] for stage in run]
    return all(near[worker] for stage in shards for worker in seating.holders[stage])


def _plan_afresh(setting: Setting, even: tuple[StageSpec, ...]) -> Plan | Infeasible:
    parallel, vocabulary = setting.job.parallel, setting.job.parallel.vocabulary
    is_beside = vocabulary.rows is not RowCut.MEMORY and vocabulary.scope is ShardScope.PIPELINE
    if is_beside or not parallel.num_shards:
        seating = _seated(setting, even)
        if seating is not None:
            return _finish(setting, even, seating, None)
    elif vocabulary.rows is not RowCut.MEMORY:
        found = _with_places(setting, even, by_memory=False)
        if found is not None:
            return _finished(setting, found)
    if parallel.num_shards and vocabulary.rows is not RowCut.EVEN:
        found = _with_places(setting, even, by_memory=True)
        if found is not None:
            return _finished(setting, found)
    fitting = cut_under_memory(setting.job, setting.pool)
    if isinstance(fitting, Infeasible):
        return with_cure(fitting, setting.job, setting.pool)
    seating = reseat(setting.demand(fitting.stages), setting.pool, enumerate(fitting.worker_by_stage))
    assert seating is not None, "every stage has a worker with room for it"
    return _finish(setting, fitting.stages, seating, None)


def _finished(setting: Setting, found: SeatedShards | Infeasible) -> Plan | Infeasible:
    return found if isinstance(found, Infeasible) else _finish(setting, found.stages, found.seating, None)


def _seated(setting: Setting, stages: Sequence[StageSpec]) -> Seating | None:
    """Holders of all stages; a worker's chunks are held together, so that they leave workers for other holders.

    Where workers are too few for that, or have too little memory, each chunk is placed by itself.
    """
    parallel = setting.job.parallel
    num_chunks = (parallel.num_stages - parallel.num_shards) // parallel.stages
    if num_chunks > 1 and len(setting.pool.workers) >= parallel.stages:
        seating = _seated_together(setting, stages, num_chunks)
        if seating is not None:
            return seating
    return _seated_together(setting, stages, 1)


def _with_places(
    setting: Setting, stages: Sequence[StageSpec], *, by_memory: bool
) -> SeatedShards | Infeasible | None:
    """Layers between the ends as if they were all there is, and shards of the vocabulary where they may be."""
    demand, between = setting.demand(stages), [*setting.job.parallel.runs[1]]
    alone = replace(
        demand,
        flops=demand.flops[between],
        memory_bytes=demand.memory_bytes[between],
        spared_bytes={},
    )
    seating = _seated_by(alone, setting.pool, len(between) // setting.job.parallel.stages)
    if seating is None:
        return None
    return seat_shards(setting.job, setting.fleet, stages, seating, setting.demand, by_memory=by_memory)


def _seated_by(demand: Demand, pool: Pool, num_chunks: int) -> Seating | None:
    """Holders of stages without shards, so many beside each other together."""
    together = [[*range(at, at + num_chunks)] for at in range(0, len(demand.flops), num_chunks)]
    return _seated_jointly(demand, pool, together)


def _seated_together(setting: Setting, stages: Sequence[StageSpec], num_chunks: int) -> Seating | None:
    """Holders of all stages: so many beside each other together, and a shard of each end with some of them."""
    demand, parallel = setting.demand(stages), setting.job.parallel
    if num_chunks == 1 and not parallel.num_shards:
        return seat(demand, setting.pool)
    inputs, between, outputs = parallel.runs
    together = [[*between[at : at + num_chunks]] for at in range(0, len(between), num_chunks)]
    # A worker's chunks lie beside each other.
    bases = together[:: len(together) // parallel.stages]
    for shards in (inputs, outputs):
        for held, shard in zip(bases, shards, strict=False):
            held.append(shard)
    return _seated_jointly(demand, setting.pool, together)


def _seated_jointly(demand: Demand, pool: Pool, together: Sequence[Sequence[int]]) -> Seating | None:
    """Holders of all stages, of which some lie together."""
    joint = replace(
        demand,
        flops=np.array([demand.flops[[*held]].sum() for held in together]),
        memory_bytes=np.array([demand.bytes_of(held) for held in together]),
        spared_bytes=demand.spared_between(together),
    )
    seating = seat(joint, pool)
    if seating is None:
        return None
    placed = zip(together, seating.holders, strict=True)
    return reseat(demand, pool, [(s, w) for held, workers in placed for s in held for w in workers])


def _finish(setting: Setting, stages: tuple[StageSpec, ...], seating: Seating, previous: Plan | None) -> Plan:
    """Paths, slots, groups and figures of a placement."""
    pool, loads = setting.pool, setting.loads(stages)
    holders = [sorted(x) for x in seating.holders]
    # Who holds several stages has only a part of its time for each.
    speeds = pool.speeds / np.array([max(len(held), 1) for held in seating.held])
    layout = setting.job.parallel.layout
    if setting.job.aggregation.walkers.are_lines:
        # Walkers that are complete keep their workers: another line would have to fetch their parameters.
        earlier = () if previous is None else [[x.worker for x in line] for line in walkers_of(previous)]
        lines = lines_of(holders, pool, [line[: len(holders)] for line in earlier])
        holders = [[line[stage] for line in lines] for stage in range(len(holders))]
        paths, evaluation_paths = paths_within(
            lines, stages, layout, setting.job.batch.num_microbatches, pool
        )
    else:
        paths, evaluation_paths = setting.paths(stages, holders, speeds)
    paths = split_at(paths, split_stages(setting.job, stages))
    if layout.comes_back:
        holders.append(holders[0])
    chunks = tuple(
        ChunkRef(stage=stage.index, worker=pool.workers[worker])
        for stage, workers in zip(stages, holders, strict=True)
        for worker in workers
    )
    step = traffic(paths, loads, pool)
    groups = setting.groups(stages, chunks)
    # What is put aside takes slots longer than a warm-up counts on.
    depths_wanted = [depths(step), dict(step.visits)] if setting.job.plan.splits else [depths(step)]
    listed = []
    for wanted in depths_wanted:
        slots = _slots(chunks, loads, wanted, pool)
        schedules = setting.schedules(stages, paths, slots)
        predicted_s = setting.predicted_s(stages, paths, schedules, slots, groups)
        listed.append((predicted_s, schedules, slots, wanted))
    predicted_s, schedules, slots, wanted = min(listed, key=lambda x: x[0])
    plan = Plan(
        layout=layout,
        stages=stages,
        chunks=tuple(ChunkPlan(chunk=chunk, slots=slots[chunk]) for chunk in chunks),
        paths=paths,
        evaluation_paths=evaluation_paths,
        schedules=schedules,
        alternates=tuple(alternates_of(chunks, pool)),
        groups=tuple(group for group, _ in groups),
        predicted_step_s=predicted_s,
        # Sums in another order differ in the last bits.
        lower_bound_s=min(predicted_s, setting.lower_bound_s(stages, paths)),
        reason=Clauses(tuple(_reasons(setting.job, seating, step, slots, wanted, loads, previous))),
    )
    for clause in shard_clauses(setting.job.model, plan):
        plan = replace(plan, reason=plan.reason.saying(clause))
    before = () if previous is None else [x.chunk for x in previous.chunks]
    # After all else: no path, order or placement may depend on who holds silently.
    plan = with_silent(plan, setting.job, loads, pool, before)
    return with_times(plan, loads, pool, *op_times(setting.fleet, loads, pool))


def _slots(
    chunks: Sequence[ChunkRef], loads: Sequence[StageLoad], wanted: dict[ChunkRef, int], pool: Pool
) -> dict[ChunkRef, int]:
    chunks_by_worker: defaultdict[WorkerId, list[ChunkRef]] = defaultdict(list)
    for chunk in chunks:
        chunks_by_worker[chunk.worker].append(chunk)
    slots: dict[ChunkRef, int] = {}
    for worker, memory_bytes in zip(pool.workers, pool.memory_bytes, strict=True):
        if own := chunks_by_worker.get(worker):
            needs = [loads[chunk.stage] for chunk in own]
            depth = [wanted.get(chunk, 1) for chunk in own]
            slots.update(zip(own, slots_within(needs, depth, int(memory_bytes)), strict=True))
    return slots


def _reasons(
    job: JobSpec,
    seating: Seating,
    step: Traffic,
    slots: dict[ChunkRef, int],
    wanted: dict[ChunkRef, int],
    loads: Sequence[StageLoad],
    previous: Plan | None,
) -> Iterator[Clause]:
    yield held_by(seating.holders, len(seating.held))
    first, *others = sorted(chunk.stage for chunk in step.visits if chunk.worker == step.slowest)
    yield Clause(f"{step.slowest} computes longest (stage {first}{and_more(others)})")
    num_split = len(split_stages(job, [load.stage for load in loads]))
    if num_split:
        yield Clause(f"backwards of {counted(num_split, 'stage')} are split")
    num_cut = sum(1 for chunk, depth in wanted.items() if slots[chunk] < depth)
    if num_cut:
        yield Clause(f"memory cuts the microbatches in flight of {counted(num_cut, 'chunk')}")
    if previous is not None:
        before = {plan.chunk for plan in previous.chunks}
        moved = sorted(chunk for chunk in slots if chunk not in before)
        if moved:
            state = format_bytes(brought_bytes(loads, job.parallel.layout, moved, slots))
            what = f"{state} of state: stage {moved[0].stage} to {moved[0].worker}{and_more(moved[1:])}"
            yield Clause(what, About.MOVES)
