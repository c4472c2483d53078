"""Small jobs for machines and simulated worlds."""

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    SkipSpec,
)
from skein.config.optimizer import AdamWSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import Layout

ROOM_FOR_ONE_STAGE = 6_000_000
"""Bytes; each of the two stages of a small job needs 4 to 5 MB, both together 7 to 8."""


def small_job(
    *,
    stages: int = 2,
    replicas: int = 2,
    microbatches: int = 4,
    steps: int = 4,
    layout: Layout = Layout.LINE,
    is_tied: bool = False,
    evaluate_every: int = 0,
    evaluation_microbatches: int = 2,
    save_every: int = 0,
    keep: int = 2,
    clip_norm: float | None = 1.0,
    skip_ratio: float = 0.0,
    name: str = "small",
) -> JobSpec:
    """A language model of two blocks per stage; two samples in each microbatch."""
    shape = LlamaShape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2 * stages,
        tie_word_embeddings=is_tied,
    )
    return JobSpec(
        name=name,
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="/corpus"),), sequence_tokens=64),
        batch=BatchSpec(samples=2 * microbatches, microbatch_samples=2),
        parallel=ParallelSpec(stages=stages, replicas=replicas, layout=layout),
        skip=SkipSpec(ratio=skip_ratio),
        optimizer=AdamWSpec(clip_norm=clip_norm),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=evaluate_every, samples=2 * evaluation_microbatches),
        checkpoint=CheckpointSpec(every_steps=save_every, keep=keep),
    )
