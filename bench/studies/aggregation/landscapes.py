"""Losses on which methods with several walkers part ways: a double well, and a matrix of low rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.config.aggregation import Lsgd
from skein.numeric.aggregate.lsgd import LsgdRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.optim.sgd import Sgd
from skein.numeric.walker import Walker
from skein.plan.agreeing.election import elect
from tests.support.exchanges import led_by, put, take, talks_by_shard

_SIZE = 100
"""Rows and columns of the matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape:
    """A loss, its exact gradient, where walkers start, and a step size that suits it."""

    loss: Callable[[Tensor], float]
    grad: Callable[[Tensor], Tensor]
    starts: tuple[Tensor, ...]
    learning_rate: float


def double_well() -> Landscape:
    """(x² - 1)² / 4 + 0.02 x: minima near 1 and, a little deeper, near -1; a walker on either side of the hump."""

    def loss(x: Tensor) -> float:
        return float((x * x - 1) ** 2 / 4 + 0.02 * x)

    starts = tuple(torch.tensor([at], dtype=torch.float64) for at in (0.9, -0.9))
    return Landscape(loss=loss, grad=lambda x: x * x * x - x + 0.02, starts=starts, learning_rate=0.1)


def factorisation(rank: int, *, seed: int, learning_rate: float, num_walkers: int = 8) -> Landscape:
    """|M - X X'|² / 4 for a 100 x 100 matrix M of this rank, from starts near zero."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(_SIZE, rank, generator=generator, dtype=torch.float64) / _SIZE**0.5
    matrix = root @ root.T

    def loss(x: Tensor) -> float:
        return float((matrix - x @ x.T).square().sum() / 4)

    def grad(x: Tensor) -> Tensor:
        slope: Tensor = (x @ x.T - matrix) @ x
        return slope

    starts = [torch.randn(_SIZE, rank, generator=generator, dtype=torch.float64) for _ in range(num_walkers)]
    return Landscape(loss=loss, grad=grad, starts=tuple(x * 0.1 for x in starts), learning_rate=learning_rate)


class LeaderSteps:
    """Walkers of our rule `lsgd` on a landscape, in one group, scored by exact loss."""

    def __init__(self, place: Landscape, *, pull: float) -> None:
        self._place = place
        spec = Lsgd(rule="lsgd", local_every_steps=1, global_every_steps=1, groups="all", global_pull=pull)
        self._rule = LsgdRule(spec=spec, optimizer=Sgd(momentum=0.0, nesterov=False, weight_decay=0.0))
        params = [{"x": x.clone()} for x in place.starts]
        self._walkers = [Walker(params=x, state=self._rule.init(x)) for x in params]
        self._scores: dict[int, tuple[float, str]] = {}

    @property
    def points(self) -> list[Tensor]:
        return [walker.params["x"] for walker in self._walkers]

    def local_step(self, walker: int, terms: Terms, *, talks: bool) -> None:
        """One walker alone; before an exchange it is scored where the step begins."""
        at = self._walkers[walker]
        if talks:
            self._scores[walker] = (self._place.loss(at.params["x"]), "")
        self._rule.local_step(at, {"x": self._place.grad(at.params["x"])}, terms, talks=talks)

    def exchange(self, terms: Terms) -> None:
        """All are pulled to where the last step of the one with the lowest score began."""
        leader = elect(self._scores)
        if leader is None:
            raise ValueError(f"nobody has a finite loss: {self._scores}")
        (due,) = self._rule.spec.due(terms.step)
        talks = talks_by_shard(due, num_members=len(self._walkers), num_shards=1)
        found = take(self._rule, self._walkers, [led_by(talk, leader) for talk in talks])
        put(self._rule, self._walkers, found, [terms] * len(self._walkers))

    def step(self, step: int) -> None:
        """One step of all, and an exchange."""
        terms = terms_of(self._place, step)
        for walker in range(len(self._walkers)):
            self.local_step(walker, terms, talks=True)
        self.exchange(terms)


def terms_of(place: Landscape, step: int) -> Terms:
    """The landscape's step size, and gradients as they are."""
    return Terms(step=step, learning_rate=place.learning_rate, gradient_scale=1.0)


def best_loss(place: Landscape, points: Sequence[Tensor]) -> float:
    """The lowest loss of any of these points."""
    return min(place.loss(x) for x in points)
