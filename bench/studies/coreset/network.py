"""A small network on digits: trained on parts that are chosen anew; a part's gradient beside the whole's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bench.report import Row, spread
from bench.studies.coreset.arms import Arms
from bench.studies.coreset.problems import Labelled, Problem, digits
from skein import rng
from skein.numeric.coreset.choice import Choice, choose_by_chance, choose_coreset
from skein.numeric.coreset.features import last_layer

SEEDS = range(10)
REFRESH_EPOCHS = 5
_BATCH = 32
_RATE, _MOMENTUM = 0.02, 0.9
_FORWARD = 1 / 3
"""Work of a forward, as a part of a gradient's."""
_GRADIENT_EPOCHS = (0, 3, 12)

Params = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weights (64, 100), bias, weights (100, 10), bias: float64."""
Chosen = Callable[[Params, int], Choice]
"""Rows and weights by the parameters and the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per cent told right of rows held out, and mean loss over the rows trained on, in nats."""

    accuracy: float
    loss: float


def rows() -> Iterator[Row]:
    """Training on 20 % for 6n gradients and on 10 % for 3n; the gradient's error at three epochs."""
    accuracy, loss = _compare(0.2, 6)
    what = "MLP 64-100-10 on 20 % of digits, 6n gradients, 10 seeds"
    goal = "≥ 95.5 and ≥ random"
    yield accuracy.row(
        f"{what}: accuracy", "%", goal=goal, holds=lambda mine, chance: mine >= max(95.5, chance)
    )
    yield loss.row(
        f"{what}: loss over all rows", "nats", goal="≤ 0.9 of random's", holds=lambda a, b: a <= 0.9 * b
    )
    accuracy, loss = _compare(0.1, 3)
    what = "MLP 64-100-10 on 10 % of digits, 3n gradients, 10 seeds"
    yield accuracy.row(f"{what}: accuracy", "%", goal="≥ random + 3", holds=lambda a, b: a >= b + 3)
    yield loss.row(f"{what}: loss over all rows", "nats", goal="none", holds=lambda _a, _b: True)
    accuracy, loss = _compare(0.5, 6)
    what = "MLP 64-100-10 on 50 % of digits, 6n gradients, 10 seeds"
    yield accuracy.row(f"{what}: accuracy", "%", goal="none", holds=lambda _a, _b: True)
    yield loss.row(f"{what}: loss over all rows", "nats", goal="none", holds=lambda _a, _b: True)
    yield from _gradient_rows()


def _compare(fraction: float, num_passes: int) -> tuple[Arms, Arms]:
    """Accuracy and loss of all arms; `num_passes` times the rows is the number of gradients."""
    scores: dict[str, list[Scores]] = {}
    num_selections = len(range(0, round(num_passes / fraction), REFRESH_EPOCHS))
    work = num_passes + num_selections * _FORWARD
    for seed in SEEDS:
        problem = digits(seed)
        data = problem.trained
        mine, chance = _greedy(data, fraction, seed), _by_chance(data, fraction, seed)
        whole = _by_chance(data, 1.0, seed)
        for arm, chosen, passes in (
            ("coreset", mine, float(num_passes)),
            ("random", chance, num_passes),
            ("random_once", _once(chance), num_passes),
            ("random_same_work", chance, work),
            ("full_equal", whole, num_passes),
            ("full", whole, num_passes / fraction),
        ):
            params = train(data, chosen, num_gradients=round(passes * len(data.y_N)), seed=seed)
            scores.setdefault(arm, []).append(score(params, problem))
    accuracy = Arms(**{arm: tuple(x.accuracy for x in found) for arm, found in scores.items()})
    return accuracy, Arms(**{arm: tuple(x.loss for x in found) for arm, found in scores.items()})


def _greedy(data: Labelled, fraction: float, seed: int) -> Chosen:
    num_picks = round(fraction * len(data.y_N))

    def chosen(params: Params, epoch: int) -> Choice:
        hidden, error = features(params, data)
        return choose_coreset(last_layer(hidden, error), data.y_N, num_picks, seed=seed + epoch)

    return chosen


def _by_chance(data: Labelled, fraction: float, seed: int) -> Chosen:
    num_picks = round(fraction * len(data.y_N))
    return lambda _params, epoch: choose_by_chance(data.y_N, num_picks, seed=rng.key(seed, "chance", epoch))


def _once(chosen: Chosen) -> Chosen:
    """The choice of epoch 0, whatever the epoch."""
    return lambda params, _epoch: chosen(params, 0)


