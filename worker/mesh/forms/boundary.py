"""Cuts of what enters and leaves a stage over the devices of a mesh: samples, boundary tensors, labels, gradients.

Outside of a mesh all of these are whole. What the parts of a sequence, or blocks of samples, do not divide is padded at
its end with what makes no difference: no token sees those after it, and no label is to be predicted there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, cat
from torch.nn import functional

from skein.config.mesh.tensor import MeshForm
from worker.compute.payload import GRADIENT, HIDDEN, LABELS, SCORES, SCORES_GRADIENT, TOKENS
from worker.model.base import IGNORED_LABEL

LOSS, BALANCE = "loss", "balance"
"""Names among the tensors of an answer: a loss, and the balance loss of each layer with experts that was visited. Both
may be no numbers at all, which a header cannot say."""
_ACTIVATIONS = (HIDDEN, GRADIENT)
"""Tensors with features in their last dim; raw samples have none, and are integers."""
_PADDING: Mapping[str, float] = {
    HIDDEN: 0,
    GRADIENT: 0,
    TOKENS: 0,
    SCORES: 0,
    SCORES_GRADIENT: 0,
    LABELS: IGNORED_LABEL,
}
"""Tensors with a dim of samples and one of tokens, and what is put after the last of both."""


@dataclass(frozen=True, slots=True)
class BoundaryCut:
    """Cut for a microbatch of so many samples and tokens of each; without meaning where a single device computes."""

    form: MeshForm
    num_samples: int
    num_tokens: int

    def cut(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors that each device is given of these."""
        padded = {name: self._padded(name, x) for name, x in tensors.items()}
        return [
            {name: self._part(name, x, index) for name, x in padded.items()}
            for index in range(self.form.size)
        ]

    def join(self, told: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The whole tensors that the devices have told of, as `tells` says."""
        return {name: self._joined(name, [x[name] for x in told if name in x]) for name in told[0]}

    def total(self, nums: Sequence[int]) -> int:
        """Number of all samples, of those that each device has found in its own."""
        return sum(nums[:: self.form.side]) if self.form.is_grid else nums[0]

    def _padded(self, name: str, x: Tensor) -> Tensor:
        side = self.form.side
        num_tokens = self.form.padded_tokens(self.num_tokens) - self.num_tokens
        num_samples = -(-self.num_samples // side) * side - self.num_samples
        if name not in _PADDING or not (num_tokens or num_samples):
            return x
        behind = (0, 0) * (x.dim() - 2)
        return functional.pad(x, (*behind, 0, num_tokens, 0, num_samples), value=_PADDING[name])

    def _part(self, name: str, x: Tensor, index: int) -> Tensor:
        if self.form.is_grid and name in _PADDING:
            row, column = divmod(index, self.form.side)
            x = x.chunk(self.form.side, 0)[row]
            return x.chunk(self.form.side, -1)[column] if _is_activation(name, x) else x
        if self.form.in_sequence and _is_activation(name, x):
            return x.chunk(self.form.size, 1)[index]
        return x

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if self.form.is_grid:
            if name == LOSS:
                return sum(parts[1:], start=parts[0])
            side = self.form.side
            rows = [cat(list(parts[first : first + side]), -1) for first in range(0, len(parts), side)]
            return cat(rows)[: self.num_samples].contiguous()
        if self.form.in_sequence and name in _PADDING:
            whole = cat(list(parts), 1) if _is_activation(name, parts[0]) else parts[0]
            return whole[:, : self.num_tokens].contiguous()
        return parts[0]


def tells(name: str, x: Tensor, form: MeshForm, index: int) -> bool:
    """Whether the device with this index tells its part of a tensor; what all have equal the first one tells.

    In blocks every device has another one of activations; a loss is that of the samples of a row of devices.
    """
    if form.is_grid and name == LOSS:
        return index % form.side == 0
    is_cut = form.is_grid or form.in_sequence
    return index == 0 or (is_cut and _is_activation(name, x))


def _is_activation(name: str, x: Tensor) -> bool:
    return name in _ACTIVATIONS and x.is_floating_point()
