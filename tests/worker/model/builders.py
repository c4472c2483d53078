"""Small models, samples, and a whole step through stages that only know each other's boundary tensors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations, pairwise

import torch
from torch import Tensor

from skein.model.decoder import DecoderModel
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.families.mistral import MistralModel, MistralShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.families.mlp import MlpModel
from skein.model.families.qwen2 import Qwen2Model, Qwen2Shape
from skein.model.families.qwen3 import Qwen3Model, Qwen3Shape
from skein.model.families.qwen3_moe import Qwen3MoeModel, Qwen3MoeShape
from skein.model.layers import AnyModel
from skein.model.shape import Llama3Rope
from skein.types import Precision, StageIndex, StageSpec
from worker.model.stage import IGNORED_LABEL, Stage, build_stage

NUM_TOKENS = 12
VOCABULARY = 50
LUCK = 2**40


_SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "initializer_range": 0.2,
}
# Waves of heads of 8 features at this theta are 6 to 590 tokens long: some fast, some slow, some between.
_STRETCHED = Llama3Rope(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def llama(
    *,
    key_value_heads: int = 2,
    head_dim: int | None = None,
    is_tied: bool = True,
    rope_scaling: Llama3Rope | None = None,
) -> LlamaModel:
    """Two blocks of 32 features and 4 heads."""
    changes: dict[str, object] = {
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": is_tied,
        "rope_scaling": rope_scaling,
    }
    return LlamaModel(shape=LlamaShape.model_validate(_SIZES | changes))


# A row makes a model inherit every law of stages, costs, imports and exports.
MODELS: dict[str, AnyModel] = {
    "tied": llama(),
    "untied": llama(is_tied=False),
    "one_group": llama(key_value_heads=1),
    "no_groups": llama(key_value_heads=4, is_tied=False),
    "wide_heads": llama(head_dim=14),
    "narrow_heads": llama(head_dim=6, is_tied=False),
    "llama 3.1": llama(rope_scaling=_STRETCHED),
    "mistral": MistralModel(
        shape=MistralShape.model_validate(
            _SIZES | {"sliding_window": NUM_TOKENS, "head_dim": 12, "tie_word_embeddings": False}
        )
    ),
    "qwen2": Qwen2Model(shape=Qwen2Shape.model_validate(_SIZES | {"rms_norm_eps": 1e-6})),
    "qwen2 windowed": Qwen2Model(
        shape=Qwen2Shape.model_validate(
            _SIZES | {"sliding_window": NUM_TOKENS + 1, "tie_word_embeddings": False}
        )
    ),
    "qwen3": Qwen3Model(
        shape=Qwen3Shape.model_validate(_SIZES | {"head_dim": 16, "tie_word_embeddings": False})
    ),
    "mixtral": MixtralModel(
        shape=MixtralShape.model_validate(_SIZES | {"num_local_experts": 4, "sliding_window": NUM_TOKENS})
    ),
    "qwen3 moe": Qwen3MoeModel(
        shape=Qwen3MoeShape.model_validate(
            _SIZES
            | {
                "head_dim": 16,
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 20,
                "norm_topk_prob": False,
                "tie_word_embeddings": False,
            }
        )
    ),
    "digits": DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2),
    "digits grouped": DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2, groups=3),
    "mlp": MlpModel(family="mlp", widths=(7, 6, 5)),
    "mlp gelu": MlpModel(family="mlp", widths=(7, 6, 5), activation="gelu"),
    "mlp dropout": MlpModel(family="mlp", widths=(7, 6, 5), dropout=0.4),
}
DECODERS = [name for name, model in MODELS.items() if isinstance(model, DecoderModel)]


def part(
    model: AnyModel, first: int, stop: int, *, precision: Precision = Precision.FP64, seed: int = 7
) -> Stage:
    return build_stage(
        model,
        StageSpec(index=StageIndex(0), first=first, stop=stop),
        sequence_tokens=NUM_TOKENS,
        seed=seed,
        precision=precision,
        device=torch.device("cpu"),
    )


def whole(model: AnyModel, *, precision: Precision = Precision.FP64, seed: int = 7) -> Stage:
    return part(model, 0, len(model.layer_parameters()), precision=precision, seed=seed)


def cuts(model: AnyModel) -> Iterator[tuple[int, ...]]:
    """Every way to cut the layer list, as the boundaries between stages, both ends included."""
    num_layers = len(model.layer_parameters())
    for num_cuts in range(num_layers):
        for inner in combinations(range(1, num_layers), num_cuts):
            yield (0, *inner, num_layers)


def stages(model: AnyModel, cut: Sequence[int]) -> list[Stage]:
    return [part(model, first, stop) for first, stop in pairwise(cut)]


def assert_near(actual: Tensor | None, expected: Tensor, *, tolerance: float, what: str = "") -> None:
    """Equal to `tolerance`, relative to each number and, near zero, absolute."""
    assert actual is not None, what
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def samples(model: AnyModel, num_samples: int = 3) -> tuple[Tensor, Tensor]:
    """Raw samples and their labels; of a text's, some are to be ignored."""
    draw = torch.Generator().manual_seed(num_samples)
    if model.vocab_size is None:
        images = torch.rand(num_samples, 1, 8, 8, generator=draw)
        return images, torch.randint(0, 10, (num_samples,), generator=draw)
    tokens = torch.randint(0, VOCABULARY, (num_samples, NUM_TOKENS), generator=draw)
    labels = torch.randint(0, VOCABULARY, (num_samples, NUM_TOKENS), generator=draw)
    labels[:, :2] = IGNORED_LABEL
    return tokens, labels


def visited(stage: Stage) -> AbstractContextManager[object]:
    """A visit in training, as far as it matters to what is dropped."""
    return stage.junction.visited(None, luck=LUCK) if stage.spec.has_dropout else nullcontext()


def step(path: Sequence[Stage], x: Tensor, labels: Tensor) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, valid labels and gradients of `path`; what two stages hold both is summed.

    Boundary tensors are cut from their graph, as if they had been on a wire.
    """
    arrived = [x]
    left: list[Tensor] = []
    for stage in path[:-1]:
        with visited(stage):
            left.append(stage(arrived[-1]))
        arrived.append(left[-1].detach().requires_grad_())
    with visited(path[-1]):
        loss, num_valid = path[-1].loss(arrived[-1], labels)
    torch.autograd.backward(loss)
    for result, copy in zip(reversed(left), reversed(arrived), strict=False):
        torch.autograd.backward(result, copy.grad)
    gradients: dict[str, Tensor] = {}
    for stage in path:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return loss.item(), num_valid, gradients