def train(data: Labelled, chosen: Chosen, *, num_gradients: int, seed: int) -> Params:
    """SGD with momentum on what `chosen` gives at every fifth epoch, in an order that `seed` draws."""
    params = initial(seed)
    moments = [torch.zeros_like(x) for x in params]
    num_left = num_gradients
    for epoch in count():
        if epoch % REFRESH_EPOCHS == 0:
            choice = chosen(params, epoch)
        order = rng.stream(seed, "order", epoch).permutation(len(choice.ids))
        for start in range(0, len(order), _BATCH):
            places = order[start : start + min(_BATCH, num_left)]
            gradients = gradient(params, data, choice.ids[places], choice.weights[places])
            for moment, found in zip(moments, gradients, strict=True):
                moment.mul_(_MOMENTUM).add_(found)
            first, second, third, fourth = (x - _RATE * m for x, m in zip(params, moments, strict=True))
            params = first, second, third, fourth
            num_left -= len(places)
            if not num_left:
                return params
    raise AssertionError


def _gradient_rows() -> Iterator[Row]:
    """Error of a 10 % part's gradient, of the whole network, along training on all rows."""
    problem = digits(0)
    data, num_rows = problem.trained, len(problem.trained.y_N)
    for epoch in _GRADIENT_EPOCHS:
        params = (
            train(data, _by_chance(data, 1.0, 0), num_gradients=epoch * num_rows, seed=0)
            if epoch
            else initial(0)
        )
        mine = _gradient_error(params, data, _greedy(data, 0.1, 0)(params, 0))
        chance = [_gradient_error(params, data, _by_chance(data, 0.1, seed)(params, 0)) for seed in range(20)]
        yield Row(
            what=f"gradient of the whole network on 10 % of digits, epoch {epoch}: relative error",
            value=mine,
            unit="of the gradient",
            against=f"random {fmean(chance):.4g}, mean of 20; all rows: 0",
            ratio=mine / fmean(chance),
            goal="ratio ≤ 0.65",
            holds=mine <= 0.65 * fmean(chance),
            spread=spread(chance),
        )


def _gradient_error(params: Params, data: Labelled, choice: Choice) -> float:
    ids = np.arange(len(data.y_N))
    whole = gradient(params, data, ids, np.ones(len(ids), np.float32))
    part = gradient(params, data, choice.ids, choice.weights)
    apart = sum(float((a - b).square().sum()) for a, b in zip(whole, part, strict=True))
    return float(np.sqrt(apart / sum(float(x.square().sum()) for x in whole)))


def initial(seed: int) -> Params:
    """Weights as He et al. scale them, biases zero."""
    generator = torch.Generator().manual_seed(seed)

    def layer(before: int, after: int) -> Tensor:
        scale = torch.tensor((2 / before) ** 0.5, dtype=torch.float64)
        return torch.randn(before, after, generator=generator, dtype=torch.float64) * scale

    zeros = (torch.zeros(size, dtype=torch.float64) for size in (100, 10))
    return layer(64, 100), next(zeros), layer(100, 10), next(zeros)


def features(params: Params, data: Labelled) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hidden states (N, 100) and errors (N, 10), of a forward alone."""
    images, classes = data.tensors
    hidden = _hidden(params, images)
    error = (hidden @ params[2] + params[3]).softmax(dim=1) - functional.one_hot(classes, 10)
    return hidden.numpy(), error.numpy()


def gradient(
    params: Params, data: Labelled, ids: NDArray[np.int64], weights: NDArray[np.float32]
) -> tuple[Tensor, ...]:
    """Gradient of the rows' weighted losses over their number."""
    images, classes = torch.from_numpy(data.x_ND[ids]), torch.from_numpy(data.y_N[ids])
    watched = tuple(x.detach().requires_grad_() for x in params)
    hidden = (images @ watched[0] + watched[1]).relu()
    losses = functional.cross_entropy(hidden @ watched[2] + watched[3], classes, reduction="none")
    return torch.autograd.grad((torch.from_numpy(weights) * losses).mean(), watched)


def score(params: Params, problem: Problem) -> Scores:
    """Accuracy on the rows held out, loss over those trained on."""
    images, classes = problem.held_out.tensors
    told = _hidden(params, images) @ params[2] + params[3]
    trained, trained_classes = problem.trained.tensors
    loss = functional.cross_entropy(_hidden(params, trained) @ params[2] + params[3], trained_classes)
    return Scores(accuracy=100 * float((told.argmax(dim=1) == classes).double().mean()), loss=float(loss))


def _hidden(params: Params, images: Tensor) -> Tensor:
    return (images @ params[0] + params[1]).relu()
