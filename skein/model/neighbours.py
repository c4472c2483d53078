"""Tensors of one stage in the place of another's: blocks of a model are alike, its ends are like nothing."""

from collections.abc import Mapping

from skein.model.layers import AnyModel
from skein.types import StageSpec


def counterparts(model: AnyModel, stage: StageSpec, neighbour: StageSpec) -> Mapping[str, str] | None:
    """For every tensor of `stage` the one of `neighbour` at the same place, layer by layer; None if they are not alike.

    The model's ends (embedding, head) do not count in `neighbour`, and a `stage` with a part of them is like no other.

    >>> from skein.model.families.digits_cnn import DigitsCnnModel
    >>> from skein.types import StageIndex
    >>> ends = DigitsCnnModel(family="digits_cnn", num_blocks=4)
    >>> first, inner = (StageSpec(index=StageIndex(i), first=2 * i, stop=2 * i + 2) for i in range(2))
    >>> counterparts(ends, inner, first), counterparts(ends, first, inner)
    (None, None)
    >>> longer = StageSpec(index=StageIndex(0), first=0, stop=3)
    >>> found = counterparts(ends, StageSpec(index=StageIndex(1), first=3, stop=5), longer)
    >>> found["blocks.2.conv.weight"]
    'blocks.0.conv.weight'
    """
    layers = model.layer_parameters()
    inner = model.inner_layers
    if stage.first < inner.start or stage.stop > inner.stop:
        return None
    wanted = layers[stage.first : stage.stop]
    given = [layers[at] for at in range(neighbour.first, neighbour.stop) if at in inner]
    if [tuple(layer.values()) for layer in wanted] != [tuple(layer.values()) for layer in given]:
        return None
    return {
        name: other
        for layer, like in zip(wanted, given, strict=True)
        for name, other in zip(layer, like, strict=True)
    }
