"""Adam's and LAMB's preconditioner where walkers only meet their neighbours: a second moment that all share.

Preconditioners of its own would make each walker weigh coordinates differently, and the walkers would agree on no
minimum of the mean loss, however small the learning rate. So the second moment, and for LAMB each tensor's ratio of
norms, are averages over all walkers, tracked by gossip (dynamic average consensus).

Rules of this file
- Each walker has its own running statistics s, and an estimate v of their mean over all walkers. When s changes, v
  changes by as much; then v is mixed with the neighbours'. So the mean of all v is the mean of all s, always, and once
  s has settled every v is that mean exactly, not only nearly, as it would be if s itself were mixed.
- A step uses v with its own change, before it is mixed: what is divided by has seen the gradient that it divides.
- The estimates remember what rounding added to them; the lower bound of what is divided by is there for that as well.
- When members change the estimates begin anew from the walkers' own statistics: a mean over others is no longer true.

Sources: the toy study behind "DecentLaM velocity form, shared v"; Zhu and Martinez, "Discrete-Time Dynamic Average
Consensus" (2010).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.config.optimizer import AdamWSpec, LambSpec
from skein.numeric.aggregate.rule import Terms
from skein.numeric.gradients import flatten, squared_norm, unflatten
from skein.numeric.optim.elementwise import zeros_like
from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

OWN_SQUARES, SHARED_SQUARES = "gossip_own_squares", "gossip_shared_squares"
"""s and v: like the parameters."""
OWN_MEAN, OWN_RATIOS, SHARED_RATIOS = "gossip_own_mean", "gossip_own_ratios", "gossip_shared_ratios"
"""For LAMB: a mean of gradients like the parameters; one number for each of them, by name."""

_COPIED = Slot(kind=StateClass.PRIVATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMoment:
    """Preconditioner of a walker's gradients, and the statistics that it keeps and sends for it."""

    spec: AdamWSpec | LambSpec

    @property
    def slots(self) -> Mapping[str, Slot]:
        """A newcomer gets its donor's."""
        lamb = (OWN_MEAN, OWN_RATIOS, SHARED_RATIOS) if isinstance(self.spec, LambSpec) else ()
        return dict.fromkeys((OWN_SQUARES, SHARED_SQUARES, *lamb), _COPIED)

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        """Zeros: nothing has been seen."""
        numbers = {name: param.new_zeros(()) for name, param in params.items()}
        shapes = {slot: numbers if slot in (OWN_RATIOS, SHARED_RATIOS) else params for slot in self.slots}
        return {slot: zeros_like(like, {slot: _COPIED})[slot] for slot, like in shapes.items()}

    def direction(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> Tensors:
        """Change that one step subtracts from the parameters before momentum, with the statistics brought up to date:

            s' = beta2 s + (1 - beta2) g²                  v' = v + s' - s
            u = g / (sqrt(max(v', (1 - beta2) s')) + eps) + weight_decay x
            direction = (1 - beta1) learning_rate c u      c = 1, or LAMB's ratio, shared the same way as v

        The lower bound keeps a walker whose gradients are far larger than all others' from dividing by less than
        nothing; it holds nobody back whose squares are below 1 / (1 - beta2) times the mean. As in AdamW v' is divided
        by 1 - beta2**t. Momentum comes after mixing, so it has no such correction: it starts slowly instead.
        """
        decayed = decayed_names(walker.params)
        step_size = (1.0 - self.spec.betas[0]) * terms.learning_rate
        out: Tensors = {}
        for name in sorted(walker.params):
            decay = self.spec.weight_decay if name in decayed else 0.0
            g = grads[name] * terms.gradient_scale
            denominator = self._denominator(walker, name, g)
            ratio = self._ratio(walker, name, g, denominator, decay)
            out[name] = (g / denominator).add_(walker.params[name] * decay).mul_(step_size * ratio)
        return out

    def sent(self, walker: Walker) -> Tensor:
        """The estimates as one vector: squares, then ratios, each in order of the parameters' names."""
        squares = flatten(walker.state[SHARED_SQUARES])
        if SHARED_RATIOS not in walker.state:
            return squares
        return torch.cat([squares, flatten(walker.state[SHARED_RATIOS])])

    def take(self, walker: Walker, mixed: Tensor) -> None:
        """Makes the mixed vector the walker's estimates, in place."""
        num_squares = sum(tensor.numel() for tensor in walker.params.values())
        for slot, part in ((SHARED_SQUARES, mixed[:num_squares]), (SHARED_RATIOS, mixed[num_squares:])):
            if slot in walker.state:
                like = walker.state[slot]
                for name, values in unflatten(part, like).items():
                    like[name].copy_(values)

    def restart(self, walker: Walker) -> None:
        """Begins the estimates anew from the walker's own statistics, in place."""
        for own, shared in ((OWN_SQUARES, SHARED_SQUARES), (OWN_RATIOS, SHARED_RATIOS)):
            for name, values in walker.state.get(own, {}).items():
                walker.state[shared][name].copy_(values)

    def _denominator(self, walker: Walker, name: str, g: Tensor) -> Tensor:
        _, beta2 = self.spec.betas
        own, shared = walker.state[OWN_SQUARES][name], walker.state[SHARED_SQUARES][name]
        change = (g * g - own).mul_(1.0 - beta2)
        own.add_(change)
        shared.add_(change)
        used = torch.maximum(shared, own * (1.0 - beta2))
        return used.sqrt_().mul_(self._inverses(walker)[1]).add_(self.spec.eps)

    def _ratio(self, walker: Walker, name: str, g: Tensor, denominator: Tensor, decay: float) -> float:
        """LAMB's ratio of norms, shared; its direction has the walker's own mean of gradients, whose norm is steady."""
        if isinstance(self.spec, AdamWSpec):
            return 1.0
        mean, x = walker.state[OWN_MEAN][name], walker.params[name]
        mean.add_((g - mean).mul_(1.0 - self.spec.betas[0]))
        u = (mean / denominator).mul_(self._inverses(walker)[0]).add_(x * decay)
        own, shared = walker.state[OWN_RATIOS][name], walker.state[SHARED_RATIOS][name]
        norms = _norm(x), _norm(u)
        change = (self._bounded(norms[0] / norms[1]) if all(norms) else 1.0) - own
        own.add_(change)
        shared.add_(change)
        return self._bounded(float(shared))

    def _bounded(self, ratio: float) -> float:
        assert isinstance(self.spec, LambSpec)
        return min(max(ratio, self.spec.min_ratio), self.spec.max_ratio)

    def _inverses(self, walker: Walker) -> tuple[float, float]:
        """Factors on the mean and on the root of the squares, for the update that is being made."""
        if isinstance(self.spec, LambSpec) and not self.spec.bias_correction:
            return 1.0, 1.0
        beta1, beta2 = self.spec.betas
        count = walker.num_updates + 1
        return 1.0 / (1.0 - beta1**count), (1.0 - beta2**count) ** -0.5


def _norm(values: Tensor) -> float:
    return float(squared_norm(values.reshape(-1)) ** 0.5)
