"""Gradients that our 1-bit rules and DeepSpeed's are both given, and what ours make of them.

Both begin with the same parameters; a peer's gradient is half the parameter plus noise drawn beforehand, so the only
way for the two to part is to compute differently.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, LambSpec
from skein.numeric.aggregate.one_bit.adam import OneBitAdamRule
from skein.numeric.aggregate.one_bit.freezing import ERROR, OneBit
from skein.numeric.aggregate.one_bit.lamb import FACTOR, RATIO, RATIO_WEIGHT, OneBitLambRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.gradients import flatten, unflatten
from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES
from skein.numeric.walker import Tensors, Walker
from tests.support.exchanges import exchange, talks_by_shard

Kind = Literal["adam", "lamb"]
DType = Literal["float32", "float64"]
Arrays = dict[str, NDArray[np.floating]]

_SHAPES: dict[str, tuple[int, ...]] = {"a": (24, 32), "b": (16, 32), "c": (64,)}
_LAST = "d"
"""In order of their names; vectors last, for DeepSpeed fuses what decays before what does not."""
RATE, BETAS, EPS, DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1
_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """What both are to do."""

    kind: Kind
    dtype: DType
    num_peers: int
    warmup_steps: int = 10
    num_steps: int = 40
    last_length: int = 32
    """Of the last parameter, a vector: 32 is what both can cut evenly."""
    divides_ratios: bool = False
    """Whether ours makes up for the mean of ratios having begun at zero."""
    floor: float = 0.0

    @property
    def name(self) -> str:
        return f"1-bit {self.kind.upper() if self.kind == 'lamb' else 'Adam'}, {self.num_peers} peers, {self.dtype}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name, in order."""
        return {**_SHAPES, _LAST: (self.last_length,)}

    @property
    def num_elements(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def start(self) -> NDArray[np.floating]:
        """(elements,): the parameters before the first step."""
        drawn: NDArray[np.floating] = np.random.default_rng(_SEED).standard_normal(self.num_elements)
        return drawn.astype(self.dtype)

    def noise(self) -> NDArray[np.floating]:
        """(steps, peers, elements)."""
        shape = (self.num_steps, self.num_peers, self.num_elements)
        drawn: NDArray[np.floating] = np.random.default_rng(_SEED + 1).standard_normal(shape)
        return drawn.astype(self.dtype)


def rule_of(contest: Contest) -> OneBit:
    """The rule with the settings that DeepSpeed is given, and without the floor that it lacks."""
    if contest.kind == "adam":
        return OneBitAdamRule(
            spec=aggregation.OneBitAdam(
                rule="one_bit_adam", warmup_steps=contest.warmup_steps, variance_floor=contest.floor
            ),
            optimizer=AdamWSpec(betas=BETAS, eps=EPS, weight_decay=DECAY),
        )
    return OneBitLambRule(
        spec=aggregation.OneBitLamb(rule="one_bit_lamb", warmup_steps=contest.warmup_steps, variance_floor=0),
        optimizer=LambSpec(name="lamb", betas=BETAS, eps=EPS, weight_decay=DECAY),
    )


def run_ours(contest: Contest) -> Arrays:
    """What our rules make of it, in the same arrays."""
    rule, noise = rule_of(contest), contest.noise()
    like = {name: torch.empty(shape) for name, shape in contest.shapes.items()}
    walkers = []
    for _ in range(contest.num_peers):
        params = {name: p.clone() for name, p in unflatten(torch.from_numpy(contest.start()), like).items()}
        walkers.append(Walker(params=params, state=rule.init(params)))
    seen = []
    for step in range(contest.num_steps):
        terms = Terms(step=step, learning_rate=RATE, gradient_scale=1.0)
        due = rule.spec.due(step)
        if not due:
            for walker in walkers:
                rule.local_step(walker, _gradients(walker, noise[step].mean(axis=0)), terms, talks=False)
        else:
            if due[0].round == 0 and contest.kind == "lamb" and not contest.divides_ratios:
                _leave_ratios_as_they_are(walkers)
            talks = talks_by_shard(due[0], num_members=contest.num_peers, num_shards=contest.num_peers)
            grads = [_gradients(walker, noise[step, me]) for me, walker in enumerate(walkers)]
            walkers = exchange(rule, walkers, grads, [terms] * contest.num_peers, talks)
        seen.append(flatten(walkers[0].params).numpy())
    return {"params": np.stack(seen)} | _kept(walkers)


def _gradients(walker: Walker, drawn: NDArray[np.floating]) -> Tensors:
    parts = unflatten(torch.from_numpy(drawn), walker.params)
    return {name: (param * 0.5).add_(parts[name]) for name, param in walker.params.items()}


def _leave_ratios_as_they_are(walkers: list[Walker]) -> None:
    """DeepSpeed does not divide them by their weight."""
    for walker in walkers:
        for weight in walker.state[RATIO_WEIGHT].values():
            weight.fill_(1.0)


def _kept(walkers: list[Walker]) -> Arrays:
    state = walkers[0].state

    def array(slot: str) -> NDArray[np.floating]:
        flat: NDArray[np.floating] = flatten(state[slot]).numpy()
        return flat

    kept = {"mean": array(MEAN), "mean_of_squares": array(MEAN_OF_SQUARES)}
    if RATIO in state:
        kept |= {"ratio": array(RATIO), "factor": array(FACTOR)}
    return kept | {"error": np.stack([flatten(walker.state[ERROR]).numpy() for walker in walkers])}


def sample(array: NDArray[np.floating]) -> list[float]:
    """Of the last step or peer every 43rd element, so that some of each parameter are among them."""
    last = array[-1] if array.ndim > 1 else array
    return [float(x) for x in (last[::43] if last.size > 43 else last)]
