"""The same job in one plain torch process: the whole model, torch's own optimizer and clipping, no Skein protocol."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from bench.experts import PlainExperts
from skein.config.job import JobSpec
from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.schedule import learning_rate
from skein.data.cursor import positions_of
from skein.types import Precision, StageIndex, StageSpec
from worker.data.dataset import Batch, Dataset, open_dataset
from worker.model.stage import Stage, build_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceStep:
    """One step: mean loss (nats per token), norm of the mean gradient before clipping, seconds it took.

    `balance_loss` is the mean over sparse layers and valid tokens, where a model has experts and a microbatch goes
    through it at a time.
    """

    loss: float
    gradient_norm: float
    seconds: float
    balance_loss: float | None = None
    drop_ratio: float | None = None
    """Share of the choices of experts that found theirs full."""


def run_reference(
    job: JobSpec, num_steps: int, *, microbatches_at_once: int | None = None
) -> list[ReferenceStep]:
    """Train `job` for `num_steps` steps in this process, on as many threads as torch is set to.

    Args:
        microbatches_at_once: how many go through the model together; None: the whole batch, or one where there are
            experts.
    """
    model = whole_model(job)
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    optimizer = torch_optimizer(job.optimizer, model.parameters())
    # How evenly experts are used is asked of each microbatch by itself.
    together = microbatches_at_once or (1 if job.model.has_experts else job.batch.num_microbatches)
    steps = []
    experts = PlainExperts([model])
    for step in range(num_steps):
        began = time.perf_counter()
        batches = [
            (*batch_of(job, dataset, step, first, together), weights_of(job, dataset, step, first, together))
            for first in range(0, job.batch.num_microbatches, together)
        ]
        loss, norm, balance = _step(
            job, model, optimizer, batches, learning_rate(job.optimizer, step, job.total_steps), experts
        )
        steps.append(
            ReferenceStep(
                loss=loss,
                gradient_norm=norm,
                seconds=time.perf_counter() - began,
                balance_loss=balance,
                drop_ratio=experts.drop_ratio(),
            )
        )
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
    parts = _parts(job, dataset, step, first, count)
    inputs = torch.cat([torch.from_numpy(part.inputs) for part in parts])
    labels = torch.cat([torch.from_numpy(part.labels) for part in parts])
    if job.precision is Precision.FP64 and inputs.is_floating_point():
        inputs = inputs.double()
    return inputs, labels


def weights_of(job: JobSpec, dataset: Dataset, step: int, first: int, count: int) -> Tensor | None:
    """Weights of the samples of the same microbatches; None: all count alike."""
    weights = [part.weights for part in _parts(job, dataset, step, first, count)]
    told = [torch.from_numpy(x) for x in weights if x is not None]
    return torch.cat(told) if told else None


def _parts(job: JobSpec, dataset: Dataset, step: int, first: int, count: int) -> list[Batch]:
    microbatches = range(first, min(first + count, job.batch.num_microbatches))
    return [dataset.train_batch(positions_of(step, microbatch, job.batch)) for microbatch in microbatches]


def _step(
    job: JobSpec,
    model: Stage,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor, Tensor | None]],
    rate: float,
    experts: PlainExperts,
) -> tuple[float, float, float | None]:
    num_valid = sum(int((labels != -100).sum()) for _, labels, _ in batches)
    optimizer.zero_grad(set_to_none=True)
    total, balance, weight = 0.0, 0.0, 0
    for inputs, labels, weights in batches:
        loss, num_here = model.loss(inputs, labels, weights)
        balances = experts.taken()
        pull = num_here * sum(balances, loss.new_zeros(()))
        torch.autograd.backward((loss + experts.coefficient * pull) / num_valid)
        total += float(loss.detach())
        balance += float(pull.detach())
        weight += num_here * len(balances)
    limit = job.optimizer.clip_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if limit is None else limit)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return total / num_valid, float(norm), balance / weight if weight else None
