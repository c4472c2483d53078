"""Configurations of Hugging Face, read and written; what our decoder does not compute is refused by name."""

from collections.abc import Mapping

import pytest
from transformers import LlamaConfig

from skein.config.job import DigitsCnnModel, LlamaModel, LlamaShape, ModelSpec
from skein.errors import UserError
from skein.model.huggingface import check_config, config_from_shape, config_of, shape_from_config
from skein.model.presets import PRESETS

SHAPES = {
    **PRESETS,
    "wide_heads": LlamaShape(head_dim=128),
    "one_group": LlamaShape(num_key_value_heads=1, rope_theta=123.5, rms_norm_eps=1e-6),
}
# As transformers 4 wrote it for Llama 2.
OLD: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 352,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_comes_back_from_what_we_write(name: str) -> None:
    assert shape_from_config(config_from_shape(SHAPES[name])) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_shape_comes_back_from_what_transformers_writes(name: str) -> None:
    config = LlamaConfig.from_dict(config_from_shape(SHAPES[name])).to_dict()
    assert shape_from_config(config) == SHAPES[name]


def test_old_configuration_is_read_with_the_defaults_of_transformers() -> None:
    shape = shape_from_config(OLD)
    assert shape == LlamaShape(
        vocab_size=32_000,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    assert shape_from_config(OLD | {"rope_theta": 5e5}).rope_theta == 5e5
    reference = LlamaConfig.from_dict({"model_type": "llama"}).to_dict()
    assert shape_from_config({"model_type": "llama"}) == shape_from_config(reference)


REFUSED: dict[str, tuple[Mapping[str, object], str]] = {
    "no family": ({"model_type": None}, r"config\.model_type: None: only 'llama'"),
    "other family": ({"model_type": "mistral"}, r"config\.model_type: 'mistral': only 'llama'"),
    "activation": ({"hidden_act": "gelu"}, r"config\.hidden_act: 'gelu': only 'silu'"),
    "attention bias": ({"attention_bias": True}, r"config\.attention_bias: True: only False"),
    "mlp bias": ({"mlp_bias": True}, r"config\.mlp_bias: True"),
    "dropout": ({"attention_dropout": 0.1}, r"config\.attention_dropout: 0\.1"),
    "quantised": ({"quantization_config": {"bits": 4}}, r"config\.quantization_config: "),
    "scaled, old": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"config\.rope_scaling: .*only default",
    ),
    "scaled, new": ({"rope_parameters": {"rope_type": "llama3"}}, r"config\.rope_parameters: .*only default"),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"config\.rope_parameters: "),
    "no mapping": ({"rope_parameters": "default"}, r"config\.rope_parameters: 'default'"),
    "not whole": ({"hidden_size": "wide"}, r"config\.hidden_size: 'wide': Input should be a valid integer"),
    "no heads": ({"num_attention_heads": 0}, r"config\.num_attention_heads: 0: Input should be greater"),
    "theta": ({"rope_theta": -1}, r"config\.rope_theta: -1: Input should be greater than 0"),
    "groups": (
        {"num_key_value_heads": 3},
        r"config: .*'num_key_value_heads': 3.*: Value error, .* multiple of num_key_value_heads",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_decoder_does_not_compute_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        shape_from_config({**OLD, **change})


def test_default_rotary_positions_are_accepted_in_both_spellings() -> None:
    for options in (
        {"rope_scaling": {"type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}, "rope_theta": None},
    ):
        assert shape_from_config({**OLD, **options}).rope_theta == 7.0


def test_configuration_of_every_family_fits_its_own_model() -> None:
    models: list[ModelSpec] = [LlamaModel(preset="llama-1m"), DigitsCnnModel(family="digits_cnn", channels=5)]
    for model in models:
        check_config(model, config_of(model))


def test_limits_that_change_no_result_may_differ() -> None:
    config = config_of(LlamaModel(preset="llama-1m"))
    check_config(
        LlamaModel(preset="llama-1m"), config | {"max_position_embeddings": 64, "initializer_range": 0.1}
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-6),
        ("num_key_value_heads", 1),
        ("tie_word_embeddings", False),
        ("hidden_size", 256),
    ],
)
def test_weights_of_another_model_are_refused(key: str, value: object) -> None:
    model = LlamaModel(preset="llama-1m")
    with pytest.raises(UserError, match=rf"model\.{key}: .*: the weights to start from have {value}"):
        check_config(model, config_of(model) | {key: value})


def test_weights_of_another_classifier_are_refused() -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=5)
    with pytest.raises(UserError, match=r"model\.channels: 5: the weights to start from have 6"):
        check_config(model, config_of(model) | {"channels": 6})
    with pytest.raises(UserError, match=r"model\.model_type: 'digits_cnn': .*'llama'"):
        check_config(model, config_of(LlamaModel(preset="llama-1m")))
