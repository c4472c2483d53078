"""Why leaders are elected on a shared probe: four walkers learn digits, each from classes that the others never see.

By its own training loss the walker with the easiest classes leads for ever, and pulls the others to what knows no other
classes. On samples of all classes, equal for all, whoever knows most leads.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

import torch

from bench.report import Row, spread
from bench.studies.aggregation.digits_mlp import Samples, batch, gradient, initial, loss, split
from skein.config.aggregation import Lsgd
from skein.config.rule import Due, Reach
from skein.numeric.aggregate.lsgd import LsgdRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.optim.sgd import Sgd
from skein.numeric.walker import Walker
from skein.plan.agreeing.election import elect, probe_positions
from tests.support.exchanges import led_by, put, take, talks_by_shard

NUM_WALKERS = 4
SEEDS = (0, 1, 2)
_NUM_STEPS = 400
_BATCH, _PROBE, _NUM_HELD_OUT = 32, 256, 360
_WINDOW = 10
"""Of how many batches a walker's own score is the mean."""
_LEARNING_RATE, _MOMENTUM = 0.05, 0.9


class Score(StrEnum):
    """What leaders are elected by."""

    PROBE = "shared probe"
    OWN = "own training loss"
    NOTHING = "no exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Images (N, 64) and classes (N,): what walkers train on, each its own, and what is held out."""

    shards: tuple[Samples, ...]
    held_out: Samples


def rows(*, is_quick: bool) -> Iterator[Row]:
    """Loss on all training data, and on data held out, of the walkers' average, by what leaders are elected by."""
    seeds, num_steps = (SEEDS[:1], 40) if is_quick else (SEEDS, _NUM_STEPS)
    losses = {score: [trained(score, seed=seed, num_steps=num_steps) for seed in seeds] for score in Score}
    for score in (Score.PROBE, Score.NOTHING):
        ratios = [mine / other for mine, other in zip(losses[score], losses[Score.OWN], strict=True)]
        is_judged = score is Score.PROBE
        yield Row(
            what=f"digits, 4 walkers with unlike classes, {score}: loss of the average on held-out data",
            value=median(losses[score]),
            unit="nats",
            against=f"{Score.OWN}: {median(losses[Score.OWN]):.4f}",
            ratio=median(ratios),
            goal="ratio < 1 for every seed" if is_judged else "none",
            holds=not is_judged or max(ratios) < 1,
            spread=spread(losses[score]),
        )


def trained(score: Score, *, seed: int, num_steps: int) -> float:
    """Loss on the data held out, in nats, of the average of the walkers after so many steps."""
    data = _data(seed)
    spec = Lsgd(rule="lsgd", local_every_steps=4, global_every_steps=4, groups="all")
    rule = LsgdRule(spec=spec, optimizer=Sgd(momentum=_MOMENTUM, nesterov=True, weight_decay=0.0))
    starts = [initial(seed) for _ in range(NUM_WALKERS)]
    walkers = [Walker(params=params, state=rule.init(params)) for params in starts]
    own: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in walkers]
    for step in range(num_steps):
        terms = Terms(step=step, learning_rate=_LEARNING_RATE, gradient_scale=1.0)
        dues = () if score is Score.NOTHING else rule.spec.due(step)
        scores = _scores(score, walkers, own, data, seed=seed, step=step) if dues else []
        for place, walker in enumerate(walkers):
            drawn = batch(data.shards[place], size=_BATCH, seed=seed, walker=place, step=step)
            mean, grads = gradient(walker.params, drawn)
            own[place].append(mean)
            rule.local_step(walker, grads, terms, talks=bool(dues))
        for due in dues:
            _exchange(rule, walkers, due, scores, terms)
    average = {name: torch.stack([w.params[name] for w in walkers]).mean(dim=0) for name in walkers[0].params}
    return float(loss(average, data.held_out))


def _exchange(
    rule: LsgdRule, walkers: Sequence[Walker], due: Due, scores: Sequence[float], terms: Terms
) -> None:
    assert due.reach is Reach.ALL
    leader = elect({place: (score, "") for place, score in enumerate(scores)})
    if leader is not None:
        talks = talks_by_shard(due, num_members=len(walkers), num_shards=1)
        found = take(rule, walkers, [led_by(talk, leader) for talk in talks])
        put(rule, walkers, found, [terms] * len(walkers))


def _scores(
    score: Score,
    walkers: Sequence[Walker],
    own: Sequence[Sequence[float]],
    data: Data,
    *,
    seed: int,
    step: int,
) -> list[float]:
    """By walker, at the parameters that the step begins with."""
    if score is Score.OWN:
        return [fmean(losses) for losses in own]
    images, classes = data.held_out
    chosen = list(probe_positions(seed, step, num_samples=_PROBE, num_validation=len(classes)))
    return [float(loss(walker.params, (images[chosen], classes[chosen]))) for walker in walkers]


def _data(seed: int) -> Data:
    """Training data sorted by class and cut in four; the rest is a sample of all classes."""
    found = split(seed, num_held_out=_NUM_HELD_OUT)
    images, classes = found.trained
    parts = classes.argsort(stable=True).tensor_split(NUM_WALKERS)
    return Data(shards=tuple((images[part], classes[part]) for part in parts), held_out=found.held_out)
