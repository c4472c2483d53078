"""Real daemons against one plain torch process: the same loss and gradient norm, step by step, however it is cut."""

from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from bench.cluster import Cluster
from bench.reference import ReferenceStep, run_reference
from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource, DigitsSource, TextSource
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
from skein.config.optimizer import AdamWSpec
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.families.mlp import MlpModel
from skein.model.families.qwen3_moe import Qwen3MoeModel, Qwen3MoeShape
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.model.sparse.routing import DropOrder, RouterKind, RoutingSpec
from skein.model.table import ModelSpec
from skein.protocol.messages.directives import StepRecord
from skein.types import JobState, Layout, Precision
from skein.wire.views import StepFinished
from tests.e2e.shared import SharedCluster
from tests.support.extent import part
from tests.support.skipping import run_skipping

NUM_STEPS = 20
# fp32: sums of a few thousand terms in another order; float64: the same, so a wrong term would show.
TOLERANCES = {Precision.FP32: 1e-5, Precision.FP64: 1e-9}


@pytest.fixture
def eight(shared: SharedCluster) -> SharedCluster:
    """Workers for four stages twice in a line."""
    shared.gather(8)
    return shared


SIZES: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Larger than usual, so that clipping and second moments matter within 20 steps.
    "initializer_range": 0.05,
}


def llama(*, is_tied: bool, num_layers: int = 4) -> LlamaModel:
    changes = {"num_hidden_layers": num_layers, "tie_word_embeddings": is_tied}
    return LlamaModel(shape=LlamaShape.model_validate(SIZES | changes))


def make_job(
    name: str, model: ModelSpec, data: DataSpec, parallel: ParallelSpec, precision: Precision
) -> JobSpec:
    return JobSpec(
        name=name,
        model=model,
        data=data,
        batch=BatchSpec(samples=8, microbatch_samples=1),
        parallel=parallel,
        optimizer=AdamWSpec(learning_rate=3e-3, warmup_steps=5, clip_norm=1.0),
        precision=precision,
        budget=BudgetSpec(steps=NUM_STEPS),
        plan=PlanSpec(budget_s=0.2),
        evaluation=EvaluationSpec(every_steps=0, samples=2),
        checkpoint=CheckpointSpec(every_steps=0, keep=1),
        seed=7,
    )


Told = tuple[float, float, float | None, float | None]
"""Loss, gradient norm, balance loss and drop ratio of a step."""


def numbers_of(record: StepRecord) -> Told:
    return record.loss, record.gradient_norm, record.balance_loss, record.drop_ratio


def train(cluster: Cluster, job: JobSpec) -> list[Told]:
    with cluster.client() as client:
        submitted = client.submit(job)
        steps = [e.body.record for e in submitted.events() if isinstance(e.body, StepFinished)]
        status = submitted.status()
    assert status.state is JobState.FINISHED, status.reason
    return [numbers_of(record) for record in steps]


def check(found: list[Told], wanted: list[ReferenceStep], tolerance: float) -> None:
    assert len(found) == NUM_STEPS
    for step, ((loss, norm, balance, drops), reference) in enumerate(zip(found, wanted, strict=True)):
        assert loss == pytest.approx(reference.loss, rel=tolerance), f"loss of step {step}"
        assert norm == pytest.approx(reference.gradient_norm, rel=tolerance), f"norm of step {step}"
        assert drops == reference.drop_ratio, f"choices dropped in step {step}"
        assert (balance is None) == (reference.balance_loss is None), f"balance of step {step}"
        if reference.balance_loss is not None:
            assert balance == pytest.approx(reference.balance_loss, rel=tolerance), f"balance of step {step}"
    assert wanted[-1].loss < wanted[0].loss


BACKWARDS: tuple[Literal["whole", "split"], ...] = ("whole", "split")
CUTS = [
    (stages, replicas, layout)
    for stages, replicas, layout in product((1, 2, 4), (1, 2), (Layout.LINE, Layout.LOOP))
]


