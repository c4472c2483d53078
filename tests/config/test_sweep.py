"""Sweeps of job files: which trials there are, and that each is checked like a job."""

import math

import pytest

from skein.config.job import JobSpec
from skein.config.load import JobFileErrors, parse_job
from skein.config.sweep.trials import trials_of
from skein.errors import UserError
from skein.plan.admission import check_admissible
from skein.plan.sweeping.packing import alike
from tests.support.sweeps import RATES


def sweep(text: str, *, job: str = RATES) -> JobSpec:
    indented = "".join(f"  {line}\n" for line in text.strip().splitlines())
    return parse_job(job + indented, origin="job.yaml")


def test_a_grid_has_every_combination() -> None:
    job = sweep("space: {optimizer.learning_rate: [0.1, 0.01], seed: [1, 2, 3]}")
    found = [(x.job.optimizer.learning_rate, x.job.seed) for x in trials_of(job)]
    assert found == [(0.1, 1), (0.1, 2), (0.1, 3), (0.01, 1), (0.01, 2), (0.01, 3)]
    assert [x.number for x in trials_of(job)] == list(range(6))


def test_a_trial_is_the_job_alone_with_some_keys_replaced() -> None:
    job = sweep("trials: [{optimizer.betas: [0.8, 0.99]}, {batch.samples: 64}]")
    first, second = (x.job for x in trials_of(job))
    assert first == job.model_copy(
        update={"sweep": None, "optimizer": job.optimizer.model_copy(update={"betas": (0.8, 0.99)})}
    )
    assert second.batch.samples == 64


def test_an_optimizer_of_another_kind_has_its_own_defaults() -> None:
    job = sweep(
        "space: {optimizer.name: [adamw, sgd], optimizer.learning_rate: [0.5]}",
        job=RATES.replace("sweep:", "optimizer: {weight_decay: 0.03}\nsweep:"),
    )
    adamw, sgd = (x.job.optimizer for x in trials_of(job))
    assert (adamw.name, sgd.name) == ("adamw", "sgd")
    assert (adamw.weight_decay, sgd.weight_decay, sgd.learning_rate) == (0.03, 0.03, 0.5)


def test_draws_lie_between_their_bounds_and_evenly_in_decades() -> None:
    job = sweep(
        "{search: random, num_trials: 400, space: {optimizer.learning_rate: {log_uniform: [1.0e-5, 0.1]}, "
        "optimizer.weight_decay: {uniform: [0.1, 0.3]}, batch.samples: [32, 64]}}"
    )
    trials = [x.job for x in trials_of(job)]
    rates = [math.log10(x.optimizer.learning_rate) for x in trials]
    assert -5 <= min(rates) < -4.9
    assert -1.1 < max(rates) <= -1
    # 400 draws: a mean is within 0.2 of the middle, 3.5 of its standard deviations.
    assert sum(rates) / len(rates) == pytest.approx(-3, abs=0.2)
    assert {0.1 <= x.optimizer.weight_decay <= 0.3 for x in trials} == {True}
    assert {x.batch.samples for x in trials} == {32, 64}


