"""Mixtral 8x7B and what shares its architecture: Mistral's blocks with experts in place of the feed-forward."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from skein.model.huggingface import Dialect
from skein.model.shape import DecoderShape, WindowedShape
from skein.model.sparse.experts import ExpertNames, Experts, check_chosen
from skein.model.sparse.model import SparseModel

_NAMES = ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralShape(WindowedShape):
    """Sizes of a Mixtral decoder, under the names of its Hugging Face configuration."""

    num_local_experts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Experts of each block, of `intermediate_size` inner features each."""
    num_experts_per_tok: Annotated[int, Field(ge=1, le=1024)] = 2
    """Experts that each token goes through."""

    @model_validator(mode="after")
    def _check_experts(self) -> "MixtralShape":
        check_chosen("num_experts_per_tok", self.num_experts_per_tok, self.num_local_experts)
        return self

    @property
    def experts(self) -> Experts:
        return Experts(
            num_experts=self.num_local_experts,
            num_chosen=self.num_experts_per_tok,
            num_features=self.hidden_size,
            num_inner=self.intermediate_size,
            is_normalised=True,
            names=_NAMES,
        )


PRESETS: Mapping[str, MixtralShape] = MappingProxyType(
    {
        # One entry of vocabulary per byte value: for text without a tokenizer.
        "mixtral-1m": MixtralShape(
            hidden_size=128,
            intermediate_size=144,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_local_experts=4,
        ),
        "mixtral-30m": MixtralShape(
            hidden_size=384, intermediate_size=352, num_hidden_layers=8, num_attention_heads=6
        ),
        # As published (8x7B v0.1).
        "mixtral-8x7b": MixtralShape(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32_768,
            rope_theta=1e6,
            tie_word_embeddings=False,
        ),
    }
)
"""Sizes by name, smallest first; but of the published, the number is that of all parameters."""


class MixtralModel(SparseModel):
    """A Mixtral language model, by preset or by shape; `init_from` names a Hugging Face directory."""

    sizes: ClassVar[type[DecoderShape]] = MixtralShape
    dialect: ClassVar[Dialect] = Dialect(
        architecture="MixtralForCausalLM",
        defaults={
            "vocab_size": 32_000,
            "intermediate_size": 14_336,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        required={"router_jitter_noise": 0.0},
        stated=("num_local_experts", "num_experts_per_tok"),
    )
    presets: ClassVar[Mapping[str, DecoderShape]] = PRESETS

    family: Literal["mixtral"] = "mixtral"
    shape: MixtralShape | None = None
