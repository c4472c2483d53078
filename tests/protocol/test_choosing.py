"""When rows are chosen, and how often, as the run log tells."""

import numpy as np
import pytest

from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec
from skein.model.families.mlp import MlpModel
from skein.numeric.coreset.choice import choose_by_chance
from skein.protocol.log.choosing import choice_due_at, is_choice_due, overhead, passes_until_next
from skein.protocol.log.history import KEPT_CHOICES, History, JobHistory
from skein.protocol.log.records import CoresetChosen, DataCounted, JobSubmitted, RolledBack
from skein.protocol.messages.coresets import ToldChoice
from skein.types import JobId, Step

JOB = JobId("j")
NUM_ROWS, SAMPLES = 100, 8


def history(**settings: object) -> tuple[History, JobHistory]:
    spec = CoresetSpec.model_validate({"method": "craig", "fraction": 0.2, "refresh_epochs": 3, **settings})
    job = JobSpec(
        name="j",
        model=MlpModel(family="mlp"),
        data=DataSpec(sources=(ArraysSource(format="arrays", path="/x.npz"),), coreset=spec),
        batch=BatchSpec(samples=SAMPLES, microbatch_samples=2),
        budget=BudgetSpec(steps=100),
    )
    found = History()
    found.apply(JobSubmitted(job=JOB, key="k", spec=job.canonical_json(), wall_s=0.0))
    return found, found.jobs[JOB]


def count(found: History) -> None:
    found.apply(DataCounted(job=JOB, num_train_samples=NUM_ROWS, num_steps=None, wall_s=0.0))


def choose(found: History, version: int, *, passes: int = 3, seed: int = 0) -> CoresetChosen:
    choice = choose_by_chance(np.zeros(NUM_ROWS, np.int64), 20, seed=seed)
    told = ToldChoice.of(choice, Step(version))
    found.jobs[JOB].version = Step(version)
    record = CoresetChosen(
        job=JOB,
        version=Step(version),
        ids=told.ids,
        sizes=told.sizes,
        digest=choice.digest,
        farness=None,
        num_rows=NUM_ROWS,
        num_set_aside=0,
        num_by_chance=0,
        num_faults=0,
        passes=passes,
        seconds=1.0,
        overhead=None,
        wall_s=0.0,
    )
    found.apply(record)
    return record


def test_rows_are_chosen_after_the_warm_up_once_they_are_counted() -> None:
    found, job = history(warmup_epochs=2)
    assert choice_due_at(job) is None
    count(found)
    assert choice_due_at(job) == 25
    assert not is_choice_due(job)
    job.version = Step(25)
    assert is_choice_due(job)


def test_a_choice_is_seen_so_many_times_before_the_next() -> None:
    found, job = history()
    count(found)
    choose(found, 0)
    assert choice_due_at(job) == 8  # three passes over 20 rows, 8 a step
    choose(found, 8, passes=6)
    assert choice_due_at(job) == 8 + 15


def test_a_choice_stays_without_a_refresh() -> None:
    found, job = history(refresh_epochs=None)
    count(found)
    choose(found, 0, passes=0)
    assert choice_due_at(job) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "none", "refresh_epochs": None},
        {"method": "random"},
        {"feature": "inputs", "refresh_epochs": None},
    ],
)
def test_no_other_method_chooses_along_the_run(settings: dict[str, object]) -> None:
    found, job = history(**settings)
    count(found)
    assert choice_due_at(job) is None


def test_choices_of_versions_that_are_given_up_count_no_more() -> None:
    found, job = history()
    count(found)
    first = choose(found, 0)
    choose(found, 8, seed=1)
    job.version = Step(9)
    found.apply(
        RolledBack(job=JOB, from_version=Step(9), to_version=Step(4), reason="nobody has it", wall_s=0.0)
    )
    assert job.chosen == [first]
    assert choice_due_at(job) == 8


def test_a_job_that_goes_back_beyond_the_choices_that_are_kept_chooses_anew_at_once() -> None:
    found, job = history()
    count(found)
    made = [choose(found, 8 * i, seed=i) for i in range(KEPT_CHOICES + 3)]
    assert job.chosen == made[3:]
    job.version = made[-1].version
    back = RolledBack(
        job=JOB, from_version=job.version, to_version=Step(9), reason="nobody has it", wall_s=0.0
    )
    found.apply(back)
    assert job.chosen == []
    assert is_choice_due(job)


def test_choices_that_take_too_long_come_half_as_often() -> None:
    found, job = history(max_overhead=0.5)
    count(found)
    assert overhead(job, 1.0) is None  # nothing was timed
    assert passes_until_next(job, None) == 3
    choose(found, 0)
    job.version, job.clock.num_timed, job.clock.timed_s = Step(8), 4, 8.0
    assert overhead(job, 4.0) == pytest.approx(0.25)
    assert passes_until_next(job, 0.5) == 3
    assert passes_until_next(job, 0.51) == 6
    choose(found, 8, passes=6)
    assert passes_until_next(job, 0.1) == 6
