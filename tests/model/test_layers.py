"""Layer lists and sums over stages. That the figures are torch's is tests/worker/model/test_costs.py's to say."""

from itertools import combinations, pairwise

import pytest

from skein.errors import UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.model.layers import AnyModel, LayerSpec, StageCost, layers_of, stage_cost, tied_names
from skein.model.parameters import num_parameters
from skein.types import Precision, StageIndex, StageSpec

TIED = LlamaModel(shape=LlamaShape(num_hidden_layers=2, tie_word_embeddings=True))
UNTIED = LlamaModel(shape=LlamaShape(num_hidden_layers=2, tie_word_embeddings=False))
DIGITS = DigitsCnnModel(family="digits_cnn", channels=6, num_blocks=2)
MODELS: list[AnyModel] = [TIED, UNTIED, DIGITS]


def layers(model: AnyModel, precision: Precision = Precision.FP32) -> tuple[LayerSpec, ...]:
    return layers_of(model, sequence_tokens=128, precision=precision)


def cost(model: AnyModel, first: int, stop: int) -> StageCost:
    return stage_cost(layers(model), StageSpec(index=StageIndex(0), first=first, stop=stop))


@pytest.mark.parametrize("model", MODELS)
def test_list_begins_with_raw_samples_and_ends_with_the_head(model: AnyModel) -> None:
    names = [layer.name for layer in layers(model)]
    assert names == [names[0], "block.0", "block.1", "head"]
    assert names[0] == ("stem" if model is DIGITS else "embedding")
    assert len(names) == len(model.layer_parameters())


@pytest.mark.parametrize("model", MODELS)
def test_whole_model_as_one_stage_counts_every_parameter_once(model: AnyModel) -> None:
    assert cost(model, 0, 4).num_parameters == num_parameters(model)


@pytest.mark.parametrize("model", MODELS)
def test_cut_adds_up_but_for_the_matrix_that_both_ends_hold(model: AnyModel) -> None:
    whole = cost(model, 0, 4)
    copied = 256 * 256 if model is TIED else 0
    for num_cuts in (1, 2, 3):
        for inner in combinations((1, 2, 3), num_cuts):
            parts = [cost(model, first, stop) for first, stop in pairwise((0, *inner, 4))]
            assert sum(part.num_parameters for part in parts) == whole.num_parameters + copied
            assert sum(part.forward_flops for part in parts) == whole.forward_flops
            assert sum(part.backward_flops for part in parts) == whole.backward_flops
            assert sum(part.activation_bytes for part in parts) == whole.activation_bytes
            assert parts[-1].output_bytes == whole.output_bytes == 0


def test_tied_matrix_is_named_where_there_is_one() -> None:
    assert tied_names(TIED) == {"model.embed_tokens.weight"}
    assert tied_names(UNTIED) == tied_names(DIGITS) == frozenset()


def test_attention_grows_with_the_square_of_the_sample_and_all_else_with_its_length() -> None:
    def block_flops(sequence_tokens: int) -> int:
        return layers_of(TIED, sequence_tokens=sequence_tokens, precision=Precision.FP32)[1].forward_flops

    # 4 T^2 width for the two products of attention: twice the sample adds twice that beyond the doubling.
    assert block_flops(256) - 2 * block_flops(128) == 2 * 4 * 128 * 128 * 256


def test_precision_decides_bytes_and_nothing_else() -> None:
    single, double, half = (layers(TIED, x) for x in (Precision.FP32, Precision.FP64, Precision.BF16))
    for a, b, c in zip(single, double, half, strict=True):
        assert a.forward_flops == b.forward_flops == c.forward_flops
        assert a.num_parameters == b.num_parameters == c.num_parameters
        assert c.activation_bytes <= a.activation_bytes <= b.activation_bytes
        assert (2 * a.output_bytes, a.output_bytes) == (b.output_bytes, c.output_bytes)


def test_sample_longer_than_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.sequence_tokens: 4096: the model has 2048 positions"):
        layers_of(TIED, sequence_tokens=4096, precision=Precision.FP32)
