"""A plan without workers that are gone: what they did goes to others that hold the same stage, all else stays.

Rules of this file
- Which stages a microbatch visits, and in which order, never changes: what it has done elsewhere stays valid.
- Work whose worker is given stays there. The rest goes where it went before, or to who is through with it first.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from skein.plan.agreeing.exchange import Tree
from skein.plan.changing.clauses import Clause, Clauses
from skein.plan.order import ascending_schedules
from skein.plan.plan import Alternates, ChunkTime, Group, Path, Plan
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId

Owners = Mapping[tuple[MicrobatchId, StageIndex], WorkerId]
"""Worker that has accumulated a microbatch's contribution to a stage."""


def ways(plan: Plan) -> tuple[tuple[StageIndex, ...], ...]:
    """The stages that each microbatch visits, in order: part of the model that is trained."""
    return tuple(tuple(hop.stage for hop in path.hops) for path in plan.paths)


def rerouted(
    plan: Plan, holders: Collection[ChunkRef], owners: Owners, *, preferred: Owners | None = None
) -> Plan | None:
    """`plan` on those of its chunks that are in `holders`; None if a stage has none of them left.

    Args:
        plan: complete, with paths and schedules.
        holders: chunks that are alive.
        owners: each holds the stage, and in the `loop` layout the same worker has what both ends of a path did.
        preferred: who is best placed for what nobody owns, where they hold the stage.
    """
    held = [x.chunk for x in plan.chunks if x.chunk in holders]
    held = usable(plan, held)
    if {chunk.stage for chunk in held} != {stage.index for stage in plan.stages}:
        return None
    choice = _Choice(plan, held, preferred or {})
    paths = tuple(choice.path(MicrobatchId(m), path, owners) for m, path in enumerate(plan.paths))
    chunks = tuple(x for x in plan.chunks if x.chunk in choice.held)
    workers = sorted({chunk.worker for chunk in held})
    slots = {x.chunk: x.slots for x in chunks}
    predicted_s = plan.predicted_step_s * max(1.0, _busiest_s(plan, paths) / _busiest_s(plan, plan.paths))
    reason = plan.reason
    if len(chunks) < len(plan.chunks):
        first, *others = plan.reason.all
        now = Clause(f"goes on with {len(workers)} workers, {predicted_s:.3g} s a step")
        reason = Clauses((now, Clause(f"before: {first}"), *others))
    return replace(
        plan,
        reason=reason,
        chunks=chunks,
        paths=paths,
        evaluation_paths=tuple(choice.path(None, path, {}) for path in plan.evaluation_paths),
        schedules=ascending_schedules(paths, slots, workers),
        alternates=tuple(
            Alternates(chunk=x.chunk, others=tuple(other for other in x.others if other in choice.held))
            for x in plan.alternates
            if x.chunk in choice.held
        ),
        groups=tuple(_group(group, choice.held) for group in plan.groups),
        predicted_step_s=predicted_s,
        chunk_times=tuple(x for x in plan.chunk_times if x.chunk in choice.held),
    )


def renamed(plan: Plan, name_by_worker: Mapping[WorkerId, WorkerId]) -> Plan:
    """`plan` with other workers in the places of some; nobody may get a name that is in it already."""

    def new(worker: WorkerId) -> WorkerId:
        return name_by_worker.get(worker, worker)

    def moved(chunk: ChunkRef) -> ChunkRef:
        return ChunkRef(stage=chunk.stage, worker=new(chunk.worker))

    def led(path: Path) -> Path:
        return replace(path, hops=tuple(moved(hop) for hop in path.hops))

    return replace(
        plan,
        chunks=tuple(replace(x, chunk=moved(x.chunk)) for x in plan.chunks),
        paths=tuple(led(path) for path in plan.paths),
        evaluation_paths=tuple(led(path) for path in plan.evaluation_paths),
        schedules=tuple(
            sorted((replace(x, worker=new(x.worker)) for x in plan.schedules), key=lambda x: x.worker)
        ),
        alternates=tuple(
            Alternates(chunk=moved(x.chunk), others=tuple(moved(other) for other in x.others))
            for x in plan.alternates
        ),
        groups=tuple(replace(x, members=tuple(moved(member) for member in x.members)) for x in plan.groups),
        chunk_times=tuple(
            sorted((replace(x, chunk=moved(x.chunk)) for x in plan.chunk_times), key=_by_chunk)
        ),
        transfer_times=tuple(
            replace(x, sender=new(x.sender), receiver=new(x.receiver)) for x in plan.transfer_times
        ),
    )