def cut_job(text: Path, precision: Precision, parallel: ParallelSpec, *, is_tied: bool) -> JobSpec:
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    name = f"{precision.value}-{parallel.num_stages}x{parallel.replicas}-{parallel.layout.value}"
    return make_job(name, llama(is_tied=is_tied), data, parallel, precision)


@pytest.mark.parametrize(
    ("precision", "parallel", "is_tied"),
    [
        (Precision.FP64, ParallelSpec(stages=2, replicas=2, layout=Layout.LOOP), True),
        (Precision.FP32, ParallelSpec(stages=4, replicas=1, layout=Layout.LINE), False),
        (Precision.FP64, ParallelSpec(stages=2, replicas=1, chunks=2), True),
    ],
    ids=["fp64-tied-loop", "fp32-untied-line", "fp64-tied-chunks"],
)
def test_a_cut_trains_like_one_torch_process(
    cluster: Cluster, text: Path, precision: Precision, parallel: ParallelSpec, is_tied: bool
) -> None:
    job = cut_job(text, precision, parallel, is_tied=is_tied)
    check(train(cluster, job), run_reference(job, NUM_STEPS), TOLERANCES[precision])


SPARSE_MODELS: list[ModelSpec] = [
    MixtralModel(shape=MixtralShape.model_validate(SIZES | {"num_local_experts": 4})),
    Qwen3MoeModel(
        routing=RoutingSpec(balance_coefficient=0.1, capacity=1.0, drop=DropOrder.PROBS),
        shape=Qwen3MoeShape.model_validate(
            SIZES | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        ),
    ),
    *(
        MixtralModel(routing=routing, shape=MixtralShape.model_validate(SIZES | {"num_local_experts": 4}))
        for routing in (
            RoutingSpec(router=RouterKind.XMOE, balance_coefficient=0.1, capacity=1.0),
            RoutingSpec(router=RouterKind.EXPERT_CHOICE, allow_lookahead=True),
        )
    ),
]
SPARSE: list[tuple[ModelSpec, int, int, Layout, Literal["whole", "split"]]] = [
    (model, stages, replicas, layout, backward)
    for model in SPARSE_MODELS
    for stages, replicas, layout in ((1, 1, Layout.LINE), (2, 2, Layout.LOOP), (4, 1, Layout.LINE))
    for backward in BACKWARDS
]

BALANCED = 9
"""Case of a balance loss that pulls, and of choices that are dropped."""


@pytest.mark.parametrize(
    ("model", "stages", "replicas", "layout", "backward"), part(SPARSE, every=len(SPARSE), start=BALANCED)
)
def test_a_sparse_model_trains_like_one_torch_process(
    cluster: Cluster,
    text: Path,
    model: ModelSpec,
    stages: int,
    replicas: int,
    layout: Layout,
    backward: Literal["whole", "split"],
) -> None:
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    parallel = ParallelSpec(stages=stages, replicas=replicas, layout=layout)
    name = f"{model.family.replace('_', '-')}-{backward}-{stages}x{replicas}"
    job = make_job(name, model, data, parallel, Precision.FP64)
    job = job.model_copy(update={"plan": PlanSpec(budget_s=0.2, backward=backward)})
    check(train(cluster, job), run_reference(job, NUM_STEPS), TOLERANCES[Precision.FP64])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "backward"), [(Layout.LINE, "split"), (Layout.LOOP, "whole")])
def test_balance_losses_count_alike_in_chunks(
    cluster: Cluster, text: Path, layout: Layout, backward: Literal["whole", "split"]
) -> None:
    model = SPARSE[BALANCED][0]
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    parallel = ParallelSpec(stages=2, chunks=2, replicas=2, layout=layout)
    job = make_job(f"balance-{layout.value}", model, data, parallel, Precision.FP64)
    job = job.model_copy(update={"plan": PlanSpec(budget_s=0.2, backward=backward)})
    check(train(cluster, job), run_reference(job, NUM_STEPS), TOLERANCES[Precision.FP64])


