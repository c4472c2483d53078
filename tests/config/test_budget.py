"""When a job is done: the first of its budgets that is spent, and what a warm-up may want of it."""

import pytest

from skein.config.aggregation import Gossip
from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import BudgetSpec, JobSpec, with_steps
from skein.config.optimizer import AdamWSpec
from skein.errors import UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.plan.admission import check_admissible
from skein.types import MOST_STEPS
from tests.support.jobs import small_job

JOB = small_job(microbatches=4)
"""Of 8 samples of 64 tokens in a step."""


def job_of(**budget: float) -> JobSpec:
    return JobSpec.model_validate(JOB.model_dump() | {"budget": budget})


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1}, 1),
        ({"tokens": 5 * 512}, 5),
        ({"tokens": 5 * 512 + 1}, 6),
        ({"tokens": 5 * 512, "steps": 9}, 5),
        ({"tokens": 5 * 512, "steps": 3}, 3),
        ({"tokens": 5 * 512, "hours": 1}, 5),
    ],
)
def test_the_first_budget_that_is_spent_ends_the_job(budget: dict[str, float], steps: int) -> None:
    assert job_of(**budget).total_steps == steps


def test_a_digit_counts_as_one_token() -> None:
    digits = DataSpec(sources=(DigitsSource(format="digits"),))
    changed = {"model": DigitsCnnModel(family="digits_cnn"), "data": digits, "budget": BudgetSpec(tokens=80)}
    assert JOB.model_copy(update=changed).total_steps == 10


def test_hours_alone_are_no_budget() -> None:
    with pytest.raises(ValueError, match="give steps, tokens or epochs"):
        job_of(hours=2)


@pytest.mark.parametrize(
    ("epochs", "num_samples", "steps"),
    [(1, 80, 10), (1, 81, 11), (0.5, 80, 5), (3, 1, 1), (0.1, 240, 3), (1_000_000, 10**9, MOST_STEPS)],
)
def test_epochs_are_whole_steps_of_what_there_is(epochs: float, num_samples: int, steps: int) -> None:
    assert job_of(epochs=epochs).budget.steps_of_epochs(num_samples, 8) == steps


def test_walkers_must_know_their_last_step() -> None:
    gossip = Gossip(rule="gossip", graph="ring").model_dump()
    with pytest.raises(ValueError, match=r"budget\.hours: 2.*leave it out"):
        JobSpec.model_validate(JOB.model_dump() | {"aggregation": gossip, "budget": {"steps": 9, "hours": 2}})


def test_more_steps_replace_all_budgets() -> None:
    assert with_steps(job_of(tokens=512, hours=1), 40).budget == BudgetSpec(steps=40)


def test_a_warm_up_longer_than_the_job_is_refused_with_what_would_be_right() -> None:
    def with_warmup(steps: int) -> JobSpec:
        return job_of(steps=50).model_copy(update={"optimizer": AdamWSpec(warmup_steps=steps)})

    check_admissible(with_warmup(50))
    with pytest.raises(UserError) as caught:
        check_admissible(with_warmup(51))
    assert str(caught.value) == (
        "optimizer.warmup_steps: 51: the job has 50 steps: give at most 50, or a larger budget"
    )


def test_the_default_warm_up_is_cut_short_by_a_shorter_job() -> None:
    check_admissible(job_of(steps=3))
