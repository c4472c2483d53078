"""Decoder stages of every family, with Hugging Face's parameter names.

B batch, T tokens, D hidden features, H heads, F features of a head.
"""

from functools import partial

import torch
from torch import Tensor, nn

from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.shape import DecoderShape
from skein.types import Precision, StageSpec
from worker.mesh.share import WHOLE, Share
from worker.model.base import (
    IGNORED_LABEL,
    Linear,
    Stage,
    empty_parameter,
    parameter_dtype,
    product_dtype,
    together,
)
from worker.model.ops import (
    attend,
    linear,
    rotary_tables,
    rotate,
    swiglu,
    takes_groups,
)
from worker.model.pending import Tray
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp
from worker.model.vocabulary import cross_entropy


class Norm(nn.Module):
    """Root mean square normalisation; its result is what matrix products take."""

    def __init__(
        self,
        num_features: int,
        shape: DecoderShape,
        precision: Precision,
        tray: Tray,
        share: Share = WHOLE,
    ) -> None:
        super().__init__()
        self.tray = tray
        self._share = share
        self.weight = empty_parameter(num_features, dtype=parameter_dtype(precision))
        self.eps = shape.rms_norm_eps
        self.dtype = product_dtype(precision)

    def forward(self, x: Tensor) -> Tensor:
        return self._share.normed(x, self.weight, self.eps, self.dtype, self.tray)


class Embedding(nn.Module):
    """Embedding with one row per token. Where the head is tied to it in another stage, only the matrix is used.

    Of several devices each has its `share` of the rows.
    """

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, tray: Tray, share: Share = WHOLE) -> None:
        super().__init__()
        self.tray = tray
        self._share = share
        self._num_rows = shape.vocab_size
        num_own = len(share.rows(self._num_rows))
        self.weight = empty_parameter(num_own, shape.hidden_size, dtype=dtype)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self._share.embedded(tokens_BT, self.weight, self._num_rows, self.tray)


class Attention(nn.Module):
    """Causal attention with rotary positions; groups of query heads share a key and a value head."""

    def __init__(self, shape: DecoderShape, precision: Precision, tray: Tray, share: Share = WHOLE) -> None:
        super().__init__()
        dtype, hidden = parameter_dtype(precision), shape.hidden_size
        inward = partial(
            Linear, hidden, dtype=dtype, tray=tray, has_bias=shape.has_input_biases, products=share.products
        )
        self.head_features = shape.head_features
        self.q_proj = inward(shape.attention_width)
        self.k_proj = inward(shape.key_width)
        self.v_proj = inward(shape.key_width)
        self.o_proj = Linear(shape.attention_width, hidden, dtype, tray, products=share.products)
        self.q_norm = Norm(self.head_features, shape, precision, tray) if shape.has_head_norms else None
        self.k_norm = Norm(self.head_features, shape, precision, tray) if shape.has_head_norms else None

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_features)
        made = together(x_BTD, self.q_proj, self.k_proj, self.v_proj)
        q_BTHF, k_BTHF, v_BTHF = (y.view(heads) for y in made)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHF, k_BTHF = self.q_norm(q_BTHF), self.k_norm(k_BTHF)
        q_BHTF, k_BHTF = rotate(q_BTHF, cos, sin).transpose(1, 2), rotate(k_BTHF, cos, sin).transpose(1, 2)
        y_BHTF = attend(q_BHTF, k_BHTF, v_BTHF.transpose(1, 2), takes_groups=takes_groups(q_BHTF))
        y: Tensor = self.o_proj(y_BHTF.transpose(1, 2).flatten(2))
        return y


