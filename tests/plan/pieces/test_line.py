"""Lines through measured times."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.pieces.line import LEAST_SIZES, fitted_line


@given(
    alpha_s=st.floats(0, 1),
    beta_s=st.floats(1e-6, 1),
    sizes=st.lists(st.integers(1, 10_000), min_size=LEAST_SIZES, max_size=20, unique=True),
)
def test_a_line_goes_through_what_lies_on_one(alpha_s: float, beta_s: float, sizes: list[int]) -> None:
    line = fitted_line(sizes, [alpha_s + beta_s * x for x in sizes])
    assert line.alpha_s == pytest.approx(alpha_s, abs=1e-6 * max(1, beta_s * max(sizes)))
    assert line.beta_s == pytest.approx(beta_s, rel=1e-6)
    assert line.r_squared == pytest.approx(1, abs=1e-6)


def test_no_call_takes_less_than_no_time() -> None:
    sizes = range(1, 11)
    # 33 ms for 8 MiB where 1 MiB takes 1.4: no line with an alpha of at least 0 is a good one, and R² says so.
    line = fitted_line(sizes, [x**2 * 1e-3 for x in sizes])
    assert line.alpha_s == 0
    assert line.seconds(0) == 0
    assert 0.8 < line.r_squared < 0.97
    shorter = fitted_line(sizes, [1 / x for x in sizes])
    assert (shorter.beta_s, shorter.alpha_s > 0) == (0, True)


def test_noise_shows_in_r_squared() -> None:
    draw = Random(3)
    sizes = range(1, 33)
    found = [
        fitted_line(sizes, [1 + 0.1 * x + draw.gauss(0, noise) for x in sizes]).r_squared
        for noise in (0, 1, 10)
    ]
    assert found[0] == pytest.approx(1)
    assert found[0] > found[1] > found[2]


def test_few_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="7 sizes: measure 8 at least"):
        fitted_line([1, 2, 3, 4, 5, 6, 7, 7], [1.0] * 8)
