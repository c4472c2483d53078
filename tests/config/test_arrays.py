import pytest
from pydantic import ValidationError

from skein.config.job import ArrayJob, JobSpec, read_spec
from skein.config.load import JobFileErrors, job_from_json
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec, RowOrigin
from tests.support.jobs import small_job


def _trial() -> JobSpec:
    return small_job(stages=1, replicas=1, microbatches=16, steps=90)


def _array(trial: JobSpec, *, first_step: int = 0, last_step: int = 30) -> ArraySpec:
    origin = RowOrigin(job="sweep-1-a0", version=3, row=1)
    rows = (
        ArrayRow(trial=4, optimizer=trial.optimizer, seed=7, origin=origin),
        ArrayRow(trial=9, optimizer=trial.optimizer, seed=8),
    )
    return ArraySpec(rows=rows, first_step=first_step, last_step=last_step, schedule_steps=90)


def test_an_array_comes_out_of_its_text_as_it_went_in() -> None:
    trial = _trial()
    array = array_job(trial, _array(trial), round_steps=8)

    again = read_spec(array.canonical_json())

    assert isinstance(again, ArrayJob)
    assert again == array
    assert [(row.trial, row.seed, row.origin) for row in again.rows] == [
        (4, 7, RowOrigin(job="sweep-1-a0", version=3, row=1)),
        (9, 8, None),
    ]


def test_a_step_of_an_array_is_a_round_of_whole_batches() -> None:
    trial = _trial()
    array = array_job(trial, _array(trial, first_step=10), round_steps=8)

    assert array.batch.microbatch_samples == array.step_batch.samples == trial.batch.samples
    assert array.round_steps == 8
    assert array.total_steps == 3, "20 steps are two rounds of 8 and one of 4"
    assert array.checkpoint.every_steps == 1


def test_no_job_file_holds_an_array() -> None:
    trial = _trial()
    text = array_job(trial, _array(trial), round_steps=8).canonical_json()

    with pytest.raises(JobFileErrors, match="array"):
        job_from_json(text)


def test_a_job_has_no_rows() -> None:
    assert read_spec(_trial().canonical_json()).rows == ()


@pytest.mark.parametrize("last_step", [10, 91])
def test_an_array_makes_steps_within_the_schedule(last_step: int) -> None:
    with pytest.raises(ValidationError, match="last_step"):
        _array(_trial(), first_step=10, last_step=last_step)
