"""The learning rate over a job."""

from itertools import pairwise
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skein.config.optimizer import AdamWSpec
from skein.config.schedule import learning_rate

Schedule = Literal["cosine", "linear", "constant"]


def spec(*, warmup_steps: int, ratio: float = 0.1, schedule: Schedule = "cosine") -> AdamWSpec:
    return AdamWSpec(
        learning_rate=2e-3, warmup_steps=warmup_steps, final_learning_rate_ratio=ratio, schedule=schedule
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@given(
    warmup_steps=st.integers(0, 50),
    steps_after=st.integers(1, 100),
    ratio=st.floats(0, 1),
)
def test_it_rises_to_the_peak_and_falls_to_the_floor(
    schedule: Schedule, warmup_steps: int, steps_after: int, ratio: float
) -> None:
    optimizer = spec(warmup_steps=warmup_steps, ratio=ratio, schedule=schedule)
    total_steps = warmup_steps + steps_after + 1
    rates = [learning_rate(optimizer, step, total_steps) for step in range(total_steps)]
    top = max(warmup_steps - 1, 0)
    assert rates[top] == max(rates) == 2e-3
    assert all(earlier < later for earlier, later in pairwise(rates[: top + 1]))
    assert all(earlier >= later for earlier, later in pairwise(rates[top:]))
    assert rates[-1] == pytest.approx(2e-3 * ratio, rel=1e-12, abs=1e-18)


def test_a_line_falls_by_the_same_at_every_step() -> None:
    optimizer = spec(warmup_steps=3, ratio=0.2, schedule="linear")
    falling = [learning_rate(optimizer, step, 11) for step in range(2, 11)]
    # Two roundings of numbers of order 1e-3.
    assert [a - b for a, b in pairwise(falling)] == pytest.approx([2e-3 * 0.8 / 8] * 8, abs=1e-18)


def test_a_constant_rate_stays_at_the_peak_after_its_warm_up() -> None:
    optimizer = spec(warmup_steps=2, schedule="constant")
    assert [learning_rate(optimizer, step, 5) for step in range(5)] == [1e-3, 2e-3, 2e-3, 2e-3, 2e-3]


def test_steps_are_those_of_torch() -> None:
    steps = AdamWSpec(learning_rate=2e-3, warmup_steps=0, schedule="step", drop_every_steps=4, drop_ratio=0.3)
    rates = [learning_rate(steps, step, 20) for step in range(20)]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    reference = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.3)
    for rate in rates:
        assert rate == pytest.approx(
            reference.get_last_lr()[0], rel=1e-14
        )  # torch multiplies one after the other
        optimizer.step()
        reference.step()


def test_drops_are_counted_from_the_end_of_the_warm_up() -> None:
    steps = AdamWSpec(learning_rate=1.0, warmup_steps=3, schedule="step", drop_every_steps=2, drop_ratio=0.5)
    assert [learning_rate(steps, step, 7) for step in range(7)] == [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 0.5, 0.5]


def test_half_way_down_cosine_and_line_meet_and_before_it_the_cosine_is_above() -> None:
    cosine, linear = (spec(warmup_steps=0, schedule=schedule) for schedule in ("cosine", "linear"))
    assert learning_rate(cosine, 4, 9) == pytest.approx(learning_rate(linear, 4, 9), rel=1e-12)
    assert learning_rate(cosine, 2, 9) > learning_rate(linear, 2, 9)


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
