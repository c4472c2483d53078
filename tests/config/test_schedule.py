"""The learning rate over a job."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.config.optimizer import AdamWSpec
from skein.config.schedule import learning_rate


def spec(*, warmup_steps: int, ratio: float = 0.1) -> AdamWSpec:
    return AdamWSpec(learning_rate=2e-3, warmup_steps=warmup_steps, final_learning_rate_ratio=ratio)


@given(
    warmup_steps=st.integers(0, 50),
    steps_after=st.integers(1, 100),
    ratio=st.floats(0, 1),
)
def test_it_rises_to_the_peak_and_falls_to_the_floor(
    warmup_steps: int, steps_after: int, ratio: float
) -> None:
    optimizer, total_steps = spec(warmup_steps=warmup_steps, ratio=ratio), warmup_steps + steps_after + 1
    rates = [learning_rate(optimizer, step, total_steps) for step in range(total_steps)]
    top = max(warmup_steps - 1, 0)
    assert rates[top] == max(rates) == 2e-3
    assert all(earlier < later for earlier, later in pairwise(rates[: top + 1]))
    assert all(earlier >= later for earlier, later in pairwise(rates[top:]))
    assert rates[-1] == pytest.approx(2e-3 * ratio, rel=1e-12, abs=1e-18)


def test_the_first_step_already_learns() -> None:
    assert learning_rate(spec(warmup_steps=20), 0, 100) == pytest.approx(2e-3 / 20, rel=1e-15)  # one rounding
    assert learning_rate(spec(warmup_steps=0), 0, 100) == 2e-3


def test_a_job_shorter_than_its_warm_up_ends_on_the_line() -> None:
    assert learning_rate(spec(warmup_steps=20), 9, 10) == 2e-3 / 2
    assert learning_rate(spec(warmup_steps=10), 9, 10) == 2e-3


def test_a_job_of_one_step_trains_at_the_peak() -> None:
    assert learning_rate(spec(warmup_steps=0), 0, 1) == 2e-3


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_that_the_job_has_not_is_refused(step: int) -> None:
    with pytest.raises(ValueError, match="not one of 10"):
        learning_rate(spec(warmup_steps=2), step, 10)
