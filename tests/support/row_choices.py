"""A log with an array whose rows are chosen for along the run, and the part that chooses."""

from collections.abc import Sequence
from dataclasses import replace

from skein.config.job import ArrayJob
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, Outbox
from skein.protocol.coordinator.runs.steps.selecting import Selecting
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import CoresetChosen, DataCounted, JobSubmitted, StepCommitted
from skein.protocol.messages.array_rounds import ArrayRound, PassKind
from skein.protocol.messages.coresets import CandidatesPicked, parts_of
from skein.sim.compute.rows import NUM_ROWS, AskedModel, picked_by
from skein.sim.shapes import shape_of
from skein.types import Generation, JobId, MicrobatchId, Step, WorkerId
from tests.support.hands import record as step_record
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import row_numbers

PLAN = plan_of([chunk(0, "a")], [path(chunk(0, "a"))])


def array(words: str = "array 3 chosen") -> ArrayJob:
    job = shape_of(f"line 1x1 {words}").job(steps=4)
    assert isinstance(job, ArrayJob)
    return job


class RowsBench:
    """A log with an array, and the part that chooses for it."""

    def __init__(self, spec: ArrayJob | None = None) -> None:
        self.outbox = Outbox(History())
        self.job = self.begin_array("j", array() if spec is None else spec)
        self.selecting = Selecting(Members(self.job, {}, self.outbox))

    def begin_array(self, name: str, spec: ArrayJob) -> JobHistory:
        job = JobId(name)
        self.outbox.history.apply(JobSubmitted(job=job, key=name, spec=spec.canonical_json(), wall_s=0.0))
        self.outbox.history.apply(
            DataCounted(job=job, num_train_samples=NUM_ROWS, num_steps=None, wall_s=0.0)
        )
        return self.outbox.history.jobs[job]

    def begin(self, plan: Plan = PLAN) -> None:
        self.selecting.begin(plan, now=0.0)

    def pick(self, *rows: int) -> None:
        for row in rows:
            for part in told(self.job, row):
                self.selecting.picked(WorkerId("a"), part, now=1.0)

    def asked(self) -> ChooseRows | None:
        found = [x for x in self.outbox.drain() if isinstance(x, ChooseRows)]
        return found[-1] if found else None

    def answer(self) -> int:
        """Answer all that is asked; how many questions there were."""
        count = 0
        while (asked := self.asked()) is not None:
            count += 1
            self.selecting.chose(asked.answer(), now=3.0)
        return count

    def choose(self, *rows: int) -> list[CoresetChosen]:
        """Choices that are made now, of these rows being asked."""
        before = len(self.job.chosen)
        self.begin()
        self.pick(*rows)
        self.answer()
        return self.job.chosen[before:]

    def round(self, *counts: int, retired: Sequence[int] = ()) -> None:
        """Commit a round that leaves rows at these counts."""
        rows = tuple(
            row_numbers(x, retired="loss not finite" if row in retired else "")
            for row, x in enumerate(counts)
        )
        array = ArrayRound(rows=rows, num_local_steps=1, pass_kind=PassKind.FUSED, speedup=1.0)
        made = replace(step_record(self.job.version), array=array)
        self.outbox.history.apply(StepCommitted(job=self.job.job, record=made, wall_s=1.0))


def told(job: JobHistory, row: int) -> tuple[CandidatesPicked, ...]:
    """Candidates of a row's model as it is now, in several parts."""
    spec = job.spec
    blocks = [MicrobatchId(m) for m in range(NUM_ROWS // spec.batch.microbatch_samples)]
    model = AskedModel(seed=spec.rows[row].seed, step=Step(job.places[row].count))
    found = picked_by(model, spec, blocks, num_rows=NUM_ROWS)
    return parts_of(found, Generation(1), job.version, row=row, part_bytes=200)
