"""Memory and time that a plan uses of each worker: planned, and beside that what workers held in a step."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from skein.config.job import JobSpec
from skein.plan.load import stage_loads, together_bytes
from skein.plan.plan import Plan, Schedule
from skein.types import StageIndex, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """Collectives of a kind between the devices of a mesh so far, `tp` or `a2a`, and what they took together.

    They are predicted by lines through measured times, which were fitted `num_fits` times; the newest have an R² of
    `r_squared` at least, None where that is not told.
    """

    kind: str
    num_collectives: int
    predicted_s: float
    measured_s: float
    num_fits: int = 0
    r_squared: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForm:
    """Devices of a mesh that share a stage, and the name of the form in which they do (`skein.config.mesh.tensor`)."""

    stage: StageIndex
    form: str
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """Use of a worker: what it holds for its chunks, and for how much of a step it has nothing to do.

    Microbatches count at each of the worker's stages by itself. The order of its ops holds `planned_peaks` of them at
    once at these stages; it may hold `slots`, if others are late. What a microbatch takes of memory is `slot_bytes`,
    reckoned (docs/planning.md), so the bytes that are held are reckoned too.

    Args:
        worker: whose.
        stages: of its chunks, ascending.
        fixed_bytes: parameters, gradients, optimizer state, and tensors on their way.
        slot_bytes: what a microbatch keeps at each of `stages`.
        slots: most microbatches that each may hold.
        planned_peaks: most at once at each, as planned.
        held_peaks: the same in the newest step that the worker told of; empty: it told of none.
        planned_bubble: share of the predicted step without an op.
        bubble: of the newest step; None: not told.
        collectives: of its mesh, since its process started, by kind.
        forms: of its mesh, by stage, of those of `stages` that it has begun with.
    """

    worker: WorkerId
    stages: tuple[StageIndex, ...]
    fixed_bytes: int
    slot_bytes: tuple[int, ...]
    slots: tuple[int, ...]
    planned_peaks: tuple[int, ...]
    planned_bubble: float
    held_peaks: tuple[int, ...] = ()
    bubble: float | None = None
    collectives: tuple[CollectiveUse, ...] = ()
    forms: tuple[StageForm, ...] = ()

    @property
    def planned_bytes(self) -> int:
        """Activations at their peaks, as planned."""
        return self._bytes(self.planned_peaks)

    @property
    def held_bytes(self) -> int:
        """Activations at the peaks of the newest step."""
        return self._bytes(self.held_peaks or (0,) * len(self.stages))

    @property
    def most_bytes(self) -> int:
        """All memory that the plan counts on: with a microbatch in every slot."""
        return self.fixed_bytes + self._bytes(self.slots)

    def _bytes(self, counts: tuple[int, ...]) -> int:
        return sum(num * size for num, size in zip(counts, self.slot_bytes, strict=True))

    def told(
        self,
        peaks: Mapping[StageIndex, int],
        bubble: float | None,
        collectives: tuple[CollectiveUse, ...] = (),
        forms: Iterable[StageForm] = (),
    ) -> "WorkerUse":
        """The same with what the worker told; a stage that it did not name held nothing."""
        held = tuple(peaks.get(stage, 0) for stage in self.stages) if peaks else ()
        known = tuple(x for x in forms if x.stage in self.stages)
        return replace(self, held_peaks=held, bubble=bubble, collectives=collectives, forms=known)


def planned_uses(plan: Plan, job: JobSpec) -> tuple[WorkerUse, ...]:
    """Use of every worker of `plan`, a plan of `job`; by worker."""
    return tuple(_uses(plan, job))


def _uses(plan: Plan, job: JobSpec) -> Iterator[WorkerUse]:
    loads = stage_loads(job, plan.stages)
    busy = busy_s(plan)
    peaks = {schedule.worker: _peaks(schedule) for schedule in plan.schedules}
    for worker in plan.workers:
        chunks = sorted((x for x in plan.chunks if x.chunk.worker == worker), key=lambda x: x.chunk.stage)
        held = [loads[x.chunk.stage] for x in chunks]
        step_s = plan.predicted_step_s
        yield WorkerUse(
            worker=worker,
            stages=tuple(x.chunk.stage for x in chunks),
            fixed_bytes=together_bytes(held, [0] * len(held)),
            slot_bytes=tuple(load.slot_bytes for load in held),
            slots=tuple(x.slots for x in chunks),
            planned_peaks=tuple(peaks[worker][x.chunk.stage] for x in chunks),
            planned_bubble=max(0.0, 1.0 - busy[worker] / step_s) if step_s > 0 else 0.0,
        )


def _peaks(schedule: Schedule) -> Counter[StageIndex]:
    """Most microbatches that hold a slot at once, by stage, in the order of a worker."""
    held: Counter[StageIndex] = Counter()
    peaks: Counter[StageIndex] = Counter()
    for op in schedule.ops:
        held[op.stage] += op.kind.row.slots
        peaks[op.stage] = max(peaks[op.stage], held[op.stage])
    return peaks


def busy_s(plan: Plan) -> Mapping[WorkerId, float]:
    """Seconds of ops in a step, by worker, as the prediction has them; 0 of whoever has none."""
    visits, found = plan.microbatches_by_chunk(), defaultdict[WorkerId, float](float)
    for time in plan.chunk_times:
        found[time.chunk.worker] += time.total_s * len(visits.get(time.chunk, ()))
    return found
