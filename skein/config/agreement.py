"""What a job's aggregation asks of the rest of the job, as far as the job file alone tells.

Rules of this file
- A check takes the whole job and raises `UserError` with the dotted field, its value and what would be right.
- What depends on a model's sizes or on a graph's stability is checked where those are known: `skein.plan.admission`.
"""

import math
from typing import TYPE_CHECKING

from skein.config.aggregation import AllReduce, DiLoCo, Gossip, Lsgd, OneBitAdam, OneBitLamb
from skein.config.explain import Words
from skein.config.optimizer import LambSpec, OptimizerSpec, SgdSpec
from skein.config.robust import CentredClip, NormClip, NoRobust, check_robust
from skein.errors import UserError
from skein.types import Layout, Precision

if TYPE_CHECKING:
    from skein.config.job import JobSpec

_LEAST_SHARE, _MOST_SHARE = 0.15, 0.25
"""Of all steps, for a 1-bit rule's warm-up; see `OneBitLamb.warmup_steps`."""


def check_aggregation(job: "JobSpec") -> None:
    """Refuses a rule that the rest of the job gives nothing to work with.

    Raises:
        UserError: with the first field that does not fit.
    """
    if job.aggregation.walkers.are_lines:
        _check_walkers(job)
    match job.aggregation:
        case AllReduce() as rule:
            _check_all_reduce(job, rule)
        case OneBitAdam() | OneBitLamb() as rule:
            _check_one_bit(job, rule)
        case Lsgd() as rule:
            _check_lsgd(job, rule)
        case Gossip() as rule:
            _check_gossip(job, rule)
        case DiLoCo() as rule:
            _check_period(job, "local_steps", rule.local_steps)
            check_robust(rule.robust, job.parallel.replicas, "parallel.replicas gives")
            _check_wire(job, rule.wire)


def _check_walkers(job: "JobSpec") -> None:
    """Every replica is a walker: there must be two, each with a microbatch and all stages of its own."""
    rule, replicas = job.aggregation.rule, job.parallel.replicas
    if replicas < 2:
        hint = f"with {rule} each replica is a walker of its own: give at least 2"
        raise UserError("parallel.replicas", replicas, hint)
    if replicas > job.batch.num_microbatches:
        most = job.batch.num_microbatches
        hint = (
            f"each walker needs a microbatch, a step has {most}: give at most {most}, or raise batch.samples"
        )
        raise UserError("parallel.replicas", replicas, hint)
    if job.skip.ratio:
        hint = f"with {rule} a walker holds each stage once, and all must learn in every step: give 0"
        raise UserError("skip.ratio", job.skip.ratio, hint)


def _check_period(job: "JobSpec", field: str, period: int) -> None:
    if period > job.total_steps:
        hint = f"the job ends before walkers meet: give at most budget.steps ({job.total_steps})"
        raise UserError(f"aggregation.{field}", period, hint)


def _check_all_reduce(job: "JobSpec", rule: AllReduce) -> None:
    if rule.pattern in ("ring", "tree"):
        field, along = "aggregation.pattern", f"along a {rule.pattern} only sums are seen"
        if not isinstance(rule.robust, NoRobust):
            hint = f"{rule.robust.kind} must see every member's part, and {along}: give direct or auto"
            raise UserError(field, rule.pattern, hint)
        if rule.wire != "fp32":
            hint = f"{rule.wire} would round at every hop, as {along}: give direct or auto, or wire: fp32"
            raise UserError(field, rule.pattern, hint)
    check_robust(rule.robust, job.parallel.replicas, "parallel.replicas gives")
    _check_wire(job, rule.wire)


def _check_wire(job: "JobSpec", wire: str, field: str = "wire") -> None:
    """Nobody pays for float64 and rounds it on the wire."""
    if job.precision is Precision.FP64 and wire != "fp32":
        hint = "what travels in a job of precision fp64 is not rounded: give fp32, which means as computed"
        raise UserError(f"aggregation.{field}", wire, hint)