class Mlp(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, tray: Tray, share: Share = WHOLE) -> None:
        super().__init__()
        matrix = partial(Linear, dtype=dtype, tray=tray, products=share.products)
        self.gate_proj = matrix(shape.hidden_size, shape.intermediate_size)
        self.up_proj = matrix(shape.hidden_size, shape.intermediate_size)
        self.down_proj = matrix(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(swiglu(*together(x, self.gate_proj, self.up_proj)))
        return y


class Block(nn.Module):
    """Decoder block: attention and feed-forward or experts, each normalised before and added to what came in.

    Of several devices each computes its `share` of both; `model` is that of its part.
    """

    def __init__(
        self,
        model: DecoderModel,
        precision: Precision,
        tray: Tray,
        junction: Junction,
        share: Share = WHOLE,
    ) -> None:
        super().__init__()
        dtype, shape, experts = parameter_dtype(precision), decoder_shape(model), model.experts
        self._share = share
        self.input_layernorm = Norm(shape.hidden_size, shape, precision, tray, share)
        self.self_attn = Attention(shape, precision, tray, share)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape, precision, tray, share)
        self._fed = "mlp" if experts is None else experts.names.module
        feed: nn.Module
        if experts is None:
            feed = Mlp(shape, dtype, tray, share)
        else:
            feed = SparseMlp(experts, precision, tray, junction, share)
        self.add_module(self._fed, feed)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        share = self._share
        attended = self.self_attn(share.enter(self.input_layernorm(x_BTD)), cos, sin)
        x_BTD = x_BTD + share.leave(attended)
        feed, normed = self.get_submodule(self._fed), self.post_attention_layernorm(x_BTD)
        fed = feed(normed) if isinstance(feed, SparseMlp) else share.leave(feed(share.enter(normed)))
        y: Tensor = x_BTD + fed
        return y


class Decoder(nn.Module):
    """Holds what Hugging Face names `model.*`, as far as a stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: Embedding | None = None
        self.layers = nn.ModuleDict()
        self.norm: Norm | None = None


class DecoderStage(Stage):
    """Layers: the embedding, one per decoder block, the head with the final norm."""

    def __init__(
        self,
        model: DecoderModel,
        stage: StageSpec,
        *,
        sequence_tokens: int,
        precision: Precision,
        share: Share = WHOLE,
    ) -> None:
        shape = decoder_shape(model)
        num_layers = shape.num_hidden_layers + 2
        super().__init__(model, stage, num_layers=num_layers, precision=precision)
        dtype = parameter_dtype(precision)
        self.embeds = stage.first == 0
        self.shape = shape
        self._share = share
        self.model = Decoder()
        self.lm_head: Linear | None = None
        if self.embeds or (self.has_head and shape.tie_word_embeddings):
            self.model.embed_tokens = Embedding(shape, dtype, self.tray, share)
        for layer in range(max(stage.first, 1), min(stage.stop, num_layers - 1)):
            self.model.layers[str(layer - 1)] = Block(model, precision, self.tray, self.junction, share)
        if self.has_head:
            self.model.norm = Norm(shape.hidden_size, shape, precision, self.tray, share)
            if not shape.tie_word_embeddings:
                self.lm_head = Linear(shape.hidden_size, len(share.rows(shape.vocab_size)), dtype, self.tray)
        cos, sin = tables_of(shape, sequence_tokens, dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def body(self, x: Tensor) -> Tensor:
        if self.embeds:
            assert self.model.embed_tokens is not None
            x = self.model.embed_tokens(x)
        num_tokens = x.shape[1] * self._share.num_parts
        cos, sin = self.get_buffer("cos")[:num_tokens], self.get_buffer("sin")[:num_tokens]
        for block in self.model.layers.values():
            x = block(x, cos, sin)
        return x

    def head(self, x: Tensor) -> Tensor:
        assert self.model.norm is not None, "this stage has no head"
        return linear(self.model.norm(x), self._scorer.weight, self.tray)

    def loss(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, int]:
        if self._share.size == 1:
            return super().loss(x, labels, weights)
        assert weights is None, "samples of text count alike"
        assert self.model.norm is not None, "this stage has no head"
        with self.autocast(x):
            normed, narrow = self.model.norm(self.body(x)), product_dtype(self.precision)
            num_rows = self.shape.vocab_size
            scores = self._share.scores(normed, labels, self._scorer.weight, num_rows, narrow, self.tray)
            total = cross_entropy(scores, labels)
        return total, int((labels != IGNORED_LABEL).sum())

    @property
    def _scorer(self) -> "Embedding | Linear":
        """Matrix that tokens are scored with: all rows, or those of this device."""
        matrix = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert matrix is not None
        return matrix

    def initial(self, name: str, shape: torch.Size) -> tuple[float, float]:
        return decoder_initial(self.shape, name)


def tables_of(shape: DecoderShape, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rotary tables of a decoder, as of `rotary_tables`."""
    return rotary_tables(num_tokens, shape.head_features, shape.rope_theta, dtype, scaling=shape.rope_scaling)


def decoder_initial(shape: DecoderShape, name: str) -> tuple[float, float]:
    """Mean and standard deviation that a decoder's parameter begins with."""
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    return 0.0, 0.0 if name.endswith(".bias") else shape.initializer_range
