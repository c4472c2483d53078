"""Presets have the size their name says; shapes are found or refused with the cure."""

import math
import re

import pytest

from skein.config.job import LlamaModel, LlamaShape
from skein.errors import UserError
from skein.model.parameters import num_parameters
from skein.model.presets import PRESETS, shape_of

# As their publisher counts them (model cards of Llama 3 8B, Llama 3.2 1B and 3B).
PUBLISHED = {"llama-1b": 1_235_814_400, "llama-3b": 3_212_749_824, "llama-8b": 8_030_261_248}
UNITS = {"m": 1e6, "b": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_about_the_parameters_in_its_name(name: str) -> None:
    match = re.fullmatch(r"llama-(\d+)([mb])", name)
    assert match is not None
    # The name is rounded to its leading digits: Llama "1B" has 1.24 B.
    assert math.isclose(
        num_parameters(LlamaModel(preset=name)), int(match[1]) * UNITS[match[2]], rel_tol=0.25
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_presets_are_llama_3(name: str) -> None:
    assert num_parameters(LlamaModel(preset=name)) == PUBLISHED[name]


def test_presets_go_from_a_million_to_eight_billion_in_order() -> None:
    sizes = [num_parameters(LlamaModel(preset=name)) for name in PRESETS]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1.1e6
    assert sizes[-1] > 8e9


def test_shape_is_the_preset_or_what_is_given() -> None:
    assert shape_of(LlamaModel(preset="llama-3m")) is PRESETS["llama-3m"]
    shape = LlamaShape(hidden_size=64)
    assert shape_of(LlamaModel(shape=shape)) is shape


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (LlamaModel(), r"model\.preset: None: give a shape, or a preset: llama-1m, .*llama-8b"),
        (
            LlamaModel(preset="llama-1m", shape=LlamaShape()),
            r"model\.preset: 'llama-1m': give either preset or shape, not both",
        ),
        (LlamaModel(preset="llama-10M"), r"'llama-10M': did you mean llama-10m\? presets are llama-1m"),
        (LlamaModel(preset="gpt"), r"model\.preset: 'gpt': presets are llama-1m"),
        (
            LlamaModel(shape=LlamaShape(hidden_size=30, num_attention_heads=4, head_dim=8)),
            r"model\.shape\.hidden_size: 30: give a multiple of num_attention_heads \(4\)",
        ),
    ],
)
def test_unclear_or_unknown_shapes_are_refused_with_the_cure(model: LlamaModel, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_of(model)
