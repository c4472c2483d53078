"""1-bit LAMB. The rules of `freezing` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from skein.config import aggregation
from skein.config.optimizer import LambSpec
from skein.numeric.aggregate.one_bit.freezing import (
    MOMENTUM_SCALE,
    SHARED_SLOTS,
    OneBit,
    direction,
    norm,
    scalars,
)
from skein.numeric.aggregate.rule import Terms
from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES
from skein.numeric.walker import Slot, StateClass, Tensors, Walker

FRESH = "mean_of_squares_fresh"
"""The second moment as it goes on, of gradients recovered from successive momenta."""
RATIO = "ratio"
"""In the warm-up a moving average of LAMB's layer ratio that began at zero, with RATIO_WEIGHT saying how much of it
is there; from the freeze on the average itself."""
RATIO_WEIGHT = "ratio_weight"
FACTOR = "factor"
"""Factor on the frozen ratio that the drift of the second moment last came to."""

_LARGEST_SCALE = 1e15
"""Above, a tensor's momentum is as good as zero, and float32 would soon overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitLambRule(OneBit):
    """LAMB whose second moments and layer ratios are frozen after the warm-up; one scale for the whole vector.

    Warm-up, with m and v the usual moving averages, tensor by tensor:

        u = m / (sqrt(v) + eps) + weight_decay * x              the last only for matrices and embeddings
        c = |x| / |u|, at least min_ratio and at most max_ratio; 1 if either norm is 0
        ratio = ratio_beta * ratio + (1 - ratio_beta) * c       unless a norm is 0; weight likewise, with 1 for c
        x = x - learning_rate * c * u

    Freeze: v rises to its floor, fresh = v, ratio = ratio / weight (1 if the weight is 0), and momentum_scale = the
    mean over tensors of |m| / sqrt(length), divided by the tensor's own; so that one bit's scale suits all.

    Compressed stage, with m from the exchange, divided by its scale:

        g = (m - beta1 * m_before) / (1 - beta1) ;   fresh = beta2 * fresh + (1 - beta2) * g * g
        u' = m / (sqrt(v) + eps) ;   u = u' + weight_decay * x
        r = max((sqrt(v) + eps) / (sqrt(fresh) + eps)) ;   if decayed: q = min(1, |u'| / |u|), r = r * q + 1 - q
        r = r, at least min_factor and at most max_factor, and within factor_change of what it was
        x = x - learning_rate * ratio * r * u

    Source: Li et al., "1-bit LAMB" (2021), Algorithm 1, as in DeepSpeed 0.18.9, `runtime/fp16/onebit/lamb.py`. There
    the average of ratios is not divided by its weight, which is why a short warm-up slows training down for good, and
    a ratio of exactly 1 is left out of it, so that a tensor with no other never moves again.
    """

    spec: aggregation.OneBitLamb
    optimizer: LambSpec

    @property
    def slots(self) -> Mapping[str, Slot]:
        return {
            **SHARED_SLOTS,
            **dict.fromkeys((FRESH, RATIO, RATIO_WEIGHT, FACTOR), Slot(kind=StateClass.REPLICATED)),
        }

    def init(self, params: Mapping[str, Tensor]) -> dict[str, Tensors]:
        return OneBit.init(self, params) | {
            FRESH: {name: param.new_zeros(param.shape) for name, param in params.items()},
            RATIO: scalars(params, 0.0),
            RATIO_WEIGHT: scalars(params, 0.0),
            FACTOR: scalars(params, 1.0),
        }

    def _segments(self, params: Mapping[str, Tensor]) -> tuple[int, ...]:
        return (sum(param.numel() for param in params.values()),)

    def _warm_up(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> None:
        beta = self.spec.ratio_beta
        for name in sorted(walker.params):
            self._average(walker, name, grads[name], terms)
            x, decay = walker.params[name], self._decay(walker, name)
            u, _ = direction(
                walker.state[MEAN][name], walker.state[MEAN_OF_SQUARES][name], self.optimizer.eps
            )
            if decay:
                u.add_(x * decay)
            size, length = norm(x), norm(u)
            c = 1.0
            if size > 0 and length > 0:
                c = min(max(size / length, self.optimizer.min_ratio), self.optimizer.max_ratio)
                for slot, value in ((RATIO, c), (RATIO_WEIGHT, 1.0)):
                    kept = walker.state[slot][name]
                    kept.fill_(beta * kept.item() + (1.0 - beta) * value)
            x.sub_(u.mul_(terms.learning_rate * c))

    def _freeze(self, walker: Walker) -> None:
        state = walker.state
        for name, ratio in state[RATIO].items():
            weight = state[RATIO_WEIGHT][name].item()
            ratio.fill_(ratio.item() / weight if weight else 1.0)
        state[FRESH] = {name: v.clone() for name, v in state[MEAN_OF_SQUARES].items()}
        sizes = {name: norm(m) / m.numel() ** 0.5 for name, m in sorted(state[MEAN].items()) if m.numel()}
        moving = [size for size in sizes.values() if size > 0]
        for name, scale in state[MOMENTUM_SCALE].items():
            size = sizes.get(name, 0.0)
            scale.fill_(min(sum(moving) / len(moving) / size, _LARGEST_SCALE) if size > 0 else 1.0)

    def _move(self, walker: Walker, momenta: Mapping[str, Tensor], terms: Terms) -> None:
        for name in sorted(walker.params):
            self._refresh(walker, name, momenta[name])
            x, decay = walker.params[name], self._decay(walker, name)
            u, denominator = direction(
                walker.state[MEAN][name], walker.state[MEAN_OF_SQUARES][name], self.optimizer.eps
            )
            share = 1.0
            if decay:
                bare = norm(u)
                length = norm(u.add_(x * decay))
                share = min(1.0, bare / length) if length > 0 else 1.0
            factor = self._factor(walker, name, denominator, share)
            x.sub_(u.mul_(terms.learning_rate * walker.state[RATIO][name].item() * factor))

    def _refresh(self, walker: Walker, name: str, momentum: Tensor) -> None:
        """Puts `momentum` in the place of the mean; the fresh second moment gets the gradient it must have come of."""
        beta1, beta2 = self.optimizer.betas
        mean, fresh = walker.state[MEAN][name], walker.state[FRESH][name]
        g = (momentum - mean * beta1).mul_(1.0 / (1.0 - beta1))
        fresh.mul_(beta2).add_(g.mul_(g).mul_(1.0 - beta2))
        mean.copy_(momentum)

    def _factor(self, walker: Walker, name: str, denominator: Tensor, share: float) -> float:
        """r, from the frozen denominator and the share that the bare direction has in the decayed one."""
        if not denominator.numel():
            return 1.0
        _, fresh = direction(denominator, walker.state[FRESH][name], self.optimizer.eps)
        r = (denominator / fresh).max().item() * share + (1.0 - share)
        kept = walker.state[FACTOR][name]
        last, change = kept.item(), self.spec.factor_change
        r = min(max(r, self.spec.min_factor), self.spec.max_factor)
        r = min(max(r, (1.0 - change) * last), (1.0 + change) * last)
        kept.fill_(r)
        return kept.item()
