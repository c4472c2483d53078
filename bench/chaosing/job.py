"""The job that is disturbed: small, real, and with steps long enough to be hit in the midst of."""

import sysconfig

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    PlanSpec,
)
from skein.config.optimizer import AdamWSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import Precision

NUM_REPLICAS = 2
"""The least with which nothing that one worker holds is lost with it."""
SEQUENCE_TOKENS, MICROBATCH_SAMPLES, NUM_MICROBATCHES = 128, 2, 32


def make_job(
    name: str,
    *,
    num_workers: int,
    steps: int,
    seed: int,
    precision: Precision = Precision.FP32,
    num_microbatches: int = NUM_MICROBATCHES,
) -> JobSpec:
    """Two layers of width 128 in a stage for every two workers; microbatches of the standard library's source."""
    stages = num_workers // NUM_REPLICAS
    shape = LlamaShape(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2 * stages,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    text = TextSource(path=sysconfig.get_path("stdlib"), glob="*.py")
    return JobSpec(
        name=name,
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(text,), sequence_tokens=SEQUENCE_TOKENS),
        batch=BatchSpec(samples=num_microbatches * MICROBATCH_SAMPLES, microbatch_samples=MICROBATCH_SAMPLES),
        parallel=ParallelSpec(stages=stages, replicas=NUM_REPLICAS),
        plan=PlanSpec(budget_s=0.2),  # others compute on the same cores while a search goes on
        # Slow, for rounding grows with every step: at 1e-3 from 1e-9 to 2e-6 of the loss within 100 steps.
        optimizer=AdamWSpec(learning_rate=5e-4, warmup_steps=50),
        precision=precision,
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=0),
        checkpoint=CheckpointSpec(every_steps=100, keep=2),
        seed=seed,
    )
