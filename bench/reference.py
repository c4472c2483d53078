"""The same job in one plain torch process: the whole model, torch's own optimizer and clipping, no Skein protocol."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.schedule import learning_rate
from skein.data.cursor import positions_of
from skein.types import Precision, StageIndex, StageSpec
from worker.data.dataset import Batch, Dataset, open_dataset
from worker.model.stage import Stage, build_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step: mean loss (nats per token), norm of the mean gradient before clipping, seconds it took."""

    loss: float
    gradient_norm: float
    seconds: float


def run_reference(
    job: JobSpec, num_steps: int, *, microbatches_at_once: int | None = None
) -> list[ReferenceStep]:
    """Train `job` for `num_steps` steps in this process, on as many threads as torch is set to.

    Args:
        microbatches_at_once: how many go through the model together; None: the whole batch.
    """
    model = whole_model(job)
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    optimizer = torch_optimizer(job.optimizer, model.parameters())
    together = microbatches_at_once or job.batch.num_microbatches
    steps = []
    for step in range(num_steps):
        began = time.perf_counter()
        batches = [
            batch_of(job, dataset, step, first, together)
            for first in range(0, job.batch.num_microbatches, together)
        ]
        loss, norm = _step(
            job, model, optimizer, batches, learning_rate(job.optimizer, step, job.total_steps)
        )
        steps.append(ReferenceStep(loss=loss, gradient_norm=norm, seconds=time.perf_counter() - began))
    return steps


def whole_model(job: JobSpec) -> Stage:
    """All layers of the job's model on the CPU, as its seed draws them."""
    layers = job.layers
    return build_stage(
        job.model,
        StageSpec(index=StageIndex(0), first=0, stop=len(layers)),
        sequence_tokens=job.data.sequence_tokens,
        seed=job.seed,
        precision=job.precision,
        device=torch.device("cpu"),
    )


def torch_optimizer(
    spec: OptimizerSpec, params: Iterable[Tensor], *, is_fused: bool = False
) -> torch.optim.Optimizer:
    """Torch's own optimizer, set as `spec` asks; the learning rate is to be set before each step.

    `is_fused`: in one pass over each tensor, as fast as torch has it.

    Raises:
        ValueError: torch has no such optimizer.
    """
    parameters = list(params)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    rate = spec.learning_rate
    match spec:
        case AdamWSpec():
            return torch.optim.AdamW(groups, lr=rate, betas=spec.betas, eps=spec.eps, fused=is_fused)
        case AdamSpec():
            return torch.optim.Adam(groups, lr=rate, betas=spec.betas, eps=spec.eps)
        case AdadeltaSpec():
            return torch.optim.Adadelta(groups, lr=rate, rho=spec.rho, eps=spec.eps)
        case SgdSpec():
            return torch.optim.SGD(
                groups, lr=rate, momentum=spec.momentum, nesterov=spec.nesterov, fused=is_fused
            )
        case LambSpec():
            raise ValueError("torch has no LAMB")
        case _:
            assert_never(spec)


def batch_of(job: JobSpec, dataset: Dataset, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of `count` microbatches of a step, from microbatch `first` on, side by side."""
    parts: list[Batch] = [
        dataset.train_batch(positions_of(step, microbatch, job.batch))
        for microbatch in range(first, min(first + count, job.batch.num_microbatches))
    ]
    inputs = torch.cat([torch.from_numpy(part.inputs) for part in parts])
    labels = torch.cat([torch.from_numpy(part.labels) for part in parts])
    if job.precision is Precision.FP64 and inputs.is_floating_point():
        inputs = inputs.double()
    return inputs, labels


def _step(
    job: JobSpec,
    model: Stage,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    rate: float,
) -> tuple[float, float]:
    num_valid = sum(int((labels != -100).sum()) for _, labels in batches)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for inputs, labels in batches:
        loss, _ = model.loss(inputs, labels)
        torch.autograd.backward(loss / num_valid)
        total += float(loss.detach())
    limit = job.optimizer.clip_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if limit is None else limit)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return total / num_valid, float(norm)
