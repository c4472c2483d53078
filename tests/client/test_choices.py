"""Choices of rows that a job will make, told before it is handed in."""

from pathlib import Path

import numpy as np
import pytest

from client.choices import choices_outline
from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec
from skein.errors import UserError
from skein.model.families.mlp import MlpModel
from worker.data import open_dataset

CLASSES = np.repeat([0, 1, 2], [1100, 360, 40])


def job_of(path: Path | str, **settings: object) -> JobSpec:
    return JobSpec(
        name="j",
        model=MlpModel(family="mlp", widths=(30,), num_features=4, num_classes=3),
        data=DataSpec(
            sources=(ArraysSource(format="arrays", path=str(path)),),
            validation_ratio=0.2,
            coreset=CoresetSpec.model_validate({"method": "craig", "fraction": 0.2} | settings),
        ),
        batch=BatchSpec(samples=8, microbatch_samples=8),
        budget=BudgetSpec(epochs=2),
        seed=5,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "rows.npz"
    np.savez(file, x=np.zeros((len(CLASSES), 4), np.float32), y=CLASSES)
    return file


def test_all_rows_are_no_choice(path: Path) -> None:
    assert list(choices_outline(job_of(path, method="none"))) == []


@pytest.mark.parametrize("group_by", ["label", "source"])
def test_picks_of_each_group_are_told_as_workers_make_them(path: Path, group_by: str) -> None:
    job = job_of(path, method="random", group_by=group_by)
    dataset = open_dataset(job.data, job.model, seed=job.seed, batch=job.batch)
    drawn = dataset.train_batch(range(240)).labels
    first, *_ = choices_outline(job)
    assert first.startswith("coreset: random: 240 of 1200 rows; of each ")
    told = [
        int(x) for x in first.partition(f"{'class' if group_by == 'label' else 'source'} ")[2].split(", ")
    ]
    assert told == (np.bincount(drawn).tolist() if group_by == "label" else [240])


def test_a_job_that_chooses_along_the_run_tells_when_and_at_what_cost(path: Path) -> None:
    first, times, cost = choices_outline(job_of(path, warmup_epochs=2, refresh_epochs=5))
    assert first.startswith("coreset: craig by last_layer: 240 of 1200 rows; of each class ")
    assert times == (
        "  chosen after 2 passes over all rows, at step 300; "
        "anew after every 5 passes over a choice, 150 steps, by the model 37 steps before"
    )
    assert cost == (
        "  each is a forward of 1200 rows, as much work as gradients of 400: 33% of the training between two "
        "(max_overhead, by time: 25%, above it choices come half as often); features take 309.4 KiB"
    )


def test_what_is_not_known_here_is_left_to_the_workers() -> None:
    first, times, cost = choices_outline(job_of("data://rows/train.npz", refresh_epochs=5))
    assert first == (
        "coreset: craig by last_layer: 20 % of the rows to train on, which workers count when they open them; "
        "of each class in proportion, at least one"
    )
    assert times == "  chosen before the first step; anew after every 5 passes over a choice"
    assert cost == "  each is a forward of all rows, a third of the work of a pass over them"


def test_a_choice_that_stays_costs_no_forward(path: Path) -> None:
    _, times = choices_outline(job_of(path, feature="inputs"))
    assert times == "  chosen before the first step, and kept"


def test_fewer_picks_than_a_step_has_rows_are_refused_as_workers_would(path: Path) -> None:
    with pytest.raises(UserError, match=r"data.coreset.fraction: 0.002: 2 of 1200 rows are fewer than the 8"):
        list(choices_outline(job_of(path, fraction=0.002)))
