"""The job that an array inside a sweep is."""

from skein.config.aggregation import AllReduce
from skein.config.checks import ChecksSpec
from skein.config.job import ArrayJob, BackupSpec, BatchSpec, BudgetSpec, JobSpec, PlanSpec
from skein.config.sweep.rows import ArraySpec

_ROUND_OPS = 8
"""Ops of a round, at most about so many: who is fenced in its midst has done some of them."""


def array_job(trial: JobSpec, array: ArraySpec, *, round_steps: int) -> ArrayJob:
    """The job that an array is.

    It is saved at the end of each round, evaluated at the end of the round in which its trials would be, and lives on
    one worker.

    Args:
        trial: what the job of any of its rows would be.
        array: its rows.
        round_steps: steps of each row between two commits; a few more, if they do not divide into ops of equally many.
    """
    samples = trial.batch.samples
    op_steps = max(1, round_steps // _ROUND_OPS)
    num_ops = -(-round_steps // op_steps)
    changed = {
        "batch": BatchSpec(samples=num_ops * samples, microbatch_samples=samples),
        "plan": PlanSpec(method="balanced", budget_s=0),
        "optimizer": array.rows[0].optimizer,
        "budget": BudgetSpec(steps=-(-array.num_steps // (num_ops * op_steps))),
        "evaluation": trial.evaluation.model_copy(
            update={"every_steps": -(-trial.evaluation.every_steps // (num_ops * op_steps))}
        ),
        "checkpoint": trial.checkpoint.model_copy(update={"every_steps": 1}),
        "backup": BackupSpec(every_steps=0),
        "aggregation": AllReduce(),
        "checks": ChecksSpec(),
        "on_divergence": "ignore",
        "sweep": None,
        "resources": trial.resources.model_copy(update={"min_workers": 1, "max_workers": 1}),
    }
    fields = {name: getattr(trial, name) for name in JobSpec.model_fields}
    return ArrayJob(**{**fields, **changed}, array=array.model_copy(update={"op_steps": op_steps}))
