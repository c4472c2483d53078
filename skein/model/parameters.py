"""Which tensors a model has: names as Hugging Face writes them, and shapes, layer by layer."""

import math
from collections.abc import Mapping
from typing import assert_never

from skein.config.job import DigitsCnnModel, LlamaModel, LlamaShape, ModelSpec
from skein.model.presets import shape_of

Shapes = Mapping[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
DIGITS_PIXELS = 8
"""Height and width of an image of scikit-learn's digits."""
DIGITS_CLASSES = 10


def layer_parameters(model: ModelSpec) -> tuple[Shapes, ...]:
    """The tensors of each layer, in the order of the layer list.

    With tied embeddings the first and the last layer list the same tensor, for each needs it where it runs.
    """
    match model:
        case LlamaModel():
            return _llama(shape_of(model))
        case DigitsCnnModel():
            return _digits_cnn(model)
        case _:
            assert_never(model)


def parameter_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the whole model once, in the order of the layer list."""
    return {name: shape for layer in layer_parameters(model) for name, shape in layer.items()}


def num_parameters(model: ModelSpec) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def num_groups(channels: int) -> int:
    """Groups of a convolution block's normalisation: 4 where the channels allow it."""
    return math.gcd(channels, 4)


def _llama(shape: LlamaShape) -> tuple[Shapes, ...]:
    matrix = (shape.vocab_size, shape.hidden_size)
    head_matrix = EMBEDDING if shape.tie_word_embeddings else "lm_head.weight"
    blocks = (_llama_block(shape, f"model.layers.{i}") for i in range(shape.num_hidden_layers))
    return ({EMBEDDING: matrix}, *blocks, {"model.norm.weight": (shape.hidden_size,), head_matrix: matrix})


def _llama_block(shape: LlamaShape, prefix: str) -> Shapes:
    hidden, inner, queries = shape.hidden_size, shape.intermediate_size, shape.attention_width
    keys = queries // shape.num_attention_heads * shape.num_key_value_heads
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
        f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
    }


def _digits_cnn(model: DigitsCnnModel) -> tuple[Shapes, ...]:
    channels = model.channels
    norm = {"norm.weight": (channels,), "norm.bias": (channels,)}
    block = norm | {"conv.weight": (channels, channels, 3, 3)}
    features = channels * DIGITS_PIXELS * DIGITS_PIXELS
    return (
        {"stem.weight": (channels, 1, 3, 3)},
        *({f"blocks.{i}.{name}": shape for name, shape in block.items()} for i in range(model.num_blocks)),
        norm | {"classifier.weight": (DIGITS_CLASSES, features), "classifier.bias": (DIGITS_CLASSES,)},
    )
