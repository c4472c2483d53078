"""Rules that every plan must satisfy, whoever made it. A coordinator adopts none that violates any of them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

from skein.config.job import JobSpec
from skein.model.reduced import reduced_by_group
from skein.plan.agreeing.exchange import Direct, Ring, Tree, is_tree
from skein.plan.agreeing.walkers import walkers_of
from skein.plan.changing.leeway import settled
from skein.plan.load import split_stages, stage_loads, together_bytes
from skein.plan.mesh.room import fullest_devices
from skein.plan.ops import Kept
from skein.plan.order import left_undone, ops_of
from skein.plan.plan import ChunkPlan, Group, Path, Plan, PlannedOp, Schedule
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, Layout, MicrobatchId, StageIndex, StageSpec, WorkerId
from skein.units import format_bytes


def violations(plan: Plan, job: JobSpec, fleet: Fleet) -> tuple[str, ...]:
    """Violations of `plan` for `job` on `fleet`, a sentence each; empty for a plan that may be adopted."""
    job = settled(job, plan)
    cut = tuple(_cut(plan, job))
    if cut:
        return cut
    walked = (*_chunks(plan, fleet), *_paths(plan, job), *_evaluation_paths(plan))
    found = (
        walked,
        # An order of ops means something only where the paths do.
        () if walked else _orders(plan),
        _alternates(plan),
        _groups(plan, job),
        _walkers(plan, job),
        _memory(plan, job, fleet),
        _devices(plan, job, fleet),
        _figures(plan),
    )
    return tuple(sentence for sentences in found for sentence in sentences)


def misplaced_stages(stages: Sequence[StageSpec]) -> Iterator[str]:
    """Stages that hold no layer or do not begin where the one before ends, a sentence each."""
    reached = 0
    for index, stage in enumerate(stages):
        if stage.index != index or stage.first != reached or stage.stop <= stage.first:
            yield f"stage {index} is {stage}, expected layers from {reached} on"
        reached = stage.stop


def _cut(plan: Plan, job: JobSpec) -> Iterator[str]:
    num_layers, parallel = len(job.layers), job.parallel
    num_stages = parallel.num_stages + parallel.layout.num_head_stages
    if plan.layout is not parallel.layout:
        yield f"the layout is {plan.layout}, the job asks for {parallel.layout}"
    if len(plan.stages) != num_stages:
        yield f"{len(plan.stages)} stages, the job asks for {num_stages}"
    yield from misplaced_stages(plan.stages)
    reached = plan.stages[-1].stop if plan.stages else 0
    if reached != num_layers:
        yield f"the stages end at layer {reached} of {num_layers}"
    if parallel.layout is Layout.LOOP and plan.stages and plan.stages[-1].first != num_layers - 1:
        yield "the head stage holds more than the head"


def _chunks(plan: Plan, fleet: Fleet) -> Iterator[str]:
    alive = {worker.worker for worker in fleet.workers}
    counts = Counter(x.chunk for x in plan.chunks)
    for stage in plan.stages:
        if not plan.holders(stage.index):
            yield f"nobody holds stage {stage.index}"
    for chunk, count in counts.items():
        if chunk.worker not in alive:
            yield f"{chunk.worker} holds stage {chunk.stage} and is not in the fleet"
        if not 0 <= chunk.stage < len(plan.stages):
            yield f"{chunk.worker} holds stage {chunk.stage}, which does not exist"
        if count > 1:
            yield f"{chunk.worker} is listed {count} times for stage {chunk.stage}"
    for x in plan.chunks:
        if x.slots < 1:
            yield f"{x.chunk.worker} has {x.slots} slots for stage {x.chunk.stage}, needs at least 1"
    if plan.layout is Layout.LOOP and set(plan.holders(StageIndex(0))) != set(
        plan.holders(plan.stages[-1].index)
    ):
        yield "the head is not held where the first stage is"


def _paths(plan: Plan, job: JobSpec) -> Iterator[str]:
    if len(plan.paths) != job.batch.num_microbatches:
        yield f"{len(plan.paths)} paths for {job.batch.num_microbatches} microbatches"
    held = {x.chunk for x in plan.chunks}
    for microbatch, path in enumerate(plan.paths):
        found = (*_ends(path, plan, held), *_way(path, plan, job), *_split(path, plan, job))
        yield from (f"path of microbatch {microbatch}: {what}" for what in found)
    counts = Counter(hop.stage for path in plan.paths for hop in path.hops)
    skippable = sorted(
        plan.layout.inner(job.parallel.num_stages), key=lambda stage: counts[StageIndex(stage)]
    )
    if skippable and counts[StageIndex(skippable[-1])] - counts[StageIndex(skippable[0])] > 1:
        seldom, often = (f"{counts[StageIndex(stage)]} times" for stage in (skippable[0], skippable[-1]))
        yield f"stage {skippable[-1]} is visited {often} in a step, stage {skippable[0]} {seldom}"


def _ends(path: Path, plan: Plan, held: Collection[ChunkRef]) -> Iterator[str]:
    """Faults of a path at its ends, and hops whose worker does not hold their stage."""
    for hop in path.hops:
        if hop not in held:
            yield f"{hop.worker} does not hold stage {hop.stage}"
    if not path.hops or path.hops[0].stage != 0:
        yield "does not begin at stage 0"
    elif path.end.stage != plan.stages[-1].index:
        yield f"does not end at stage {plan.stages[-1].index}, where the loss is"
    elif plan.layout is Layout.LOOP and path.hops[0].worker != path.end.worker:
        yield f"ends on {path.end.worker}, not where it began"


def _way(path: Path, plan: Plan, job: JobSpec) -> Iterator[str]:
    """Faults of a path that leaves the straight way further than the rules that keep convergence allow.

    Source: SkipPipe (arXiv 2502.19913), convergence constraints of its path search. The highest stage so far is the
    frontier; a step below it is a swap and lands exactly one below.
    """
    stages = [hop.stage for hop in path.hops]
    body = stages[: len(stages) - plan.layout.num_head_stages]
    if len(body) != job.num_visited_stages:
        yield f"visits {len(body)} stages, the job asks for {job.num_visited_stages}"
    if len(set(stages)) < len(stages):
        yield "visits a stage twice"
        return
    frontier, num_swaps = 0, 0
    for stage in body[1:]:
        if stage < frontier:
            num_swaps += 1
            if stage != frontier - 1:
                yield f"goes back from stage {frontier} to stage {stage}, which is not the one before"
        elif job.skip.max_jump is not None and stage - frontier > job.skip.max_jump:
            yield f"goes on from stage {frontier} to stage {stage}, the job allows {job.skip.max_jump} at once"
        frontier = max(frontier, stage)
    if num_swaps > job.skip.max_swaps:
        yield f"swaps stages {num_swaps} times, the job allows {job.skip.max_swaps}"


def _split(path: Path, plan: Plan, job: JobSpec) -> Iterator[str]:
    """Hops whose backward is split where the job wants it whole, or the other way round."""
    wanted = split_stages(job, plan.stages)
    if path.split != tuple(i for i, hop in enumerate(path.hops) if hop.stage in wanted):
        yield f"has split backwards at hops {list(path.split)}, the job wants them at stages {sorted(wanted)}"


def _evaluation_paths(plan: Plan) -> Iterator[str]:
    if not plan.evaluation_paths:
        yield "no path to evaluate on"
    held = {x.chunk for x in plan.chunks}
    for index, path in enumerate(plan.evaluation_paths):
        found = list(_ends(path, plan, held))
        if [hop.stage for hop in path.hops] != [stage.index for stage in plan.stages]:
            found.append("does not visit every stage once, in order")
        yield from (f"evaluation path {index}: {what}" for what in found)


def _orders(plan: Plan) -> Iterator[str]:
    """Whether schedules list what paths ask for, and can be carried out."""
    if [schedule.worker for schedule in plan.schedules] != list(plan.workers):
        yield f"schedules of {[str(x.worker) for x in plan.schedules]}, chunks of {[str(x) for x in plan.workers]}"
        return
    asked: defaultdict[WorkerId, Counter[PlannedOp]] = defaultdict(Counter)
    for index, path in enumerate(plan.paths):
        for placed in ops_of(MicrobatchId(index), path):
            asked[placed.chunk.worker][placed.op] += 1
    found = [sentence for x in plan.schedules for sentence in _schedule(x, asked[x.worker])]
    yield from found
    stuck = () if found else left_undone(plan)
    if stuck:
        yield f"the schedules make {len(stuck)} microbatches wait for each other, the first for {_named(stuck[0])}"


def _schedule(schedule: Schedule, asked: Counter[PlannedOp]) -> Iterator[str]:
    """Whether one worker's list has the ops that are asked of it, each forward before its backward."""
    listed = Counter(schedule.ops)
    for difference, word in ((asked - listed, "lacks"), (listed - asked, "has without need")):
        for op in list(difference)[:1]:
            yield f"the schedule of {schedule.worker} {word} {_named(op)}"
    left: set[tuple[StageIndex, MicrobatchId, Kept | None]] = set()
    for op in schedule.ops:
        row = op.kind.row
        if row.uses and op in asked and (op.stage, op.microbatch, row.uses) not in left:
            yield f"{schedule.worker} goes back through stage {op.stage} before forward: microbatch {op.microbatch}"
        left.add((op.stage, op.microbatch, row.leaves))


