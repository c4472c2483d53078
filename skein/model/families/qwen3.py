"""Qwen 3: each head's queries and keys are normalised; no biases; heads as wide as head_dim says."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Literal

from skein.model.decoder import DecoderModel
from skein.model.families import qwen2
from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape, WindowedShape


class Qwen3Shape(WindowedShape):
    """Sizes of a Qwen 3 decoder, under the names of its Hugging Face configuration."""

    has_head_norms: ClassVar[bool] = True


PRESETS: Mapping[str, Qwen3Shape] = MappingProxyType(
    {
        # As published.
        "qwen3-0.6b": Qwen3Shape(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
        )
    }
)


class Qwen3Model(DecoderModel):
    """A Qwen 3 language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = Qwen3Shape
    dialect: ClassVar[Dialect] = replace(
        qwen2.DIALECT,
        architecture="Qwen3ForCausalLM",
        defaults={**qwen2.DIALECT.defaults, "head_dim": 128},
        required={"attention_bias": False},
    )
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["qwen3"] = "qwen3"
    shape: Qwen3Shape | None = None
