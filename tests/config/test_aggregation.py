"""A job's aggregation and the rest of the job: what does not go together is refused, with what would."""

import pytest

from skein.config.aggregation import DiLoCo, OneBitLamb
from skein.config.job import JobSpec
from skein.config.load import JobFileErrors, parse_job
from skein.config.robust import Krum, TrimmedMean, check_robust
from skein.config.rule import Walkers
from skein.errors import UserError

GOOD = """
name: agreed
model: {family: llama, preset: llama-1m}
data: {sources: [{format: text, path: /books}]}
batch: {samples: 32, microbatch_samples: 4}
parallel: {stages: 2, replicas: 4}
budget: {steps: 400}
"""
ONE_BIT_ADAM = "aggregation={rule: one_bit_adam, warmup_steps: 60}"
ONE_BIT_LAMB = "aggregation={rule: one_bit_lamb, warmup_steps: 60}"
LAMB = "optimizer={name: lamb}"
LSGD, GOSSIP, DILOCO = "aggregation.rule=lsgd", "aggregation.rule=gossip", "aggregation.rule=diloco"
SGD = "optimizer={name: sgd}"

# Changes to a good job, and the whole of what is said about them.
WRONG = {
    (ONE_BIT_ADAM, LAMB): "optimizer.name: 'lamb': one_bit_adam is made of it: give adamw",
    (ONE_BIT_LAMB,): "optimizer.name: 'adamw': one_bit_lamb is made of it: give lamb",
    (
        ONE_BIT_ADAM,
        "aggregation.warmup_steps=400",
    ): "aggregation.warmup_steps: 400: all 400 steps would be warm-up: give 60 to 100, or another rule",
    (
        ONE_BIT_ADAM,
        "optimizer.warmup_steps=61",
    ): "aggregation.warmup_steps: 60: the variance is frozen before the "
    "learning rate is warm: give at least optimizer.warmup_steps (61)",
    (
        ONE_BIT_LAMB,
        LAMB,
        "aggregation.ratio_beta=0.99",
    ): "aggregation.warmup_steps: 60: the mean of layer ratios "
    "(ratio_beta 0.99) is not settled: give at least 100",
    (
        ONE_BIT_LAMB,
        LAMB,
        "aggregation.min_factor=5",
    ): "aggregation.min_factor: 5.0: give at most max_factor (4)",
    (ONE_BIT_LAMB, LAMB, "optimizer.bias_correction=true"): "optimizer.bias_correction: true: "
    "one_bit_lamb freezes the moments as they are: give false",
    (LAMB, "optimizer.min_ratio=11"): "optimizer.min_ratio: 11.0: give at most max_ratio (10)",
    (DILOCO, "parallel.replicas=1"): "parallel.replicas: 1: with diloco each replica is a walker of its own: "
    "give at least 2",
    (
        LSGD,
        "parallel.replicas=9",
    ): "parallel.replicas: 9: each walker needs a microbatch, a step has 8: give at most 8, "
    "or raise batch.samples",
    (
        GOSSIP,
        "parallel.stages=4",
        "skip.ratio=0.25",
    ): "skip.ratio: 0.25: with gossip a walker holds each stage once, "
    "and all must learn in every step: give 0",
    (
        DILOCO,
        "aggregation.local_steps=401",
    ): "aggregation.local_steps: 401: the job ends before walkers meet: give at most budget.steps (400)",
    (
        LSGD,
        "aggregation.global_every_steps=404",
    ): "aggregation.global_every_steps: 404: the job ends before walkers "
    "meet: give at most budget.steps (400)",
    (
        GOSSIP,
        "aggregation.every_steps=401",
    ): "aggregation.every_steps: 401: the job ends before walkers meet: give at most budget.steps (400)",
    (LSGD, "data.validation_ratio=0"): "data.validation_ratio: 0: lsgd scores walkers on validation samples: "
    "give more than 0, such as 0.02",
    (GOSSIP, "optimizer.name=adam"): "optimizer.name: 'adam': its momentum, or how it decays weights, "
    "is not gossip's to share: give adamw, sgd or lamb",
    (GOSSIP, SGD, "optimizer.nesterov=true"): "optimizer.nesterov: true: "
    "decentlam says itself where momentum goes: give false",
    (
        GOSSIP,
        SGD,
        "aggregation.method=dsgd",
    ): "optimizer.momentum: 0.9: dsgd has no momentum: give 0, or method: dmsgd",
    (
        GOSSIP,
        "aggregation.method=dsgd",
    ): "optimizer.betas[0]: 0.9: dsgd has no momentum: give 0, or method: dmsgd",
    (
        GOSSIP,
        SGD,
        "aggregation.robust.kind=krum",
    ): "aggregation.robust.kind: 'krum': of other combiners neighbours' "
    "means part: give none, median_norm_clip or centred_clip",
    (
        LSGD,
        "aggregation.asynchronous=true",
    ): "aggregation.asynchronous: true: a walker of several stages cannot go on "
    "between two steps: give false, or parallel: {stages: 1, layout: line}",
    (
        LSGD,
        "aggregation.asynchronous=true",
        "parallel.stages=1",
        "parallel.layout=loop",
    ): "aggregation.asynchronous: true: a walker of several stages cannot go on "
    "between two steps: give false, or parallel: {stages: 1, layout: line}",
    (
        ONE_BIT_ADAM,
        "precision=fp64",
    ): "aggregation.warmup_wire: 'bf16': what travels in a job of precision fp64 is not "
    "rounded: give fp32, which means as computed",
    (
        DILOCO,
        "precision=fp64",
    ): "aggregation.wire: 'int8': what travels in a job of precision fp64 is not rounded: "
    "give fp32, which means as computed",
    (
        "aggregation.wire=bf16",
        "precision=fp64",
    ): "aggregation.wire: 'bf16': what travels in a job of precision fp64 "
    "is not rounded: give fp32, which means as computed",
    (
        "aggregation={pattern: ring, robust: {kind: krum}}",
    ): "aggregation.pattern: 'ring': krum must see every "
    "member's part, and along a ring only sums are seen: give direct or auto",
    (
        "aggregation={pattern: tree, wire: int8}",
    ): "aggregation.pattern: 'tree': int8 would round at every hop, as along "
    "a tree only sums are seen: give direct or auto, or wire: fp32",
    (
        "aggregation.robust={kind: trimmed_mean, trimmed: 2}",
    ): "aggregation.robust.trimmed: 2: needs 5 members, parallel.replicas gives 4: give at most 1",
    (
        DILOCO,
        "parallel.replicas=2",
        "aggregation.robust={kind: trimmed_mean}",
    ): "aggregation.robust.trimmed: 1: needs 3 members, parallel.replicas gives 2: give robust: {kind: none}",
    (
        DILOCO,
        "aggregation.robust={kind: krum}",
    ): "aggregation.robust.bad: 1: needs 5 members, parallel.replicas gives 4: give at most 0",
    (
        "aggregation.robust={kind: krum, bad: 0, chosen: 3}",
    ): "aggregation.robust.chosen: 3: of 4 members 0 may be bad, and two more are left out: give at most 2",
    ("parallel.replicas=2", "aggregation.robust={kind: median_norm_clip}"): "aggregation.robust.kind: "
    "'median_norm_clip': of fewer than 3 members none stands out, and parallel.replicas gives 2: give none, "
    "or more members",
}
RIGHT = (
    (ONE_BIT_ADAM,),
    (ONE_BIT_ADAM, "precision=fp64", "aggregation.warmup_wire=fp32"),
    (LSGD, "aggregation.asynchronous=true", "parallel.stages=1"),
    (ONE_BIT_ADAM, "optimizer.warmup_steps=60"),
    (ONE_BIT_ADAM, "aggregation.warmup_steps=399"),
    (ONE_BIT_LAMB, LAMB, "aggregation.warmup_steps=100", "aggregation.ratio_beta=0.99"),
    (ONE_BIT_LAMB, LAMB, "optimizer.warmup_steps=0", "aggregation.warmup_steps=10"),
    (LSGD,),
    (LSGD, "parallel.layout=loop"),
    (GOSSIP, SGD),
    (GOSSIP, SGD, "aggregation.method=dsgd", "optimizer.momentum=0"),
    (GOSSIP, SGD, "aggregation.robust.kind=centred_clip"),
    (DILOCO, "parallel.replicas=8", "aggregation.local_steps=400"),
    (DILOCO, "precision=fp64", "aggregation.wire=fp32"),
    ("aggregation={pattern: direct, robust: {kind: krum, bad: 0}}",),
    ("parallel.replicas=5", "aggregation.robust={kind: krum}"),
    ("parallel.replicas=3", "aggregation.robust={kind: trimmed_mean}"),
    ("aggregation={pattern: direct, wire: int8}",),
    ("aggregation={pattern: tree}",),
    ("parallel.stages=4", "skip.ratio=0.25"),
)


