"""Stages: any cut computes what the whole model does, from the same first numbers."""

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch

from skein.config.job import JobSpec
from skein.model.decoder import DecoderModel, decoder_shape
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.layers import tied_names
from skein.model.parameters import parameter_shapes
from skein.types import Precision
from tests.support import extent
from tests.worker.model.builders import (
    DECODERS,
    MODELS,
    assert_near,
    cuts,
    llama,
    part,
    samples,
    stages,
    step,
    whole,
)
from worker.model.stage import BUILDS, IGNORED_LABEL

FIELD = JobSpec.model_fields["model"]
# Sums of the same float64 numbers in another order: a few units in the last place of the largest.
ROUNDING = 1e-12

NAMES = extent.part(list(MODELS), every=2)


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_gives_the_loss_and_gradients_of_the_whole(name: str) -> None:
    model = MODELS[name]
    x, labels = samples(model)
    loss, num_valid, gradients = step([whole(model)], x, labels)
    for cut in cuts(model):
        cut_loss, cut_valid, cut_gradients = step(stages(model, cut), x, labels)
        assert math.isclose(cut_loss, loss, rel_tol=ROUNDING), cut
        assert cut_valid == num_valid
        assert cut_gradients.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert_near(cut_gradients[parameter], gradient, tolerance=ROUNDING, what=f"{cut} {parameter}")


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_holds_the_tensors_of_its_layers_and_no_others(name: str) -> None:
    model = MODELS[name]
    layers = model.layer_parameters()
    for cut in cuts(model):
        for stage, (first, stop) in zip(stages(model, cut), pairwise(cut), strict=True):
            expected = {key: shape for layer in layers[first:stop] for key, shape in layer.items()}
            assert {key: tuple(x.shape) for key, x in stage.named_parameters()} == expected
            assert stage.has_head == (stop == len(layers))


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_begins_with_the_same_numbers(name: str) -> None:
    model = MODELS[name]
    expected = dict(whole(model).named_parameters())
    assert expected.keys() == parameter_shapes(model).keys()
    for cut in cuts(model):
        for stage in stages(model, cut):
            for key, parameter in stage.named_parameters():
                assert torch.equal(parameter, expected[key])


def test_tied_matrix_is_one_parameter_in_one_stage_and_equal_copies_in_two() -> None:
    model = llama()
    assert tied_names(model) == {"model.embed_tokens.weight"}
    first, last = part(model, 0, 1), part(model, 3, 4)
    assert first.state_dict().keys() == {"model.embed_tokens.weight"}
    assert last.state_dict().keys() == {"model.embed_tokens.weight", "model.norm.weight"}
    assert torch.equal(
        first.state_dict()["model.embed_tokens.weight"], last.state_dict()["model.embed_tokens.weight"]
    )
    assert tied_names(llama(is_tied=False)) == frozenset()


@pytest.mark.parametrize("name", NAMES)
def test_first_numbers_do_not_depend_on_precision(name: str) -> None:
    model = MODELS[name]
    exact = dict(whole(model).named_parameters())
    for precision in (Precision.FP32, Precision.BF16):
        for key, parameter in whole(model, precision=precision).named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, exact[key].float())


