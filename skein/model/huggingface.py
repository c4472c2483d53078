"""Between our model specifications and Hugging Face's `config.json`.

What our decoder does not compute (biases, other activations, scaled rotary positions, quantised weights) is refused by
name: a model that loads must give the same logits.
"""

from collections.abc import Mapping
from typing import assert_never

from pydantic import ValidationError

from skein.config.job import DigitsCnnModel, LlamaModel, LlamaShape, ModelSpec
from skein.errors import UserError
from skein.model.presets import shape_of

# What transformers assumes of a Llama where `config.json` is silent.
_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# The only value of each that our decoder computes.
_REQUIRED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "quantization_config": None,
}
_DEFAULT_THETA = 10_000.0
# Weights fit whatever these are.
_FREE = frozenset({"initializer_range", "max_position_embeddings", "head_dim"})


def shape_from_config(config: Mapping[str, object]) -> LlamaShape:
    """The sizes that a Hugging Face configuration describes, written by transformers 4 or 5.

    Raises:
        UserError: not a Llama, an option that our decoder does not compute, or a size out of range; names the key.
    """
    if config.get("model_type") != "llama":
        raise UserError("config.model_type", config.get("model_type"), "only 'llama' models can be loaded")
    for key, value in _REQUIRED.items():
        if config.get(key, value) != value:
            raise UserError(f"config.{key}", config[key], f"only {value!r} is supported")
    values = {key: config.get(key, value) for key, value in _DEFAULTS.items()}
    values["rope_theta"] = _rope_theta(config)
    heads = values["num_attention_heads"]
    key_value_heads = config.get("num_key_value_heads")
    values["num_key_value_heads"] = heads if key_value_heads is None else key_value_heads
    if (
        isinstance(heads, int)
        and heads > 0
        and config.get("head_dim") != _even_split(values["hidden_size"], heads)
    ):
        values["head_dim"] = config.get("head_dim")
    try:
        return LlamaShape.model_validate(values)
    except ValidationError as error:
        raise _refusal(values, error) from error


def config_from_shape(shape: LlamaShape) -> dict[str, object]:
    """A configuration that transformers opens as `LlamaForCausalLM`.

    Neither begin nor end of a text has a token: the defaults of transformers would stop at byte 2.
    """
    sizes = shape.model_dump(exclude={"head_dim", "rope_theta"})
    return sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.attention_width // shape.num_attention_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def config_of(model: ModelSpec) -> dict[str, object]:
    """The `config.json` that lies beside exported weights of `model`."""
    match model:
        case LlamaModel():
            return config_from_shape(shape_of(model))
        case DigitsCnnModel():
            return {"model_type": model.family, "channels": model.channels, "num_blocks": model.num_blocks}
        case _:
            assert_never(model)


def check_config(model: ModelSpec, config: Mapping[str, object]) -> None:
    """Refuses weights that `config` says are of another model than `model`.

    Raises:
        UserError: the first difference that would change what the weights compute.
    """
    match model:
        case LlamaModel():
            ours, theirs = _comparable(shape_of(model)), _comparable(shape_from_config(config))
        case DigitsCnnModel():
            ours, theirs = config_of(model), dict(config)
        case _:
            assert_never(model)
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f"model.{key}", value, f"the weights to start from have {theirs.get(key)!r}")


def _refusal(values: Mapping[str, object], error: ValidationError) -> UserError:
    first = error.errors()[0]
    if first["loc"]:
        return UserError(f"config.{first['loc'][0]}", first["input"], first["msg"])
    # Sizes that do not fit together: those of the heads.
    return UserError("config", {key: values[key] for key in sorted(values) if "head" in key}, first["msg"])


def _comparable(shape: LlamaShape) -> dict[str, object]:
    return shape.model_dump(exclude=set(_FREE)) | {"attention_width": shape.attention_width}


def _even_split(hidden: object, heads: int) -> int | None:
    return hidden // heads if isinstance(hidden, int) and hidden % heads == 0 else None


def _rope_theta(config: Mapping[str, object]) -> object:
    """transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and, for longer texts, `rope_scaling`."""
    theta = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        options = config.get(key)
        if options is None:
            continue
        kind = (
            options.get("rope_type", options.get("type", "default")) if isinstance(options, Mapping) else None
        )
        if (
            not isinstance(options, Mapping)
            or kind != "default"
            or options.get("partial_rotary_factor", 1) != 1
        ):
            raise UserError(f"config.{key}", options, "only default rotary positions are supported")
        theta = options.get("rope_theta", theta)
    return _DEFAULT_THETA if theta is None else theta
