"""Cuts of a stage's parameters over the devices of a mesh: by rows, by columns, by experts, or not at all.

Outside of a mesh tensors are whole. Each device has its part of a matrix, some experts whole, and a copy of what is not
cut; the sums of gradients are put together again under the same names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, cat
from torch.nn import functional

from skein.config.mesh.tensor import MeshForm
from worker.compute.payload import GRADIENT, HIDDEN, LABELS, SCORES, SCORES_GRADIENT, TOKENS
from worker.model.base import IGNORED_LABEL


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
    r"\w+\.gate(\.projection|\.experts)?\.weight": ShareCut.PARTIAL,
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


_NORMS = re.compile(r"model\.(layers\.\d+\.\w+_layernorm|norm)\.weight")
"""Norms of what goes on from one half of a block to the next."""


def cut_of(name: str, form: MeshForm) -> ShareCut:
    """Cut of the parameter of this name in this form.

    >>> two, in_parts = MeshForm(size=2), MeshForm(size=2, in_sequence=True)
    >>> cut_of("model.layers.3.mlp.down_proj.weight", two), cut_of("model.norm.weight", two)
    (<ShareCut.COLUMNS: 'columns'>, <ShareCut.SAME: 'same'>)
    >>> cut_of("model.norm.weight", in_parts)
    <ShareCut.PARTIAL: 'partial'>
    """
    found = _IN_BLOCK.fullmatch(name)
    if form.size == 1:
        return ShareCut.SAME
    if form.in_sequence and _NORMS.fullmatch(name):
        # Each device normalises its own tokens only.
        return ShareCut.PARTIAL
    if found is None:
        return ShareCut.ROWS if name in _VOCABULARY else ShareCut.SAME
    return next((cut for form, cut in _CUTS.items() if re.fullmatch(form, found[1])), ShareCut.SAME)


_IN_PARTS = (HIDDEN, GRADIENT)
"""Tensors that each device has a part of, where sequences are in parts."""
_OVER_TOKENS: Mapping[str, float] = {
    HIDDEN: 0,
    GRADIENT: 0,
    TOKENS: 0,
    SCORES: 0,
    SCORES_GRADIENT: 0,
    LABELS: IGNORED_LABEL,
}
"""Tensors with a dim of tokens, the second, and what is put after the last one."""


@dataclass(frozen=True, slots=True)
class BoundaryCut:
    """Cut of what enters and leaves a stage with sequences of `num_tokens`: whole outside of the mesh."""

    form: MeshForm
    num_tokens: int

    def cut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors that each device is given of these."""
        padded = {name: self._padded(name, x) for name, x in tensors.items()}
        return [
            {name: self._part(name, x, index) for name, x in padded.items()}
            for index in range(self.form.size)
        ]

    def join(self, told: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The whole tensors that the devices have told of: the first one all, others their parts."""
        return {name: self._joined(name, [x[name] for x in told if name in x]) for name in told[0]}

    def _padded(self, name: str, x: Tensor) -> Tensor:
        num_more = self.form.padded_tokens(self.num_tokens) - self.num_tokens
        if not num_more or name not in _OVER_TOKENS:
            return x
        return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, num_more), value=_OVER_TOKENS[name])

    def _part(self, name: str, x: Tensor, index: int) -> Tensor:
        return x.chunk(self.form.size, 1)[index] if is_in_parts(name, x, self.form) else x

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        whole = cat(list(parts), 1) if is_in_parts(name, parts[0], self.form) else parts[0]
        if not self.form.in_sequence or name not in _OVER_TOKENS:
            return whole
        return whole[:, : self.num_tokens].contiguous()


def is_in_parts(name: str, x: Tensor, form: MeshForm) -> bool:
    """Whether each device has a part of a tensor that enters or leaves a stage; raw samples are whole on all."""
    return form.in_sequence and name in _IN_PARTS and x.is_floating_point()
