"""Dropout: how much is dropped, and that it follows from a sample's luck, its layer and nothing else."""

import pytest
import torch

from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdamWSpec
from skein.model.families.mlp import MlpModel
from skein.types import Precision
from tests.worker.lab import Lab
from worker.model.dropout import dropped, luck_of

NUM_SAMPLES, NUM_FEATURES = 200, 500
ONES = torch.ones(NUM_SAMPLES, NUM_FEATURES, dtype=torch.float64)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_so_many_are_dropped_in_every_sample_and_feature_and_the_mean_stays(probability: float) -> None:
    found = dropped(ONES, luck_of(0, 0, 0), layer=1, probability=probability)
    assert set(found.flatten().tolist()) == {0.0, 1.0 / (1.0 - probability)}
    spread = (probability * (1.0 - probability)) ** 0.5
    shares = (found == 0).to(torch.float64)
    assert shares.mean() == pytest.approx(probability, abs=5 * spread / (NUM_SAMPLES * NUM_FEATURES) ** 0.5)
    # Of 700 means of independent draws the furthest is 3.2 standard deviations off.
    for dim, size in ((0, NUM_SAMPLES), (1, NUM_FEATURES)):
        assert (shares.mean(dim) - probability).abs().max() < 5 * spread / size**0.5
    # Neighbours know nothing of each other.
    for one, other in ((shares[1:], shares[:-1]), (shares[:, 1:], shares[:, :-1])):
        covariance = ((one - probability) * (other - probability)).mean()
        assert abs(float(covariance)) < 5 * spread**2 / (NUM_SAMPLES * NUM_FEATURES) ** 0.5


def test_draws_are_a_samples_own_wherever_a_batch_is_cut() -> None:
    whole = dropped(ONES, luck_of(7, 3, 0), layer=2, probability=0.5)
    part = dropped(ONES[:50], luck_of(7, 3, 120), layer=2, probability=0.5)
    assert torch.equal(part, whole[120:170])
    rows = torch.tensor([luck_of(7, 3, 0), luck_of(8, 3, 0)])
    both = dropped(ONES.expand(2, -1, -1), rows, layer=2, probability=0.5)
    assert torch.equal(both[0], whole)
    others = (luck_of(8, 3, 0), luck_of(7, 4, 0))
    for other in (*(dropped(ONES, x, layer=2, probability=0.5) for x in others), both[1]):
        assert 0.4 < (other == whole).to(torch.float64).mean() < 0.6
    assert not torch.equal(dropped(ONES, luck_of(7, 3, 0), layer=1, probability=0.5), whole)


def test_what_is_dropped_has_no_gradient_even_where_it_is_not_finite() -> None:
    x = torch.full((1, 64), torch.inf, dtype=torch.float64, requires_grad=True)
    made = dropped(x, luck_of(0, 0, 0), layer=1, probability=0.5)
    torch.autograd.backward(made.sum())
    assert x.grad is not None
    assert set(x.grad.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad == 0, made == 0)


def job(*, dropout: float, stages: int = 1, replicas: int = 1, microbatch: int = 16) -> JobSpec:
    return JobSpec(
        name="dropping",
        model=MlpModel(family="mlp", widths=(16, 12), dropout=dropout),
        data=DataSpec(sources=(DigitsSource(format="digits"),)),
        batch=BatchSpec(samples=16, microbatch_samples=microbatch),
        parallel=ParallelSpec(stages=stages, replicas=replicas),
        optimizer=AdamWSpec(learning_rate=1e-2, warmup_steps=0),
        budget=BudgetSpec(steps=4),
        evaluation=EvaluationSpec(samples=16),
        precision=Precision.FP64,
    )


def trained(asked: JobSpec) -> list[float]:
    """Loss of each of three steps, and of an evaluation after them."""
    lab = Lab(asked)
    found = [lab.step(step).loss for step in range(3)]
    found.append(lab.evaluate(3, asked.evaluation.samples // asked.batch.microbatch_samples))
    lab.close()
    return found


def test_stages_replicas_and_microbatches_change_nothing_of_what_is_dropped() -> None:
    whole = trained(job(dropout=0.4))
    for stages, replicas, microbatch in ((3, 1, 8), (1, 2, 4), (2, 2, 2)):
        other = job(dropout=0.4, stages=stages, replicas=replicas, microbatch=microbatch)
        assert trained(other) == pytest.approx(whole, rel=1e-11)
    calm = trained(job(dropout=0.0))
    assert all(abs(one - other) > 1e-3 for one, other in zip(whole, calm, strict=True))


def test_evaluations_drop_nothing() -> None:
    # Before the first step both have the same parameters.
    lab, calm = Lab(job(dropout=0.9)), Lab(job(dropout=0.0))
    assert lab.evaluate(0, 1) == calm.evaluate(0, 1)
    for each in (lab, calm):
        each.close()
