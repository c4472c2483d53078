"""1-bit Adam. The rules of `freezing` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from skein.config import aggregation
from skein.config.optimizer import AdamWSpec
from skein.numeric.aggregate.one_bit.freezing import MOMENTUM_SCALE, OneBit, direction, scalars
from skein.numeric.aggregate.rule import Terms
from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES
from skein.numeric.walker import Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBitAdamRule(OneBit):
    """AdamW without bias correction, whose second moments are frozen after the warm-up; every tensor has its own scale.

        u = m / (sqrt(v) + eps) + weight_decay * x              the last only for matrices and embeddings
        x = x - learning_rate * u

    m is what came back from the exchange, v is frozen (in the warm-up: the usual moving averages).

    Source: Tang et al., "1-bit Adam" (2021), Algorithm 1, as in DeepSpeed 0.18.9, `runtime/fp16/onebit/adam.py`.
    """

    spec: aggregation.OneBitAdam
    optimizer: AdamWSpec

    def _segments(self, params: Mapping[str, Tensor]) -> tuple[int, ...]:
        return tuple(params[name].numel() for name in sorted(params))

    def _warm_up(self, walker: Walker, grads: Mapping[str, Tensor], terms: Terms) -> None:
        for name in sorted(walker.params):
            self._average(walker, name, grads[name], terms)
            self._step(walker, name, terms)

    def _freeze(self, walker: Walker) -> None:
        walker.state[MOMENTUM_SCALE] = scalars(walker.params, 1.0)

    def _move(self, walker: Walker, momenta: Mapping[str, Tensor], terms: Terms) -> None:
        for name in sorted(walker.params):
            walker.state[MEAN][name].copy_(momenta[name])
            self._step(walker, name, terms)

    def _step(self, walker: Walker, name: str, terms: Terms) -> None:
        x, decay = walker.params[name], self._decay(walker, name)
        u, _ = direction(walker.state[MEAN][name], walker.state[MEAN_OF_SQUARES][name], self.optimizer.eps)
        if decay:
            u.add_(x * decay)
        x.sub_(u.mul_(terms.learning_rate))
