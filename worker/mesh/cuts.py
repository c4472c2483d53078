"""Cuts of a stage's parameters over the devices of a mesh: by rows, by columns, by experts, or not at all.

Outside of a mesh tensors are whole. Each device has its part of a matrix, some experts whole, and a copy of what is not
cut; the sums of gradients are put together again under the same names.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from torch import Tensor


class ShareCut(StrEnum):
    """Part of a parameter that a device has; of `PARTIAL` all, with a part of its gradient only.

    Those of `ONE` one device has, and no other knows of.
    """

    ROWS = "rows"
    COLUMNS = "columns"
    SAME = "same"
    PARTIAL = "partial"
    ONE = "one"

    def part(self, whole: Tensor, index: int, size: int) -> Tensor:
        """A view of what the device with this index of `size` has of `whole`."""
        if self.dim is None:
            return whole
        own = portion_of(whole.shape[self.dim], index, size)
        return whole.narrow(self.dim, own.start, len(own))

    @property
    def dim(self) -> int | None:
        """The dim that is cut."""
        return {ShareCut.ROWS: 0, ShareCut.COLUMNS: 1}.get(self)

    @property
    def comes_from_all(self) -> bool:
        """Whether what a device has of the gradient is no other's; else all have the same."""
        return self is not ShareCut.SAME

    def add(self, whole: Tensor, given: Sequence[Tensor]) -> None:
        """Add the devices' gradients, in the order of the devices, to the whole tensor's."""
        for index, gradient in enumerate(given):
            self.part(whole, index, len(given)).add_(gradient)


_CUTS = {
    r"self_attn\.[qkv]_proj\.(weight|bias)": ShareCut.ROWS,
    r"self_attn\.o_proj\.weight": ShareCut.COLUMNS,
    # Each device normalises its own heads only.
    r"self_attn\.[qk]_norm\.weight": ShareCut.PARTIAL,
    r"mlp\.(gate|up)_proj\.weight": ShareCut.ROWS,
    r"mlp\.down_proj\.weight": ShareCut.COLUMNS,
    # Each device goes back for its own tokens only.
    r"\w+\.gate\.weight": ShareCut.PARTIAL,
    r"\w+\.experts\..+": ShareCut.ONE,
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Whole matrices over a vocabulary. Blocks of rows, which are layers, are not cut once more."""
_IN_BLOCK = re.compile(r"model\.layers\.\d+\.(.+)")
_EXPERT = re.compile(r"model\.layers\.\d+\.\w+\.experts\.(\d+)\..+")


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


def cut_of(name: str, size: int) -> ShareCut:
    """Cut of the parameter of this name over so many devices.

    >>> cut_of("model.layers.3.mlp.down_proj.weight", 2), cut_of("model.norm.weight", 2)
    (<ShareCut.COLUMNS: 'columns'>, <ShareCut.SAME: 'same'>)
    """
    found = _IN_BLOCK.fullmatch(name)
    if size == 1:
        return ShareCut.SAME
    if found is None:
        return ShareCut.ROWS if name in _VOCABULARY else ShareCut.SAME
    return next((cut for form, cut in _CUTS.items() if re.fullmatch(form, found[1])), ShareCut.SAME)
