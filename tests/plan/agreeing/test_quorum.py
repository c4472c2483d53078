"""When rounds are closed, and what walkers count."""

import random
from collections import deque
from collections.abc import Callable
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.agreeing.quorum import NUM_PROVEN, NUM_REMEMBERED, Quorum, token_weights
from tests.support.extent import part

HALF = Quorum(share=0.5, grace=3.0)
USUAL = [[10.0, 10.0, 11.0, 14.0]] * NUM_PROVEN
"""Four walkers; the last comes four seconds after the second, which makes the quorum."""


def is_closed(
    quorum: Quorum, arrived_s: list[float], history: list[list[float]], *, num_members: int, now_s: float
) -> bool:
    deadline_s = quorum.deadline(arrived_s, history, num_members=num_members)
    return deadline_s is not None and now_s >= deadline_s


def test_a_round_is_closed_at_once_when_all_are_there() -> None:
    assert is_closed(HALF, [10.0, 10.0, 10.0, 10.0], [], num_members=4, now_s=10.0)


def test_a_round_without_a_quorum_is_never_closed() -> None:
    assert not is_closed(HALF, [10.0], USUAL, num_members=4, now_s=1e9)


def test_with_a_quorum_a_round_waits_for_its_grace_and_no_longer() -> None:
    assert HALF.deadline([9.0, 10.0], USUAL, num_members=4) == 22.0
    assert not is_closed(HALF, [9.0, 10.0], USUAL, num_members=4, now_s=21.99)
    assert is_closed(HALF, [9.0, 10.0], USUAL, num_members=4, now_s=22.0)


def test_reports_after_the_quorum_do_not_put_the_deadline_off() -> None:
    assert HALF.deadline([9.0, 10.0, 15.5], USUAL, num_members=4) == 22.0


def test_the_first_rounds_wait_for_all() -> None:
    assert HALF.deadline([9.0, 10.0, 11.0], [], num_members=4) is None
    assert HALF.deadline([9.0, 10.0, 11.0], USUAL[1:], num_members=4) is None


def test_nobody_is_late_before_it_takes_twice_as_long_as_the_quorum() -> None:
    assert HALF.deadline([10.0, 10.0], [[10.0] * 4] * NUM_PROVEN, num_members=4) == 20.0


def test_a_walker_that_is_always_late_is_waited_for() -> None:
    history = [*USUAL, *([[10.0, 10.0, 10.0, 40.0]] * 4)]
    deadline_s = HALF.deadline([10.0, 10.0, 10.0], history, num_members=4)
    assert deadline_s is not None
    assert deadline_s > 40.0


def test_a_walker_that_stood_still_once_makes_nobody_wait_for_long_from_then_on() -> None:
    history = [*USUAL * 8, [10.0, 10.0, 10.0, 600.0]][-NUM_REMEMBERED:]
    assert HALF.deadline([10.0, 10.0, 10.0], history, num_members=4) == 22.0


def test_what_was_usual_long_ago_is_forgotten() -> None:
    history = [[10.0, 10.0, 10.0, 40.0]] * 100 + USUAL[:1] * NUM_REMEMBERED
    assert HALF.usual_wait_s(history) == 4.0


Draw = Callable[[random.Random], float]


def shared_machine(draw: random.Random) -> float:
    """A walk of half a second beside others on the same cores: noise, and now and then one that has to stand back."""
    stands_back_s = draw.paretovariate(1.5) * 0.1 if draw.random() < 0.05 else 0.0
    return 0.5 * draw.lognormvariate(0.0, 0.3) + stands_back_s


def calm(draw: random.Random) -> float:
    return 0.5 * draw.lognormvariate(0.0, 0.02)


def heavy_tailed(draw: random.Random) -> float:
    return 0.5 * draw.paretovariate(2.0)


