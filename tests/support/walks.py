"""Walkers on quadratic problems, for rules of many local steps: gradients are curvature * (params - target)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.config.rule import Due
from skein.numeric.aggregate.diloco import DiLoCoRule
from skein.numeric.aggregate.rule import Rule, Terms
from skein.numeric.walker import Walker
from tests.support.exchanges import InFlight, Weights, put, take, talks_by_shard

SHAPES: Mapping[str, tuple[int, ...]] = {"a.weight": (5, 7), "b.bias": (3,), "c.weight": (4, 4, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What one walker sees: every element pulled to a target of its own."""

    curvature: Mapping[str, Tensor]
    target: Mapping[str, Tensor]

    def grads(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(params - target) * curvature."""
        return {name: (params[name] - self.target[name]) * self.curvature[name] for name in params}


def drawn(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Normal tensors of SHAPES."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def problem(seed: int, *, dtype: torch.dtype = torch.float32) -> Problem:
    """With curvatures from 0.5 to 1.5."""
    curvature = {name: tensor.sigmoid() + 0.5 for name, tensor in drawn(2 * seed + 1, dtype=dtype).items()}
    return Problem(curvature=curvature, target=drawn(2 * seed, dtype=dtype))


def walkers_at(rule: Rule, num_walkers: int, *, dtype: torch.dtype = torch.float32) -> list[Walker]:
    """New walkers, all at the same point."""
    return [_walker_at(rule, drawn(99, dtype=dtype)) for _ in range(num_walkers)]


def _walker_at(rule: Rule, params: dict[str, Tensor]) -> Walker:
    return Walker(params=params, state=rule.init(params))


def terms_at(step: int) -> Terms:
    """A learning rate that falls, and gradients that are sums over two tokens."""
    return Terms(step=step, learning_rate=0.1 / (1 + step // 8), gradient_scale=0.5)


@dataclass(slots=True, kw_only=True)
class Walk:
    """Walkers under a rule, each on its own problem; exchanges are applied as many steps later as they say."""

    rule: DiLoCoRule
    walkers: list[Walker]
    problems: Sequence[Problem]
    num_shards: int = 3
    weights: Weights = ()
    step: int = 0

    def run(self, num_steps: int) -> list[InFlight]:
        """Makes so many steps; gives back the exchanges that were taken."""
        taken: list[InFlight] = []
        waiting: dict[int, list[InFlight]] = {}
        for step in range(self.step, self.step + num_steps):
            terms = terms_at(step)
            for walker, own in zip(self.walkers, self.problems, strict=True):
                self.rule.local_step(walker, own.grads(walker.params), terms, talks=False)
            for due in self.rule.spec.due(step):
                taken.append(self.take(due))
                waiting.setdefault(step + due.overlap_steps, []).append(taken[-1])
            for exchange in waiting.pop(step, []):
                put(self.rule, self.walkers, exchange, [terms] * len(self.walkers))
        self.step += num_steps
        return taken

    def take(self, due: Due) -> InFlight:
        """One exchange of all walkers, not applied."""
        talks = talks_by_shard(
            due, num_members=len(self.walkers), num_shards=self.num_shards, weights=self.weights
        )
        return take(self.rule, self.walkers, talks)


def walk_of(
    rule: DiLoCoRule, num_walkers: int, *, num_shards: int = 3, dtype: torch.dtype = torch.float32
) -> Walk:
    """Walkers at one point, before problems that differ."""
    return Walk(
        rule=rule,
        walkers=walkers_at(rule, num_walkers, dtype=dtype),
        problems=[problem(i, dtype=dtype) for i in range(num_walkers)],
        num_shards=num_shards,
    )
