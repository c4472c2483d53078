"""What `skein.model` predicts is what torch counts."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import AutoConfig, AutoModelForCausalLM

from skein.model.decoder import DecoderModel
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel
from skein.model.families.mistral import MistralModel
from skein.model.families.mixtral import MixtralModel
from skein.model.families.qwen2 import Qwen2Model
from skein.model.families.qwen3 import Qwen3Model
from skein.model.families.qwen3_moe import Qwen3MoeModel
from skein.model.layers import AnyModel, StageCost, layers_of, stage_cost
from skein.model.parameters import num_parameters
from skein.types import Precision, StageIndex, StageSpec
from tests.support import extent
from tests.worker.model.builders import MODELS, NUM_TOKENS, cuts, part, samples, visited, whole
from worker.model.stage import Stage

NUM_SAMPLES = 3
RANGES = [
    (name, first, stop)
    for name, model in MODELS.items()
    for first, stop in sorted({pair for cut in cuts(model) for pair in pairwise(cut)})
]


# torch leaves these without types.
_forward_count: Callable[..., int] = sdpa_flop_count
_backward_count: Callable[..., int] = sdpa_backward_flop_count


def _attention(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    return _forward_count(query, key, value)


def _attention_backward(
    grad: list[int], query: list[int], key: list[int], value: list[int], *_: object, **__: object
) -> int:
    return _backward_count(grad, query, key, value)


# torch counts its CUDA attention kernels; here its formulas are applied to the CPU's.
CPU_ATTENTION: Mapping[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=dict(CPU_ATTENTION))


def inputs(model: AnyModel, first: int, precision: Precision) -> tuple[Tensor, Tensor]:
    """What a stage that begins at layer `first` receives, and labels."""
    x, labels = samples(model, NUM_SAMPLES)
    if first > 0:
        x = part(model, 0, first, precision=precision)(x).detach().requires_grad_()
    return x, labels


def run(stage: Stage, x: Tensor, labels: Tensor) -> Tensor:
    """The loss, or the sum of what the next stage would get."""
    with visited(stage):
        return stage.loss(x, labels)[0] if stage.has_head else stage(x).sum()


def cost(model: AnyModel, first: int, stop: int, precision: Precision) -> StageCost:
    layers = layers_of(model, sequence_tokens=NUM_TOKENS, precision=precision)
    return stage_cost(layers, StageSpec(index=StageIndex(0), first=first, stop=stop))


def kept_bytes(stage: Stage, x: Tensor, labels: Tensor) -> int:
    """Bytes that autograd keeps, each storage once, without parameters and tables.

    Scalars are left out: they are the loss's own, once per microbatch and not per sample.
    """
    own = {y.untyped_storage().data_ptr() for y in (*stage.parameters(), *stage.buffers())}
    saved: list[Tensor] = []  # kept alive, or storages would share an address

    def pack(y: Tensor) -> Tensor:
        saved.append(y)
        return y

    with saved_tensors_hooks(pack, lambda y: y):
        result = run(stage, x, labels)
    storages = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved if y.dim() > 0}
    assert result.requires_grad
    return sum(num_bytes for address, num_bytes in storages.items() if address not in own)


def too_many(model: AnyModel, first: int, stop: int) -> int:
    """FLOPs per sample that torch counts of weight gradients as if groups of channels were not kept apart."""
    if not isinstance(model, DigitsCnnModel):
        return 0
    blocks = range(max(first, 1), min(stop, model.num_blocks + 1))
    layers = layers_of(model, sequence_tokens=NUM_TOKENS, precision=Precision.FP32)
    return (model.groups - 1) * sum(layers[block].forward_flops for block in blocks)


@pytest.mark.parametrize(("name", "first", "stop"), extent.part(RANGES, every=4))
def test_parameters_and_flops_of_any_stage_are_those_that_torch_counts(
    name: str, first: int, stop: int
) -> None:
    model = MODELS[name]
    stage = part(model, first, stop, precision=Precision.FP32)
    expected = cost(model, first, stop, Precision.FP32)
    x, labels = inputs(model, first, Precision.FP32)
    with counter() as forward:
        result = run(stage, x, labels)
    with counter() as backward:
        torch.autograd.backward(result)
    assert sum(y.numel() for y in stage.parameters()) == expected.num_parameters
    assert forward.get_total_flops() == NUM_SAMPLES * expected.forward_flops
    counted = expected.backward_flops + too_many(model, first, stop)
    assert backward.get_total_flops() == NUM_SAMPLES * counted


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_torchs_own_products_where_attention_has_no_kernel(name: str) -> None:
    model = MODELS[name]
    x, labels = samples(model, NUM_SAMPLES)
    stage = whole(model)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        run(stage, x, labels)
    expected = cost(model, 0, stage.num_layers, Precision.FP64)
    assert forward.get_total_flops() == NUM_SAMPLES * expected.forward_flops


@pytest.mark.parametrize(
    ("name", "first", "stop", "precision"),
    extent.part([(*stage, precision) for stage in RANGES for precision in Precision], every=7),
)
def test_activation_bytes_of_any_stage_are_those_that_autograd_keeps(
    name: str, first: int, stop: int, precision: Precision
) -> None:
    model = MODELS[name]
    stage = part(model, first, stop, precision=precision)
    kept = kept_bytes(stage, *inputs(model, first, precision))
    predicted = NUM_SAMPLES * cost(model, first, stop, precision).activation_bytes
    # Autocast keeps a bfloat16 copy of the CNN's matrices with every microbatch, which is no cost of a sample.
    casts = 0
    if isinstance(model, DigitsCnnModel) and precision is Precision.BF16:
        casts = sum(2 * y.numel() for y in stage.parameters() if y.dim() > 1)
    assert kept == predicted + casts


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("name", MODELS)
def test_output_bytes_are_those_of_the_boundary_tensor(name: str, precision: Precision) -> None:
    model = MODELS[name]
    x, _ = samples(model, NUM_SAMPLES)
    for stop in (1, 2, 3):
        sent = part(model, 0, stop, precision=precision)(x)
        assert sent.nbytes == NUM_SAMPLES * cost(model, 0, stop, precision).output_bytes


KINDS: list[type[DecoderModel]] = [
    LlamaModel,
    MistralModel,
    MixtralModel,
    Qwen2Model,
    Qwen3Model,
    Qwen3MoeModel,
]
PRESETS = {preset: kind.model_validate({"preset": preset}) for kind in KINDS for preset in kind.presets}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_parameters_that_transformers_counts(preset: str) -> None:
    model = PRESETS[preset]
    config = {key: value for key, value in model.hugging_face().items() if key != "model_type"}
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(model.family, **config)
        )
    assert num_parameters(model) == reference.num_parameters()