def left_out(walk_s: Draw, *, num_walkers: int, num_rounds: int, seed: int) -> float:
    """The share of walks that rounds go on without, as a run closes them: nobody is left out twice in a row."""
    draw, history, num_late, was_late = (
        random.Random(seed),
        deque[list[float]](maxlen=NUM_REMEMBERED),
        0,
        False,
    )
    for _ in range(num_rounds):
        done_s = sorted(walk_s(draw) for _ in range(num_walkers))
        closed_s = inf
        for count in range(1, num_walkers):
            ends_s = HALF.deadline(done_s[:count], list(history), num_members=num_walkers)
            if not was_late and ends_s is not None and ends_s < done_s[count]:
                closed_s = ends_s
                break
        late = [at for at in done_s if at > closed_s]
        history.append([min(at, closed_s) for at in done_s])
        num_late, was_late = num_late + len(late), bool(late)
    return num_late / (num_rounds * num_walkers)


@pytest.mark.parametrize("num_walkers", [2, 3, 8])
@pytest.mark.parametrize("walk_s", [calm, shared_machine, heavy_tailed])
def test_noise_leaves_out_less_than_a_hundredth(walk_s: Draw, num_walkers: int) -> None:
    shares = [
        left_out(walk_s, num_walkers=num_walkers, num_rounds=72, seed=seed)
        for seed in part(range(40), every=4)
    ]
    assert sum(shares) / len(shares) <= 0.01
    assert left_out(walk_s, num_walkers=num_walkers, num_rounds=300, seed=0) <= 0.01


@pytest.mark.parametrize(
    ("share", "num_members", "needed"), [(0.5, 4, 2), (0.5, 5, 3), (0.01, 4, 1), (1, 4, 4), (0.1, 30, 3)]
)
def test_a_quorum_is_a_share_rounded_up_and_at_least_one(share: float, num_members: int, needed: int) -> None:
    assert Quorum(share=share, grace=1.0).needed(num_members) == needed


@given(
    arrived=st.lists(st.floats(0.0, 1e4), min_size=1, max_size=8),
    history=st.lists(st.lists(st.floats(0.0, 1e4), max_size=8), max_size=20),
    share=st.floats(0.01, 1.0),
    grace=st.floats(1.0, 100.0),
    num_late=st.integers(0, 8),
)
def test_a_closed_round_has_its_quorum_and_stays_closed_when_more_arrive(
    arrived: list[float], history: list[list[float]], share: float, grace: float, num_late: int
) -> None:
    quorum = Quorum(share=share, grace=grace)
    num_members = len(arrived) + num_late
    deadline_s = quorum.deadline(arrived, history, num_members=num_members)
    if deadline_s is None:
        return
    assert len(arrived) >= share * num_members - 1e-6
    later = [*arrived, max(arrived)]
    assert num_late == 0 or is_closed(
        quorum, later, history, num_members=num_members, now_s=deadline_s + max(arrived)
    )


@pytest.mark.parametrize(("share", "grace"), [(0.0, 3.0), (1.5, 3.0), (0.5, 0.5)])
def test_a_share_or_grace_without_meaning_is_refused(share: float, grace: float) -> None:
    with pytest.raises(ValueError, match="give a number"):
        Quorum(share=share, grace=grace)


def test_a_walker_counts_by_its_tokens_and_not_at_all_without_any() -> None:
    assert token_weights({1: 30, 0: 10, 2: 0}) == ((0, 0.25), (1, 0.75), (2, 0.0))


@given(st.dictionaries(st.integers(0, 100), st.integers(0, 10**12), min_size=1, max_size=50))
def test_weights_are_one_together_and_in_order_of_the_members(tokens: dict[int, int]) -> None:
    weights = token_weights(tokens)
    assert [member for member, _ in weights] == sorted(tokens)
    # Fifty roundings of at most half an ulp of one each.
    assert sum(weight for _, weight in weights) == pytest.approx(1.0, abs=50 * 2.0**-53)


@pytest.mark.parametrize("tokens", [{}, {0: -1}])
def test_no_members_and_fewer_tokens_than_none_are_refused(tokens: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="none or more"):
        token_weights(tokens)
