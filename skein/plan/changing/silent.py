"""Silent holders: workers without work that keep stages up to date, so that a death costs no step.

Where fewer workers are fast enough, or large enough, for microbatches than the job asks holders for, those without work
hold what they can: each is a member of its stages' groups with an empty ledger, and a zero changes no sum.

Rules of this file
- Silent holders come after everything else: no path, order or placement of a plan depends on them.
- Only plain sums allow it. A combiner that compares members would count a zero, and of many walkers each has its own
  parameters.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from skein.config.job import JobSpec
from skein.plan.changing.clauses import Clause
from skein.plan.clock.timing import reduction_s
from skein.plan.groups import alternates_of, groups_of
from skein.plan.load import StageLoad, slots_within, together_bytes
from skein.plan.place import Pool
from skein.plan.plan import ChunkPlan, Plan, Schedule
from skein.types import ChunkRef, StageIndex, WorkerId


def silent_chunks(plan: Plan) -> frozenset[ChunkRef]:
    """Chunks that no microbatch visits, to train or to evaluate; none of a plan without paths."""
    visited = {hop for path in (*plan.paths, *plan.evaluation_paths) for hop in path.hops}
    return frozenset(x.chunk for x in plan.chunks if x.chunk not in visited) if visited else frozenset()


def busy_workers(plan: Plan) -> frozenset[WorkerId]:
    """Workers that microbatches of a step visit."""
    return frozenset(hop.worker for path in plan.paths for hop in path.hops)


def working(plan: Plan, alive: Collection[WorkerId]) -> Plan:
    """`plan` without its silent chunks; those of a stage whose other holders are not `alive` stay."""
    silent = silent_chunks(plan)
    served = {x.chunk.stage for x in plan.chunks if x.chunk.worker in alive and x.chunk not in silent}
    dropped = {chunk for chunk in silent if chunk.stage in served}
    if not dropped:
        return plan
    chunks = tuple(x for x in plan.chunks if x.chunk not in dropped)
    workers = {x.chunk.worker for x in chunks}
    return replace(
        plan,
        chunks=chunks,
        schedules=tuple(x for x in plan.schedules if x.worker in workers),
        alternates=tuple(
            replace(x, others=tuple(other for other in x.others if other not in dropped))
            for x in plan.alternates
            if x.chunk not in dropped
        ),
        groups=tuple(
            replace(x, members=tuple(member for member in x.members if member not in dropped))
            for x in plan.groups
        ),
        chunk_times=tuple(x for x in plan.chunk_times if x.chunk not in dropped),
    )


def with_silent(
    plan: Plan, job: JobSpec, loads: Sequence[StageLoad], pool: Pool, before: Collection[ChunkRef]
) -> Plan:
    """`plan` with a silent holder wherever a stage has fewer holders than asked and a worker without work has room.

    Args:
        plan: a plan of `job` without times.
        job: `job.parallel.replicas` holders of each stage are asked for.
        loads: of the plan's stages, the head of `LOOP` included.
        pool: who may hold something.
        before: what workers hold already; that stays where it is of use.
    """
    if not job.aggregation.is_additive:
        return plan
    seats = _Seats(plan, loads, pool, job.parallel.replicas)
    seats.keep(before)
    seats.fill()
    return _joined(plan, job, loads, pool, seats) if seats.silent else plan


class _Seats:
    """Body stages that each worker without work holds, as far as its memory allows."""

    def __init__(self, plan: Plan, loads: Sequence[StageLoad], pool: Pool, asked: int) -> None:
        self.silent: defaultdict[WorkerId, list[int]] = defaultdict(list)
        self._loads = loads
        self._is_loop = plan.layout.comes_back
        self._missing = {
            stage.index: asked - len(plan.holders(stage.index))
            for stage in plan.stages[: len(plan.stages) - self._is_loop]
        }
        busy = set(plan.workers)
        self._speeds = {w: float(x) for w, x in zip(pool.workers, pool.speeds, strict=True) if w not in busy}
        self._memory_bytes = {
            w: int(x) for w, x in zip(pool.workers, pool.memory_bytes, strict=True) if w not in busy
        }

    def keep(self, before: Collection[ChunkRef]) -> None:
        """Let holders of stages that are short of holders go on holding them."""
        for chunk in sorted(before):
            if self._missing.get(chunk.stage, 0) > 0 and self._has_room(chunk.worker, chunk.stage):
                self._take(chunk.worker, chunk.stage)

    def fill(self) -> None:
        """A holder for each stage that is short, that with most missing first, as long as anybody has room."""
        while True:
            short = sorted((-missing, stage) for stage, missing in self._missing.items() if missing > 0)
            options = (found for _, stage in short for found in self._options(stage))
            best = next(options, None)
            if best is None:
                return
            self._take(*best)

    def _options(self, stage: StageIndex) -> Iterator[tuple[WorkerId, StageIndex]]:
        """The worker that should hold `stage`, with it: of those with room that hold least the fastest, if any."""
        able = [worker for worker in self._speeds if self._has_room(worker, stage)]
        if able:
            yield min(able, key=lambda w: (len(self.silent.get(w, ())), -self._speeds[w], w)), stage

    def _has_room(self, worker: WorkerId, stage: StageIndex) -> bool:
        before = self.silent.get(worker, [])
        if worker not in self._memory_bytes or stage in before:
            return False
        held = [self._loads[at] for body in (*before, stage) for at in self.chunks_at(body)]
        return self._memory_bytes[worker] >= together_bytes(held, [1] * len(held))

    def _take(self, worker: WorkerId, stage: StageIndex) -> None:
        self.silent[worker].append(stage)
        self._missing[stage] -= 1

    def chunks_at(self, stage: int) -> tuple[int, ...]:
        """Stages that come with a body stage, itself included: in `LOOP` the head goes where the first stage goes."""
        return (stage, len(self._loads) - 1) if self._is_loop and stage == 0 else (stage,)


def _joined(plan: Plan, job: JobSpec, loads: Sequence[StageLoad], pool: Pool, seats: _Seats) -> Plan:
    added = [
        ChunkPlan(chunk=chunk, slots=slots)
        for worker, stages in sorted(seats.silent.items())
        for chunk, slots in _with_slots(plan, loads, pool, worker, stages, seats)
    ]
    chunks = tuple(sorted((*plan.chunks, *added), key=lambda x: x.chunk.stage))
    refs = tuple(x.chunk for x in chunks)
    groups = tuple(groups_of(job, plan.stages, refs, pool))
    empty = (Schedule(worker=worker, ops=()) for worker in seats.silent)
    joined = replace(
        plan,
        chunks=chunks,
        schedules=tuple(sorted((*plan.schedules, *empty), key=lambda x: x.worker)),
        alternates=tuple(alternates_of(refs, pool)),
        groups=tuple(group for group, _ in groups),
        predicted_step_s=plan.predicted_step_s + slower_s(plan, job, pool, refs),
    )
    return replace(joined, reason=joined.reason.saying(_told([x.chunk for x in added])))


def slower_s(plan: Plan, job: JobSpec, pool: Pool, chunks: Sequence[ChunkRef]) -> float:
    """Seconds that the longest reduction takes more among these chunks than among those of `plan`."""
    longest_s = [
        max(
            reduction_s(group, num_bytes, pool)
            for group, num_bytes in groups_of(job, plan.stages, members, pool)
        )
        for members in ([x.chunk for x in plan.chunks], chunks)
    ]
    return max(0.0, longest_s[1] - longest_s[0])


def _with_slots(
    plan: Plan,
    loads: Sequence[StageLoad],
    pool: Pool,
    worker: WorkerId,
    stages: Sequence[int],
    seats: _Seats,
) -> Iterator[tuple[ChunkRef, int]]:
    """A worker's silent chunks, with room for as many microbatches as those have that it would take over from."""
    held = [at for stage in sorted(stages) for at in seats.chunks_at(stage)]
    wanted = [max(x.slots for x in plan.chunks if x.chunk.stage == at) for at in held]
    memory_bytes = int(pool.memory_bytes[pool.workers.index(worker)])
    for at, slots in zip(held, slots_within([loads[at] for at in held], wanted, memory_bytes), strict=True):
        yield ChunkRef(stage=StageIndex(at), worker=worker), slots


def _told(added: Sequence[ChunkRef]) -> Clause:
    """Clause about silent holders: the first with its stage, and how many more there are."""
    more = f" and {len(added) - 1} more" if len(added) > 1 else ""
    return Clause(f"silent holders: {added[0].worker} of stage {added[0].stage}{more}")
