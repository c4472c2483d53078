"""Qwen 3 with experts in every block: many narrow ones, of which each token goes through several."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from skein.model.families import qwen2
from skein.model.families.qwen3 import Qwen3Shape
from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape
from skein.model.sparse.experts import ExpertNames, Experts, check_chosen
from skein.model.sparse.model import SparseModel

_NAMES = ExpertNames(module="mlp", gate="gate_proj", up="up_proj", down="down_proj")


class Qwen3MoeShape(Qwen3Shape):
    """Sizes of a Qwen 3 decoder with experts, under the names of its Hugging Face configuration.

    No layer has `intermediate_size` features: it is kept for the export.
    """

    num_experts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Experts of each block."""
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1024)] = 2
    """Experts that each token goes through."""
    moe_intermediate_size: Annotated[int, Field(ge=8, le=262_144)] = 176
    """Inner features of one expert."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""

    @model_validator(mode="after")
    def _check_experts(self) -> "Qwen3MoeShape":
        check_chosen("num_experts_per_tok", self.num_experts_per_tok, self.num_experts)
        return self

    @property
    def experts(self) -> Experts:
        return Experts(
            num_experts=self.num_experts,
            num_chosen=self.num_experts_per_tok,
            num_features=self.hidden_size,
            num_inner=self.moe_intermediate_size,
            is_normalised=self.norm_topk_prob,
            names=_NAMES,
        )


PRESETS: Mapping[str, Qwen3MoeShape] = MappingProxyType(
    {
        # One entry of vocabulary per byte value: for text without a tokenizer.
        "qwen3-moe-1m": Qwen3MoeShape(
            hidden_size=128,
            moe_intermediate_size=72,
            num_hidden_layers=4,
            num_attention_heads=4,
        ),
        "qwen3-moe-30m": Qwen3MoeShape(
            hidden_size=384,
            moe_intermediate_size=176,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_experts=16,
            num_experts_per_tok=4,
        ),
        # As published.
        "qwen3-30b-a3b": Qwen3MoeShape(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40_960,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
        ),
    }
)
"""Sizes by name, smallest first; the first number is that of all parameters."""


class Qwen3MoeModel(SparseModel):
    """A Qwen 3 language model with experts, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = Qwen3MoeShape
    dialect: ClassVar[Dialect] = replace(
        qwen2.DIALECT,
        architecture="Qwen3MoeForCausalLM",
        defaults={
            **qwen2.DIALECT.defaults,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
        },
        # A block with a feed-forward of its own among those with experts is none of ours.
        required={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        windowed={"use_sliding_window": True},
        stated=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        spellings={"num_local_experts": "num_experts"},
    )
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["qwen3_moe"] = "qwen3_moe"
    shape: Qwen3MoeShape | None = None
