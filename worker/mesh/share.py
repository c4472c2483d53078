"""Share of a stage that one device of a mesh computes: some heads, some of the inner width, some rows.

Each half of a block is entered with whole activations, equal on all devices, and left with a sum of what each has made:
forward the sum is at the exit, backward at the entry. So a block costs two sums each way, and nothing else crosses. Of
the vocabulary each device looks up its own rows, which are summed, and scores its own: of each token two numbers cross.

Source: Shoeybi et al., Megatron-LM, 2019, Section 3, its functions f and g.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from skein.plan.pieces.lanes import Pieces
from worker.mesh.forms.cuts import portion_of
from worker.mesh.passing import as_it_is, passed
from worker.mesh.pieces.idle import ArrivingSum, IdleSums
from worker.mesh.pieces.meter import Meter
from worker.model.base import linears
from worker.model.ops import embedding, rms_norm
from worker.model.pending import Tray
from worker.model.vocabulary import looked_up, merged, scored


class Arriving(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor: ...


class SumGroup(Protocol):
    """Devices that sum, gather and exchange; `worker.mesh.groups.DeviceGroup` is one."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_in_place(self, tensor: Tensor) -> None: ...

    def begin_sum(self, tensor: Tensor) -> ArrivingSum: ...

    def gather(self, tensor: Tensor) -> Tensor: ...

    def scatter_sum(self, whole: Tensor) -> Tensor: ...

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving: ...


class Share:
    """Part of every block that is computed here: all of it without `group`.

    Sums are taken in `dtype`, so that what is narrow on a device is rounded once and not at each device.
    """

    def __init__(self, group: SumGroup | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._group = group
        self._dtype = dtype
        self.meter = Meter()
        """Time that layers of experts take; whoever tells of it puts their own here."""
        self.pieces = Pieces()
        """Pieces in which tokens go to experts on other devices; whoever asks for a visit says so first."""
        self.num_tokens = 0
        """Tokens of a sequence without what pads it; likewise."""
        self.idle_sums: IdleSums | None = None
        """Sums of gradients beside layers of experts, where there are any."""

    @property
    def size(self) -> int:
        """Devices that share each block."""
        return 1 if self._group is None else self._group.size

    @property
    def index(self) -> int:
        """Place of this device among them."""
        return 0 if self._group is None else self._group.index

    @property
    def num_parts(self) -> int:
        """Parts that a sequence is in between blocks' halves."""
        return 1

    def sum_beside(self, layers: Sequence[Sequence[nn.Parameter]]) -> None:
        """Sum gradients beside layers of experts from now on, as of `IdleSums`."""
        self.idle_sums = None if self._group is None else IdleSums(self._group, layers)

    def rows(self, num_rows: int) -> range:
        """Rows that this device has of a matrix over the vocabulary; shares may differ by one."""
        return portion_of(num_rows, self.index, self.size)

    def gathered(self, x: Tensor) -> Tensor:
        """The tensors of all devices, in their order, along a new first dim; each has the gradient of its own."""
        if self._group is None:
            return x[None]
        placed = x.new_zeros((self._group.size, *x.shape))
        placed[self._group.index] = x
        return self._summed(placed)

    def enter(self, x: Tensor) -> Tensor:
        """`x`, which all devices have; its gradient is the sum of theirs."""
        return x if self._group is None else passed(x, as_it_is, lambda grad: self.sum(grad).to(grad.dtype))

    def leave(self, y: Tensor) -> Tensor:
        """The sum of what all devices give; each has the gradient of it."""
        return y if self._group is None else self._summed(y)

    def _summed(self, y: Tensor) -> Tensor:
        dtype = y.dtype
        return passed(y, self.sum, lambda grad: grad.to(dtype))

    def rows_of_all(self, own: Tensor) -> Tensor:
        """Rows of all devices one after the other, as they are; each gives equally many."""
        assert self._group is not None
        return self._group.gather(own.contiguous())

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """Rows from all devices, in their order, once they have come: `received` of each, for so many `sent` to it."""
        assert self._group is not None
        return self._group.exchange(rows, sent, received)

    # --- functions with parameters; 1-D ones are each device's own ---

    def products(self, x: Tensor, weights: Sequence[Tensor], tray: Tray) -> tuple[Tensor, ...]:
        """`linear` of this device's part of each matrix."""
        return linears(x, weights, tray)

    def normed(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, tray: Tray) -> Tensor:
        """`rms_norm` over all features."""
        return rms_norm(x, weight, eps, dtype, tray)

    def embedded(self, tokens_BT: Tensor, weight: Tensor, num_rows: int, tray: Tray) -> Tensor:
        """Row of each token, of a matrix of `num_rows` of which this device has a part."""
        if self._group is None:
            return embedding(tokens_BT, weight, tray)
        return self.leave(looked_up(tokens_BT, self.rows(num_rows), weight, tray))

    def scores(
        self, x: Tensor, labels_BT: Tensor, weight: Tensor, num_rows: int, dtype: torch.dtype, tray: Tray
    ) -> Tensor:
        """Scores over all rows of such a matrix, as of `worker.model.vocabulary`, with products in `dtype`."""
        normed = self.enter(x.to(self._dtype))
        own = scored(normed, labels_BT, dtype, self.rows(num_rows), weight, tray)
        return merged(self.gathered(own))

    def parts(self, x: Tensor) -> Tensor:
        """The part of `x`, which all devices have, that goes from one layer to the next: all of it."""
        return x

    def joined(self, x: Tensor) -> Tensor:
        """The whole of which `x` is this device's part: `x` itself."""
        return x

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all devices, in a new tensor of the dtype of sums."""
        assert self._group is not None
        total = tensor.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        self._group.sum_in_place(total)
        return total


WHOLE = Share()
"""Share of a device that computes alone."""
