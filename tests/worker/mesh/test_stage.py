"""Stages on the devices of a mesh, in real processes over gloo, against the same stages on one device."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BudgetSpec, JobSpec, ParallelSpec
from skein.config.mesh.tensor import TensorSpec
from skein.model.layers import AnyModel
from skein.model.rows import VocabularySpec, VocabularySplit
from skein.plan.plan import Group
from skein.types import ChunkRef, Own, Precision, StageIndex, StageSpec, Step, WorkerId
from tests.support.hands import record
from tests.worker.lab import HOST
from tests.worker.model.builders import LUCK, MODELS, NUM_TOKENS, assert_near, part, samples, whole
from tests.worker.sweep.trials import array_of
from worker.compute.chunk import Chunk
from worker.mesh.mesh import Mesh
from worker.mesh.stage import MeshStage
from worker.mesh.traffic import Collective
from worker.model.base import Crossing, Stage
from worker.model.pending import add_up
from worker.sweep.chunk import ArrayChunk
from worker.sweep.drawing import drawn_chunk

# Sums of the same float64 numbers in another order, through two blocks and a loss.
ROUNDING = 1e-12
FAMILIES = ["no_groups", "tied", "qwen2", "qwen3", "mistral", "mixtral", "digits"]


def job_of(
    model: AnyModel, size: int = 4, parallel: ParallelSpec | None = None, *, in_sequence: bool = False
) -> JobSpec:
    tensor = TensorSpec(size=size, sequence_parallel=in_sequence)
    given = (parallel or ParallelSpec()).model_copy(update={"tensor": tensor})
    if model.tensor_divisor == 1:
        given = given.model_copy(update={"tensor": TensorSpec()})
    elif model.tensor_divisor % size:
        given = given.model_copy(update={"tensor": tensor.model_copy(update={"size": "auto"})})
    return JobSpec.model_validate(
        {
            "name": "shared",
            "model": model,
            "data": DataSpec(sources=(TextSource(path="text"),), sequence_tokens=NUM_TOKENS),
            "parallel": given,
            "precision": Precision.FP64,
            "budget": BudgetSpec(steps=1),
        }
    )


def grid_job(model: AnyModel) -> JobSpec:
    job = job_of(model, 1)
    tensor = TensorSpec(size=4, form="2d")
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"tensor": tensor})})


def zeroed(stage: Stage) -> Stage:
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage


def sums(stage: Stage) -> dict[str, Tensor]:
    return {name: x.grad.clone() for name, x in stage.named_parameters() if x.grad is not None}


def assert_same_sums(found: Stage, wanted: Stage, *, tolerance: float = ROUNDING) -> None:
    expected = sums(wanted)
    for name, gradient in sums(found).items():
        assert_near(gradient, expected[name], tolerance=tolerance, what=name)


def assert_learns_alike(stage: MeshStage, shared: Stage, alone: Stage, x: Tensor, labels: Tensor) -> None:
    """Loss and sums of two passes over a mesh, and the loss after an update, are those of one device."""
    for _ in range(2):
        wanted, num_valid = alone.score(Crossing(x), labels)
        torch.autograd.backward(wanted)
        found, num_found = stage.score(Crossing(x), labels)
        torch.autograd.backward(found)
        assert num_found == num_valid
        assert_near(found.detach(), wanted.detach(), tolerance=ROUNDING)
    stage.gather_sums()
    assert_same_sums(shared, alone)
    with torch.no_grad():
        for module in (alone, shared):
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.01)
        after, _ = stage.score(Crossing(x), labels)
        assert_near(after, alone.score(Crossing(x), labels)[0], tolerance=ROUNDING)


@pytest.mark.parametrize(
    ("name", "size", "in_sequence"),
    [
        *((name, size, False) for name in FAMILIES for size in (2, 4)),
        *((name, 2, True) for name in FAMILIES if MODELS[name].tensor_divisor > 1),
        ("no_groups", 4, True),
    ],
)
def test_devices_together_give_the_loss_and_gradients_of_one(
    four: Mesh, name: str, size: int, in_sequence: bool
) -> None:
    model = MODELS[name]
    job = job_of(model, size, in_sequence=in_sequence)
    alone, shared = zeroed(whole(model)), zeroed(whole(model))
    stage = MeshStage(four, job, shared)
    assert_learns_alike(stage, shared, alone, *samples(model))


def test_a_device_drops_what_its_worker_would(four: Mesh) -> None:
    model = MODELS["mlp dropout"]
    alone, shared = zeroed(whole(model)), zeroed(whole(model))
    stage, (x, labels) = MeshStage(four, job_of(model, 1), shared), samples(model)
    found = []
    for each in (alone, stage):
        with each.junction.visited(None, luck=LUCK):
            total, _ = each.score(Crossing(x), labels)
        torch.autograd.backward(total)
        found.append(total.detach())
    assert_near(found[1], found[0], tolerance=ROUNDING)
    with torch.no_grad():
        assert abs(float(stage.score(Crossing(x), labels)[0] - found[0])) > 1e-3
    stage.gather_sums()
    assert_same_sums(shared, alone)


def counted(mesh: Mesh, before: Mapping[Collective, int] | None = None) -> dict[Collective, int]:
    """Collectives of the mesh so far, or since."""
    return dict(mesh.traffic.counts - Counter(before or {}))


SUM, GATHER, SCATTER = Collective.SUM, Collective.GATHER, Collective.SCATTER


@pytest.mark.parametrize(
    ("in_sequence", "there", "back"),
    [
        pytest.param(False, {SUM: 2 * 2 + 2}, {SUM: 2 * 2 + 1}, id="whole"),
        pytest.param(
            True,
            {SUM: 1, GATHER: 2 * 2 + 1, SCATTER: 2 * 2 + 1},
            {GATHER: 2 * 2 + 1, SCATTER: 2 * 2 + 1},
            id="in parts",
        ),
    ],
)
def test_a_vocabulary_costs_a_sum_where_it_is_looked_up_and_two_where_it_is_scored(
    four: Mesh, in_sequence: bool, there: dict[Collective, int], back: dict[Collective, int]
) -> None:
    model = MODELS["untied"]
    stage = MeshStage(four, job_of(model, 2, in_sequence=in_sequence), zeroed(whole(model)))
    x, labels = samples(model)
    before = counted(four)
    total, _ = stage.score(Crossing(x), labels)
    assert counted(four, before) == there, "two blocks, the rows looked up and those scored"
    before = counted(four)
    torch.autograd.backward(total)
    assert counted(four, before) == back


@pytest.mark.parametrize(
    ("in_sequence", "num_tokens"),
    [(False, NUM_TOKENS), *((True, num_tokens) for num_tokens in (NUM_TOKENS, NUM_TOKENS - 3, 1))],
)
@pytest.mark.parametrize("size", [2, 4])
def test_a_block_costs_two_sums_each_way_or_two_gathers_and_two_scatters(
    four: Mesh, size: int, in_sequence: bool, num_tokens: int
) -> None:
    model = MODELS["no_groups"]
    inner = zeroed(part(model, 1, 3))
    stage = MeshStage(four, job_of(model, size, in_sequence=in_sequence), inner)
    x = torch.randn(3, num_tokens, 32, dtype=torch.float64)
    given = Crossing(x).followed(is_sample=False)
    each_way = {GATHER: 2 * 2, SCATTER: 2 * 2} if in_sequence else {SUM: 2 * 2}
    before, had = counted(four), four.traffic.elements.total()
    y = stage.onward(given, None)
    assert counted(four, before) == each_way, "two blocks"
    # Sums are as many elements as gathers and scatters, but for what pads a sequence.
    num_padded = -(-num_tokens // size) * size if in_sequence else num_tokens
    assert four.traffic.elements.total() - had == 4 * 2 * (3 * num_padded * 32) * (size - 1) // size
    before = counted(four)
    torch.autograd.backward(y.differentiable, [torch.ones_like(y.hidden)])
    assert counted(four, before) == each_way
    assert given.hidden.grad is not None

    alone = zeroed(part(model, 1, 3))
    other = Crossing(x.detach().clone()).followed(is_sample=False)
    wanted = alone.onward(other, None)
    torch.autograd.backward(wanted.differentiable, [torch.ones_like(y.hidden)])
    assert y.hidden.shape == wanted.hidden.shape
    assert_near(y.hidden.detach(), wanted.hidden.detach(), tolerance=ROUNDING)
    assert_near(given.hidden.grad, other.hidden.grad, tolerance=ROUNDING)  # type: ignore[arg-type]
    stage.gather_sums()
    assert_same_sums(inner, alone)


@pytest.mark.parametrize(("name", "in_sequence"), [("no_groups", False), ("qwen3", True)])
def test_what_is_put_aside_is_in_no_sum_until_it_is_added(four: Mesh, name: str, in_sequence: bool) -> None:
    model = MODELS[name]
    alone, shared = zeroed(part(model, 1, 4)), zeroed(part(model, 1, 4))
    stage = MeshStage(four, job_of(model, 2, in_sequence=in_sequence), shared)
    x, (_, labels) = torch.randn(3, NUM_TOKENS, 32, dtype=torch.float64), samples(model)
    given = [Crossing(x.clone()).followed(is_sample=False) for _ in range(2)]
    aside = stage.put_aside(stage.score(given[0], labels)[:1])
    torch.autograd.backward(alone.score(given[1], labels)[0])
    assert given[1].hidden.grad is not None
    assert_near(given[0].hidden.grad, given[1].hidden.grad, tolerance=ROUNDING)
    stage.gather_sums()
    assert all(not gradient.any() for gradient in sums(shared).values())
    add_up(aside)
    stage.gather_sums()
    assert_same_sums(shared, alone)


def test_a_parameter_in_the_place_of_another_is_given_to_the_devices(four: Mesh) -> None:
    model = MODELS["no_groups"]
    stage = MeshStage(four, job_of(model, 2), whole(model))
    x, labels = samples(model)
    name, memory = "model.norm.weight", np.ones(32)
    scores = []
    for factor in (1.0, 2.0):
        memory[:] = factor
        # At the same address, and as often changed.
        stage.parameters = {**stage.parameters, name: torch.from_numpy(memory)}
        with torch.no_grad():
            scores.append(stage.score(Crossing(x), labels)[0].item())
    assert scores[0] != scores[1]


def test_what_nobody_comes_back_for_is_in_no_sum(four: Mesh) -> None:
    model = MODELS["no_groups"]
    shared = zeroed(part(model, 1, 4))
    stage = MeshStage(four, job_of(model, 2), shared)
    x, (_, labels) = torch.randn(3, NUM_TOKENS, 32, dtype=torch.float64), samples(model)

    def step() -> None:
        torch.autograd.backward(stage.score(Crossing(x.clone()).followed(is_sample=False), labels)[0])

    step()
    stage.gather_sums()
    once = sums(shared)
    step()
    stage.drop_sums()
    stage.put_aside(stage.score(Crossing(x.clone()).followed(is_sample=False), labels)[:1])
    stage.score(Crossing(x.clone()).followed(is_sample=False), labels)
    step()
    stage.gather_sums()
    for name, gradient in sums(shared).items():
        assert torch.equal(gradient, 2 * once[name]), name


@pytest.mark.parametrize("in_sequence", [False, True])
@pytest.mark.parametrize("split", [VocabularySplit.OUTPUT, VocabularySplit.BOTH])
def test_rows_of_a_vocabulary_and_blocks_are_on_the_same_devices(
    four: Mesh, split: VocabularySplit, in_sequence: bool
) -> None:
    parallel = ParallelSpec(vocabulary=VocabularySpec(split=split))
    model = job_of(MODELS["untied"], 2, parallel).model
    # Within the input's rows, and within the output's.
    bounds = [
        0,
        model.inner_layers.start // 2 or 1,
        model.inner_layers.stop + 3,
        len(model.layer_parameters()),
    ]
    x, labels = samples(model)

    def run(functions: list[Stage] | list[MeshStage]) -> Tensor:
        given, crossed = Crossing(x), []
        for stage in functions[:-1]:
            y = stage.onward(given, labels)
            given = y.detached().followed(is_sample=False)
            crossed.append((y, given))
        loss, _ = functions[-1].score(given, labels)
        torch.autograd.backward(loss)
        for y, after in reversed(crossed):
            torch.autograd.backward(y.differentiable, [t.grad for t in after.differentiable])
        return loss.detach()

    def stages() -> list[Stage]:
        return [zeroed(part(model, a, b)) for a, b in pairwise(bounds)]

    alone, shared = stages(), stages()
    job = job_of(MODELS["untied"], 2, parallel, in_sequence=in_sequence)
    meshed = [MeshStage(four, job, module) for module in shared]
    assert_near(run(meshed), run(alone), tolerance=ROUNDING)
    for stage, found, wanted in zip(meshed, shared, alone, strict=True):
        stage.gather_sums()
        assert_same_sums(found, wanted)


def test_state_of_a_mesh_goes_to_one_device_and_to_four_in_parts_and_in_blocks_and_all_go_on_alike(
    four: Mesh,
) -> None:
    model = MODELS["no_groups"]
    spec = StageSpec(index=StageIndex(0), first=0, stop=4)
    drawn = partial(Chunk.drawn, stage=spec, version=Step(0), device=torch.device("cpu"))
    group = Group(
        group=Own(spec.index), members=(ChunkRef(stage=spec.index, worker=WorkerId("w")),), num_shards=1
    )

    def step(chunk: Chunk) -> float:
        chunk.lay_out([group], WorkerId("w"))
        loss, num_tokens = chunk.functions.score(Crossing(x), labels)
        torch.autograd.backward(loss)
        chunk.step_alone(record(chunk.version), 1 / num_tokens)
        return loss.item()

    x, labels = samples(model)
    first = drawn(job_of(model, 2), mesh=four)
    step(first)
    jobs = [job_of(model, 4, in_sequence=True), grid_job(model)]
    chunks = [drawn(job_of(model, 2)), *(drawn(job, mesh=four) for job in jobs)]
    for chunk in chunks:
        chunk.load_state(first.copy_state(), version=first.version)
        for name, tensor in chunk.copy_state().items():
            assert torch.equal(tensor, first.copy_state()[name]), name
    for _ in range(3):
        wanted, *found = [step(chunk) for chunk in (first, *chunks)]
        assert found == pytest.approx([wanted] * 3, rel=1e-11)


def test_rows_of_an_array_are_computed_without_the_mesh_and_that_is_said(
    four: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    stage = StageSpec(index=StageIndex(0), first=0, stop=2)
    with caplog.at_level("WARNING", logger="worker.sweep.drawing"):
        chunk = drawn_chunk(array_of(0, 1), stage, version=Step(0), device=HOST, mesh=four)
    assert isinstance(chunk, ArrayChunk)
    assert [x.getMessage() for x in caplog.records] == [
        "rows of an array are computed on cpu alone: 4 devices rest"
    ]
