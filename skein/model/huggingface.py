"""Between the shapes of our decoders and Hugging Face's `config.json`.

What our decoder does not compute (other activations, rotary positions or biases than a family has, quantised weights)
is refused by name, and so is every key that is not known to change nothing: a model that loads must give the same
logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from skein.errors import UserError, shown
from skein.model.shape import DecoderShape, Llama3Rope

Shape = TypeVar("Shape", bound=DecoderShape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Differences of a family's `config.json` from others'."""

    architecture: str
    """The class that transformers opens the weights as."""
    defaults: Mapping[str, object]
    """Values that transformers assumes where the file is silent, as far as not all families have them."""
    required: Mapping[str, object]
    """The only value of each key that our decoder computes, as far as not all families have it."""
    windowed: Mapping[str, object] = field(default_factory=dict)
    """Keys that turn a window of attention on besides its length; transformers assumes it to be off."""
    stated: tuple[str, ...] = ()
    """Keys that the file must have: what transformers assumes may be another model's, and weights may fit it."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Our name of each key that some releases of transformers write otherwise."""


# What transformers assumes of any family where `config.json` is silent.
_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# The only value of each that our decoder computes.
_REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
    "is_encoder_decoder": False,
}
_DEFAULT_THETA = 10_000.0
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_ATTENTION = "layer_types"
_SWITCH = "use_sliding_window"
# Weights fit whatever these are.
_FREE = frozenset({"initializer_range", "max_position_embeddings", "head_dim"})
# Written by whoever saves, and anew by us.
_WRITTEN = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"})
# No number that a decoder computes depends on these: ids of tokens, how text is sampled, what a call gives back, what a
# trainer adds to the loss.
# fmt: off
_HARMLESS = frozenset((
    "_attn_implementation", "_commit_hash", "attn_implementation", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "id2label", "is_llama_config", "label2id", "length_penalty", "max_length", "max_window_layers",
    "min_length", "model_max_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers.js_config", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version",
    "use_bfloat16", "use_cache", "use_sliding_window",
))
# fmt: on
# Long and without meaning for what we export.
_DROPPED = frozenset({"id2label", "label2id", "task_specific_params", "auto_map", "pruned_heads"})


def shape_from_config(config: Mapping[str, object], kind: type[Shape], dialect: Dialect) -> Shape:
    """The sizes that a Hugging Face configuration of a family describes, written by transformers 4 or 5.

    Raises:
        UserError: an option that our decoder does not compute, or a size out of range; names the key.
    """
    config = _spelt(config, dialect)
    required = {**_REQUIRED, **dialect.required}
    for key, value in required.items():
        if config.get(key, value) != value:
            raise UserError(f"config.{key}", config[key], f"only {shown(value)} is supported")
    _check_known(config, kind, required)
    for key in dialect.stated:
        if config.get(key) is None:
            hint = "config.json does not say it, and must: write there what the model was trained with"
            raise UserError(f"config.{key}", None, hint)
    defaults = {**_DEFAULTS, **dialect.defaults}
    values = {name: config.get(name, defaults.get(name)) for name in kind.model_fields}
    theta = defaults.get("rope_theta", _DEFAULT_THETA)
    values["rope_theta"], values["rope_scaling"] = _rope(config, values["max_position_embeddings"], theta)
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values["head_dim"] = _head_dim(values)
    window = _window(config, values.get("sliding_window"), dialect)
    if "sliding_window" in values:
        values["sliding_window"] = window
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from error


