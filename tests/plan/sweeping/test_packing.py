"""Arrays that trials are packed into."""

import pytest

from skein.config.load import parse_job
from skein.config.sweep.trials import SweepTrial, trials_of
from skein.model.families.mlp import MlpModel
from skein.plan.sweeping.packing import alike, packed, parting, round_steps, why_alone
from tests.support.sweeps import RATES


def trials(*space: str) -> tuple[SweepTrial, ...]:
    lines = "".join(f"    {line}\n" for line in space)
    return trials_of(parse_job(f"{RATES}  space:\n{lines}", origin="job.yaml"))


@pytest.mark.parametrize(
    "space",
    [
        "optimizer.learning_rate: [0.1, 0.01]",
        "optimizer.betas: [[0.9, 0.95], [0.8, 0.99]]",
        "optimizer.schedule: [cosine, linear]",
        "optimizer.clip_norm: [1.0, null]",
        "optimizer.weight_decay: [0, 0.1]",
        "optimizer.warmup_steps: [0, 10]",
        "seed: [1, 2]",
        "model.label_smoothing: [0, 0.1]",
    ],
)
def test_trials_that_differ_in_numbers_may_be_rows_of_one_array(space: str) -> None:
    assert [len(group) for group in alike(trials(space))] == [2]


@pytest.mark.parametrize(
    ("space", "key"),
    [
        ("optimizer.name: [adamw, sgd]", "optimizer.name"),
        ("batch.samples: [32, 64]", "batch.samples"),
        ("model.widths: [[64, 32, 10], [64, 16, 10]]", "model.widths"),
        ("precision: [fp32, fp64]", "precision"),
        ("model.dropout: [0.1, 0.2]", "model.dropout"),
        ("budget.steps: [20, 30]", "budget.steps"),
    ],
)
def test_what_makes_operators_unlike_parts_trials(space: str, key: str) -> None:
    one, other = trials(space)
    assert key in parting(one).differs_in(parting(other))
    assert packed((one, other), most_rows=8, num_workers=1) == ((one,), (other,))


@pytest.mark.parametrize(
    ("given", "instead"), [("{steps: 50}", "{epochs: 2}"), ("seed: 1", "batch: {samples: 65544}")]
)
def test_trials_that_can_be_no_rows_are_jobs_of_their_own(given: str, instead: str) -> None:
    text = RATES.replace("parallel:", "seed: 1\nparallel:").replace(given, instead)
    found = trials_of(
        parse_job(text + "  space: {optimizer.learning_rate: [0.1, 0.01]}\n", origin="job.yaml")
    )
    assert all(why_alone(trial.job) for trial in found)
    assert packed(found, most_rows=8, num_workers=1) == tuple((trial,) for trial in found)


def test_a_momentum_parts_trials_from_those_without_and_flags_do() -> None:
    sgd = "optimizer.name: [sgd]"
    assert len(alike(trials(sgd, "optimizer.momentum: [0, 0.8, 0.9]"))) == 2
    assert len(alike(trials(sgd, "optimizer.nesterov: [true, false]"))) == 2


def test_arrays_are_as_equal_as_can_be_and_keep_all_workers_busy() -> None:
    many = trials("seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]")
    assert [len(x) for x in packed(many, most_rows=16, num_workers=1)] == [10]
    assert [len(x) for x in packed(many, most_rows=16, num_workers=3)] == [3, 3, 4]
    assert [len(x) for x in packed(many, most_rows=4, num_workers=1)] == [3, 3, 4]
    assert [len(x) for x in packed(many, most_rows=4, num_workers=99)] == [1] * 10
    assert [trial for array in packed(many, most_rows=4, num_workers=2) for trial in array] == [*many]


@pytest.mark.parametrize("row_s", [0.0, 5e-324, 1e-310, 1e9])
def test_a_round_has_some_steps_whatever_a_worker_tells_of_one(row_s: float) -> None:
    job = trials("seed: [1, 2]")[0].job
    assert 1 <= round_steps(job, num_rows=2, num_saved=2, num_steps=20, row_s=row_s) <= 20


def test_a_round_is_as_long_as_before_once_rows_that_are_saved_make_no_more_steps() -> None:
    model = MlpModel(family="mlp", widths=(384, 384))
    job = trials("seed: [1, 2]")[0].job.model_copy(update={"model": model})
    # A step of few rows takes as long as one of all.
    steps = [
        round_steps(job, num_rows=going, num_saved=8, num_steps=20_000, row_s=0.02 / going)
        for going in (8, 1)
    ]
    assert steps == [400, 400]
