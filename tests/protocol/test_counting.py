"""What an epoch of a job's data is: told and recorded once, with the steps that its budget is."""

from dataclasses import replace

import pytest

from skein.config.job import BudgetSpec, JobSpec
from skein.numeric.coreset.room import MOST_FEATURE_BYTES, feature_bytes
from skein.protocol.coordinator.coordinator_io import Append, Log, Outbox
from skein.protocol.coordinator.runs.steps.counting import count_data, room_doubt
from skein.protocol.log.history import History
from skein.protocol.log.records import DataCounted, JobResumed, JobSubmitted
from skein.protocol.messages.coresets import MOST_PICKS
from skein.sim.shapes import shape_of
from skein.types import JobId, Step
from tests.support.jobs import small_job
from tests.support.plans import chunk, path, plan_of
from tests.support.row_choices import RowsBench, array

JOB = JobId("j-1")


def counting(budget: BudgetSpec, job: JobSpec | None = None) -> tuple[History, Outbox]:
    history = History()
    spec = (job or small_job()).model_copy(update={"budget": budget})
    history.apply(JobSubmitted(job=JOB, key="k", spec=spec.canonical_json(), wall_s=0.0))
    return history, Outbox(history)


def test_an_epoch_is_counted_once_whatever_is_found_later() -> None:
    history, outbox = counting(BudgetSpec(epochs=2, steps=10_000))
    job = history.jobs[JOB]
    assert count_data(job, 804, outbox, now=1.0) is None
    assert count_data(job, 5, outbox, now=2.0) is None
    told = outbox.drain()
    assert [x.record for x in told if isinstance(x, Append)] == [
        DataCounted(job=JOB, num_train_samples=804, num_steps=201, wall_s=1.0)
    ]
    assert [x.line for x in told if isinstance(x, Log)] == [
        "job=j-1 data: an epoch is 804 samples, 51456 tokens, 101 steps; 2 of them are 201 steps"
    ]
    assert job.total_steps == 201


def test_data_of_an_older_log_get_their_fingerprint_when_they_are_opened_next() -> None:
    history, outbox = counting(BudgetSpec(epochs=2, steps=10_000))
    job = history.jobs[JOB]
    history.apply(DataCounted(job=JOB, num_train_samples=804, num_steps=201, wall_s=1.0))
    job.version = Step(7)
    assert history.trained_on(job) is None
    for now in (2.0, 3.0):
        known = {"fingerprint": "abc", "num_validation_samples": 9}
        assert count_data(job, 804, outbox, now=now, **known) is None  # type: ignore[arg-type]  # by name
    [recorded] = [x.record for x in outbox.drain() if isinstance(x, Append)]
    assert recorded == history.trained_on(job)
    assert recorded == DataCounted(
        job=JOB, num_train_samples=804, num_steps=201, wall_s=2.0, fingerprint="abc", num_validation_samples=9
    )


def test_new_data_leave_the_budget_that_epochs_came_to_once_a_step_is_made() -> None:
    history, outbox = counting(BudgetSpec(epochs=2, steps=10_000))
    job = history.jobs[JOB]
    count_data(job, 804, outbox, now=1.0, fingerprint="abc", num_validation_samples=9)
    count_data(job, 80, outbox, now=2.0, fingerprint="def", num_validation_samples=9)
    assert job.total_steps == 20  # of no step yet: what epochs come to now
    assert history.trained_on(job) is None
    job.version = Step(7)
    history.apply(JobResumed(job=JOB, steps=None, wall_s=3.0, takes_new_data=True))
    assert history.trained_on(job) is None
    count_data(job, 800, outbox, now=4.0, fingerprint="ghi", num_validation_samples=9)
    assert (job.total_steps, job.counted and job.counted.num_train_samples) == (20, 800)


def test_more_steps_take_the_place_of_epochs() -> None:
    history, outbox = counting(BudgetSpec(epochs=1))
    job = history.jobs[JOB]
    count_data(job, 80, outbox, now=1.0)
    assert job.total_steps == 10
    history.apply(JobResumed(job=JOB, steps=30, wall_s=2.0))
    assert job.total_steps == 30


@pytest.mark.parametrize("num_rows", [0, 3, 1 << 50])
def test_rows_that_cannot_be_chosen_of_end_the_job_and_are_not_recorded(num_rows: int) -> None:
    history, outbox = counting(BudgetSpec(steps=10), shape_of("line 1x4 chosen").job(steps=10))
    doubt = count_data(history.jobs[JOB], num_rows, outbox, now=1.0)
    assert doubt is not None
    assert doubt.startswith(f"data: {num_rows} rows: choices along the run are made of ")
    assert outbox.drain() == []


@pytest.mark.parametrize(("num_ends", "fits"), [(1, False), (4, True)])
def test_rows_that_no_worker_has_room_to_compare_end_the_job_before_its_first_step(
    num_ends: int, fits: bool
) -> None:
    history, _ = counting(BudgetSpec(steps=10), shape_of("line 1x4 chosen").job(steps=10))
    job = history.jobs[JOB]
    at_once = MOST_FEATURE_BYTES // feature_bytes(job.spec.model, job.spec.data.coreset, 1)
    chunks = [chunk(0, name) for name in "abcd"]
    plan = plan_of(chunks, [path(x) for x in chunks[:num_ends]])
    doubt = room_doubt(job, plan, 4 * (at_once - 1_000))  # parts have 1,000 rows, and are whole
    assert (doubt is None) is fits
    assert fits or "or more workers" in str(doubt)
    assert room_doubt(job, plan, num_ends * (at_once - 1_000)) is None


def test_rows_of_several_arrays_whose_choices_are_too_much_to_tell_end_theirs() -> None:
    bench = RowsBench(array("array 3 chosen shared"))
    num_rows = 4 * MOST_PICKS // 3
    assert bench.job.spec.data.coreset.num_picks(num_rows) == MOST_PICKS // 3
    assert count_data(bench.job, num_rows, bench.outbox, now=1.0) is None
    made = bench.choose(0)
    bench.job.chosen = [
        replace(x, digest=f"of array {row}", rows=(of,)) for x in made for row, of in enumerate(x.rows)
    ]
    assert count_data(bench.job, num_rows, bench.outbox, now=1.0) is None
    doubt = count_data(bench.job, 2 * num_rows, bench.outbox, now=1.0)
    assert doubt is not None
    assert doubt.endswith("give a smaller sweep.per_array")