def _named(op: PlannedOp) -> str:
    return f"the {op.kind} of microbatch {op.microbatch} at stage {op.stage}"


def _alternates(plan: Plan) -> Iterator[str]:
    if [x.chunk for x in plan.alternates] != [x.chunk for x in plan.chunks]:
        yield "alternates are not listed once for each chunk, in their order"
    held = {x.chunk for x in plan.chunks}
    for x in plan.alternates:
        for other in x.others:
            if other == x.chunk or other not in held or other.stage != x.chunk.stage:
                yield f"{other.worker} is no alternate of {x.chunk.worker} for stage {x.chunk.stage}"
        if len(set(x.others)) < len(x.others):
            yield f"{x.chunk.worker} has an alternate twice for stage {x.chunk.stage}"


def _groups(plan: Plan, job: JobSpec) -> Iterator[str]:
    expected = reduced_by_group(job.model, plan.stages)
    groups = [str(group.group) for group in plan.groups]
    if sorted(groups) != sorted(map(str, expected)):
        yield f"groups {groups}, expected {list(map(str, expected))}"
    for group in plan.groups:
        reduced = expected.get(group.group)
        yield from _group(group, plan, () if reduced is None else reduced.stages)
        yield from _pattern(group, job)
    short = too_few(plan, job)
    if short is not None:
        yield short