def _by_chunk(time: ChunkTime) -> ChunkRef:
    return time.chunk


def usable(plan: Plan, held: Sequence[ChunkRef]) -> list[ChunkRef]:
    """Chunks of `held` that paths may visit: in `loop` paths end where they began, so one end is of no use alone."""
    if not plan.layout.comes_back:
        return list(held)
    head = plan.stages[-1].index
    ends = [{x.worker for x in held if x.stage == stage} for stage in (0, head)]
    both = ends[0] & ends[1]
    return [x for x in held if x.stage not in (0, head) or x.worker in both]


def _group(group: Group, held: Collection[ChunkRef]) -> Group:
    left = replace(group, members=tuple(member for member in group.members if member in held))
    if isinstance(left.pattern, Tree) and left.members != group.members:
        # The parents of a given tree are places, and those have moved.
        left = replace(left, pattern=Tree())
    return replace(left, num_shards=min(left.num_shards, len(left.workers)))


def _busiest_s(plan: Plan, paths: Sequence[Path]) -> float:
    """Seconds, or visits where no times are known, of the worker with most to do."""
    seconds = _seconds(plan.chunk_times)
    load: defaultdict[WorkerId, float] = defaultdict(float)
    for path in paths:
        for hop in path.hops:
            load[hop.worker] += seconds.get(hop, 1.0)
    return max(load.values())


def _seconds(times: Sequence[ChunkTime]) -> dict[ChunkRef, float]:
    return {x.chunk: x.total_s for x in times if x.total_s > 0}


class _Choice:
    """Gives each hop its worker, and remembers who has how much to do."""

    def __init__(self, plan: Plan, held: Sequence[ChunkRef], preferred: Owners) -> None:
        self.held = frozenset(held)
        self._preferred = preferred
        self._is_loop = plan.layout.comes_back
        self._seconds = _seconds(plan.chunk_times)
        self._holders: defaultdict[StageIndex, list[ChunkRef]] = defaultdict(list)
        for chunk in held:
            self._holders[chunk.stage].append(chunk)
        self._load: defaultdict[WorkerId, float] = defaultdict(float)
        for path in plan.paths:
            for hop in path.hops:
                if hop in self.held:
                    self._load[hop.worker] += self._seconds.get(hop, 1.0)

    def path(self, microbatch: MicrobatchId | None, path: Path, owners: Owners) -> Path:
        """The same stages, every hop with a worker that is alive."""
        hops = [self._hop(microbatch, hop, owners) for hop in path.hops]
        if self._is_loop:
            last = len(hops) - 1
            # Whoever has done one end has the other too; else both go where the first goes.
            is_fixed = microbatch is not None and (microbatch, hops[last].stage) in owners
            at, other = (last, 0) if is_fixed else (0, last)
            hops[other] = ChunkRef(stage=hops[other].stage, worker=hops[at].worker)
        return replace(path, hops=tuple(hops))

    def _hop(self, microbatch: MicrobatchId | None, hop: ChunkRef, owners: Owners) -> ChunkRef:
        owner = None if microbatch is None else owners.get((microbatch, hop.stage))
        if owner is not None:
            return ChunkRef(stage=hop.stage, worker=owner)
        if microbatch is not None and (microbatch, hop.stage) in self._preferred:
            best = ChunkRef(stage=hop.stage, worker=self._preferred[microbatch, hop.stage])
            if best in self.held:
                return best
        if hop in self.held:
            return hop
        chosen = min(self._holders[hop.stage], key=lambda x: (self._done_s(x), x.worker))
        self._load[chosen.worker] = self._done_s(chosen)
        return chosen

    def _done_s(self, chunk: ChunkRef) -> float:
        """Work of the chunk's worker with one visit more, in seconds, or in visits where no times are known."""
        return self._load[chunk.worker] + self._seconds.get(chunk, 1.0)
