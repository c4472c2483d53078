"""Decoders of text: tensors and costs of their layers, whatever differs between families.

A family gives its shape (sizes, biases, norms of heads), its dialect of `config.json` and its presets.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, JsonValue, field_validator

from skein.errors import UserError
from skein.model.huggingface import (
    Dialect,
    comparable,
    config_from_shape,
    kept_from_config,
    shape_from_config,
)
from skein.model.layers import (
    LABEL_BYTES,
    AnyModel,
    LayerSpec,
    Shapes,
    num_elements,
    refuse_difference,
)
from skein.model.rows import VocabularySplit, block_name, row_blocks
from skein.model.shape import DecoderShape
from skein.model.sparse.experts import Experts
from skein.types import Precision

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
OVER_VOCABULARY = (EMBEDDING, HEAD)
"""Whole matrices over the vocabulary. Blocks of their rows have names of their own."""
NORM = "model.norm.weight"
NUM_SCORES = 2
"""Numbers of a token that shards of the output pass on: the normaliser of the rows so far, and the label's logit."""


class DecoderModel(AnyModel):
    """A language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    has_split_backward: ClassVar[bool] = True
    has_vocabulary: ClassVar[bool] = True
    sizes: ClassVar[type[DecoderShape]]
    dialect: ClassVar[Dialect]
    presets: ClassVar[Mapping[str, DecoderShape]] = {}
    """Shapes by name, smallest first."""
    divided: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    """Sizes of its shape of which each device that shares blocks has an equal part."""

    preset: str | None = None
    shape: DecoderShape | None = None
    init_from: str | None = None
    config: dict[str, JsonValue] = Field(default_factory=dict)
    """Further keys of the exported config.json, such as eos_token_id. Those of `init_from` are kept by themselves."""

    def __hash__(self) -> int:
        # `config` holds JSON, which has no hash; models that differ in it alone are few.
        return hash((self.family, self.preset, self.shape, self.init_from, self.vocabulary_split))

    @field_validator("config")
    @classmethod
    def _check_config_is_free(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key in config:
            if key not in kept_from_config({key: True}, cls.sizes, cls.dialect):
                raise UserError(
                    key, config[key], "follows from the model: leave it out here, and set it in shape"
                )
        return config

    @property
    def begins_from(self) -> str | None:
        return self.init_from

    @property
    def experts(self) -> Experts | None:
        """The experts that every block has in place of a feed-forward; None: it has none."""
        return decoder_shape(self).experts

    @property
    def tensor_divisor(self) -> int:
        if self.shape is None and self.preset is None:
            return 0
        shape = decoder_shape(self)
        # Query heads are a multiple of key heads.
        return math.gcd(shape.num_key_value_heads, shape.intermediate_size)

    @property
    def divided_words(self) -> str:
        shape = decoder_shape(self)
        return ", ".join(f"{name} ({getattr(shape, name)})" for name in self.divided)

    def shared(self, size: int) -> Self:
        assert self.tensor_divisor % size == 0
        return self._divided(size, self.divided)

    @property
    def grid_sizes(self) -> Mapping[str, int]:
        if self.shape is None and self.preset is None:
            return {}
        shape = decoder_shape(self)
        return {name: getattr(shape, name) for name in (*self.divided, "hidden_size")}

    def gridded(self, side: int) -> Self:
        return self._divided(side, tuple(self.grid_sizes))

    def _divided(self, num: int, names: tuple[str, ...]) -> Self:
        shape = decoder_shape(self)
        part = {name: getattr(shape, name) // num for name in names}
        part["head_dim"] = shape.head_features
        made = self.model_copy(update={"preset": None, "shape": shape.model_copy(update=part)})
        return made if num > 1 else self

    @property
    def vocab_size(self) -> int:
        return decoder_shape(self).vocab_size

    def layer_parameters(self) -> tuple[Shapes, ...]:
        shape, experts = decoder_shape(self), self.experts
        split = self.vocabulary_split
        output = EMBEDDING if shape.tie_word_embeddings else HEAD
        # What is tied to blocks is held in blocks.
        has_input_blocks = split is VocabularySplit.BOTH or (
            split is VocabularySplit.OUTPUT and shape.tie_word_embeddings
        )
        embeddings = _matrix(shape, EMBEDDING, in_blocks=has_input_blocks)
        norm = {NORM: (shape.hidden_size,)}
        heads = _matrix(shape, output, in_blocks=split is not VocabularySplit.OFF)
        return (
            *(embeddings if split is VocabularySplit.BOTH else [_merged(embeddings)]),
            *(_block(shape, experts, f"model.layers.{i}") for i in range(shape.num_hidden_layers)),
            *([_merged([norm, heads[0]])] if split is VocabularySplit.OFF else [norm, *heads]),
        )

    @property
    def inner_layers(self) -> range:
        num_blocks = decoder_shape(self).num_hidden_layers
        first = len(row_blocks(self.vocab_size)) if self.vocabulary_split is VocabularySplit.BOTH else 1
        return range(first, first + num_blocks)

    def layers(self, *, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
        shape, experts = decoder_shape(self), self.experts
        _check_length(shape, sequence_tokens)
        word = precision.word_bytes
        every, inner = self.layer_parameters(), self.inner_layers
        blocks = every[inner.start : inner.stop]
        hidden_bytes = sequence_tokens * shape.hidden_size * word
        scores_flops = 2 * sequence_tokens * sequence_tokens * shape.attention_width
        num_resting = 0 if experts is None else experts.num_resting_elements
        mixing_flops = 0 if experts is None else experts.mixing_flops(sequence_tokens)
        mixing_bytes = 0 if experts is None else experts.mixing_bytes(precision)
        middle = (
            LayerSpec(
                name=f"block.{i}",
                num_parameters=num_elements(tensors),
                # Every matrix but those of resting experts multiplies a token; scores and values are two more products.
                forward_flops=2 * sequence_tokens * (_matrix_elements(tensors) - num_resting)
                + 2 * scores_flops
                + mixing_flops,
                extra_backward_flops=scores_flops,
                activation_bytes=sequence_tokens * _block_bytes(shape, experts, precision) + mixing_bytes,
                output_bytes=hidden_bytes,
                pending_bytes=sequence_tokens * _block_pending_bytes(shape, experts, precision)
                + mixing_bytes,
                num_early_gradients=2 * shape.hidden_size + shape.has_head_norms * 2 * shape.head_features,
            )
            for i, tensors in enumerate(blocks)
        )
        return (*self._inputs(sequence_tokens, word), *middle, *self._outputs(sequence_tokens, precision))

    def _inputs(self, sequence_tokens: int, word_bytes: int) -> tuple[LayerSpec, ...]:
        """Embedding, or blocks of its rows; each hands the tokens on to the next one.

        Blocks keep the tokens between them; of what is put aside they share all, tokens and the gradient that came.
        """
        shape = decoder_shape(self)
        tokens_bytes = sequence_tokens * LABEL_BYTES
        hidden_bytes = sequence_tokens * shape.hidden_size * word_bytes
        layers = self.layer_parameters()[: self.inner_layers.start]
        return tuple(
            LayerSpec(
                name="embedding" if len(layers) == 1 else f"embedding.{i}",
                num_parameters=num_elements(tensors),
                forward_flops=0,
                activation_bytes=(i == 0) * tokens_bytes,
                output_bytes=hidden_bytes + (i < len(layers) - 1) * tokens_bytes,
                pending_bytes=(i == 0) * (tokens_bytes + hidden_bytes),
            )
            for i, tensors in enumerate(layers)
        )

    def _outputs(self, sequence_tokens: int, precision: Precision) -> tuple[LayerSpec, ...]:
        """Final norm and head in one; or the norm, and blocks of the head's rows.

        Blocks keep the scores that they pass on, and share the norm's result, as it came or was made. Labels go along.
        """
        shape = decoder_shape(self)
        word = precision.word_bytes
        norm, *blocks = self.layer_parameters()[self.inner_layers.stop :]
        kept_bytes = word if blocks else precision.product_bytes
        norm_bytes = sequence_tokens * (shape.hidden_size * (word + kept_bytes) + word)
        hidden_bytes = sequence_tokens * shape.hidden_size * word
        num_tied = num_elements(norm) - shape.hidden_size if shape.tie_word_embeddings else 0
        head = LayerSpec(
            name="norm" if blocks else "head",
            num_parameters=num_elements(norm),
            num_tied_parameters=num_tied,
            forward_flops=0,
            activation_bytes=norm_bytes,
            output_bytes=hidden_bytes + sequence_tokens * LABEL_BYTES,
            num_early_gradients=shape.hidden_size,
        )
        if not blocks:
            num_rows = shape.vocab_size
            return (
                replace(
                    head,
                    forward_flops=2 * sequence_tokens * shape.hidden_size * num_rows,
                    activation_bytes=norm_bytes + sequence_tokens * (num_rows * word + LABEL_BYTES),
                    output_bytes=0,
                    pending_bytes=sequence_tokens * (shape.hidden_size + num_rows) * precision.product_bytes,
                ),
            )
        scores_bytes = sequence_tokens * NUM_SCORES * word
        rows = (
            LayerSpec(
                name=f"head.{i}",
                num_parameters=num_elements(tensors),
                num_tied_parameters=num_elements(tensors) if shape.tie_word_embeddings else 0,
                forward_flops=2 * sequence_tokens * num_elements(tensors),
                # The logits once more.
                extra_backward_flops=2 * sequence_tokens * num_elements(tensors),
                activation_bytes=scores_bytes,
                output_bytes=0 if i == len(blocks) - 1 else head.output_bytes + scores_bytes,
                pending_bytes=sequence_tokens * _num_rows(tensors) * precision.product_bytes,
            )
            for i, tensors in enumerate(blocks)
        )
        return (head, *rows)

    def hugging_face(self) -> dict[str, object]:
        return config_from_shape(decoder_shape(self), self.dialect, self.family) | self.config

    def check_config(self, config: Mapping[str, object]) -> None:
        refuse_difference(comparable(decoder_shape(self)), comparable(self.shape_in(config)))

    def begun(self, config: Mapping[str, object]) -> Self:
        kept = {"config": kept_from_config(config, self.sizes, self.dialect) | self.config}
        if self.shape is None and self.preset is None:
            return self.model_copy(update=kept | {"shape": self.shape_in(config)})
        self.check_config(config)
        return self.model_copy(update=kept)

    @classmethod
    def shape_in(cls, config: Mapping[str, object]) -> DecoderShape:
        """The sizes that a Hugging Face configuration describes.

        Raises:
            UserError: it is of another family, or has what our decoder does not compute.
        """
        family = cls.model_fields["family"].default
        if config.get("model_type") != family:
            hint = f"only {family!r} models can be loaded with family: {family}"
            raise UserError("config.model_type", config.get("model_type"), hint)
        return shape_from_config(config, cls.sizes, cls.dialect)


def decoder_shape(model: DecoderModel) -> DecoderShape:
    """The sizes that `model` asks for, by preset or by shape.

    Raises:
        UserError: both or neither are given, or the preset is unknown.
    """
    presets = model.presets
    if model.shape is not None:
        if model.preset is not None:
            raise UserError("model.preset", model.preset, "give either preset or shape, not both")
        return model.shape
    if model.preset is None:
        raise UserError("model.preset", None, f"give a shape, or a preset: {', '.join(presets)}")
    if model.preset not in presets:
        close = difflib.get_close_matches(model.preset, presets, n=1)
        question = f"did you mean {close[0]}? " if close else ""
        raise UserError("model.preset", model.preset, f"{question}presets are {', '.join(presets)}")
    return presets[model.preset]


def _check_length(shape: DecoderShape, num_tokens: int) -> None:
    if num_tokens > shape.max_position_embeddings:
        hint = f"the model has {shape.max_position_embeddings} positions (max_position_embeddings)"
        raise UserError("data.sequence_tokens", num_tokens, hint)
    if shape.window is not None and num_tokens > shape.window:
        hint = f"attention would reach over all of a sample, the model's only over {shape.window} tokens "
        hint += f"(sliding_window): give at most {shape.window}"
        raise UserError("data.sequence_tokens", num_tokens, hint)


def _matrix(shape: DecoderShape, name: str, *, in_blocks: bool) -> list[Shapes]:
    """Matrix over the vocabulary, whole or in blocks of rows."""
    if not in_blocks:
        return [{name: (shape.vocab_size, shape.hidden_size)}]
    blocks = row_blocks(shape.vocab_size)
    return [{block_name(name, rows): (len(rows), shape.hidden_size)} for rows in blocks]


def _merged(layers: Sequence[Shapes]) -> Shapes:
    return {name: sizes for layer in layers for name, sizes in layer.items()}


def _num_rows(tensors: Shapes) -> int:
    return sum(sizes[0] for sizes in tensors.values())


def _block(shape: DecoderShape, experts: Experts | None, prefix: str) -> Shapes:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys, features = shape.attention_width, shape.key_width, shape.head_features
    tensors: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    if experts is None:
        tensors |= {f"mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
        tensors |= {"mlp.down_proj.weight": (hidden, inner)}
    else:
        tensors |= experts.tensors()
    if shape.has_input_biases:
        tensors |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", queries), ("k", keys), ("v", keys))}
    if shape.has_head_norms:
        tensors |= {f"self_attn.{x}_norm.weight": (features,) for x in ("q", "k")}
    return {f"{prefix}.{name}": sizes for name, sizes in tensors.items()}


def _matrix_elements(tensors: Shapes) -> int:
    return sum(math.prod(shape) for shape in tensors.values() if len(shape) > 1)


def _block_bytes(shape: DecoderShape, experts: Experts | None, precision: Precision) -> int:
    """Per token: input, output and scale of both norms; queries, keys, values, their result and log-sum; the MLP.

    Experts say what they keep in its place. Where heads are normalised, their queries and keys before that too, and a
    scale of each.
    """
    word, product = precision.word_bytes, precision.product_bytes
    norms = 2 * (shape.hidden_size * (word + product) + word)
    attention = 2 * (shape.attention_width + shape.key_width) * product + shape.num_attention_heads * word
    if shape.has_head_norms:
        num_heads = shape.num_attention_heads + shape.num_key_value_heads
        attention += (shape.attention_width + shape.key_width) * product + num_heads * word
    if experts is not None:
        return norms + attention + experts.activation_bytes(precision)
    return norms + attention + 3 * shape.intermediate_size * product


def _block_pending_bytes(shape: DecoderShape, experts: Experts | None, precision: Precision) -> int:
    """Per token: input and output's gradient of each product; queries, keys and values share an input, as gate and up.

    A bias's gradient is made of what its matrix keeps.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    attention = 2 * hidden + 2 * shape.attention_width + 2 * shape.key_width
    if experts is not None:
        return attention * precision.product_bytes + experts.pending_bytes(precision)
    return (attention + 2 * hidden + 3 * inner) * precision.product_bytes
