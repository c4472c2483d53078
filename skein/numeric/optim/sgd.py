"""Gradient descent with momentum. The rules of `elementwise` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.optim.elementwise import check_update, pieces, scratch_rows
from skein.numeric.optim.groups import decayed_names
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Walker

MOMENTUM = "momentum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Optimizer):
    """Gradient descent with heavy-ball or Nesterov momentum; without momentum it keeps nothing."""

    momentum: float
    nesterov: bool
    weight_decay: float

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {MOMENTUM: Slot(kind=StateClass.REPLICATED)} if self.momentum else {}

    @torch.no_grad()
    def update(
        self,
        walker: Walker,
        grads: Mapping[str, Tensor],
        *,
        learning_rate: float,
        gradient_scale: float,
    ) -> None:
        """Make one update, in the dtype of the parameter:

            g = gradient_scale * grad + weight_decay * p            the last only if decayed
            b = momentum * b + g                                    b = 0 before the first
            p = p - learning_rate * (g + momentum * b if nesterov else b)

        Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), as in
        torch.optim.SGD without dampening.

        >>> rule = Sgd(momentum=0.5, nesterov=False, weight_decay=0.0)
        >>> params = {"w": torch.tensor([1.0])}
        >>> walker = Walker(params=params, state=rule.init(params))
        >>> for _ in range(2):
        ...     rule.update(walker, {"w": torch.tensor([1.0])}, learning_rate=0.25, gradient_scale=1.0)
        >>> walker.params["w"].tolist(), walker.state["momentum"]["w"].tolist()
        ([0.375], [1.5])
        """
        check_update(walker, grads, self.slots)
        rows = scratch_rows(walker.params, num_rows=2)
        decayed = decayed_names(walker.params)
        for name in sorted(walker.params):
            decay = self.weight_decay if name in decayed else 0.0
            kept = [walker.state[slot][name] for slot in self.slots]
            for p, grad, *buffers in pieces(walker.params[name], grads[name], *kept):
                g, x = rows[0, : p.numel()], rows[1, : p.numel()]
                torch.mul(grad, gradient_scale, out=g)
                if decay:
                    g.add_(torch.mul(p, decay, out=x))
                for b in buffers:
                    b.mul_(self.momentum).add_(g)
                    g = g.add_(torch.mul(b, self.momentum, out=x)) if self.nesterov else b
                p.sub_(torch.mul(g, learning_rate, out=x))
        walker.num_updates += 1
