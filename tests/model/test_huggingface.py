"""Configurations of Hugging Face, read and written; what our decoder does not compute is refused by name."""

from collections.abc import Mapping

import pytest
from transformers import AutoConfig

from skein.errors import UserError, shown
from skein.model.decoder import DecoderModel
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import PRESETS, LlamaModel, LlamaShape
from skein.model.families.mistral import MistralModel, MistralShape
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.families.qwen2 import Qwen2Model, Qwen2Shape
from skein.model.families.qwen3 import Qwen3Model, Qwen3Shape
from skein.model.families.qwen3_moe import Qwen3MoeModel, Qwen3MoeShape
from skein.model.layers import layers_of
from skein.model.shape import Llama3Rope
from skein.model.sparse.routing import RouterKind, RoutingSpec
from skein.types import Precision

KINDS: list[type[DecoderModel]] = [
    LlamaModel,
    MistralModel,
    MixtralModel,
    Qwen2Model,
    Qwen3Model,
    Qwen3MoeModel,
]
MODELS: dict[str, DecoderModel] = {
    **{name: LlamaModel(shape=shape) for name, shape in PRESETS.items()},
    "wide_heads": LlamaModel(shape=LlamaShape(head_dim=128)),
    "one_group": LlamaModel(shape=LlamaShape(num_key_value_heads=1, rope_theta=123.5, rms_norm_eps=1e-6)),
    "stretched": LlamaModel(shape=LlamaShape(rope_scaling=Llama3Rope(factor=32.0))),
    "mistral": MistralModel(shape=MistralShape(sliding_window=512)),
    "mistral without window": MistralModel(shape=MistralShape()),
    "qwen2": Qwen2Model(shape=Qwen2Shape()),
    "qwen2 windowed": Qwen2Model(shape=Qwen2Shape(sliding_window=512)),
    "qwen3": Qwen3Model(shape=Qwen3Shape(head_dim=128)),
    "mixtral": MixtralModel(shape=MixtralShape(num_local_experts=6, num_experts_per_tok=3)),
    "mixtral windowed": MixtralModel(shape=MixtralShape(sliding_window=512)),
    "qwen3 moe": Qwen3MoeModel(shape=Qwen3MoeShape(num_experts=12, num_experts_per_tok=5)),
    "qwen3 moe windowed": Qwen3MoeModel(shape=Qwen3MoeShape(sliding_window=512, norm_topk_prob=False)),
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


@pytest.mark.parametrize("name", MODELS)
def test_shape_comes_back_from_what_we_write(name: str) -> None:
    model = MODELS[name]
    assert model.shape_in(model.hugging_face()) == model.shape


@pytest.mark.parametrize("name", MODELS)
def test_shape_comes_back_from_what_transformers_writes(name: str) -> None:
    model = MODELS[name]
    written = {key: value for key, value in model.hugging_face().items() if key != "model_type"}
    assert model.shape_in(AutoConfig.for_model(model.family, **written).to_dict()) == model.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_configuration_is_read_with_the_defaults_of_transformers(kind: type[DecoderModel]) -> None:
    family = kind.model_fields["family"].default
    reference = AutoConfig.for_model(family).to_dict()
    assert kind.shape_in({"model_type": family} | _stated(kind)) == kind.shape_in(reference)


def _stated(kind: type[DecoderModel]) -> dict[str, object]:
    """Values that transformers assumes of what a file of this family must say."""
    reference = AutoConfig.for_model(kind.model_fields["family"].default).to_dict()
    return {
        key: value
        for key, value in reference.items()
        if kind.dialect.spellings.get(key, key) in kind.dialect.stated
    }


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KINDS for key in kind.dialect.stated])
def test_a_sparse_configuration_says_what_its_experts_are(kind: type[DecoderModel], key: str) -> None:
    said = {kind.dialect.spellings.get(name, name): value for name, value in _stated(kind).items()}
    for lacking in ({}, {key: None}):
        config = {"model_type": kind.model_fields["family"].default, **said}
        del config[key]
        with pytest.raises(UserError, match=rf"config\.{key}: null: config\.json does not say it, and must"):
            kind.shape_in(config | lacking)


def test_old_configuration_is_read_with_the_defaults_of_transformers() -> None:
    shape = LlamaModel.shape_in(OLD)
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
    assert LlamaModel.shape_in(OLD | {"rope_theta": 5e5}).rope_theta == 5e5


