"""Named model sizes, and the one shape that a model specification means."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from skein.config.job import LlamaModel, LlamaShape
from skein.errors import UserError

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


def shape_of(model: LlamaModel) -> LlamaShape:
    """The sizes that `model` asks for, by preset or by shape.

    Raises:
        UserError: both or neither are given, the preset is unknown, or transformers could not open the export.
    """
    if model.shape is not None:
        if model.preset is not None:
            raise UserError("model.preset", model.preset, "give either preset or shape, not both")
        return _exportable(model.shape)
    if model.preset is None:
        raise UserError("model.preset", None, f"give a shape, or a preset: {', '.join(PRESETS)}")
    if model.preset not in PRESETS:
        raise UserError("model.preset", model.preset, _suggestion(model.preset))
    return PRESETS[model.preset]


def _exportable(shape: LlamaShape) -> LlamaShape:
    if shape.hidden_size % shape.num_attention_heads:
        hint = f"give a multiple of num_attention_heads ({shape.num_attention_heads}): transformers opens no other"
        raise UserError("model.shape.hidden_size", shape.hidden_size, hint)
    return shape


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, PRESETS, n=1)
    question = f"did you mean {close[0]}? " if close else ""
    return f"{question}presets are {', '.join(PRESETS)}"
