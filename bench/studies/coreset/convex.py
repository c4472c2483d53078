"""Softmax regression to its optimum on a part: how far the full objective then is above its own optimum.

The part is chosen by inputs, once; then, as a job does, anew by the last layer of the model that it has led to.
"""

from collections.abc import Callable, Iterator
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.report import Row, spread
from bench.studies.coreset.problems import Labelled, Problem, covers, digits
from skein.numeric.coreset.choice import Choice, choose_by_chance, choose_coreset
from skein.numeric.coreset.features import Features, last_layer, vectors

_L2 = 1e-3
_NUM_RANDOM = 5
_GOALS = (("digits", digits, 0.6), ("covers", covers, 0.3))
_FRACTIONS = (0.1, 0.3)
_NUM_REFRESHES = 2


def rows() -> Iterator[Row]:
    """Each set at 10 % and 30 %, by inputs and then anew by the last layer, beside five random parts and the whole."""
    for name, make, most in _GOALS:
        problem = make(0)
        yield from _rows(name, problem, most)


def _rows(name: str, problem: Problem, most: float) -> Iterator[Row]:
    data = problem.trained
    best = optimum(data, torch.ones(len(data.y_N), dtype=torch.float64))
    least = objective(best, data)
    for fraction in _FRACTIONS:
        num_picks = round(fraction * len(data.y_N))
        by_inputs = on_part(data, choose_coreset(vectors(data.x_ND), data.y_N, num_picks))
        by_model = by_inputs
        for _ in range(_NUM_REFRESHES):
            by_model = on_part(data, choose_coreset(traits(by_model, data), data.y_N, num_picks))
        chances = [choose_by_chance(data.y_N, num_picks, seed=seed) for seed in range(_NUM_RANDOM)]
        by_chance = [on_part(data, chance) for chance in chances]
        random = [objective(x, data) - least for x in by_chance]
        full = accuracy(best, problem.held_out)
        chance_accuracy = fmean(accuracy(x, problem.held_out) for x in by_chance)
        for how, found in (
            ("inputs", by_inputs),
            (f"inputs, then {_NUM_REFRESHES} times the last layer", by_model),
        ):
            what = f"softmax regression on {fraction:.0%} of {name}, by {how}"
            # Goals are for 10 % and what jobs do; more is measured, to see where the method stops to matter.
            has_goal = fraction == _FRACTIONS[0] and found is by_model
            residual = objective(found, data) - least
            yield Row(
                what=f"{what}: objective over all rows, above its optimum",
                value=residual,
                unit="nats",
                against=f"random {fmean(random):.4g}, mean of {_NUM_RANDOM}; all rows: 0",
                ratio=residual / fmean(random),
                goal=f"ratio ≤ {most}" if has_goal else "none",
                holds=not has_goal or residual <= most * fmean(random),
                spread=spread(random),
            )
            mine = accuracy(found, problem.held_out)
            has_goal = has_goal and name == "covers"
            yield Row(
                what=f"{what}: accuracy on rows held out",
                value=mine,
                unit="%",
                against=f"all rows {full:.2f}; random {chance_accuracy:.2f}",
                ratio=mine / full,
                goal="at most 0.5 points below all rows" if has_goal else "none",
                holds=not has_goal or mine >= full - 0.5,
                spread=0.0,
            )


def traits(params: Tensor, data: Labelled) -> Features:
    """Gradients of rows at the model, which is its own last layer."""
    images, classes = data.tensors
    logits = _logits(params, images)
    error = logits.softmax(dim=1) - functional.one_hot(classes, logits.shape[1])
    return last_layer(data.x_ND, error.numpy())


def on_part(data: Labelled, choice: Choice) -> Tensor:
    """Optimum of a choice's weighted objective."""
    part = Labelled(x_ND=data.x_ND[choice.ids], y_N=data.y_N[choice.ids])
    return optimum(part, torch.from_numpy(choice.weights.astype(np.float64)))


def optimum(data: Labelled, weights_N: Tensor) -> Tensor:
    """(D + 1, C), float64: the last row is the bias."""
    images, classes = data.tensors
    params = torch.zeros(images.shape[1] + 1, 10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [params], max_iter=2000, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        found = _objective(params, images, classes, weights_N)
        found.backward()  # type: ignore[no-untyped-call]
        return float(found.detach())

    step: Callable[[Callable[[], float]], object] = optimizer.step
    step(closure)
    return params.detach()


def objective(params: Tensor, data: Labelled) -> float:
    """Mean cross entropy over all rows, in nats, with its decay."""
    return float(_objective(params, *data.tensors, torch.ones(len(data.y_N), dtype=torch.float64)))


def accuracy(params: Tensor, data: Labelled) -> float:
    """Per cent of rows that are told right."""
    images, classes = data.tensors
    return 100 * float((_logits(params, images).argmax(dim=1) == classes).double().mean())


def _objective(params: Tensor, images: Tensor, classes: Tensor, weights_N: Tensor) -> Tensor:
    losses = functional.cross_entropy(_logits(params, images), classes, reduction="none")
    return (weights_N * losses).mean() + _L2 / 2 * params.square().sum()


def _logits(params: Tensor, images: Tensor) -> Tensor:
    return images @ params[:-1] + params[-1]
