"""Samples that rounds of DiLoCo go on without though nothing is wrong: walkers that are real processes, one machine."""

import tempfile
from pathlib import Path

from bench.cluster import running
from bench.report import Row
from bench.studies.aggregation.measured import Measured
from skein.config.aggregation import DiLoCo
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, CheckpointSpec, EvaluationSpec, JobSpec, ParallelSpec
from skein.errors import UserError
from skein.model.families.llama import LlamaModel, LlamaShape

NUM_WALKERS = 3
NUM_STEPS, QUICK_STEPS = 300, 24
GOAL = 0.01
"""Of all samples, at most."""


def measure(*, is_quick: bool) -> Measured:
    """One row: the share of samples that no update has seen.

    Raises:
        UserError: the job did not come to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "corpus.txt"
        text.write_text("".join(f"line {index} of a text that has many lines\n" for index in range(20_000)))
        job = job_of(text, steps=QUICK_STEPS if is_quick else NUM_STEPS)
        with running(folder / "cluster", NUM_WALKERS) as cluster, cluster.client() as client:
            status = client.submit(job).wait()
    if status.step < job.total_steps:
        raise UserError("steps", status.step, f"{status.state}: {status.reason}")
    share = status.num_late_samples / (job.total_steps * job.batch.samples)
    row = Row(
        what=f"samples left out of {job.total_steps} steps of {NUM_WALKERS} walkers that nothing disturbs",
        value=status.num_late_samples,
        unit="samples",
        against=f"{job.total_steps * job.batch.samples} samples",
        ratio=share,
        goal=f"<= {GOAL:g}",
        holds=share <= GOAL,
        spread=0.0,
    )
    return Measured(rows=(row,))


def job_of(text: Path, *, steps: int) -> JobSpec:
    """A small language model, a walker on each worker, which meet in every sixth step."""
    return JobSpec(
        name="late",
        model=LlamaModel(shape=LlamaShape(hidden_size=128, intermediate_size=352, num_hidden_layers=2)),
        data=DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=64),
        batch=BatchSpec(samples=12, microbatch_samples=2),
        parallel=ParallelSpec(stages=1, replicas=NUM_WALKERS),
        aggregation=DiLoCo(rule="diloco", local_steps=6),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=0),
        checkpoint=CheckpointSpec(every_steps=0),
    )
