"""Choices of an array's rows: which row draws by which, what is kept and carried over, and how far rows go by them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from skein.config.job import ArrayJob
from skein.config.sweep.rows import RowOrigin
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, Outbox
from skein.protocol.coordinator.runs.steps.selecting import Selecting
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.choosing import choice_due_at, is_choice_due
from skein.protocol.log.history import KEPT_CHOICES, History, JobHistory
from skein.protocol.log.records import CoresetChosen, DataCounted, JobSubmitted, RolledBack, StepCommitted
from skein.protocol.log.row_choices import choices_in_force, newest_choices
from skein.protocol.messages.array_rounds import ArrayRound, PassKind
from skein.protocol.messages.coresets import CandidatesPicked, DrawingRow, parts_of
from skein.sim.compute.rows import NUM_ROWS, AskedModel, picked_by
from skein.sim.shapes import shape_of
from skein.types import Generation, JobId, MicrobatchId, Step, WorkerId
from tests.support.hands import record as step_record
from tests.support.plans import chunk, path, plan_of
from tests.support.reports import row_numbers

PLAN = plan_of([chunk(0, "a")], [path(chunk(0, "a"))])
PASS = 8
"""Steps in which 30 of 120 rows are drawn, 4 in each."""


def array(words: str = "array 3 chosen") -> ArrayJob:
    job = shape_of(f"line 1x1 {words}").job(steps=4)
    assert isinstance(job, ArrayJob)
    return job


class Bench:
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


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_choice_of_each_row_is_recorded_once_all_are_picked_for(bench: Bench) -> None:
    bench.begin()
    bench.pick(0, 2)
    assert bench.asked() is None
    bench.pick(1)
    assert bench.answer() == 3
    assert [x.rows for x in bench.job.chosen] == [
        (DrawingRow(row=row, since=Step(0), until=Step(PASS)),) for row in range(3)
    ]
    assert len({x.digest for x in bench.job.chosen}) == 3
    assert all(x.seconds == 1.0 for x in bench.job.chosen)  # a third each
    assert not is_choice_due(bench.job)


def test_a_worker_that_dies_before_it_has_picked_for_all_rows_costs_none_its_choice(bench: Bench) -> None:
    bench.begin()
    bench.pick(0, 1)
    bench.selecting.fenced(now=2.0)
    bench.begin()
    assert bench.asked() is None
    bench.pick(0, 1, 2)
    bench.answer()
    assert [x.num_faults for x in bench.job.chosen] == [0, 0, 0]


def test_rows_are_asked_at_their_own_steps(bench: Bench) -> None:
    bench.choose(0, 1, 2)
    bench.round(PASS, PASS, 3)
    found = bench.choose(0, 1)
    assert [x.rows[0] for x in found] == [
        DrawingRow(row=row, since=Step(PASS), until=Step(2 * PASS)) for row in (0, 1)
    ]
    assert choice_due_at(bench.job) == 2  # the last row is at step 3 of 8, in rounds of 16
    bench.round(2 * PASS, 2 * PASS, PASS)
    assert [x.rows[0].row for x in bench.choose(0, 1, 2)] == [0, 1, 2]
    in_force = choices_in_force(bench.job.chosen)
    assert [row for x in in_force for row in x.rows] == [
        DrawingRow(row=row, since=Step(at), until=Step(at + PASS))
        for row, at in ((0, 2 * PASS), (1, 2 * PASS), (2, PASS))
    ]


def test_one_choice_for_all_is_of_the_first_row_that_is_left() -> None:
    bench = Bench(array("array 3 chosen shared"))
    (first,) = bench.choose(0)
    assert [x.row for x in first.rows] == [0, 1, 2]
    bench.round(0, PASS, PASS, retired=[0])
    (second,) = bench.choose(1)
    assert [x.row for x in second.rows] == [1, 2]
    assert second.digest != first.digest


def test_an_array_has_as_many_rounds_as_its_choices_make_of_it(bench: Bench) -> None:
    last_step = array().array.last_step
    assert last_step == 63
    assert bench.job.total_steps == 8  # a round for each 8 steps, though rounds may have 16
    while bench.job.version < bench.job.total_steps:
        bench.choose(0, 1, 2)
        count = min(last_step, bench.job.places[0].count + PASS)
        bench.round(count, count, count)
    assert (bench.job.version, bench.job.places[0].count) == (8, last_step)
    assert not is_choice_due(bench.job)


def test_rows_that_go_on_elsewhere_take_their_choices_along(bench: Bench) -> None:
    bench.choose(0, 1, 2)
    bench.round(4, 4, 4)
    spec = array("array 2 chosen")
    origins = [RowOrigin(job="j", version=1, row=row) for row in (2, 0)]
    rows = tuple(row.model_copy(update={"origin": x}) for row, x in zip(spec.rows, origins, strict=True))
    going_on = spec.array.model_copy(update={"rows": rows, "first_step": 4})
    other = bench.begin_array("k", spec.model_copy(update={"array": going_on}))
    before = bench.job.chosen
    assert [(x.job, x.version, x.digest, x.rows[0].row) for x in other.chosen] == [
        ("k", 0, before[2].digest, 0),
        ("k", 0, before[0].digest, 1),
    ]
    assert not is_choice_due(other)
    assert [place.due for place in other.places] == [PASS, PASS]


def test_an_array_that_goes_back_draws_as_it_did_there(bench: Bench) -> None:
    first = bench.choose(0, 1, 2)
    bench.round(PASS, PASS, 5)
    bench.choose(0, 1)
    bench.round(2 * PASS, 2 * PASS, PASS)
    bench.outbox.history.apply(
        RolledBack(job=bench.job.job, from_version=Step(2), to_version=Step(0), reason="lost", wall_s=2.0)
    )
    assert bench.job.chosen == first
    assert [place.count for place in bench.job.places] == [0, 0, 0]
    assert not is_choice_due(bench.job)


def test_so_many_choices_of_each_row_are_kept(bench: Bench) -> None:
    bench.choose(0, 1, 2)
    old, *others = bench.job.chosen
    made = [replace(others[0], seconds=float(number)) for number in range(KEPT_CHOICES + 2)]
    assert newest_choices([old, *others, *made], KEPT_CHOICES) == [old, others[1], *made[2:]]