def _group(group: Group, plan: Plan, stages: Sequence[StageIndex]) -> Iterator[str]:
    members = [x.chunk for stage in stages for x in plan.chunks if x.chunk.stage == stage]
    if sorted(group.members) != sorted(members):
        yield f"group {group.group} has other members than the chunks of its stages"
    if not 1 <= group.num_shards <= max(1, len(group.workers)):
        yield f"group {group.group} has {group.num_shards} shards for {len(group.workers)} workers"


def too_few(plan: Plan, job: JobSpec) -> str | None:
    """Reason why a robust combiner has too few holders of some stage to choose from; None if it has enough."""
    robust = job.aggregation.combiner
    needed = robust.least_members
    counts = {stage.index: len(plan.holders(stage.index)) for stage in plan.stages}
    short = [f"stage {stage} has {count}" for stage, count in counts.items() if count < needed]
    return f"{robust.kind} needs {needed} holders of each stage: {', '.join(short)}" if short else None


def _walkers(plan: Plan, job: JobSpec) -> Iterator[str]:
    """Under a rule of many walkers each has one holder of every stage, and its microbatches never leave it."""
    if not job.aggregation.walkers.are_lines:
        return
    counts = {stage.index: len(plan.holders(stage.index)) for stage in plan.stages}
    if len(set(counts.values())) > 1:
        yield f"walkers are not complete: holders by stage are {list(counts.values())}"
        return
    walkers = walkers_of(plan)
    of_stage = {StageIndex(stage.index): [walker[stage.index] for walker in walkers] for stage in plan.stages}
    for group in plan.groups:
        stages = {member.stage for member in group.members}
        if len(stages) == 1 and list(group.members) != of_stage[group.members[0].stage]:
            yield f"group {group.group} does not have its members in the order of the walkers"
    walker_of = {chunk: index for index, walker in enumerate(walkers) for chunk in walker}
    visited: set[int] = set()
    for microbatch, path in enumerate(plan.paths):
        on_path = {walker_of[hop] for hop in path.hops if hop in walker_of}
        visited |= on_path
        if len(on_path) > 1:
            yield f"path of microbatch {microbatch} leaves its walker"
    if len(visited) < len(walkers):
        yield f"{len(visited)} of {len(walkers)} walkers have a microbatch"
    ways = [{walker_of[hop] for hop in path.hops if hop in walker_of} for path in plan.evaluation_paths]
    if ways != [{index} for index in range(len(walkers))]:
        yield "evaluation paths are not one for each walker, in their order"


def _pattern(group: Group, job: JobSpec) -> Iterator[str]:
    if not isinstance(group.pattern, Direct | Ring | Tree):
        yield f"group {group.group} does not sum the gradients of all for all: {group.pattern}"
    elif not isinstance(group.pattern, Direct) and not job.aggregation.is_additive:
        yield f"group {group.group} adds on the way what may only be combined at the owner: {group.pattern}"
    if isinstance(group.pattern, Tree) and not is_tree(group.pattern.parents, len(group.workers)):
        yield f"group {group.group} has no tree over its {len(group.workers)} workers: {group.pattern.parents}"


def _memory(plan: Plan, job: JobSpec, fleet: Fleet) -> Iterator[str]:
    loads = stage_loads(job, plan.stages)
    held: defaultdict[WorkerId, list[ChunkPlan]] = defaultdict(list)
    for x in plan.chunks:
        if 0 <= x.chunk.stage < len(loads):
            held[x.chunk.worker].append(x)
    for worker in fleet.workers:
        own = held[worker.worker]
        needed = together_bytes([loads[x.chunk.stage] for x in own], [x.slots for x in own])
        available = worker.profile.memory_bytes
        if needed > available:
            yield (
                f"{worker.worker} needs {format_bytes(needed)} ({needed} bytes) "
                f"and has {format_bytes(available)} ({available} bytes)"
            )


def _devices(plan: Plan, job: JobSpec, fleet: Fleet) -> Iterator[str]:
    known = [x for x in plan.chunks if 0 <= x.chunk.stage < len(plan.stages)]
    return (str(x) for x in fullest_devices(job, fleet, plan.stages, known) if x.is_short)


def _figures(plan: Plan) -> Iterator[str]:
    # The bound sums in another order than the prediction, so it may lie above by rounding.
    if not 0 < plan.lower_bound_s <= plan.predicted_step_s * (1 + 1e-9):
        yield f"predicts {plan.predicted_step_s} s, below its own lower bound of {plan.lower_bound_s} s"