def config_from_shape(shape: DecoderShape, dialect: Dialect, model_type: str) -> dict[str, object]:
    """A configuration that transformers opens as the family's architecture.

    Neither begin nor end of a text has a token: the defaults of transformers would stop at byte 2.
    """
    sizes = shape.model_dump(mode="json", exclude={"head_dim", "rope_theta", "rope_scaling"})
    rope: dict[str, object] = {"rope_type": "default"}
    if shape.rope_scaling is not None:
        rope = shape.rope_scaling.model_dump(mode="json")
        sizes["rope_scaling"] = dict(rope)  # for transformers 4
    if shape.window is not None:
        sizes |= dialect.windowed
    return {
        **sizes,
        **dialect.required,
        "architectures": [dialect.architecture],
        "model_type": model_type,
        "head_dim": shape.head_features,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_parameters": rope | {"rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def kept_from_config(
    config: Mapping[str, object], kind: type[DecoderShape], dialect: Dialect
) -> dict[str, object]:
    """Part of a configuration that training leaves alone and no shape says: it comes out again in an export."""
    said = {
        *kind.model_fields,
        *_ROPE,
        *_REQUIRED,
        *dialect.required,
        *dialect.spellings,
        *_WRITTEN,
        *_DROPPED,
        "model_type",
        _SWITCH,
    }
    return {key: value for key, value in config.items() if key not in said and value is not None}


def comparable(shape: DecoderShape) -> dict[str, object]:
    """Sizes that two shapes must have in common for one's weights to be the other's."""
    sizes = shape.model_dump(mode="json", exclude=set(_FREE))
    return sizes | {"attention_width": shape.attention_width}


def _spelt(config: Mapping[str, object], dialect: Dialect) -> Mapping[str, object]:
    """`config` with our names of the keys that are spelt in several ways.

    Raises:
        UserError: two spellings of a key have different values.
    """
    spelt = {key: value for key, value in config.items() if key not in dialect.spellings}
    for key, name in dialect.spellings.items():
        if key in config and spelt.setdefault(name, config[key]) != config[key]:
            raise UserError(
                f"config.{key}", config[key], f"{name} is {shown(spelt[name])}: they mean the same"
            )
    return spelt


def _check_known(
    config: Mapping[str, object], kind: type[DecoderShape], required: Mapping[str, object]
) -> None:
    known = {*kind.model_fields, *required, *_ROPE, *_WRITTEN, *_HARMLESS, "model_type", _ATTENTION}
    for key, value in config.items():
        # What is off changes nothing, whatever it is.
        if key not in known and value is not None and value is not False:
            hint = "is not known here and may change what the model computes: take it out of config.json if it does not"
            raise UserError(f"config.{key}", value, hint)


def _refusal(error: ValidationError) -> UserError:
    first = error.errors()[0]
    reason, field = first.get("ctx", {}).get("error"), ".".join(map(str, ("config", *first["loc"])))
    if isinstance(reason, UserError):
        # Sizes that do not fit together.
        return UserError(f"{field}.{reason.field}", reason.value, reason.hint)
    return UserError(field, first["input"], first["msg"])


def _head_dim(values: Mapping[str, object]) -> object:
    """None where heads share the features evenly: that is what a job file says nothing about."""
    hidden, heads, given = values["hidden_size"], values["num_attention_heads"], values["head_dim"]
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and given == hidden / heads:
        return None
    return given


def _window(config: Mapping[str, object], length: object, dialect: Dialect) -> object:
    """The window of attention, where any layer has one."""
    layers = config.get(_ATTENTION)
    if layers is not None and not _are_kinds(layers):
        hint = "only layers of full_attention and sliding_attention are supported"
        raise UserError(f"config.{_ATTENTION}", layers, hint)
    window = length if config.get(_SWITCH, not dialect.windowed) else None
    is_sliding = isinstance(layers, list) and "sliding_attention" in layers
    if is_sliding and window is None:
        raise UserError(
            f"config.{_ATTENTION}", layers, "sliding_attention needs a family with sliding_window, and one"
        )
    return window if layers is None or is_sliding else None


def _are_kinds(layers: object) -> bool:
    return isinstance(layers, list) and set(map(str, layers)) <= {"full_attention", "sliding_attention"}


def _rope(
    config: Mapping[str, object], max_positions: object, default_theta: object
) -> tuple[object, object]:
    """Base and scaling. transformers 5 writes `rope_parameters`; 4 `rope_theta` and perhaps `rope_scaling`."""
    theta, scaling = config.get("rope_theta"), None
    for key in ("rope_scaling", "rope_parameters"):
        options = config.get(key)
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise UserError(f"config.{key}", options, "only a mapping is supported")
        kind = options.get("rope_type", options.get("type", "default"))
        others = {name: value for name, value in options.items() if name not in _SPOKEN}
        theta = options.get("rope_theta", theta)
        if kind == "llama3":
            scaling = {"original_max_position_embeddings": max_positions} | others
            lacking = Llama3Rope.model_fields.keys() - scaling.keys() - {"rope_type"}
            if lacking:
                raise UserError(f"config.{key}", options, f"lacks {', '.join(sorted(lacking))}")
        elif kind != "default" or others:
            raise UserError(
                f"config.{key}", options, "only rope_type default and llama3 are supported, whole"
            )
        if options.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"config.{key}", options, "only partial_rotary_factor 1 is supported")
    return default_theta if theta is None else theta, scaling


_SPOKEN = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
