"""The job that emulated fleets train: real, but so small that its real ops are done long before their emulated time."""

from pathlib import Path
from typing import Literal

import numpy as np

from skein.config.data.sources import TokenSource
from skein.config.data.spec import DataSpec
from skein.config.job import (
    BatchSpec,
    BudgetSpec,
    CheckpointSpec,
    EvaluationSpec,
    JobSpec,
    ParallelSpec,
    PlanSpec,
    SkipSpec,
)
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.types import Layout

Method = Literal["search", "balanced", "full"]

SEQUENCE_TOKENS, HIDDEN, SAMPLES = 128, 32, 2
ACTIVATION_BYTES = SEQUENCE_TOKENS * HIDDEN * SAMPLES * 4
"""Of one microbatch: below the window that HTTP/2 grants a stream before it asks for more."""
_VOCABULARY = 64
_NUM_TOKENS = 1 << 18


def write_tokens(path: Path) -> Path:
    """A file of tokens that repeat with a period, so that there is something to learn."""
    tokens = np.arange(_NUM_TOKENS) * np.arange(_NUM_TOKENS) % 61
    path.write_bytes(tokens.astype(np.uint8).tobytes())
    return path


def make_job(
    name: str,
    tokens: Path,
    *,
    method: Method,
    num_workers: int,
    stages: int,
    microbatches: int,
    skip_ratio: float,
    budget_s: float,
    steps: int,
) -> JobSpec:
    """One block of a Llama to each stage, in the loop layout, with as many replicas as give every worker a place."""
    shape = LlamaShape(
        vocab_size=_VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=stages,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return JobSpec(
        name=name,
        model=LlamaModel(shape=shape),
        data=DataSpec(
            sources=(TokenSource(format="tokens", path=str(tokens), dtype="uint8"),),
            sequence_tokens=SEQUENCE_TOKENS,
        ),
        batch=BatchSpec(samples=microbatches * SAMPLES, microbatch_samples=SAMPLES),
        parallel=ParallelSpec(stages=stages, replicas=-(-num_workers // stages) + 1, layout=Layout.LOOP),
        skip=SkipSpec(ratio=skip_ratio),
        plan=PlanSpec(method=method, budget_s=budget_s),
        budget=BudgetSpec(steps=steps),
        evaluation=EvaluationSpec(every_steps=0, samples=SAMPLES),
        checkpoint=CheckpointSpec(every_steps=0, keep=1),
    )
