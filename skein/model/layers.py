"""What every layer of a model costs, and what a stage of them costs together.

All figures but parameters are per sample. FLOPs count the matrix products and convolutions, as
`torch.utils.flop_counter` does: 2 m n k each, and attention as if it were not causal. Activation bytes are those that
autograd keeps from forward to backward, each tensor once, without parameters and rotary tables, with an attention
kernel that keeps no scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from skein.config.job import DigitsCnnModel, LlamaModel, LlamaShape, ModelSpec
from skein.errors import UserError
from skein.model.parameters import DIGITS_CLASSES, DIGITS_PIXELS, layer_parameters, num_groups
from skein.model.presets import shape_of
from skein.types import Precision, StageSpec

_LABEL_BYTES = 8
"""Tokens and labels are int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: the smallest thing that a cut may separate from its neighbours."""

    name: str
    num_parameters: int
    """All that the layer must hold, so a head includes a tied matrix; `stage_cost` counts that once."""
    forward_flops: int
    activation_bytes: int
    output_bytes: int
    """Size of what it hands to the next layer; 0 for the head, whose loss stays where it is."""
    extra_backward_flops: int = 0
    """What backward needs beyond twice the forward: scores recomputed, or less where no input wants a gradient."""
    num_tied_parameters: int = 0
    """How many of the parameters the first layer holds too."""

    @property
    def backward_flops(self) -> int:
        """FLOPs of the gradients of inputs and parameters together."""
        return 2 * self.forward_flops + self.extra_backward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Sums over the layers of a stage; `output_bytes` is that of its last layer."""

    num_parameters: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    output_bytes: int


def layers_of(model: ModelSpec, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
    """The layer list of `model`: what takes raw samples first, then the blocks, the head and its loss last.

    Args:
        model: what the job asks for.
        sequence_tokens: length of a sample; without meaning for images.
        precision: decides how many bytes an activation takes.

    Raises:
        UserError: the model's sizes do not fit together, or a sample is longer than the model's positions.
    """
    match model:
        case LlamaModel():
            return _llama(model, sequence_tokens, precision)
        case DigitsCnnModel():
            return _digits_cnn(model, precision)
        case _:
            assert_never(model)


def stage_cost(layers: Sequence[LayerSpec], stage: StageSpec) -> StageCost:
    """What `stage` of `layers` costs per sample; a matrix tied within the stage is held, and counted, once."""
    held = layers[stage.first : stage.stop]
    holds_both_ends = stage.first == 0 and stage.stop == len(layers)
    return StageCost(
        num_parameters=sum(x.num_parameters for x in held) - holds_both_ends * layers[-1].num_tied_parameters,
        forward_flops=sum(x.forward_flops for x in held),
        backward_flops=sum(x.backward_flops for x in held),
        activation_bytes=sum(x.activation_bytes for x in held),
        output_bytes=held[-1].output_bytes,
    )


def tied_names(model: ModelSpec) -> frozenset[str]:
    """Names of the tensors that the first and the last layer share; a cut between them leaves two copies."""
    first, *_, last = layer_parameters(model)
    return frozenset(first.keys() & last.keys())


def _word_bytes(precision: Precision) -> int:
    """Bytes of one number in parameters, residuals and losses."""
    return 8 if precision is Precision.FP64 else 4


def _product_bytes(precision: Precision) -> int:
    """Bytes of one number that enters or leaves a matrix product."""
    return 2 if precision is Precision.BF16 else _word_bytes(precision)


def _sizes(model: ModelSpec) -> tuple[int, ...]:
    return tuple(sum(math.prod(shape) for shape in layer.values()) for layer in layer_parameters(model))


def _llama(model: LlamaModel, num_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
    shape = shape_of(model)
    if num_tokens > shape.max_position_embeddings:
        hint = f"the model has {shape.max_position_embeddings} positions (max_position_embeddings)"
        raise UserError("data.sequence_tokens", num_tokens, hint)
    word = _word_bytes(precision)
    first, *blocks, last = _sizes(model)
    hidden_bytes = num_tokens * shape.hidden_size * word
    embedding = LayerSpec(
        name="embedding",
        num_parameters=first,
        forward_flops=0,
        activation_bytes=num_tokens * _LABEL_BYTES,
        output_bytes=hidden_bytes,
    )
    scores_flops = 2 * num_tokens * num_tokens * shape.attention_width
    middle = (
        LayerSpec(
            name=f"block.{i}",
            num_parameters=size,
            # Every weight but those of the two norms multiplies every token; scores and values are two more products.
            forward_flops=2 * num_tokens * (size - 2 * shape.hidden_size) + 2 * scores_flops,
            extra_backward_flops=scores_flops,
            activation_bytes=num_tokens * _llama_block_bytes(shape, precision),
            output_bytes=hidden_bytes,
        )
        for i, size in enumerate(blocks)
    )
    norm_bytes = shape.hidden_size * (word + _product_bytes(precision)) + word
    head = LayerSpec(
        name="head",
        num_parameters=last,
        num_tied_parameters=first if shape.tie_word_embeddings else 0,
        forward_flops=2 * num_tokens * shape.hidden_size * shape.vocab_size,
        activation_bytes=num_tokens * (norm_bytes + shape.vocab_size * word + _LABEL_BYTES),
        output_bytes=0,
    )
    return (embedding, *middle, head)


def _llama_block_bytes(shape: LlamaShape, precision: Precision) -> int:
    """Per token: input, output and scale of both norms; queries, keys, values, their result and log-sum; the MLP."""
    word, product = _word_bytes(precision), _product_bytes(precision)
    norms = 2 * (shape.hidden_size * (word + product) + word)
    key_width = shape.attention_width // shape.num_attention_heads * shape.num_key_value_heads
    attention = 2 * (shape.attention_width + key_width) * product + shape.num_attention_heads * word
    return norms + attention + 3 * shape.intermediate_size * product


def _digits_cnn(model: DigitsCnnModel, precision: Precision) -> tuple[LayerSpec, ...]:
    word, product = _word_bytes(precision), _product_bytes(precision)
    num_pixels = DIGITS_PIXELS * DIGITS_PIXELS
    num_features = num_pixels * model.channels
    # Input and rectified output of the norm, its mean and scale per group; bfloat16 keeps a cast copy besides.
    copy_bytes = num_features * product if precision is Precision.BF16 else 0
    norm_bytes = 2 * num_features * word + 2 * num_groups(model.channels) * word + copy_bytes
    first, *blocks, last = _sizes(model)
    conv_flops = 2 * 9 * model.channels * num_features
    stem_flops = conv_flops // model.channels
    stem = LayerSpec(
        name="stem",
        num_parameters=first,
        forward_flops=stem_flops,
        extra_backward_flops=-stem_flops,
        activation_bytes=num_pixels * product,
        output_bytes=num_features * word,
    )
    middle = (
        LayerSpec(
            name=f"block.{i}",
            num_parameters=size,
            forward_flops=conv_flops,
            activation_bytes=norm_bytes,
            output_bytes=num_features * word,
        )
        for i, size in enumerate(blocks)
    )
    head = LayerSpec(
        name="head",
        num_parameters=last,
        forward_flops=2 * num_features * DIGITS_CLASSES,
        activation_bytes=norm_bytes + DIGITS_CLASSES * word + _LABEL_BYTES,
        output_bytes=0,
    )
    return (stem, *middle, head)