@pytest.mark.parametrize("layout", part(list(Layout), every=2), ids=lambda layout: layout.value)
def test_split_backwards_train_like_one_torch_process(cluster: Cluster, text: Path, layout: Layout) -> None:
    parallel = ParallelSpec(stages=4, replicas=1, layout=layout)
    job = cut_job(text, Precision.FP64, parallel, is_tied=True)
    whole = job.model_copy(update={"plan": PlanSpec(method="balanced")})
    split = job.model_copy(update={"plan": PlanSpec(method="balanced", backward="split")})
    searched = job.model_copy(
        update={
            "plan": PlanSpec(backward="split", budget_s=0.2),
            "parallel": parallel.model_copy(update={"stages": 2, "chunks": 2}),
        }
    )
    found, reference = train(cluster, split), run_reference(job, NUM_STEPS)
    check(found, reference, TOLERANCES[Precision.FP64])
    assert found == train(cluster, whole), "whole and split backwards differ"
    check(train(cluster, searched), reference, TOLERANCES[Precision.FP64])


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP64], ids=lambda p: p.value)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_any_cut_trains_like_one_torch_process(
    eight: Cluster, text: Path, precision: Precision, is_tied: bool
) -> None:
    reference: list[ReferenceStep] = []
    # A wrong term shows in float64; float32 shows that nothing else is summed in it.
    every, start = (4, 3 - is_tied) if precision is Precision.FP64 else (12, 4 + 3 * is_tied)
    for stages, replicas, layout in part(CUTS, every=every, start=start):
        parallel = ParallelSpec(stages=stages, replicas=replicas, layout=layout)
        job = cut_job(text, precision, parallel, is_tied=is_tied)
        reference = reference or run_reference(job, NUM_STEPS)
        check(train(eight, job), reference, TOLERANCES[precision])


MANNERS = [
    (stages, chunks, backward, layout)
    for layout, (stages, chunks), backward in product(Layout, ((2, 1), (2, 2), (4, 2)), BACKWARDS)
]


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP64], ids=lambda p: p.value)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_chunks_and_split_backwards_train_like_one_torch_process(
    eight: Cluster, text: Path, precision: Precision, is_tied: bool
) -> None:
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    reference: list[ReferenceStep] = []
    for stages, chunks, backward, layout in part(MANNERS, every=12, start=5 + 2 * is_tied):
        parallel = ParallelSpec(stages=stages, chunks=chunks, layout=layout)
        name = f"{backward}-{stages}x{chunks}-{layout.value}"
        job = make_job(name, llama(is_tied=is_tied, num_layers=7), data, parallel, precision)
        job = job.model_copy(update={"plan": PlanSpec(budget_s=0.2, backward=backward)})
        reference = reference or run_reference(job, NUM_STEPS)
        check(train(eight, job), reference, TOLERANCES[precision])


SHARDS = [
    (stages, chunks, backward, split)
    for split, (stages, chunks), backward in product(
        (VocabularySplit.OUTPUT, VocabularySplit.BOTH, VocabularySplit.AUTO),
        ((2, 1), (2, 2), (4, 2)),
        BACKWARDS,
    )
]


@pytest.mark.long
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP64], ids=lambda p: p.value)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_shards_of_the_vocabulary_train_like_one_torch_process_without(
    eight: Cluster, text: Path, precision: Precision, is_tied: bool
) -> None:
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    model = llama(is_tied=is_tied, num_layers=7)
    reference: list[ReferenceStep] = []
    for stages, chunks, backward, split in part(SHARDS, every=18, start=5 + 12 * is_tied):
        name = f"{split.value}-{backward}-{stages}x{chunks}"
        plain = make_job(name, model, data, ParallelSpec(), precision)
        reference = reference or run_reference(plain, NUM_STEPS)
        vocabulary = VocabularySpec(split=split)
        parallel = ParallelSpec(stages=stages, chunks=chunks, vocabulary=vocabulary)
        job = make_job(name, model, data, parallel, precision)
        job = job.model_copy(update={"plan": PlanSpec(budget_s=0.2, backward=backward)})
        check(train(eight, job), reference, TOLERANCES[precision])


