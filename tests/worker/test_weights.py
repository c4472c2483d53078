"""Samples with weights: what they do to loss and gradients, in one process and through the chunks of a job."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.reference import run_reference, whole_model
from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource
from skein.config.data.spec import DataSpec
from skein.config.job import JobSpec
from skein.config.optimizer import AdamWSpec
from skein.model.families.mlp import MlpModel
from skein.types import Layout, Precision
from tests.worker.lab import Lab, tiny_job

STEPS = 5


def job_of(tmp_path: Path, text: Path, layout: Layout, method: str) -> JobSpec:
    generator = np.random.default_rng(2)
    y = np.repeat([0, 1, 2], [120, 30, 10])
    np.savez(tmp_path / "rows.npz", x=generator.normal(size=(160, 4)) + y[:, None], y=y)
    source = ArraysSource(format="arrays", path=str(tmp_path / "rows.npz"))
    coreset = CoresetSpec.model_validate({"method": method, "fraction": 0.4, "feature": "inputs"})
    drawn = tiny_job(text, stages=2, replicas=2, is_tied=False)
    return drawn.model_copy(
        update={
            "model": MlpModel(family="mlp", widths=(8, 8), num_features=4, num_classes=3),
            "data": DataSpec(sources=(source,), coreset=coreset),
            "parallel": drawn.parallel.model_copy(update={"layout": layout}),
            "precision": Precision.FP64,
            # The lab's record keeps to one learning rate.
            "optimizer": AdamWSpec(learning_rate=1e-2, schedule="constant", warmup_steps=0),
        }
    )


@pytest.mark.parametrize("method", ["craig", "random"])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_job_on_weighted_rows_learns_as_one_process_does(
    tmp_path: Path, text: Path, labs: list[Lab], layout: Layout, method: str
) -> None:
    job = job_of(tmp_path, text, layout, method)
    lab = Lab(job)
    labs.append(lab)
    losses = [lab.step(step).loss for step in range(STEPS)]
    # Sums in float64, in another order.
    assert losses == pytest.approx([x.loss for x in run_reference(job, STEPS)], rel=1e-10)
    plain = job.model_copy(update={"data": job.data.model_copy(update={"coreset": CoresetSpec()})})
    assert losses != pytest.approx([x.loss for x in run_reference(plain, STEPS)], rel=1e-3)


def test_a_weight_counts_like_so_many_rows_and_samples_are_still_counted(tmp_path: Path, text: Path) -> None:
    model = whole_model(job_of(tmp_path, text, Layout.LINE, "none"))
    x, y = (
        torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).double(),
        torch.tensor([0, 1, 2, -100]),
    )
    loss, num_valid = model.loss(x, y, torch.tensor([3.0, 0.0, 1.0, 2.0]))
    torch.autograd.backward(loss)
    weighted = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    repeated, _ = model.loss(x[[0, 0, 0, 2]], y[[0, 0, 0, 2]])
    torch.autograd.backward(repeated)
    assert num_valid == 3
    assert loss.item() == pytest.approx(repeated.item(), rel=1e-12)
    for before, param in zip(weighted, model.parameters(), strict=True):
        torch.testing.assert_close(before, param.grad, rtol=1e-12, atol=1e-14)
