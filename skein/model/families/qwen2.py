"""Qwen 2 and 2.5: queries, keys and values are made with a bias."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from skein.model.decoder import DecoderModel
from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape, WindowedShape


class Qwen2Shape(WindowedShape):
    """Sizes of a Qwen 2 decoder, under the names of its Hugging Face configuration."""

    has_input_biases: ClassVar[bool] = True


PRESETS: Mapping[str, Qwen2Shape] = MappingProxyType(
    {
        # As published.
        "qwen2.5-0.5b": Qwen2Shape(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
        )
    }
)


DIALECT = Dialect(
    architecture="Qwen2ForCausalLM",
    defaults={
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
    required={},
    windowed={"use_sliding_window": True, "max_window_layers": 0},
)


class Qwen2Model(DecoderModel):
    """A Qwen 2 or 2.5 language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = Qwen2Shape
    dialect: ClassVar[Dialect] = DIALECT
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["qwen2"] = "qwen2"
    shape: Qwen2Shape | None = None
