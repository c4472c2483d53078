"""Cuts of a stage's parameters over the devices of a mesh: by rows, by columns, by experts, or not at all.

Outside of a mesh tensors are whole. Each device has its part of a matrix, some experts whole, and a copy of what is not
cut; the sums of gradients are put together again under the same names.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import assert_never

from torch import Tensor

from skein.config.mesh.tensor import MeshForm
from skein.model.decoder import OVER_VOCABULARY


class AnyCut(StrEnum):
    """Part of a parameter that each device of a mesh has."""

    @abstractmethod
    def pieces(self, index: int, size: int) -> Sequence[tuple[int, int, int]]:
        """Dims that are cut, with the place of the part that a device has, and the number of parts."""

    @property
    def comes_from_all(self) -> bool:
        """Whether what a device has of the gradient is no other's; else all have the same."""
        return True

    def part(self, whole: Tensor, index: int, size: int) -> Tensor:
        """A view of what the device with this index of `size` has of `whole`."""
        for dim, place, num in self.pieces(index, size):
            own = portion_of(whole.shape[dim], place, num)
            whole = whole.narrow(dim, own.start, len(own))
        return whole

    def add(self, whole: Tensor, given: Sequence[Tensor]) -> None:
        """Add the devices' gradients, in the order of the devices, to the whole tensor's."""
        for index, gradient in enumerate(given):
            self.part(whole, index, len(given)).add_(gradient)


class ShareCut(AnyCut):
    """Part of a parameter that a device has; of `PARTIAL` all, with a part of its gradient only.

    Those of `ONE` one device has, and no other knows of.
    """

    ROWS = "rows"
    COLUMNS = "columns"
    SAME = "same"
    PARTIAL = "partial"
    ONE = "one"

    def pieces(self, index: int, size: int) -> Sequence[tuple[int, int, int]]:
        dim = {ShareCut.ROWS: 0, ShareCut.COLUMNS: 1}.get(self)
        return () if dim is None else ((dim, index, size),)

    @property
    def comes_from_all(self) -> bool:
        return self is not ShareCut.SAME


class BlockCut(AnyCut):
    """Block of a parameter that a device in row i and column j of a square has; gradients are of its own samples.

    `MATRIX` is of a linear function, with rows by j and columns by i, `LOOKUP` over a vocabulary, with rows by i and
    columns by j, `FEATURES` a vector by j; of `WHOLE` all have all.
    """

    MATRIX = "matrix"
    LOOKUP = "lookup"
    FEATURES = "features"
    WHOLE = "whole"

    def pieces(self, index: int, size: int) -> Sequence[tuple[int, int, int]]:
        side = math.isqrt(size)
        row, column = divmod(index, side)
        match self:
            case BlockCut.MATRIX:
                return (0, column, side), (1, row, side)
            case BlockCut.LOOKUP:
                return (0, row, side), (1, column, side)
            case BlockCut.FEATURES:
                return ((0, column, side),)
            case BlockCut.WHOLE:
                return ()
            case _:
                assert_never(self)


_CUTS = {
    r"self_attn\.[qkv]_proj\.(weight|bias)": ShareCut.ROWS,
    r"self_attn\.o_proj\.weight": ShareCut.COLUMNS,
    # Each device normalises its own heads only.
    r"self_attn\.[qk]_norm\.weight": ShareCut.PARTIAL,
    r"mlp\.(gate|up)_proj\.weight": ShareCut.ROWS,
    r"mlp\.down_proj\.weight": ShareCut.COLUMNS,
    # Each device goes back for its own tokens only.
    r"\w+\.gate(\.projection|\.experts)?\.weight": ShareCut.PARTIAL,
    r"\w+\.experts\..+": ShareCut.ONE,
}
_IN_BLOCK = re.compile(r"model\.layers\.\d+\.(.+)")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"model\.layers\.\d+\.\w+\.experts\.(\d+)\..+")
_NORMS = re.compile(r"model\.(layers\.\d+\.\w+_layernorm|norm)\.weight")
"""Norms of what goes on from one half of a block to the next."""
_BLOCKS = {
    r".*_proj\.weight": BlockCut.MATRIX,
    r".*(_proj\.bias|layernorm\.weight)": BlockCut.FEATURES,
    r".*self_attn\.[qk]_norm\.weight": BlockCut.WHOLE,
    r"model\.norm\.weight": BlockCut.FEATURES,
    **{re.escape(name): BlockCut.LOOKUP for name in OVER_VOCABULARY},
}


def portion_of(num: int, index: int, size: int) -> range:
    """Part that the device with this index has of `num` things in a row; parts differ by one at most."""
    return range(num * index // size, num * (index + 1) // size)


def is_held(name: str, index: int, size: int, num_experts: int) -> bool:
    """Whether the device with this index has any of the parameter of this name.

    >>> [is_held("model.layers.0.mlp.experts.2.up_proj.weight", index, 2, 5) for index in range(2)]
    [False, True]
    """
    found = _EXPERT.fullmatch(name)
    return found is None or size == 1 or int(found[1]) in portion_of(num_experts, index, size)


def partial_by_layer(names: Sequence[str], form: MeshForm) -> list[tuple[str, ...]]:
    """Parameters of which each device has a part of the gradient, by the layers of experts, the last layer first.

    Those whose gradients are made before the way back through that layer, and after that through the layer before. None
    are of the blocks up to the first layer's: nothing follows theirs.

    >>> names = [f"model.layers.{block}.mlp.{x}.weight" for block in (0, 1) for x in ("gate", "experts.0.up_proj")]
    >>> partial_by_layer([*names, "model.norm.weight"], MeshForm(size=2, in_sequence=True))
    [('model.norm.weight',), ('model.layers.1.mlp.gate.weight',)]
    """
    blocks = {name: int(found[1]) for name in names if (found := _BLOCK.match(name))}
    layers = sorted({blocks[name] for name in names if _EXPERT.fullmatch(name)}, reverse=True)
    partial = [name for name in names if cut_of(name, form) is ShareCut.PARTIAL]
    return [
        tuple(name for name in partial if layer < blocks.get(name, math.inf) <= above)
        for above, layer in pairwise([math.inf, *layers])
    ]


def cut_of(name: str, form: MeshForm) -> AnyCut:
    """Cut of the parameter of this name in this form.

    >>> two, in_parts = MeshForm(size=2), MeshForm(size=2, in_sequence=True)
    >>> cut_of("model.layers.3.mlp.down_proj.weight", two), cut_of("model.norm.weight", two)
    (<ShareCut.COLUMNS: 'columns'>, <ShareCut.SAME: 'same'>)
    >>> cut_of("model.norm.weight", in_parts)
    <ShareCut.PARTIAL: 'partial'>
    """
    found = _IN_BLOCK.fullmatch(name)
    if form.is_grid:
        return next(cut for pattern, cut in _BLOCKS.items() if re.fullmatch(pattern, name))
    if form.size == 1:
        return ShareCut.SAME
    if form.in_sequence and _NORMS.fullmatch(name):
        # Each device normalises its own tokens only.
        return ShareCut.PARTIAL
    if found is None:
        # Blocks of rows, which are layers, are not cut once more.
        return ShareCut.ROWS if name in OVER_VOCABULARY else ShareCut.SAME
    return next((cut for pattern, cut in _CUTS.items() if re.fullmatch(pattern, found[1])), ShareCut.SAME)
