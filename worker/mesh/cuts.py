"""Cuts of a stage's parameters over the devices of a mesh: by rows, by columns, or not at all.

Outside of a mesh tensors are whole. Each device has its part of a matrix, and a copy of what is not cut; the sums of
gradients are put together again under the same names.
"""

import re
from collections.abc import Sequence
from enum import StrEnum

from torch import Tensor


class ShareCut(StrEnum):
    """Part of a parameter that a device has; of `PARTIAL` all, with a part of its gradient only."""

    ROWS = "rows"
    COLUMNS = "columns"
    SAME = "same"
    PARTIAL = "partial"

    def part(self, whole: Tensor, index: int, size: int) -> Tensor:
        """A view of what the device with this index of `size` has of `whole`."""
        if self.dim is None:
            return whole
        length = whole.shape[self.dim]
        start, stop = length * index // size, length * (index + 1) // size
        return whole.narrow(self.dim, start, stop - start)

    @property
    def dim(self) -> int | None:
        """The dim that is cut."""
        return {ShareCut.ROWS: 0, ShareCut.COLUMNS: 1}.get(self)

    @property
    def comes_from_all(self) -> bool:
        """Whether every device has a part of the gradient; else all have the same."""
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
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Whole matrices over a vocabulary. Blocks of rows, which are layers, are not cut once more."""
_IN_BLOCK = re.compile(r"model\.layers\.\d+\.(.+)")


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
