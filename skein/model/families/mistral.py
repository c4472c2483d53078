"""Mistral 7B and what shares its architecture: attention over a window, which samples must fit in."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from skein.model.decoder import DecoderModel
from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape, WindowedShape


class MistralShape(WindowedShape):
    """Sizes of a Mistral decoder, under the names of its Hugging Face configuration."""


PRESETS: Mapping[str, MistralShape] = MappingProxyType(
    {
        # As published (v0.3): no window any more.
        "mistral-7b": MistralShape(
            vocab_size=32_768,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32_768,
            rope_theta=1e6,
            tie_word_embeddings=False,
        )
    }
)


class MistralModel(DecoderModel):
    """A Mistral language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = MistralShape
    dialect: ClassVar[Dialect] = Dialect(
        architecture="MistralForCausalLM",
        defaults={
            "vocab_size": 32_000,
            "intermediate_size": 14_336,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        required={},
    )
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["mistral"] = "mistral"
    shape: MistralShape | None = None
