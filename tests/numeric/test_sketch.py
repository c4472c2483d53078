"""Sketches: linear, the same under every cut, and near the truth about differences."""

import math

import pytest
import torch

from skein.numeric.gradients import sketch
from skein.numeric.sketch import SKETCH_LENGTH, added, distance


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_parts_of_a_model_add_up_to_the_whole_whichever_way_it_is_cut() -> None:
    whole = {"a": drawn(40, 7), "b": drawn(333, seed=1)}
    one = sketch(whole, 5)
    assert len(one) == SKETCH_LENGTH
    assert added(sketch({name: tensor}, 5) for name, tensor in whole.items()) == pytest.approx(one, rel=1e-12)


def test_sketches_are_linear() -> None:
    a, b = {"x": drawn(1000)}, {"x": drawn(1000, seed=1)}
    both = sketch({"x": a["x"].double() + b["x"].double()}, 9)
    assert both == pytest.approx(added([sketch(a, 9), sketch(b, 9)]), rel=1e-9)


def test_another_seed_or_name_is_another_sketch() -> None:
    x = drawn(1000)
    assert len({sketch({"x": x}, 1), sketch({"x": x}, 2), sketch({"y": x}, 1)}) == 3


def test_long_tensors_are_sketched_in_pieces_as_if_in_one() -> None:
    long = torch.ones(3_000_017)
    values = sketch({"x": long}, 4)
    # Each is a sum of as many signs, whose standard deviation is the root of their number.
    assert max(map(abs, values)) < 5 * math.sqrt(long.numel() / SKETCH_LENGTH)
    assert len({round(value) for value in values}) > SKETCH_LENGTH // 2


@pytest.mark.parametrize("share", [1e-3, 0.1, 2.0])
def test_a_difference_shows_about_as_large_as_it_is(share: float) -> None:
    x, noise = drawn(20_000).double(), drawn(20_000, seed=1).double()
    true = share / max(1.0, math.hypot(1.0, share))
    found = [distance(sketch({"x": x}, seed), sketch({"x": x + share * noise}, seed)) for seed in range(20)]
    assert all(true / 3 < one < 3 * true for one in found)
    assert true / 1.2 < sum(found) / len(found) < 1.2 * true


def test_no_lie_that_is_made_for_one_seed_hides_under_another() -> None:
    x = drawn(5_000).double()
    signs = torch.tensor(
        [sketch({"x": one}, 1) for one in torch.eye(64, dtype=torch.float64)], dtype=torch.float64
    )
    lie = torch.zeros(5_000, dtype=torch.float64)
    lie[:64] = torch.linalg.svd(signs.T).Vh[-1] * 100
    assert distance(sketch({"x": x}, 1), sketch({"x": x + lie}, 1)) < 1e-9
    assert distance(sketch({"x": x}, 2), sketch({"x": x + lie}, 2)) > 0.1


def test_what_is_not_finite_equals_only_its_like() -> None:
    nan = sketch({"x": torch.tensor([1.0, math.nan])}, 1)
    assert distance(nan, nan) == 0
    assert distance(nan, sketch({"x": torch.ones(2)}, 1)) == math.inf
