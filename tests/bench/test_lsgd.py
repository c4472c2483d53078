"""What the comparison of leader SGD stands on: gradients, the baseline's equations, and the double well's figures."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bench.aggregating import lsgd
from bench.aggregating.easgd import tied
from bench.aggregating.landscapes import Landscape, double_well, factorisation


def flock(seed: int, *, num: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(num)]


@pytest.mark.parametrize("place", [double_well(), factorisation(3, seed=1, learning_rate=0.2)])
def test_gradients_are_those_of_the_loss(place: Landscape) -> None:
    x, size = place.starts[0], 1e-6
    direction = torch.ones_like(x)
    rise = (place.loss(x + size * direction) - place.loss(x - size * direction)) / (2 * size)
    # Central differences are off by size squared times the third derivative, and by rounding over size.
    assert float((place.grad(x) * direction).sum()) == pytest.approx(rise, rel=1e-6)


def test_elastic_ties_move_workers_and_centre_but_not_their_sum() -> None:
    found = tied(flock(0), elasticity=0.2)
    before = torch.stack([*found.workers, found.centre]).sum(dim=0)
    for _ in range(5):
        found.step([torch.zeros(3, dtype=torch.float64)] * 4, learning_rate=0.1)
    # Sums of five numbers of order one, in float64.
    torch.testing.assert_close(
        torch.stack([*found.workers, found.centre]).sum(dim=0), before, atol=1e-14, rtol=0
    )


def test_both_sides_of_a_tie_use_what_was_before() -> None:
    found = tied([torch.tensor([1.0]), torch.tensor([3.0])], elasticity=0.25)
    found.step([torch.tensor([2.0]), torch.tensor([0.0])], learning_rate=0.5)
    # Centre 2: 1 - 0.5 * 2 + 0.25, 3 - 0.25, and 2 + 0.25 * (-1 + 1).
    assert [x.item() for x in (*found.workers, found.centre)] == [0.25, 2.75, 2.0]


def test_workers_without_elasticity_are_alone() -> None:
    found = tied(flock(1), elasticity=0.0)
    found.step(flock(2), learning_rate=0.5)
    for x, start, grad in zip(found.workers, flock(1), flock(2), strict=True):
        assert torch.equal(x, start - 0.5 * grad)


def test_leader_sgd_leaves_the_shallow_well_and_elastic_averaging_stays_on_its_slopes() -> None:
    distance, slope = lsgd.well_rows()
    assert distance.holds
    assert slope.holds
    stuck = lsgd.averaged(double_well(), elasticity=lsgd.WELL_PULL)
    for _ in range(lsgd.WELL_STEPS):
        points: Sequence[Tensor] = next(stuck)
    assert [float(x) for x in points] == pytest.approx([0.6624, -0.7446, -0.0411], abs=5e-5)


def test_fewer_steps_are_needed_to_a_factor_than_by_elastic_averaging() -> None:
    place = factorisation(5, seed=0, learning_rate=0.3)
    counts = {label: lsgd.num_steps_to(place, trace) for label, trace in lsgd.traces(place).items()}
    assert counts[lsgd.LSGD] < min(counts[label] for label in lsgd.EASGD)


def test_a_goal_that_is_never_reached_takes_for_ever() -> None:
    place = double_well()
    assert lsgd.num_steps_to(place, iter([place.starts] * 3)) == 1
    high = [torch.zeros(1, dtype=torch.float64)]
    assert lsgd.num_steps_to(place, iter([high] * 3)) == math.inf
