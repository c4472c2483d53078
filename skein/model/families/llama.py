"""Llama 2 to 3.3, and what shares its architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import model_validator

from skein.errors import UserError
from skein.model.decoder import DecoderModel
from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape


class LlamaShape(DecoderShape):
    """Sizes of a Llama-family decoder, under the names of its Hugging Face configuration."""

    @model_validator(mode="after")
    def _check_heads(self) -> "LlamaShape":
        if self.hidden_size % self.num_attention_heads:
            hint = f"give a multiple of num_attention_heads ({self.num_attention_heads}): transformers opens no other"
            raise UserError("hidden_size", self.hidden_size, hint)
        return self


# One entry of vocabulary per byte value: for text without a tokenizer.
_BYTES = LlamaShape(vocab_size=256, tie_word_embeddings=True)
_WORDS = LlamaShape(vocab_size=32_000, tie_word_embeddings=True)
# Llama 3 as published, at its own context of 8,192 tokens: no rotary scaling for longer ones.
_LLAMA_3 = LlamaShape(
    vocab_size=128_256,
    num_key_value_heads=8,
    num_attention_heads=32,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
)


def _sized(
    base: LlamaShape, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> LlamaShape:
    sizes: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return LlamaShape.model_validate(base.model_dump() | sizes)


PRESETS: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "llama-1m": _sized(_BYTES, 128, 352, 5, 4, 2),
        "llama-3m": _sized(_BYTES, 192, 512, 8, 6, 2),
        "llama-10m": _sized(_BYTES, 320, 864, 10, 5, 1),
        "llama-30m": _sized(_BYTES, 512, 1376, 10, 8, 4),
        "llama-125m": _sized(_WORDS, 768, 2048, 16, 12, 4),
        "llama-350m": _sized(_WORDS, 1024, 2816, 28, 16, 4),
        "llama-1b": _sized(_LLAMA_3, 2048, 8192, 16, 32, 8),
        "llama-3b": _sized(_LLAMA_3, 3072, 8192, 28, 24, 8),
        "llama-8b": _sized(_LLAMA_3, 4096, 14_336, 32, 32, 8).model_copy(
            update={"tie_word_embeddings": False}
        ),
    }
)
"""Sizes by name, smallest first; the number is that of the parameters, tied matrices counted once."""


class LlamaModel(DecoderModel):
    """A Llama-family language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = LlamaShape
    dialect: ClassVar[Dialect] = Dialect(
        architecture="LlamaForCausalLM",
        defaults={"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
        required={"attention_bias": False, "mlp_bias": False},
    )
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["llama"] = "llama"
    shape: LlamaShape | None = None
