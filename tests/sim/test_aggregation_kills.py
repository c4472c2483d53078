"""One strike amid an exchange, for every rule and at every moment: nothing hangs, no step is lost, equals stay equal.

`python -m skein.sim --rule all --seeds 200` is the same with more seeds.
"""

import pytest

from skein.sim.moments import MOMENTS, STRUCK, draw_strike, judge_struck, struck
from tests.support.extent import part

SEEDS = range(6)


@pytest.mark.parametrize("rule", part(list(STRUCK), every=3))
def test_a_strike_amid_an_exchange_loses_nothing(rule: str) -> None:
    for seed in part(SEEDS, every=6, start=list(STRUCK).index(rule)):
        world = struck(rule, seed)
        try:
            judge_struck(world)
        except Exception as error:
            about = f"python -m skein.sim --rule {rule} --seed {seed} -v"
            raise AssertionError(f"{about}: {error!r}\n" + "\n".join(world.lines[-30:])) from error
        assert any(" strike: " in line for line in world.lines), f"{rule} seed={seed} was not struck"


def test_a_second_strike_while_walkers_are_copied_mixes_none() -> None:
    """Some had built what the interrupted plan gave them, and others not: no walker of that plan was whole."""
    judge_struck(struck("decentlam", 44))


def test_who_is_steps_behind_the_fastest_needs_no_checkpoint_when_that_dies() -> None:
    """All others had been told what was decided without them, and had not come to apply it."""
    judge_struck(struck("lsgd_eager", 303))


def test_strikes_come_at_all_moments() -> None:
    alike = range(0, 6000, 30)  # seeds of one undisturbed run
    drawn = {draw_strike(rule, seed).moment for rule in ("lsgd", "diloco") for seed in alike}
    assert drawn == set(MOMENTS)