def agreed(*overrides: str) -> JobSpec:
    return parse_job(GOOD, origin="job", overrides=overrides)


@pytest.mark.parametrize("changes", WRONG)
def test_what_does_not_go_together_is_refused(changes: tuple[str, ...]) -> None:
    with pytest.raises(JobFileErrors) as caught:
        agreed(*changes)
    assert str(caught.value) == WRONG[changes]


@pytest.mark.parametrize("changes", RIGHT)
def test_what_goes_together_is_a_job(changes: tuple[str, ...]) -> None:
    job = agreed(*changes)
    assert JobSpec.model_validate_json(job.canonical_json()) == job


def test_the_default_warm_up_is_refused_where_the_job_is_shorter() -> None:
    with pytest.raises(JobFileErrors, match="give 60 to 100"):
        agreed("aggregation.rule=one_bit_lamb", LAMB)
    assert OneBitLamb(rule="one_bit_lamb").warmup_steps == 1000


def test_a_rule_of_many_walkers_is_read_by_its_name_alone() -> None:
    rule = agreed(DILOCO).aggregation
    assert isinstance(rule, DiLoCo)
    assert rule.walkers is Walkers.MANY


@pytest.mark.parametrize("num_members", range(1, 12))
@pytest.mark.parametrize(
    "robust",
    [
        *(TrimmedMean(kind="trimmed_mean", trimmed=trimmed) for trimmed in (1, 2, 4)),
        *(Krum(kind="krum", bad=bad, chosen=chosen) for bad in (0, 1, 3) for chosen in (1, 2, 5)),
    ],
    ids=str,
)
def test_jobs_are_refused_with_too_few_members_for_the_combiner_and_no_others(
    robust: TrimmedMean | Krum, num_members: int
) -> None:
    if isinstance(robust, TrimmedMean):
        needed = 2 * robust.trimmed + 1
    else:
        needed = max(2 * robust.bad + 3, robust.bad + robust.chosen + 2)
    assert robust.least_members == needed
    if num_members >= needed:
        check_robust(robust, num_members, "here are")
    else:
        with pytest.raises(UserError, match=r"aggregation\.robust\."):
            check_robust(robust, num_members, "here are")
