"""One plain torch process in which each microbatch goes through some of the stages: what skipping must come to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.experts import PlainExperts
from bench.reference import ReferenceStep, torch_optimizer
from skein.config.job import JobSpec
from skein.config.schedule import learning_rate
from skein.data.cursor import positions_of
from skein.plan.cut import cut
from skein.types import Layout, StageSpec
from worker.data.dataset import Dataset, open_dataset
from worker.model.stage import Stage, build_stage


def run_skipping(
    job: JobSpec, num_steps: int, ways: Sequence[Sequence[int]], *, cut_at: Sequence[StageSpec] | None = None
) -> list[ReferenceStep]:
    """Train `job` for `num_steps` steps, microbatch m through the stages `ways[m % len(ways)]`, in that order.

    Every parameter's summed gradient is divided by the valid tokens of the microbatches that used it, then all are
    clipped together, by torch's own optimizer and clipping; what nobody used has no gradient, and stays. In `LOOP` the
    head is the stage after the last. Stages are those of `cut_at`, by default the job's even cut.
    """
    stages = _stages(job, cut_at or cut(job.layers, job.parallel.stages, job.parallel.layout))
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    users = {name: [s for s, stage in enumerate(stages) if name in stage.state_dict()] for name in parameters}
    spec = job.optimizer
    optimizer = torch_optimizer(spec, parameters.values())
    dataset = open_dataset(job.data, job.model, seed=job.seed)
    experts = PlainExperts(stages)
    steps = []
    for step in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        tokens = [0] * len(stages)
        total, balance, weight = 0.0, 0.0, 0
        for microbatch in range(job.batch.num_microbatches):
            way = list(ways[microbatch % len(ways)])
            if job.parallel.layout is Layout.LOOP:
                way.append(len(stages) - 1)
            loss, num_valid = _loss([stages[s] for s in way], *_batch(job, dataset, step, microbatch))
            balances = experts.taken()
            pull = num_valid * sum(balances, loss.new_zeros(()))
            torch.autograd.backward(loss + experts.coefficient * pull)
            total += float(loss.detach())
            balance += float(pull.detach())
            weight += num_valid * len(balances)
            for stage in way:
                tokens[stage] += num_valid
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad /= max(tokens[stage] for stage in users[name])
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), spec.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, job.total_steps)
        optimizer.step()
        steps.append(
            ReferenceStep(
                loss=total / tokens[0],
                gradient_norm=float(norm),
                seconds=0.0,
                balance_loss=balance / weight if weight else None,
                drop_ratio=experts.drop_ratio(),
            )
        )
    return steps


def _stages(job: JobSpec, cut_at: Sequence[StageSpec]) -> list[Stage]:
    """The job's stages; what two of them hold is one parameter."""
    built = [
        build_stage(
            job.model,
            stage,
            sequence_tokens=job.data.sequence_tokens,
            seed=job.seed,
            precision=job.precision,
            device=torch.device("cpu"),
        )
        for stage in cut_at
    ]
    first = dict(built[0].named_parameters())
    for name in first.keys() & dict(built[-1].named_parameters()).keys():
        owner, _, attribute = name.rpartition(".")
        setattr(built[-1].get_submodule(owner), attribute, first[name])
    return built


def _loss(stages: Sequence[Stage], x: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    for stage in stages[:-1]:
        x = stage(x)
    return stages[-1].loss(x, labels)


def _batch(job: JobSpec, dataset: Dataset, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    batch = dataset.train_batch(positions_of(step, microbatch, job.batch))
    return torch.from_numpy(batch.inputs), torch.from_numpy(batch.labels)