# What a plain rotation leaves out: 1 or 2 of the stages 1 and 2, and two of the stages 1, 2 and 3.
SKIPS: dict[str, tuple[Layout, float, list[tuple[int, ...]]]] = {
    "line": (Layout.LINE, 0.25, [(0, 2, 3), (0, 1, 3)]),
    "loop": (Layout.LOOP, 0.5, [(0, 3), (0, 1), (0, 2)]),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "ratio", "ways", "is_tied"),
    part([(*skip, is_tied) for skip in SKIPS.values() for is_tied in (True, False)], every=3),
)
def test_stages_that_are_left_out_train_like_one_torch_process_that_leaves_them_out(
    eight: Cluster,
    text: Path,
    layout: Layout,
    ratio: float,
    ways: list[tuple[int, ...]],
    is_tied: bool,
) -> None:
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    parallel = ParallelSpec(stages=4, replicas=2, layout=layout)
    whole = make_job(f"skip-{layout.value}", llama(is_tied=is_tied), data, parallel, Precision.FP64)
    job = whole.model_copy(update={"skip": SkipSpec(ratio=ratio), "plan": PlanSpec(method="balanced")})
    found = train(eight, job)
    check(found, run_skipping(job, NUM_STEPS, ways), TOLERANCES[Precision.FP64])
    assert found[0][:2] != pytest.approx(train(eight, whole)[0][:2], rel=1e-3), "nothing was left out"


@pytest.mark.long
@pytest.mark.parametrize("skip", SKIPS)
def test_balance_losses_count_alike_where_stages_are_left_out(eight: Cluster, text: Path, skip: str) -> None:
    layout, ratio, ways = SKIPS[skip]
    data = DataSpec(sources=(TextSource(path=str(text)),), sequence_tokens=32, validation_ratio=0.1)
    parallel = ParallelSpec(stages=4, replicas=2, layout=layout)
    job = make_job(f"balance-skip-{skip}", SPARSE[BALANCED][0], data, parallel, Precision.FP64)
    job = job.model_copy(update={"skip": SkipSpec(ratio=ratio), "plan": PlanSpec(method="balanced")})
    check(train(eight, job), run_skipping(job, NUM_STEPS, ways), TOLERANCES[Precision.FP64])


def arrays_beside(text: Path) -> ArraysSource:
    """300 rows of 20 numbers in three classes, where workers may read."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(300, 4, 5))
    path = text.with_name("rows.npz")
    np.savez(path, x=x, y=(x.sum(axis=(1, 2)) > 0) + 1 * (x[:, 0, 0] > 1))
    return ArraysSource(format="arrays", path=str(path))


@pytest.mark.parametrize(
    ("name", "model", "num_stages"),
    [
        ("cnn", DigitsCnnModel(family="digits_cnn", channels=8, num_blocks=2), 2),
        pytest.param("mlp", MlpModel(family="mlp", widths=(24, 16)), 2, marks=pytest.mark.long),
        pytest.param("softmax", MlpModel(family="mlp", widths=()), 1, marks=pytest.mark.long),
        pytest.param(
            "arrays",
            MlpModel(family="mlp", widths=(24, 16), num_features=20, num_classes=3),
            2,
            marks=pytest.mark.long,
        ),
        ("coreset", MlpModel(family="mlp", widths=(24, 16), num_features=20, num_classes=3), 2),
    ],
)
def test_a_classifier_trains_like_one_torch_process(
    cluster: Cluster, text: Path, name: str, model: ModelSpec, num_stages: int
) -> None:
    source = (
        DigitsSource(format="digits") if "num_features" not in model.model_fields_set else arrays_beside(text)
    )
    coreset = (
        CoresetSpec(method="craig", feature="inputs", fraction=0.8) if name == "coreset" else CoresetSpec()
    )
    data = DataSpec(sources=(source,), coreset=coreset)
    parallel = ParallelSpec(stages=num_stages, replicas=2)
    job = make_job(f"digits-{name}", model, data, parallel, Precision.FP64)
    check(train(cluster, job), run_reference(job, NUM_STEPS), TOLERANCES[Precision.FP64])