# --- 1-bit ---


def _check_one_bit(job: "JobSpec", rule: OneBitAdam | OneBitLamb) -> None:
    wanted = "adamw" if isinstance(rule, OneBitAdam) else "lamb"
    if job.optimizer.name != wanted:
        raise UserError("optimizer.name", job.optimizer.name, f"{rule.rule} is made of it: give {wanted}")
    field, steps = "aggregation.warmup_steps", rule.warmup_steps
    if steps >= job.total_steps:
        low, high = (max(2, math.ceil(share * job.total_steps)) for share in (_LEAST_SHARE, _MOST_SHARE))
        hint = f"all {job.total_steps} steps would be warm-up: give {low} to {high}, or another rule"
        raise UserError(field, steps, hint)
    if steps < job.optimizer.warmup_steps:
        hint = (
            "the variance is frozen before the learning rate is warm: give at least optimizer.warmup_steps "
        )
        raise UserError(field, steps, f"{hint}({job.optimizer.warmup_steps})")
    _check_wire(job, rule.warmup_wire, "warmup_wire")
    if isinstance(rule, OneBitLamb):
        _check_one_bit_lamb(job, rule)


def _check_one_bit_lamb(job: "JobSpec", rule: OneBitLamb) -> None:
    # A mean with decay b has seen what it is a mean of after 1 / (1 - b) steps; the margin is for rounding.
    least = math.ceil(1 / (1 - rule.ratio_beta) - 1e-6)
    if rule.warmup_steps < least:
        hint = (
            f"the mean of layer ratios (ratio_beta {rule.ratio_beta:g}) is not settled: give at least {least}"
        )
        raise UserError("aggregation.warmup_steps", rule.warmup_steps, hint)
    if rule.min_factor > rule.max_factor:
        hint = f"give at most max_factor ({rule.max_factor:g})"
        raise UserError("aggregation.min_factor", rule.min_factor, hint)
    if isinstance(job.optimizer, LambSpec) and job.optimizer.bias_correction:
        hint = "one_bit_lamb freezes the moments as they are: give false"
        raise UserError("optimizer.bias_correction", Words("true"), hint)


# --- many walkers ---


def _check_lsgd(job: "JobSpec", rule: Lsgd) -> None:
    _check_period(job, "global_every_steps", rule.global_every_steps)
    if not (job.data.held_out_ratio or job.data.validation):
        hint = "lsgd scores walkers on validation samples: give more than 0, such as 0.02"
        raise UserError("data.validation_ratio", 0, hint)
    # LOOP's head is a stage of its own.
    if rule.asynchronous and (job.parallel.stages > 1 or job.parallel.layout is Layout.LOOP):
        hint = (
            "a walker of several stages cannot go on between two steps: "
            "give false, or parallel: {stages: 1, layout: line}"
        )
        raise UserError("aggregation.asynchronous", Words("true"), hint)


def _check_gossip(job: "JobSpec", rule: Gossip) -> None:
    _check_period(job, "every_steps", rule.every_steps)
    if isinstance(job.optimizer, SgdSpec) and job.optimizer.nesterov:
        hint = f"{rule.method} says itself where momentum goes: give false"
        raise UserError("optimizer.nesterov", Words("true"), hint)
    if rule.method == "dsgd":
        _check_no_momentum(job.optimizer)
    if not isinstance(rule.robust, NoRobust | NormClip | CentredClip):
        hint = "of other combiners neighbours' means part: give none, median_norm_clip or centred_clip"
        raise UserError("aggregation.robust.kind", rule.robust.kind, hint)


def _check_no_momentum(optimizer: OptimizerSpec) -> None:
    if isinstance(optimizer, SgdSpec):
        field, momentum = "momentum", optimizer.momentum
    else:
        field, momentum = "betas[0]", optimizer.betas[0]
    if momentum:
        raise UserError(f"optimizer.{field}", momentum, "dsgd has no momentum: give 0, or method: dmsgd")