REFUSED: dict[str, tuple[Mapping[str, object], str]] = {
    "no family": ({"model_type": None}, r"config\.model_type: null: only 'llama'"),
    "other family": ({"model_type": "mistral"}, r"config\.model_type: 'mistral': only 'llama'"),
    "activation": ({"hidden_act": "gelu"}, r"config\.hidden_act: 'gelu': only 'silu'"),
    "attention bias": ({"attention_bias": True}, r"config\.attention_bias: true: only false"),
    "mlp bias": ({"mlp_bias": True}, r"config\.mlp_bias: true"),
    "dropout": ({"attention_dropout": 0.1}, r"config\.attention_dropout: 0\.1"),
    "quantised": ({"quantization_config": {"bits": 4}}, r"config\.quantization_config: "),
    "scaled, old": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"config\.rope_scaling: .*only rope_type default and llama3",
    ),
    "scaled, new": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        r"config\.rope_parameters: .*only rope_type default and llama3",
    ),
    "scaled in part": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        r"config\.rope_scaling: .*lacks high_freq_factor, low_freq_factor",
    ),
    "scaled with more": (
        {"rope_scaling": {"rope_type": "default", "attention_factor": 2.0}},
        r"config\.rope_scaling: .*only rope_type default and llama3 are supported, whole",
    ),
    "unknown": ({"logit_scale": 0.1}, r"config\.logit_scale: 0\.1: is not known here and may change"),
    "window": ({"sliding_window": 64}, r"config\.sliding_window: 64: is not known here"),
    "sliding layers": (
        {"layer_types": ["sliding_attention"] * 3},
        r"config\.layer_types: .*sliding_attention needs a family with sliding_window",
    ),
    "other layers": (
        {"layer_types": ["chunked_attention"] * 3},
        r"config\.layer_types: .*only layers of full",
    ),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"config\.rope_parameters: "),
    "no mapping": ({"rope_parameters": "default"}, r"config\.rope_parameters: 'default'"),
    "not whole": ({"hidden_size": "wide"}, r"config\.hidden_size: 'wide': Input should be a valid integer"),
    "no heads": ({"num_attention_heads": 0}, r"config\.num_attention_heads: 0: Input should be greater"),
    "theta": ({"rope_theta": -1}, r"config\.rope_theta: -1: Input should be greater than 0"),
    "groups": (
        {"num_key_value_heads": 3},
        r"config\.num_attention_heads: 4: give a multiple of num_key_value_heads \(3\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_decoder_does_not_compute_is_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        LlamaModel.shape_in({**OLD, **change})


REFUSED_EXPERTS: dict[str, tuple[type[DecoderModel], Mapping[str, object], str]] = {
    "jitter": (
        MixtralModel,
        {"router_jitter_noise": 0.01},
        r"router_jitter_noise: 0\.01: only 0\.0 is supported",
    ),
    "more than all": (
        MixtralModel,
        {"num_experts_per_tok": 9},
        r"config\.num_experts_per_tok: 9: there are 8 experts: give at most so many",
    ),
    "shared": (
        Qwen3MoeModel,
        {"shared_expert_intermediate_size": 64},
        r"shared_expert_intermediate_size: 64: is not known here",
    ),
    "dense blocks": (
        Qwen3MoeModel,
        {"mlp_only_layers": [0]},
        r"mlp_only_layers: \[0\]: only \[\] is supported",
    ),
    "every other block": (Qwen3MoeModel, {"decoder_sparse_step": 2}, r"decoder_sparse_step: 2: only 1"),
    "two numbers": (
        Qwen3MoeModel,
        {"num_experts": 8, "num_local_experts": 4},
        r"num_local_experts: 4: num_experts is 8: they mean the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED_EXPERTS)
def test_experts_that_we_do_not_compute_are_refused_by_name(case: str) -> None:
    kind, change, message = REFUSED_EXPERTS[case]
    with pytest.raises(UserError, match=message):
        kind.shape_in({"model_type": kind.model_fields["family"].default, **_stated(kind), **change})


@pytest.mark.parametrize("kind", RouterKind)
def test_exports_of_routers_that_transformers_lacks_are_refused_by_name(kind: RouterKind) -> None:
    routing = RoutingSpec(router=kind, allow_lookahead=kind.row.looks_ahead)
    divided = MixtralModel(preset="mixtral-1m", routing=routing)
    undivided = Qwen3MoeModel(shape=Qwen3MoeShape(norm_topk_prob=False), routing=routing)
    # Weights of gshard are always divided by their sum.
    known_to = {RouterKind.SOFTMAX_TOPK: (divided, undivided), RouterKind.GSHARD: (divided,)}
    for model in (divided, undivided):
        if model in known_to.get(kind, ()):
            assert model.hugging_face()["architectures"]
        else:
            with pytest.raises(
                UserError, match=rf"model\.routing\.router: '{kind}': transformers has no such"
            ):
                model.hugging_face()


def test_default_rotary_positions_are_accepted_in_both_spellings() -> None:
    for options in (
        {"rope_scaling": {"type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}, "rope_theta": None},
    ):
        assert LlamaModel.shape_in({**OLD, **options}).rope_theta == 7.0


def test_llama_3_positions_are_read_in_both_spellings() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3Rope(factor=32.0)
    old = {"rope_scaling": scaling, "rope_theta": 5e5}
    for options in (old, {"rope_parameters": scaling | {"rope_theta": 5e5}}):
        shape = LlamaModel.shape_in({**OLD, **options})
        assert (shape.rope_scaling, shape.rope_theta) == (expected, 5e5)


# As published, shortened to what is read: Qwen2.5 carries a window that it does not use, Mistral 0.1 uses its own.
WINDOWS: dict[str, tuple[type[DecoderModel], dict[str, object], int | None]] = {
    "mistral 0.1": (MistralModel, {"sliding_window": 4096}, 4096),
    "mistral 0.3": (MistralModel, {"sliding_window": None}, None),
    "qwen 2.5": (Qwen2Model, {"sliding_window": 131_072, "use_sliding_window": False}, None),
    "qwen 2, on": (Qwen2Model, {"sliding_window": 64, "use_sliding_window": True}, 64),
    "qwen 3, full layers": (
        Qwen3Model,
        {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 32},
        None,
    ),
    "mixtral 0.1": (MixtralModel, {"sliding_window": None}, None),
    "mixtral, on": (MixtralModel, {"sliding_window": 4096}, 4096),
    "qwen 3 with experts": (Qwen3MoeModel, {"sliding_window": 64, "use_sliding_window": False}, None),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_a_window_counts_where_a_layer_uses_it(case: str) -> None:
    kind, config, window = WINDOWS[case]
    family = kind.model_fields["family"].default
    assert kind.shape_in({"model_type": family} | _stated(kind) | config).window == window


def test_a_window_may_not_act() -> None:
    model = MistralModel(shape=MistralShape(sliding_window=64))
    layers_of(model, sequence_tokens=64, precision=Precision.FP32)
    with pytest.raises(UserError, match=r"data\.sequence_tokens: 65: .*\(sliding_window\): give at most 64"):
        layers_of(model, sequence_tokens=65, precision=Precision.FP32)


def test_configuration_of_every_family_fits_its_own_model() -> None:
    for model in (*MODELS.values(), DigitsCnnModel(family="digits_cnn", channels=5)):
        model.check_config(model.hugging_face())


def test_limits_that_change_no_result_may_differ() -> None:
    model = LlamaModel(preset="llama-1m")
    model.check_config(model.hugging_face() | {"max_position_embeddings": 64, "initializer_range": 0.1})


def test_what_training_leaves_alone_is_kept() -> None:
    source = OLD | {
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "use_cache": True,
        "id2label": {"0": "LABEL_0"},
    }
    model = LlamaModel(init_from="/llama", config={"eos_token_id": 9}).begun(source)
    assert model.config == {"bos_token_id": 1, "eos_token_id": 9, "use_cache": True, "pretraining_tp": 1}
    assert model.hugging_face().items() >= model.config.items()
    assert model.shape == LlamaModel.shape_in(source)


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
    with pytest.raises(UserError, match=rf"model\.{key}: .*: the weights to start from have {shown(value)}"):
        model.check_config(model.hugging_face() | {key: value})


def test_weights_of_another_classifier_are_refused() -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=5)
    with pytest.raises(UserError, match=r"model\.channels: 5: the weights to start from have 6"):
        model.check_config(model.hugging_face() | {"channels": 6})
    with pytest.raises(UserError, match=r"model\.model_type: 'digits_cnn': .*'llama'"):
        model.check_config(LlamaModel(preset="llama-1m").hugging_face())


# As their publishers wrote them, with transformers 4: what is read, and what else lies there.
PUBLISHED: dict[str, tuple[type[DecoderModel], dict[str, object]]] = {
    "llama-1b": (
        LlamaModel,
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 131_072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0",
            "use_cache": True,
            "vocab_size": 128_256,
        },
    ),
    "qwen2.5-0.5b": (
        Qwen2Model,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "eos_token_id": 151_643,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1_000_000.0,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        },
    ),
    "qwen3-0.6b": (
        Qwen3Model,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "max_position_embeddings": 40_960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        },
    ),
    "mistral-7b": (
        MistralModel,
        {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14_336,
            "max_position_embeddings": 32_768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0",
            "use_cache": True,
            "vocab_size": 32_768,
        },
    ),
    "mixtral-8x7b": (
        MixtralModel,
        {
            "architectures": ["MixtralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14_336,
            "max_position_embeddings": 32_768,
            "model_type": "mixtral",
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.36.0.dev0",
            "use_cache": True,
            "vocab_size": 32_000,
        },
    ),
    "qwen3-30b-a3b": (
        Qwen3MoeModel,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "decoder_sparse_step": 1,
            "eos_token_id": 151_645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "max_position_embeddings": 40_960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        },
    ),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_configuration_is_that_of_the_preset(preset: str) -> None:
    kind, config = PUBLISHED[preset]
    read, ours = kind.shape_in(config), kind.presets[preset]
    # Presets of Llama 3 are those of its own 8,192 positions, not stretched to more.
    longer = {"max_position_embeddings": read.max_position_embeddings, "rope_scaling": read.rope_scaling}
    assert read == ours.model_copy(update=longer if kind is LlamaModel else {})
    begun = kind.model_validate({"init_from": "/published"}).begun(config)
    assert begun.hugging_face()["eos_token_id"] == config["eos_token_id"]
    assert not {"torch_dtype", "transformers_version", "rope_theta"} & begun.config.keys()
