"""Presets have the size their name says; shapes are found or refused with the cure."""

import math
import re

import pytest

from skein.config.load import parse_job
from skein.errors import UserError
from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.families.llama import PRESETS, LlamaModel, LlamaShape
from skein.model.families.mistral import MistralModel
from skein.model.families.mixtral import MixtralModel
from skein.model.families.qwen2 import Qwen2Model
from skein.model.families.qwen3 import Qwen3Model
from skein.model.families.qwen3_moe import Qwen3MoeModel
from skein.model.parameters import num_parameters

# As their publishers count them (model cards; of Llama those of Llama 3 8B, Llama 3.2 1B and 3B).
PUBLISHED: list[tuple[DecoderModel, int]] = [
    (LlamaModel(preset="llama-1b"), 1_235_814_400),
    (LlamaModel(preset="llama-3b"), 3_212_749_824),
    (LlamaModel(preset="llama-8b"), 8_030_261_248),
    (MistralModel(preset="mistral-7b"), 7_248_023_552),
    (Qwen2Model(preset="qwen2.5-0.5b"), 494_032_768),
    (Qwen3Model(preset="qwen3-0.6b"), 596_049_920),
    (MixtralModel(preset="mixtral-8x7b"), 46_702_792_704),
    (Qwen3MoeModel(preset="qwen3-30b-a3b"), 30_532_122_624),
]
UNITS = {"m": 1e6, "b": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_about_the_parameters_in_its_name(name: str) -> None:
    match = re.fullmatch(r"llama-(\d+)([mb])", name)
    assert match is not None
    # The name is rounded to its leading digits: Llama "1B" has 1.24 B.
    assert math.isclose(
        num_parameters(LlamaModel(preset=name)), int(match[1]) * UNITS[match[2]], rel_tol=0.25
    )


@pytest.mark.parametrize(("model", "published"), PUBLISHED)
def test_large_presets_have_the_parameters_that_were_published(model: DecoderModel, published: int) -> None:
    assert num_parameters(model) == published


def test_presets_go_from_a_million_to_eight_billion_in_order() -> None:
    sizes = [num_parameters(LlamaModel(preset=name)) for name in PRESETS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1.1e6
    assert sizes[-1] > 8e9


def test_shape_is_the_preset_or_what_is_given() -> None:
    assert decoder_shape(LlamaModel(preset="llama-3m")) is PRESETS["llama-3m"]
    shape = LlamaShape(hidden_size=64)
    assert decoder_shape(LlamaModel(shape=shape)) is shape


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LlamaModel(), r"model\.preset: null: give a shape, or a preset: llama-1m, .*llama-8b"),
        (
            LlamaModel(preset="llama-1m", shape=LlamaShape()),
            r"model\.preset: 'llama-1m': give either preset or shape, not both",
        ),
        (LlamaModel(preset="llama-10M"), r"'llama-10M': did you mean llama-10m\? presets are llama-1m"),
        (LlamaModel(preset="gpt"), r"model\.preset: 'gpt': presets are llama-1m"),
        (Qwen3Model(preset="qwen3-0.5b"), r"'qwen3-0.5b': did you mean qwen3-0\.6b\? presets are qwen3"),
    ],
)
def test_unclear_or_unknown_shapes_are_refused_with_the_cure(model: DecoderModel, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decoder_shape(model)


REFUSED_SHAPES = {
    "family: llama, shape: {hidden_size: 30, num_attention_heads: 4, head_dim: 8}": (
        r"model\.shape\.hidden_size: 30: give a multiple of num_attention_heads \(4\): transformers opens no other"
    ),
    "family: qwen3, shape: {rope_scaling: {high_freq_factor: 1.0}}": (
        r"model\.shape\.rope_scaling\.high_freq_factor: 1\.0: give more than low_freq_factor \(1\.0\)"
    ),
    "family: llama, shape: {sliding_window: 8}": r"model\.shape\.sliding_window: 8: no such key",
    "family: qwen2, preset: qwen2.5-0.5b, config: {hidden_act: gelu}": (
        r"model\.config\.hidden_act: 'gelu': follows from the model: leave it out here"
    ),
    "family: llama, preset: llama-1m, config: 3": r"model\.config: 3: give a mapping$",
}


@pytest.mark.parametrize("model", REFUSED_SHAPES)
def test_shapes_that_fit_nothing_are_refused_where_they_stand_in_the_job(model: str) -> None:
    text = f"{{name: a, model: {{{model}}}, data: {{sources: [{{format: digits}}]}}, budget: {{steps: 1}}}}"
    with pytest.raises(UserError, match=REFUSED_SHAPES[model]):
        parse_job(text, origin="job.yaml")


def test_equal_models_have_equal_hashes_whatever_their_exported_config_says() -> None:
    one, same = (LlamaModel(preset="llama-1m", config={"eos_token_id": [1, 2]}) for _ in range(2))
    assert hash(one) == hash(same)
