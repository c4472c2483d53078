"""Builders of stages, one for each family."""

from collections.abc import Callable, Mapping

import torch

from skein.model.decoder import DecoderModel
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.mlp import MlpModel
from skein.model.layers import AnyModel
from skein.model.rows import VocabularySplit
from skein.types import Precision, StageSpec
from worker.mesh.share import WHOLE, Share
from worker.model.base import IGNORED_LABEL, Stage
from worker.model.decoder import DecoderStage
from worker.model.digits_cnn import DigitsCnnStage
from worker.model.mlp import MlpStage
from worker.model.sharded import ShardedDecoderStage

__all__ = ["BUILDS", "IGNORED_LABEL", "Stage", "build_stage", "empty_stage"]

Build = Callable[[AnyModel, StageSpec, int, Precision, Share], Stage]


def _decoder(
    model: AnyModel, stage: StageSpec, sequence_tokens: int, precision: Precision, share: Share
) -> Stage:
    assert isinstance(model, DecoderModel)
    is_whole = model.vocabulary_split is VocabularySplit.OFF
    kind = DecoderStage if is_whole else ShardedDecoderStage
    return kind(model, stage, sequence_tokens=sequence_tokens, precision=precision, share=share)


def _digits_cnn(
    model: AnyModel, stage: StageSpec, _sequence_tokens: int, precision: Precision, share: Share
) -> Stage:
    assert isinstance(model, DigitsCnnModel)
    assert share.size == 1
    return DigitsCnnStage(model, stage, precision=precision)


def _mlp(
    model: AnyModel, stage: StageSpec, _sequence_tokens: int, precision: Precision, share: Share
) -> Stage:
    assert isinstance(model, MlpModel)
    assert share.size == 1
    return MlpStage(model, stage, precision=precision)


BUILDS: Mapping[type[AnyModel], Build] = {
    DecoderModel: _decoder,
    DigitsCnnModel: _digits_cnn,
    MlpModel: _mlp,
}
"""Functions that build an uninitialised stage, by class of the model; all decoders share one way."""


def build_stage(
    model: AnyModel,
    stage: StageSpec,
    *,
    sequence_tokens: int,
    seed: int,
    precision: Precision,
    device: torch.device,
) -> Stage:
    """The layers `stage.first` to `stage.stop` of `model` on `device`, initialised from `seed`.

    Whatever the cut, device and precision, the same layer begins with the same numbers, up to rounding to its dtype.

    Args:
        model: what the job asks for; its `init_from` is left to `worker.model.weights`.
        stage: a range of the layer list of `skein.model.layers.layers_of`.
        sequence_tokens: the longest sample that will come.
        seed: the job's.
        precision: the job's.
        device: where the parameters and the arithmetic shall be.

    Raises:
        UserError: the model's sizes do not fit together.
        ValueError: the model has no such layers.
    """
    built = empty_stage(
        model, stage, sequence_tokens=sequence_tokens, precision=precision, device=device, share=WHOLE
    )
    built.initialise(seed)
    return built


def empty_stage(
    model: AnyModel,
    stage: StageSpec,
    *,
    sequence_tokens: int,
    precision: Precision,
    device: torch.device,
    share: Share,
) -> Stage:
    """The stage as of `build_stage` before it has parameters; of several devices that share blocks, one's part.

    Args:
        model: what the job asks for; of a share, `skein.model.layers.AnyModel.shared`.
        stage: as for `build_stage`.
        sequence_tokens: the longest sample that will come.
        precision: the job's.
        device: where the parameters and the arithmetic shall be.
        share: sums over the devices that share each block.
    """
    build = next(build for kind, build in BUILDS.items() if isinstance(model, kind))
    with device:
        built = build(model, stage, sequence_tokens, precision, share)
    if not 0 <= stage.first < stage.stop <= built.num_layers:
        raise ValueError(f"layers {stage.first} to {stage.stop} of a model with {built.num_layers}")
    return built.to(device)
