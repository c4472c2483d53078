"""Forwards of several models at once: each operator of a stage that is known here, made wider by an axis of rows.

R rows, B batch, T tokens, D features, C channels, H heads, F features of a head.

Rules of this file
- Rows are in front, (R, B, ...). Between convolutions they are within the channels, (B, R·C, ...): one turn at each
  border. Nothing is reduced over rows.
- A stage is fused if each of its modules is one of those written out here, by its very class: what a subclass or a
  stranger computes is not guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from skein.model.families.digits_cnn import num_groups
from worker.model import decoder, digits_cnn
from worker.model.base import Linear, Stage
from worker.model.mlp import ACTIVATIONS, MlpStage
from worker.model.ops import attend, rotate, takes_groups

Fused = Callable[[Mapping[str, Tensor], Tensor, Tensor | None], Tensor]
"""Logits (R, B, ..., classes) from parameters by name, (R, ...) each, inputs (R, B, ...), and the luck (R,) of each
row's first sample, where something is dropped."""


@dataclass(frozen=True, slots=True)
class _At:
    """Parameters of all rows, as one module names them."""

    params: Mapping[str, Tensor]
    prefix: str = ""

    def __getitem__(self, name: str) -> Tensor:
        return self.params[self.prefix + name]

    def inside(self, name: str) -> "_At":
        """The same, as the module of that name in this one names them."""
        return replace(self, prefix=f"{self.prefix}{name}.")


def fused_forward(stage: Stage) -> Fused | None:
    """The forward of all layers of a whole model for several rows; None if it has a module that is not known here."""
    forward = _FORWARDS.get(type(stage))
    if forward is None or strangers(stage):
        return None

    def logits(params: Mapping[str, Tensor], x: Tensor, luck: Tensor | None) -> Tensor:
        with stage.autocast(x), stage.junction.visited(None, luck=luck):
            return forward(stage, _At(params), x)

    return logits


def strangers(stage: Stage) -> tuple[str, ...]:
    """Classes of modules, sorted, whose forward is not written out here."""
    found = {type(module) for module in stage.modules()} - _FORWARDS.keys() - _PARTS
    return tuple(sorted(x.__name__ for x in found))


# --- operators ---


def _linear(at: _At, x: Tensor) -> Tensor:
    """Products of each row's own matrix, and its bias where there is one; in the dtype of `x`."""
    weight_RIO = at["weight"].to(x.dtype).transpose(1, 2)
    flat = x.flatten(1, -2)
    bias = at.params.get(f"{at.prefix}bias")
    y = (
        torch.bmm(flat, weight_RIO)
        if bias is None
        else torch.baddbmm(bias.to(x.dtype).unsqueeze(1), flat, weight_RIO)
    )
    return y.view(*x.shape[:-1], -1)


def _convolution(module: digits_cnn.Convolution, at: _At, x: Tensor, num_rows: int) -> Tensor:
    """3 x 3 over (B, R·C, height, width): the groups of all rows are groups."""
    return functional.conv2d(x, at["weight"].flatten(0, 1), padding=1, groups=num_rows * module.groups)


def _rectified_norm(at: _At, x: Tensor, num_rows: int) -> Tensor:
    """Groups of each row's channels, normalised and rectified; over (B, R·C, height, width)."""
    groups = num_rows * num_groups(x.shape[1] // num_rows)
    return functional.relu(functional.group_norm(x, groups, at["weight"].flatten(), at["bias"].flatten()))


def _norm(module: decoder.Norm, at: _At, x: Tensor) -> Tensor:
    weight = at["weight"]
    wide = x.to(weight.dtype)
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + module.eps)
    return (wide * scale * _spread(weight, x)).to(module.dtype)


def _spread(weight_RD: Tensor, x: Tensor) -> Tensor:
    """A vector of each row, to multiply (R, ..., D) by."""
    return weight_RD.view(len(weight_RD), *[1] * (x.dim() - 2), -1)


def _embedding(at: _At, tokens_RBT: Tensor) -> Tensor:
    """Look-up in one table of all rows' tables; a row's tokens count from its own first."""
    weight_RVD = at["weight"]
    first = torch.arange(len(weight_RVD), device=tokens_RBT.device) * weight_RVD.shape[1]
    return functional.embedding(tokens_RBT + first.view(-1, 1, 1), weight_RVD.flatten(0, 1))


# --- modules ---


