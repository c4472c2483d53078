"""LAMB. The rules of `elementwise` hold here."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES, WithMoments
from skein.numeric.optim.elementwise import (
    average_moments,
    check_update,
    norm_of,
    pieces,
    root,
    row_sums_of_squares,
    scratch_rows,
)
from skein.numeric.optim.groups import decayed_names
from skein.numeric.walker import Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class Lamb(WithMoments):
    """Adam's direction, scaled tensor by tensor with the ratio of the norms of parameter and direction."""

    min_ratio: float
    max_ratio: float
    bias_correction: bool

    @torch.no_grad()
    def update(
        self,
        walker: Walker,
        grads: Mapping[str, Tensor],
        *,
        learning_rate: float,
        gradient_scale: float,
    ) -> None:
        """Make one update with g = gradient_scale * grad, in the dtype of the parameter, norms in float64:

            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            u = m / (sqrt(v) + eps) + weight_decay * p              the last only if decayed
            c = |p| / |u|, at least min_ratio and at most max_ratio; 1 if either norm is 0
            p = p - learning_rate * c * u

        With `bias_correction` u has m / (1 - beta1**t) and v / (1 - beta2**t), t = walker.num_updates + 1.

        Source: You et al., "Large Batch Optimization for Deep Learning" (2020), Algorithm 2, with the ratio bounded as
        in DeepSpeed's 1-bit LAMB (`runtime/fp16/onebit/lamb.py`), warm-up stage.

        >>> rule = Lamb(betas=(0.0, 0.0), eps=0.0, weight_decay=0.0, min_ratio=0.0, max_ratio=10.0,
        ...             bias_correction=False)
        >>> params = {"w": torch.tensor([3.0, 4.0])}
        >>> walker = Walker(params=params, state=rule.init(params))
        >>> rule.update(walker, {"w": torch.ones(2)}, learning_rate=0.5, gradient_scale=1.0)
        >>> [round(x, 3) for x in walker.params["w"].tolist()]  # 3 and 4, less 0.5 * 5 / sqrt(2)
        [1.232, 2.232]
        """
        check_update(walker, grads, self.slots)
        sweep = _Sweep(
            betas=self.betas,
            eps=self.eps,
            gradient_scale=gradient_scale,
            inverse=self._inverses(walker.num_updates + 1),
            rows=scratch_rows(walker.params, num_rows=2),
            squares=scratch_rows(walker.params, num_rows=1, dtype=torch.float64)[0],
        )
        decayed = decayed_names(walker.params)
        for name in sorted(walker.params):
            decay = self.weight_decay if name in decayed else 0.0
            moments = walker.state[MEAN][name], walker.state[MEAN_OF_SQUARES][name]
            param_norm, norm = sweep.average(walker.params[name], grads[name], *moments, decay=decay)
            size = learning_rate * self._ratio(param_norm, norm)
            sweep.move(walker.params[name], *moments, decay=decay, size=size)
        walker.num_updates += 1

    def _inverses(self, count: int) -> tuple[float, float]:
        """Factors on m and on the root of v."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1.0 / (1.0 - self.betas[0] ** count), (1.0 - self.betas[1] ** count) ** -0.5

    def _ratio(self, param_norm: float, norm: float) -> float:
        if not (param_norm > 0.0 and norm > 0.0):
            return 1.0
        return min(max(param_norm / norm, self.min_ratio), self.max_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """The numbers and the scratch memory of one update. Directions are computed twice: keeping them takes memory."""

    betas: tuple[float, float]
    eps: float
    gradient_scale: float
    inverse: tuple[float, float]
    rows: Tensor
    squares: Tensor

    def average(
        self, param: Tensor, grad: Tensor, mean: Tensor, mean_of_squares: Tensor, *, decay: float
    ) -> tuple[float, float]:
        """Updates the moments of one tensor; the norms of parameter and direction."""
        param_sums: list[float] = []
        sums: list[float] = []
        for p, g, m, v in pieces(param, grad, mean, mean_of_squares):
            rows = self.rows[0, : p.numel()], self.rows[1, : p.numel()]
            average_moments(g, m, v, betas=self.betas, gradient_scale=self.gradient_scale, rows=rows)
            param_sums += row_sums_of_squares(p, self.squares)
            sums += row_sums_of_squares(self._direction(p, m, v, decay=decay), self.squares)
        return norm_of(param_sums), norm_of(sums)

    def move(
        self, param: Tensor, mean: Tensor, mean_of_squares: Tensor, *, decay: float, size: float
    ) -> None:
        for p, m, v in pieces(param, mean, mean_of_squares):
            p.sub_(self._direction(p, m, v, decay=decay).mul_(size))

    def _direction(self, p: Tensor, m: Tensor, v: Tensor, *, decay: float) -> Tensor:
        """u of one piece, in scratch memory."""
        x, u = self.rows[0, : p.numel()], self.rows[1, : p.numel()]
        denominator = root(v, out=x).mul_(self.inverse[1]).add_(self.eps)
        torch.mul(m, self.inverse[0], out=u).div_(denominator)
        return u.add_(torch.mul(p, decay, out=x)) if decay else u
