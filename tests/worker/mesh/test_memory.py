"""What devices of a mesh hold of a stage, against what is planned for them; devices are threads over gloo."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import BatchSpec, BudgetSpec, JobSpec
from skein.config.mesh.tensor import MeshForm
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.sparse.experts import ExpertPlacement
from skein.model.sparse.routing import RouterKind, RoutingSpec
from skein.plan.mesh.devices import chosen_form, device_load
from skein.types import Precision, StageIndex, StageSpec
from worker.mesh.device import DeviceShare
from worker.mesh.forms.boundary import BoundaryCut
from worker.mesh.frames import GroupAsk, ReturnAsk, StageAsk, VisitAsk
from worker.mesh.traffic import Collective

CPU = torch.device("cpu")
NUM_SAMPLES, NUM_TOKENS, VOCABULARY = 2, 48, 96
MODEL = LlamaModel(
    shape=LlamaShape(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
)
SPARSE = MixtralModel(
    shape=MixtralShape(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        tie_word_embeddings=False,
    ),
    placement=ExpertPlacement.MESH,
)
STAGES = {
    "first": StageSpec(index=StageIndex(0), first=0, stop=3),
    "inner": StageSpec(index=StageIndex(1), first=1, stop=4),
    "last": StageSpec(index=StageIndex(1), first=3, stop=5),
}
# All is planned but a few numbers of a token, and scalars.
SHARE = 0.005


def job_of(precision: Precision, model: LlamaModel | MixtralModel = MODEL) -> JobSpec:
    return JobSpec(
        name="shared",
        model=model,
        data=DataSpec(sources=(TextSource(path="text"),), sequence_tokens=NUM_TOKENS),
        batch=BatchSpec(samples=NUM_SAMPLES, microbatch_samples=NUM_SAMPLES),
        precision=precision,
        budget=BudgetSpec(steps=1),
    )


def tensor_job(tensor: dict[str, object], num_tokens: int) -> JobSpec:
    job = job_of(Precision.FP32).model_dump()
    job["parallel"]["tensor"] |= tensor
    job["data"]["sequence_tokens"] = num_tokens
    return JobSpec.model_validate(job)


def on_devices(size: int, act: Callable[[int], tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(act, range(size)))


def held_by_each(job: JobSpec, stage: StageSpec, form: MeshForm, folder: Path) -> list[tuple[int, int, int]]:
    """Bytes of parameters and their sums on each device, of all else between there and back, elements received.

    Of elements those alone that are not exchanged.
    """
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, NUM_TOKENS))
    hidden = torch.randn(NUM_SAMPLES, NUM_TOKENS, 64)
    scores = stage.stop == 5
    given = {"x": hidden if stage.first else tokens} | ({"labels": tokens} if scores else {})
    # As they arrive: each in memory of its own.
    cut = BoundaryCut(form, NUM_SAMPLES, NUM_TOKENS).cut(given)
    sent = [{name: x.clone() for name, x in part.items()} for part in cut]
    asked = VisitAsk(
        chunk=1, ticket=2, follows=stage.first > 0, scores=scores, num_valid=None, num_tokens=NUM_TOKENS
    )

    def act(index: int) -> tuple[int, int, int]:
        share = DeviceShare(index, CPU)
        share.carry_out(GroupAsk(folder=str(folder), epoch=1, form=form), {})
        spec = (stage.index, stage.first, stage.stop)
        share.carry_out(StageAsk(chunk=1, job=job.model_dump_json(), stage=spec, form=form), {})
        held = share._kept.stages[1]
        torch.nn.init.normal_(next(held.parameters()))
        own = {x.untyped_storage().data_ptr() for x in (*held.parameters(), *held.buffers())}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            answer, _ = share.carry_out(asked, sent[index])
        for tensor in (*sent[index].values(), *share._kept.visits[2].made):
            keep(tensor)
        num_bytes = sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in own)
        gradients = {str(i): torch.ones_like(x) for i, x in enumerate(share._kept.visits[2].made)}
        back, _ = share.carry_out(ReturnAsk(chunk=1, ticket=2, puts_aside=False), gradients)
        every = Counter(answer.elements) + Counter(back.elements)
        num_elements = every.total() - every[Collective.EXCHANGE]
        return sum(2 * x.nbytes for x in held.parameters()), num_bytes, num_elements

    return on_devices(form.size, act)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "form",
    [
        MeshForm(size=2),
        MeshForm(size=4),
        MeshForm(size=4, in_sequence=True),
        MeshForm(size=4, is_grid=True),
    ],
    ids=str,
)
def test_a_device_holds_what_is_planned(
    tmp_path: Path, form: MeshForm, stage: str, precision: Precision
) -> None:
    job = job_of(precision)
    load = device_load(job, STAGES[stage], form)
    for fixed_bytes, kept_bytes, _ in held_by_each(job, STAGES[stage], form, tmp_path):
        assert fixed_bytes == pytest.approx(load.fixed_bytes, rel=1e-9)
        assert kept_bytes == pytest.approx(load.slot_bytes, rel=SHARE)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "form",
    [MeshForm(size=2), MeshForm(size=4, in_sequence=True), MeshForm(size=4, is_grid=True)],
    ids=str,
)
def test_what_comes_to_a_device_is_planned(tmp_path: Path, form: MeshForm, stage: str) -> None:
    job = job_of(Precision.FP32)
    load = device_load(job, STAGES[stage], form)
    for _, _, num_elements in held_by_each(job, STAGES[stage], form, tmp_path):
        assert 4 * num_elements == load.received_bytes


# Some experts are chosen more often than others: all devices together have what is planned, but for weights. Slots are
# planned for each sample, and a microbatch has them once.
@pytest.mark.parametrize(("router", "share"), [(RouterKind.SOFTMAX_TOPK, 0.01), (RouterKind.SOFTMOE, 0.1)])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("form", [MeshForm(size=2), MeshForm(size=4, in_sequence=True)], ids=str)
def test_devices_with_experts_hold_about_what_is_planned(
    tmp_path: Path, form: MeshForm, precision: Precision, router: RouterKind, share: float
) -> None:
    routing = RoutingSpec(router=router, allow_lookahead=router.row.looks_ahead)
    job, stage = job_of(precision, SPARSE.model_copy(update={"routing": routing})), STAGES["inner"]
    load = device_load(job, stage, form)
    held = held_by_each(job, stage, form, tmp_path)
    for fixed_bytes, _, num_elements in held:
        assert fixed_bytes == pytest.approx(load.fixed_bytes, rel=1e-9)
        assert precision is not Precision.FP32 or 4 * num_elements == load.received_bytes
    assert sum(kept_bytes for _, kept_bytes, _ in held) == pytest.approx(
        form.size * load.slot_bytes, rel=share
    )


AMPLE = 10**9


@pytest.mark.parametrize(
    ("tensor", "num_tokens", "memory_bytes", "expected"),
    [
        ({}, 48, AMPLE, MeshForm(size=4, in_sequence=True)),
        ({"size": 2}, 48, AMPLE, MeshForm(size=2, in_sequence=True)),
        ({"sequence_parallel": False}, 48, AMPLE, MeshForm(size=4)),
        ({"form": "1d"}, 48, 0, MeshForm(size=4, in_sequence=True)),
        ({"form": "2d"}, 48, AMPLE, MeshForm(size=4, is_grid=True)),
        ({}, 48, 0, MeshForm(size=4, is_grid=True)),
        ({"sequence_parallel": True}, 46, AMPLE, MeshForm(size=4, in_sequence=True)),
        ({"sequence_parallel": True, "size": 1}, 48, 0, MeshForm(size=1)),
    ],
)
def test_a_form_is_taken_by_memory_first_then_by_what_travels(
    tensor: dict[str, object], num_tokens: int, memory_bytes: int, expected: MeshForm
) -> None:
    job = tensor_job(tensor, num_tokens)
    assert chosen_form(job, STAGES["inner"], num_devices=5, slots=4, memory_bytes=memory_bytes) == expected


def test_sequences_that_devices_do_not_divide_are_in_parts_only_where_memory_is_short() -> None:
    job = tensor_job({}, NUM_TOKENS - 2)
    whole, parts = (device_load(job, STAGES["inner"], MeshForm(size=4, in_sequence=x)) for x in (False, True))
    assert parts.received_bytes == whole.received_bytes * 48 // 46
    assert parts.memory_bytes(4) < whole.memory_bytes(4)
    for memory_bytes, in_sequence in [(whole.memory_bytes(4), False), (whole.memory_bytes(4) - 1, True)]:
        form = chosen_form(job, STAGES["inner"], num_devices=4, slots=4, memory_bytes=memory_bytes)
        assert form.in_sequence is in_sequence
