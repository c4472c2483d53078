"""Sequence parallelism: norms and residuals of a part of the tokens on each device, of all heads' tokens nowhere.

Each half of a block is entered by gathering all tokens, and left by scattering the sum: each device has the sum of its
part of the tokens. Backward it is the reverse. So a block costs two gathers and two scatters each way, which carry as
many elements as the two sums that they stand for.

All parts are equally long, and whoever gives a sequence has padded it: what comes after all tokens is seen by none.

B batch, T tokens, D features, N devices, P tokens of a part.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, Section 4.2.2.
"""

import torch
from torch import Tensor

from worker.mesh.passing import passed
from worker.mesh.share import Share, SumGroup


class SequenceShare(Share):
    """Share of one of several devices, each with a part of the tokens between blocks' halves."""

    def __init__(self, group: SumGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(group, dtype)
        self._members = group

    @property
    def num_parts(self) -> int:
        return self.size

    def enter(self, x: Tensor) -> Tensor:
        """All tokens, of which each device has `x`; its gradient is its part of the sum of theirs."""
        return passed(x, self.gather, lambda grad: self.scatter(grad).to(grad.dtype))

    def leave(self, y: Tensor) -> Tensor:
        """Part of the sum of what all devices give, each for all tokens."""
        dtype = y.dtype
        return passed(y, self.scatter, lambda grad: self.gather(grad.to(dtype)))

    def parts(self, x: Tensor) -> Tensor:
        """Part of `x`, which all devices have equal, and whose gradient they all want."""
        return passed(x, self.own, self.gather)

    def joined(self, x: Tensor) -> Tensor:
        """All tokens, whose gradient all devices have equal."""
        return passed(x, self.gather, self.own)

    def gather(self, part_BPD: Tensor) -> Tensor:
        """Tokens of all devices, in a new tensor."""
        whole_NBPD = self._members.gather(part_BPD.contiguous()[None])
        return whole_NBPD.transpose(0, 1).flatten(1, 2)

    def scatter(self, whole_BTD: Tensor) -> Tensor:
        """This device's part of the sum of all devices' tensors, in the dtype of sums."""
        by_part_NBPD = self._by_part(whole_BTD).transpose(0, 1)
        ordered_NBPD = by_part_NBPD.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return self._members.scatter_sum(ordered_NBPD)[0]

    def _by_part(self, whole_BTD: Tensor) -> Tensor:
        num_samples, num_tokens, num_features = whole_BTD.shape
        return whole_BTD.reshape(num_samples, self.size, num_tokens // self.size, num_features)

    def own(self, whole_BTD: Tensor) -> Tensor:
        """This device's part of a tensor, in a new one."""
        return self._by_part(whole_BTD)[:, self._members.index].clone()
