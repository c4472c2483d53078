"""Adadelta. The rules of `elementwise` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.optim.elementwise import check_update, decayed_gradient, pieces, root, scratch_rows
from skein.numeric.optim.groups import decayed_names
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Walker

MEAN_OF_SQUARES, MEAN_OF_CHANGES = "square_avg", "acc_delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adadelta(Optimizer):
    """Steps as large as the last ones, relative to the gradients that made them."""

    rho: float
    eps: float
    weight_decay: float

    @property
    def slots(self) -> Mapping[str, Slot]:
        return dict.fromkeys((MEAN_OF_SQUARES, MEAN_OF_CHANGES), Slot(kind=StateClass.REPLICATED))

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
            v = rho * v + (1 - rho) * g * g
            d = sqrt(u + eps) / sqrt(v + eps) * g
            u = rho * u + (1 - rho) * d * d
            p = p - learning_rate * d

        Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012), Algorithm 1, as in torch.optim.Adadelta.

        >>> rule = Adadelta(rho=0.75, eps=0.25, weight_decay=0.0)
        >>> params = {"w": torch.tensor([1.0])}
        >>> walker = Walker(params=params, state=rule.init(params))
        >>> rule.update(walker, {"w": torch.tensor([2.0])}, learning_rate=1.0, gradient_scale=1.0)
        >>> round(walker.params["w"].item(), 4), walker.state["square_avg"]["w"].tolist()
        (0.1056, [1.0])
        """
        check_update(walker, grads, self.slots)
        squares, changes = walker.state[MEAN_OF_SQUARES], walker.state[MEAN_OF_CHANGES]
        rows = scratch_rows(walker.params, num_rows=3)
        decayed = decayed_names(walker.params)
        for name in sorted(walker.params):
            decay = self.weight_decay if name in decayed else 0.0
            for p, grad, v, u in pieces(walker.params[name], grads[name], squares[name], changes[name]):
                g, x, y = rows[:, : p.numel()]
                torch.mul(grad, gradient_scale, out=g)
                if decay:
                    decayed_gradient(g, p, scale=1.0, decay=decay, rows=(g, x))
                self._average(v, g, row=x)
                torch.add(u, self.eps, out=x)
                root(x, out=x).div_(root(torch.add(v, self.eps, out=y), out=y))
                g.mul_(x)
                self._average(u, g, row=x)
                p.sub_(torch.mul(g, learning_rate, out=x))
        walker.num_updates += 1

    def _average(self, mean: Tensor, x: Tensor, *, row: Tensor) -> None:
        """mean = rho * mean + (1 - rho) * x * x, in place."""
        mean.mul_(self.rho).add_(torch.mul(x, x, out=row).mul_(1.0 - self.rho))