def test_more_trials_or_keys_leave_draws_as_they_are() -> None:
    one = "search: random\nnum_trials: 3\nspace:\n  optimizer.learning_rate: {uniform: [0.1, 1]}"
    more = one.replace("3", "9") + "\n  seed: [1, 2]"
    few, many = ([x.job.optimizer.learning_rate for x in trials_of(sweep(text))] for text in (one, more))
    assert many[:3] == few


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("seed: 3", "sweep.space: empty: give keys and their values to try, or trials"),
        (
            "{space: {seed: [1]}, trials: [{seed: 1}]}",
            "sweep.space: beside trials: give either space or trials",
        ),
        ("space: {seed: 3}", "sweep.space.seed.values: 3: give a list of values, uniform or log_uniform"),
        ("space: {seed: []}", "sweep.space.seed.values: (): give a list of 1 to 1024"),
        ("space: {seed: [2, 2]}", "sweep.space.seed.values: [2, 2]: give each value once"),
        ("space: {seed: {uniform: [1, 2]}}", "space.seed: drawn: a grid has no drawn values"),
        ("{search: random, space: {seed: [1]}}", "sweep.num_trials: missing: say how many are to be drawn"),
        (
            "{num_trials: 2, space: {seed: [1]}}",
            "sweep.num_trials: 2: there are 1 trials, whatever this says",
        ),
        (
            "{search: random, num_trials: 2, space: {optimizer.eps: {uniform: [-1.0e+308, 1.0e+308]}}}",
            "uniform: [-1e+308, 1e+308]: give bounds less far apart",
        ),
        (
            "{search: random, num_trials: 2, space: {optimizer.eps: {log_uniform: [0, 1]}}}",
            "log_uniform: [0.0, 1.0]: give bounds above 0: only those have logarithms",
        ),
    ],
)
def test_what_makes_no_sweep_is_refused(text: str, error: str) -> None:
    with pytest.raises(JobFileErrors) as refused:
        sweep(text)
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "space: {optimizer.learning_rate: [0.1, 11]}",
            "trial 1 of sweep (optimizer.learning_rate: 11), optimizer.learning_rate: 11: "
            "give a number above 0 and at most 10",
        ),
        (
            "space: {optimiser.eps: [0.1]}",
            "trial 0 of sweep: optimiser.eps: is no key that trials may differ in",
        ),
        ("space: {name: [a]}", "trial 0 of sweep: name: is no key that trials may differ in"),
        ("space: {sweep.seed: [1]}", "trial 0 of sweep: sweep.seed: is no key that trials may differ in"),
        (
            "space: {parallel.stages: [1, 2]}",
            "trial 1 of sweep (parallel.stages: 2), parallel.stages: 2: a trial",
        ),
        (
            "space: {batch.samples: [30]}",
            "trial 0 of sweep (batch.samples: 30), batch.samples: 30: give a multiple",
        ),
    ],
)
def test_what_a_trial_may_not_be_is_refused_with_trial_key_and_value(text: str, error: str) -> None:
    with pytest.raises(UserError) as refused:
        check_admissible(sweep(text))
    assert error in str(refused.value)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_sweep_whose_gradients_are_to_be_rounded_is_told_what_to_leave_away(wire: str) -> None:
    job = RATES.replace("sweep:", f"aggregation: {{rule: all_reduce, wire: {wire}}}\nsweep:")
    with pytest.raises(UserError, match="all_reduce, with wire: fp32 and without robust"):
        check_admissible(sweep("space: {seed: [1, 2]}", job=job))


def test_trials_that_would_not_fit_into_the_run_log_are_refused() -> None:
    sources = ", ".join(f"{{format: text, path: /{'x' * 900}/{number}}}" for number in range(60))
    job = sweep(
        "{search: random, num_trials: 1000, space: {optimizer.learning_rate: {uniform: [0.1, 1]}}}",
        job=RATES.replace("{format: digits}", sources).replace(
            "{family: mlp, widths: [64, 32, 10]}", "{family: llama}"
        ),
    )
    with pytest.raises(UserError, match=r"sweep: 1000 trials: each is a job of \d+ characters: give at most"):
        trials_of(job)


def test_hyperband_refuses_trials_whose_budgets_are_other_steps() -> None:
    job = RATES.replace("steps: 50", "tokens: 6400")
    trials = "{search: hyperband, trials: [{batch.samples: 32}, {batch.samples: 64}]}"
    with pytest.raises(
        UserError, match=r"trial 1 has 100 where the job has 200: give budget\.steps, or random"
    ):
        check_admissible(sweep(trials, job=job))
    check_admissible(sweep(trials))


def test_trials_that_nothing_is_measured_of_are_refused() -> None:
    job = RATES.replace("{format: digits}]", "{format: digits}], validation_ratio: 0")
    with pytest.raises(UserError, match=r"sweep.metric: 'evaluation_loss': no sample validates"):
        check_admissible(sweep("{space: {seed: [1, 2]}, metric: evaluation_loss}", job=job))
    check_admissible(sweep("space: {seed: [1, 2]}", job=job))


def test_a_sweep_over_stages_is_refused() -> None:
    job = sweep("space: {seed: [1]}", job=RATES.replace("stages: 1", "stages: 2"))
    with pytest.raises(UserError, match=r"parallel.stages: 2: a trial trains on one worker"):
        check_admissible(job)


def test_trials_choose_rows_along_the_run_each_by_its_own_model_or_all_by_one() -> None:
    coreset = "data: {sources: [{format: digits}], coreset: {method: %s, %s}}"
    plain = "data: {sources: [{format: digits}]}"

    def asking(*settings: str) -> JobSpec:
        return sweep(
            "space: {seed: [1, 2], optimizer.eps: [1e-8, 1e-6]}", job=RATES.replace(plain, coreset % settings)
        )

    for method, share, num_arrays in (
        ("craig", "share: row", 1),
        ("craig", "share: first_alive", 2),  # which rows validate is a matter of the seed
        ("random", "fraction: 0.3", 1),
    ):
        job = asking(method, share)
        check_admissible(job)
        assert len(alike(trials_of(job))) == num_arrays
    with pytest.raises(ValueError, match=r"share: 'first_alive': no model is asked .* leave it away"):
        asking("random", "share: first_alive")
