"""AdamW and Adam. The rules of `elementwise` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.optim.elementwise import (
    average_moments,
    check_update,
    decayed_gradient,
    pieces,
    root,
    scratch_rows,
)
from skein.numeric.optim.groups import decayed_names
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.walker import Slot, StateClass, Walker

MEAN, MEAN_OF_SQUARES = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, slots=True, kw_only=True)
class WithMoments(Optimizer):
    """Settings of who keeps two running means per parameter: of gradients and of their squares."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def slots(self) -> Mapping[str, Slot]:
        return dict.fromkeys((MEAN, MEAN_OF_SQUARES), Slot(kind=StateClass.REPLICATED))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(WithMoments):
    """Adam with decoupled weight decay; or, where it `decays_gradients`, Adam."""

    decays_gradients: bool = False

    @torch.no_grad()
    def update(
        self,
        walker: Walker,
        grads: Mapping[str, Tensor],
        *,
        learning_rate: float,
        gradient_scale: float,
    ) -> None:
        """Make one update with g = gradient_scale * grad and t = walker.num_updates + 1, in the dtype of the parameter:

            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = (1 - learning_rate * weight_decay) * p              only if decayed; for Adam instead, and first,
            g = g + weight_decay * p
            p = p - learning_rate / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)

        Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), Algorithm 2, with the learning
        rate in the place of its schedule multiplier, as in torch.optim.AdamW; Kingma and Ba, "Adam: A Method for
        Stochastic Optimization" (2015), Algorithm 1, as in torch.optim.Adam.

        >>> rule = AdamW(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
        >>> params = {"w": torch.tensor([1.0])}
        >>> walker = Walker(params=params, state=rule.init(params))
        >>> rule.update(walker, {"w": torch.tensor([2.0])}, learning_rate=0.5, gradient_scale=1.0)
        >>> walker.num_updates, walker.params["w"].tolist()
        (1, [0.5])
        """
        check_update(walker, grads, self.slots)
        means, squares = walker.state[MEAN], walker.state[MEAN_OF_SQUARES]
        count = walker.num_updates + 1
        step_size = learning_rate / (1.0 - self.betas[0] ** count)
        inverse_root = (1.0 - self.betas[1] ** count) ** -0.5
        rows = scratch_rows(walker.params, num_rows=2)
        decayed = decayed_names(walker.params)
        for name in sorted(walker.params):
            param = walker.params[name]
            decay = self.weight_decay if name in decayed else 0.0
            if decay and not self.decays_gradients:
                param.mul_(1.0 - learning_rate * decay)
            for p, grad, m, v in pieces(param, grads[name], means[name], squares[name]):
                one, two = rows[0, : p.numel()], rows[1, : p.numel()]
                scale = gradient_scale
                if decay and self.decays_gradients:
                    grad = decayed_gradient(grad, p, scale=scale, decay=decay, rows=(one, two))
                    scale = 1.0
                average_moments(grad, m, v, betas=self.betas, gradient_scale=scale, rows=(one, two))
                denominator = root(v, out=one).mul_(inverse_root).add_(self.eps)
                p.sub_(torch.mul(m, step_size, out=two).div_(denominator))
        walker.num_updates = count
