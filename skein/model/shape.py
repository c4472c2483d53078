"""Sizes of a decoder, under the names that Hugging Face's `config.json` gives them."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from skein.errors import UserError
from skein.model.sparse.experts import Experts
from skein.spec import Spec


class Llama3Rope(Spec):
    """Rotary positions stretched for long texts as Llama 3.1 to 3.3 do: slow waves by `factor`, fast ones not."""

    rope_type: Literal["llama3"] = "llama3"
    factor: Annotated[float, Field(ge=1)] = 8.0
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Waves longer than the original positions divided by this are stretched wholly."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Waves shorter than the original positions divided by this are left alone; between both it goes over."""
    original_max_position_embeddings: Annotated[int, Field(ge=2, le=1_048_576)] = 8192

    @model_validator(mode="after")
    def _check(self) -> "Llama3Rope":
        if self.high_freq_factor <= self.low_freq_factor:
            hint = f"give more than low_freq_factor ({self.low_freq_factor})"
            raise UserError("high_freq_factor", self.high_freq_factor, hint)
        return self


class DecoderShape(Spec):
    """Sizes of a decoder, under the names of its Hugging Face configuration."""

    has_input_biases: ClassVar[bool] = False
    """Whether queries, keys and values are made with a bias."""
    has_head_norms: ClassVar[bool] = False
    """Whether each head's queries and keys are normalised before they are turned."""

    vocab_size: Annotated[int, Field(ge=2, le=1_000_000)] = 256
    hidden_size: Annotated[int, Field(ge=8, le=65_536)] = 256
    intermediate_size: Annotated[int, Field(ge=8, le=262_144)] = 704
    num_hidden_layers: Annotated[int, Field(ge=1, le=512)] = 4
    num_attention_heads: Annotated[int, Field(ge=1, le=512)] = 4
    num_key_value_heads: Annotated[int, Field(ge=1, le=512)] = 2
    head_dim: Annotated[int, Field(ge=2, le=1024)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=2, le=1_048_576)] = 2048
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    rope_scaling: Llama3Rope | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: Annotated[float, Field(gt=0, lt=1)] = 0.02

    @model_validator(mode="after")
    def _check(self) -> "DecoderShape":
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            hint = f"give a multiple of num_key_value_heads ({self.num_key_value_heads})"
            raise UserError("num_attention_heads", heads, hint)
        if self.head_dim is not None and self.head_dim % 2:
            raise UserError("head_dim", self.head_dim, "give an even number (rotary embedding)")
        if self.head_dim is None and self.hidden_size % (2 * heads):
            hint = f"give an even multiple of num_attention_heads ({heads}), or set head_dim"
            raise UserError("hidden_size", self.hidden_size, hint)
        return self

    @property
    def head_features(self) -> int:
        """Features of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """All query heads side by side, in features."""
        return self.head_features * self.num_attention_heads

    @property
    def key_width(self) -> int:
        """All key heads side by side, in features; so many have the values, too."""
        return self.head_features * self.num_key_value_heads

    @property
    def window(self) -> int | None:
        """Over how many tokens back attention reaches; None: over all."""
        return None

    @property
    def experts(self) -> Experts | None:
        """The experts that every block has in place of a feed-forward; None: it has none."""
        return None


class WindowedShape(DecoderShape):
    """Sizes of a decoder whose attention may reach back over a window only."""

    sliding_window: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Kept for the export. Samples must fit in it, so that it makes no difference here."""

    @property
    def window(self) -> int | None:
        return self.sliding_window
