"""When training has diverged, and when it only looks like it: the losses of a run log, step by step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, inf, nan

import pytest

from skein.protocol.log.divergence import MAX_SKIPPED, NUM_JUDGED, Doubt, LossWatch
from skein.protocol.messages.directives import Decision, StepRecord
from skein.types import Step
from tests.support.extent import part
from tests.support.hands import record

NOTHING_LEARNED, LEARNED = 5.6, 1.8


def step_of(step: int, loss: float) -> StepRecord:
    """A step whose loss is not finite makes no update."""
    is_finite = abs(loss) < inf
    decision, reason = (Decision.APPLY, "") if is_finite else (Decision.SKIP, "loss not finite")
    return replace(record(step, decision=decision), loss=loss, reason=reason)


def watched(losses: Iterable[float], watch: LossWatch | None = None) -> LossWatch:
    """A watch that has seen these losses."""
    watch = watch or LossWatch()
    for step, loss in enumerate(losses):
        watch.stepped(step_of(step, loss))
    return watch


def doubts(losses: Sequence[float]) -> list[Doubt]:
    """What is doubted on the way."""
    watch, found = LossWatch(), []
    for step, loss in enumerate(losses):
        watch.stepped(step_of(step, loss))
        found.append(watch.doubt())
    return [doubt for doubt in found if doubt is not None]


def learning(num_steps: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    """Losses that fall as those of a language model do."""
    luck = random.Random(seed)
    fall = NOTHING_LEARNED - LEARNED
    return [LEARNED + fall * exp(-step / 40) + luck.gauss(0, noise) for step in range(num_steps)]


# --- what it finds ---


def test_losses_that_stay_not_finite_are_found_after_a_few_steps() -> None:
    losses = learning(40) + [nan] * MAX_SKIPPED
    assert watched(losses[:-1]).doubt() is None
    found = watched(losses).doubt()
    assert found is not None
    assert (found.step, found.last_good) == (40, 39)
    assert found.reason == "loss not finite, 10 steps in a row without an update"


def test_gradients_that_stay_not_finite_leave_their_version_good() -> None:
    watch = watched(learning(40))
    for step in range(40, 40 + MAX_SKIPPED):
        skipped = record(step, decision=Decision.SKIP)
        watch.stepped(replace(skipped, loss=3.0, reason="gradient not finite in s1"))
    found = watch.doubt()
    assert found is not None
    assert (found.step, found.last_good) == (40, 40)
    assert "gradient not finite in s1" in found.reason


def test_losses_that_climb_to_where_they_began_and_stay_there_are_found() -> None:
    [first, *_] = doubts(learning(200) + [NOTHING_LEARNED] * NUM_JUDGED)
    assert 200 <= first.step < 200 + NUM_JUDGED
    assert first.last_good == first.step - 1
    assert "far above" in first.reason


def test_losses_that_creep_up_are_found_too() -> None:
    climbing = [LEARNED + step / 60 for step in range(300)]
    [first, *_] = doubts(learning(200) + climbing)
    assert 200 < first.step < 380


def test_a_validation_loss_that_is_not_finite_is_the_end_of_a_last_version() -> None:
    watch = watched(learning(40))
    assert watch.last_doubt(Step(40), 2.5) is None
    assert watch.last_doubt(Step(40), None) is None
    found = watch.last_doubt(Step(40), inf)
    assert found is not None
    assert (found.step, found.last_good) == (40, 39)


def test_last_losses_that_are_not_finite_count_where_nothing_is_evaluated() -> None:
    found = watched([*learning(40), nan]).last_doubt(Step(41), None)
    assert found is not None
    assert found.reason == "loss not finite at the end"


# --- what it leaves alone ---


@pytest.mark.parametrize("seed", part(range(20), every=4))
@pytest.mark.parametrize("noise", [0.05, 0.3, 0.6])
def test_learning_with_noise_is_left_alone(seed: int, noise: float) -> None:
    assert not doubts(learning(400, seed=seed, noise=noise))


def test_warming_up_may_make_losses_worse_than_they_began() -> None:
    warming_up = [NOTHING_LEARNED + bump for bump in (0, 0, 1, 3, 6, 9, 7, 5, 4, 3, 2, 1, 1, 0, 0, 0)]
    assert not doubts(warming_up + [8.0] * 5 + learning(200))


def test_spikes_that_pass_are_left_alone() -> None:
    spiked = learning(200)
    for at in (60, 120, 180):
        spiked[at : at + 5] = [9.0] * 5
    assert not doubts(spiked)


def test_a_few_skipped_updates_now_and_then_are_left_alone() -> None:
    skipping = [nan if step % 12 < MAX_SKIPPED - 1 else 3.0 for step in range(200)]
    assert not doubts(skipping)


@pytest.mark.parametrize("start", [2.3, 0.01])
def test_tiny_losses_may_vary_by_large_factors(start: float) -> None:
    luck = random.Random(1)
    tiny = [start] * 20 + [10 ** luck.uniform(-6, -1) for _ in range(300)]
    assert not doubts(tiny)


def test_a_roll_back_begins_a_new_row() -> None:
    watch = watched(learning(40) + [nan] * (MAX_SKIPPED - 1))
    watch.went_back(Step(30))
    assert watch.good == 30
    watch.stepped(replace(record(30, decision=Decision.SKIP), loss=nan))
    assert watch.doubt() is None


def test_a_stage_made_of_its_neighbours_has_a_level_of_its_own() -> None:
    watch = watched(learning(200))
    watch.changed()
    assert watched([NOTHING_LEARNED] * 3 * NUM_JUDGED, watch).doubt() is None
