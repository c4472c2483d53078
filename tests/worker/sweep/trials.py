"""Trials of a small classifier, and arrays of them."""

from collections.abc import Mapping

from skein.config.data.sources import DigitsSource
from skein.config.data.spec import DataSpec
from skein.config.job import ArrayJob, BatchSpec, BudgetSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.config.optimizer import AdamWSpec
from skein.config.sweep.arrays import array_job
from skein.config.sweep.rows import ArrayRow, ArraySpec, RowOrigin
from skein.model.families.mlp import MlpModel
from skein.types import Precision

NUM_STEPS = 20
RATES = (3e-3, 1e-2, 3e-2, 1e-3)
SEEDS = (1, 2, 1, 3)


def trial(row: int) -> JobSpec:
    """The job that a trial would be alone; a step is one microbatch, as a row's is."""
    return JobSpec(
        name="trial",
        model=MlpModel(family="mlp", widths=(16,)),
        data=DataSpec(sources=(DigitsSource(format="digits"),)),
        batch=BatchSpec(samples=16, microbatch_samples=16),
        parallel=ParallelSpec(stages=1),
        optimizer=AdamWSpec(learning_rate=RATES[row], warmup_steps=2, clip_norm=0.5 * (row + 1)),
        budget=BudgetSpec(steps=NUM_STEPS),
        evaluation=EvaluationSpec(samples=32),
        precision=Precision.FP64,
        seed=SEEDS[row],
    )


def array_of(
    *rows: int,
    first_step: int = 0,
    last_step: int = NUM_STEPS,
    round_steps: int = 4,
    origins: Mapping[int, RowOrigin] | None = None,
) -> ArrayJob:
    listed = tuple(
        ArrayRow(trial=row, optimizer=trial(row).optimizer, seed=SEEDS[row], origin=(origins or {}).get(row))
        for row in rows
    )
    spec = ArraySpec(
        rows=listed, first_step=first_step, last_step=last_step, schedule_steps=NUM_STEPS, fuse="always"
    )
    return array_job(trial(rows[0]), spec, round_steps=round_steps)
