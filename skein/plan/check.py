"""What every plan must satisfy, whoever made it. A coordinator adopts none that violates any of it."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from skein.config.job import JobSpec
from skein.plan.load import job_layers, stage_loads, tied_bytes
from skein.plan.plan import Group, Path, Plan
from skein.topology.fleet import Fleet
from skein.types import ChunkRef, Layout, StageIndex, WorkerId
from skein.units import format_bytes


def violations(plan: Plan, job: JobSpec, fleet: Fleet) -> tuple[str, ...]:
    """What is wrong with `plan` for `job` on `fleet`, a sentence each; empty for a plan that may be adopted."""
    cut = tuple(_cut(plan, job))
    if cut:
        return cut
    found = (
        _chunks(plan, fleet),
        _paths(plan, job),
        _groups(plan, job),
        _memory(plan, job, fleet),
        _figures(plan),
    )
    return tuple(sentence for sentences in found for sentence in sentences)


def _cut(plan: Plan, job: JobSpec) -> Iterator[str]:
    num_layers, parallel = len(job_layers(job)), job.parallel
    num_stages = parallel.stages + (parallel.layout is Layout.LOOP)
    if plan.layout is not parallel.layout:
        yield f"the layout is {plan.layout}, the job asks for {parallel.layout}"
    if len(plan.stages) != num_stages:
        yield f"{len(plan.stages)} stages, the job asks for {num_stages}"
    reached = 0
    for index, stage in enumerate(plan.stages):
        if stage.index != index or stage.first != reached or stage.stop <= stage.first:
            yield f"stage {index} is {stage}, expected layers from {reached} on"
        reached = stage.stop
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
        yield from (f"path of microbatch {microbatch}: {what}" for what in _path(path, plan, held))


def _path(path: Path, plan: Plan, held: set[ChunkRef]) -> Iterator[str]:
    if [hop.stage for hop in path.hops] != [stage.index for stage in plan.stages]:
        yield "does not visit every stage once, in order"
    for hop in path.hops:
        if hop not in held:
            yield f"{hop.worker} does not hold stage {hop.stage}"
    if plan.layout is Layout.LOOP and path.hops and path.hops[0].worker != path.hops[-1].worker:
        yield f"ends on {path.hops[-1].worker}, not where it began"


def _groups(plan: Plan, job: JobSpec) -> Iterator[str]:
    layers = job_layers(job)
    expected = {f"s{stage.index}": [stage.index] for stage in plan.stages}
    if tied_bytes(job, layers, plan.stages):
        expected["tied"] = [plan.stages[0].index, plan.stages[-1].index]
    if sorted(group.group for group in plan.groups) != sorted(expected):
        yield f"groups {[group.group for group in plan.groups]}, expected {list(expected)}"
    for group in plan.groups:
        yield from _group(group, plan, expected.get(group.group, []))


def _group(group: Group, plan: Plan, stages: list[StageIndex]) -> Iterator[str]:
    members = [x.chunk for stage in stages for x in plan.chunks if x.chunk.stage == stage]
    if sorted(group.members) != sorted(members):
        yield f"group {group.group} has other members than the chunks of its stages"
    if not 1 <= group.num_shards <= max(1, len(group.workers)):
        yield f"group {group.group} has {group.num_shards} shards for {len(group.workers)} workers"


def _memory(plan: Plan, job: JobSpec, fleet: Fleet) -> Iterator[str]:
    loads = stage_loads(job, job_layers(job), plan.stages)
    needed: defaultdict[WorkerId, int] = defaultdict(int)
    for x in plan.chunks:
        if 0 <= x.chunk.stage < len(loads):
            needed[x.chunk.worker] += loads[x.chunk.stage].memory_bytes(x.slots)
    for worker in fleet.workers:
        available = worker.profile.memory_bytes
        if needed[worker.worker] > available:
            yield (
                f"{worker.worker} needs {format_bytes(needed[worker.worker])} ({needed[worker.worker]} bytes) "
                f"and has {format_bytes(available)} ({available} bytes)"
            )


def _figures(plan: Plan) -> Iterator[str]:
    # The bound sums in another order than the prediction, so it may lie above by rounding.
    if not 0 < plan.lower_bound_s <= plan.predicted_step_s * (1 + 1e-9):
        yield f"predicts {plan.predicted_step_s} s, below its own lower bound of {plan.lower_bound_s} s"