def _attention(module: decoder.Attention, at: _At, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def heads(name: str, norm: decoder.Norm | None = None, norm_name: str = "") -> Tensor:
        y = _linear(at.inside(name), x).view(*x.shape[:3], -1, module.head_features)
        return y if norm is None else _norm(norm, at.inside(norm_name), y)

    q, k = heads("q_proj", module.q_norm, "q_norm"), heads("k_proj", module.k_norm, "k_norm")
    # Rows are samples to attention.
    q_BHTF, k_BHTF, v_BHTF = (
        y.flatten(0, 1).transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), heads("v_proj"))
    )
    y_BHTF = attend(q_BHTF, k_BHTF, v_BHTF, takes_groups=takes_groups(q_BHTF))
    return _linear(at.inside("o_proj"), y_BHTF.transpose(1, 2).flatten(2).view(*x.shape[:3], -1))


def _feed_forward(at: _At, x: Tensor) -> Tensor:
    gated = functional.silu(_linear(at.inside("gate_proj"), x)) * _linear(at.inside("up_proj"), x)
    return _linear(at.inside("down_proj"), gated)


def _block(module: decoder.Block, at: _At, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    before, after = module.input_layernorm, module.post_attention_layernorm
    normed = _norm(before, at.inside("input_layernorm"), x)
    x = x + _attention(module.self_attn, at.inside("self_attn"), normed, cos, sin)
    return x + _feed_forward(at.inside("mlp"), _norm(after, at.inside("post_attention_layernorm"), x))


# --- stages ---


def _mlp_stage(stage: Stage, at: _At, x: Tensor) -> Tensor:
    assert isinstance(stage, MlpStage)
    activate = ACTIVATIONS[stage.activation]

    def taken(x: Tensor, layer: int) -> Tensor:
        x = x.to(stage.product)
        return stage.dropped(activate(x), layer, stage.junction.luck) if layer else x

    x = x.flatten(2)
    for name in stage.layers:
        x = _linear(at.inside(f"layers.{name}"), taken(x, int(name))).to(stage.dtype)
    return _linear(at.inside("classifier"), taken(x, len(stage.layers)))


def _digits_cnn_stage(stage: Stage, at: _At, x_RBC: Tensor) -> Tensor:
    assert isinstance(stage, digits_cnn.DigitsCnnStage)
    num_rows = len(x_RBC)
    x = x_RBC.to(stage.dtype).transpose(0, 1).flatten(1, 2)
    assert stage.stem is not None
    x = _convolution(stage.stem, at.inside("stem"), x, num_rows).to(stage.dtype)
    for name, module in stage.blocks.items():
        assert isinstance(module, digits_cnn.ConvolutionBlock)
        block = at.inside(f"blocks.{name}")
        normed = _rectified_norm(block.inside("norm"), x, num_rows)
        x = x + _convolution(module.conv, block.inside("conv"), normed, num_rows)
    x = _rectified_norm(at.inside("norm"), x, num_rows)
    return _linear(at.inside("classifier"), x.reshape(len(x), num_rows, -1).transpose(0, 1))


def _decoder_stage(stage: Stage, at: _At, tokens_RBT: Tensor) -> Tensor:
    assert isinstance(stage, decoder.DecoderStage)
    inner, model = at.inside("model"), stage.model
    num_tokens = tokens_RBT.shape[-1]
    cos, sin = stage.get_buffer("cos")[:num_tokens], stage.get_buffer("sin")[:num_tokens]
    x = _embedding(inner.inside("embed_tokens"), tokens_RBT)
    for name, block in model.layers.items():
        assert isinstance(block, decoder.Block)
        x = _block(block, inner.inside(f"layers.{name}"), x, cos, sin)
    assert model.norm is not None
    head = inner.inside("embed_tokens") if stage.lm_head is None else at.inside("lm_head")
    return _linear(head, _norm(model.norm, inner.inside("norm"), x))


_FORWARDS: Mapping[type[nn.Module], Callable[[Stage, _At, Tensor], Tensor]] = {
    MlpStage: _mlp_stage,
    digits_cnn.DigitsCnnStage: _digits_cnn_stage,
    decoder.DecoderStage: _decoder_stage,
}
_PARTS: frozenset[type[nn.Module]] = frozenset(
    {
        nn.ModuleDict,
        Linear,
        digits_cnn.Convolution,
        digits_cnn.RectifiedNorm,
        digits_cnn.ConvolutionBlock,
        digits_cnn.Classifier,
        decoder.Decoder,
        decoder.Embedding,
        decoder.Norm,
        decoder.Attention,
        decoder.Mlp,
        decoder.Block,
    }
)
