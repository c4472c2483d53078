"""Tensors of a model: names as Hugging Face writes them, and shapes, layer by layer."""

import math

from skein.model.layers import AnyModel, Shapes


def layer_parameters(model: AnyModel) -> tuple[Shapes, ...]:
    """The tensors of each layer, in the order of the layer list.

    With tied embeddings the first and the last layer list the same tensor, for each needs it where it runs.
    """
    return model.layer_parameters()


def parameter_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """Every tensor of the whole model once, in the order of the layer list."""
    return {name: shape for layer in layer_parameters(model) for name, shape in layer.items()}


def num_parameters(model: AnyModel) -> int:
    """Parameters of the whole model; tied ones count once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())