def test_first_numbers_depend_on_seed_and_name_and_have_the_models_spread() -> None:
    model = llama()
    stage, other = dict(whole(model).named_parameters()), dict(whole(model, seed=8).named_parameters())
    query, gate = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    assert not torch.equal(stage[query], other[query])
    assert not torch.equal(stage[query], stage[gate])
    # 1,600 numbers: the standard error of their deviation is 1/sqrt(2 * 1600) = 1.8 %; four of them.
    spread = stage["model.embed_tokens.weight"].std().item()
    assert math.isclose(spread, decoder_shape(model).initializer_range, rel_tol=0.07)
    assert torch.equal(stage["model.norm.weight"], torch.ones(32, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_splitting_a_microbatch_changes_nothing(name: str) -> None:
    model = MODELS[name]
    x, labels = samples(model, 6)
    loss, num_valid, gradients = step([whole(model)], x, labels)
    stage = whole(model)
    parts = [stage.loss(x[rows], labels[rows]) for rows in (slice(0, 2), slice(2, 6))]
    torch.autograd.backward([part_loss for part_loss, _ in parts])
    assert math.isclose(sum(part_loss.item() for part_loss, _ in parts), loss, rel_tol=ROUNDING)
    assert sum(part_valid for _, part_valid in parts) == num_valid
    for key, parameter in stage.named_parameters():
        assert_near(parameter.grad, gradients[key], tolerance=ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_sum_over_valid_labels(name: str) -> None:
    model = MODELS[name]
    stage = whole(model)
    x, labels = samples(model)
    loss, num_valid = stage.loss(x, labels)
    chances = stage.logits(x).log_softmax(-1)
    valid = labels != IGNORED_LABEL
    chosen = chances.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert num_valid == valid.sum()
    assert_near(loss, -chosen[valid].sum(), tolerance=ROUNDING)


@pytest.mark.parametrize("name", NAMES)
def test_microbatch_without_a_valid_label_gives_nothing(name: str) -> None:
    model = MODELS[name]
    x, labels = samples(model)
    loss, num_valid, gradients = step([whole(model)], x, torch.full_like(labels, IGNORED_LABEL))
    assert (loss, num_valid) == (0.0, 0)
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("name", DECODERS)
def test_no_token_sees_a_later_one(name: str) -> None:
    model = MODELS[name]
    assert isinstance(model, DecoderModel)
    stage = whole(model)
    tokens, _ = samples(model)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = stage.logits(tokens), stage.logits(changed)
    # Sums of an expert's product go in another order where it has other rows.
    tolerance = 0.0 if decoder_shape(model).experts is None else ROUNDING
    assert_near(after[:, :7], before[:, :7], tolerance=tolerance)
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_gives_float32_gradients_near_those_of_float64(name: str) -> None:
    model = MODELS[name]
    x, labels = samples(model)
    loss, _, gradients = step([whole(model)], x, labels)
    rough_loss, _, rough = step([whole(model, precision=Precision.BF16)], x, labels)
    # bfloat16 keeps 8 bits, 0.4 % per product; errors of a chain of about ten products mostly cancel.
    assert math.isclose(rough_loss, loss, rel_tol=0.02)
    for key, gradient in gradients.items():
        assert rough[key].dtype == torch.float32
        assert (rough[key] - gradient).norm() < 0.1 * gradient.norm(), key


@pytest.mark.parametrize("name", NAMES)
def test_boundary_tensors_have_the_dtype_of_parameters(name: str) -> None:
    for precision, dtype in (
        (Precision.FP32, torch.float32),
        (Precision.FP64, torch.float64),
        (Precision.BF16, torch.float32),
    ):
        model = MODELS[name]
        x, _ = samples(model)
        embedded = part(model, 0, 1, precision=precision)(x)
        assert embedded.dtype == part(model, 1, 2, precision=precision)(embedded).dtype == dtype


def test_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="layers 3 to 5 of a model with 4"):
        part(llama(), 3, 5)
    with pytest.raises(ValueError, match="layers 2 to 2"):
        part(llama(), 2, 2)


def test_every_family_of_the_job_file_is_in_the_law_table_and_can_be_built() -> None:
    families = {get_args(kind.model_fields["family"].annotation)[0] for kind in get_args(FIELD.annotation)}
    assert {model.family for model in MODELS.values()} == families
    assert all(isinstance(model, tuple(BUILDS)) for model in MODELS.values())


def test_digits_model_learns_its_samples() -> None:
    model = DigitsCnnModel(family="digits_cnn", channels=8, num_blocks=2)
    stage = whole(model, precision=Precision.FP32)
    x, labels = samples(model, 16)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.02)
    for _ in range(40):
        sgd.zero_grad()
        torch.autograd.backward(stage.loss(x, labels)[0] / 16)
        sgd.step()
    assert torch.equal(stage.logits(x).argmax(-1), labels)
