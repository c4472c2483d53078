"""Small jobs that real processes train in seconds, and what came of them."""

from collections.abc import Iterable
from pathlib import Path

from client.api import Job
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
from skein.wire.views import JobEvent, StepFinished

NUM_STEPS = 24
"""Of jobs that are compared with one that nobody disturbs."""


def write_text(folder: Path) -> Path:
    """A folder of text files, always the same: on another text rounding may grow faster than tests allow."""
    source = Path(__file__).with_name("sample.txt").read_bytes() * 4
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(8):
        (folder / f"{index}.txt").write_bytes(source[index * 97 :])
    return folder


def text_job(
    name: str, text: Path, *, steps: int, stages: int = 2, replicas: int = 2, checkpoint_every: int = 0
) -> JobSpec:
    """A byte-level model with dimensions that leave time to interfere: tens of milliseconds per step."""
    shape = LlamaShape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return JobSpec(
        name=name,
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=64, validation_ratio=0.1),
        batch=BatchSpec(samples=16, microbatch_samples=2),
        parallel=ParallelSpec(stages=stages, replicas=replicas),
        optimizer=AdamWSpec(learning_rate=3e-3, warmup_steps=min(5, steps)),
        budget=BudgetSpec(steps=steps),
        plan=PlanSpec(budget_s=0.2),
        evaluation=EvaluationSpec(every_steps=0, samples=4),
        checkpoint=CheckpointSpec(every_steps=checkpoint_every, keep=2),
        seed=3,
    )


def losses_of(events: Iterable[JobEvent]) -> dict[int, float]:
    """The loss of each step; of a step that was made twice, the last."""
    return {e.body.record.step: e.body.record.loss for e in events if isinstance(e.body, StepFinished)}


def wait_for_step(job: Job, step: int) -> None:
    """Until it is committed."""
    for event in job.events():
        if isinstance(event.body, StepFinished) and event.body.record.step >= step:
            return
    raise AssertionError(f"{job.id} ended before step {step}: {job.status()}")
