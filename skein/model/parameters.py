"""Tensors of a model: names as Hugging Face writes them, and shapes, layer by layer."""

import math

from skein.model.layers import AnyModel
from skein.types import StageSpec


def parameter_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Every tensor of the whole model once, in the order of the layer list."""
    return {name: shape for layer in model.layer_parameters() for name, shape in layer.items()}


def stage_shapes(model: AnyModel, stage: StageSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a stage once, in the order of the layer list."""
    layers = model.layer_parameters()[stage.first : stage.stop]
    return {name: shape for layer in layers for name, shape in layer.items()}


def num_parameters(model: AnyModel) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())
