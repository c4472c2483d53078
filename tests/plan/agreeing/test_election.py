"""Elections: who leads, what is checked, which samples decide, and how long walkers go alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.agreeing.election import (
    Claim,
    bears_out,
    elect,
    is_refuted,
    probe_positions,
    rechecking,
    scores_of,
)
from skein.types import Step, WorkerId

SCORES = st.dictionaries(
    st.integers(0, 20), st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.text(max_size=4))
)
FINITE = st.floats(-1e6, 1e6)


def claim(score: float = 0.5, digest: str = "d0", *, step: int = 7, walker: int = 3) -> Claim[int]:
    return Claim(walker=walker, step=Step(step), score=score, digest=digest)


@given(scores=SCORES, blacklisted=st.frozensets(st.integers(0, 20)))
def test_the_leader_is_fit_and_nobody_fit_is_better(
    scores: dict[int, tuple[float, str]], blacklisted: frozenset[int]
) -> None:
    fit = {w: score for w, (score, _) in scores.items() if math.isfinite(score) and w not in blacklisted}
    leader = elect(scores, blacklisted)
    if leader is None:
        assert not fit
    else:
        assert all(fit[leader] < score or (fit[leader] == score and leader <= w) for w, score in fit.items())


@given(scores=SCORES, data=st.data())
def test_the_order_in_which_scores_arrive_does_not_matter(
    scores: dict[int, tuple[float, str]], data: st.DataObject
) -> None:
    shuffled = {w: scores[w] for w in data.draw(st.permutations(sorted(scores)))}
    assert elect(shuffled) == elect(scores)


@given(scores=st.dictionaries(st.integers(0, 20), st.tuples(FINITE, st.just("")), min_size=2))
def test_only_the_leaders_loss_changes_the_leader(scores: dict[int, tuple[float, str]]) -> None:
    leader = elect(scores)
    for other in scores:
        without = {w: score for w, score in scores.items() if w != other}
        assert (elect(without) == leader) == (other != leader)


def test_the_best_of_all_is_the_best_of_its_group() -> None:
    scores = {0: (0.5, ""), 1: (0.3, ""), 2: (0.4, ""), 3: (0.2, "")}
    of_all = elect(scores)
    assert of_all == elect({w: scores[w] for w in (2, 3)}) == 3


def test_walkers_may_be_named() -> None:
    assert elect({WorkerId("b"): (1.0, ""), WorkerId("a"): (1.0, "")}) == WorkerId("a")


def test_claims_about_another_step_and_second_claims_do_not_count() -> None:
    claims = [claim(0.4, step=6), claim(0.5), claim(0.1), claim(0.6, walker=1)]
    assert scores_of(claims, Step(7)) == {3: (0.5, "d0"), 1: (0.6, "d0")}


@given(truth=st.floats(1e-3, 1e3), share=st.floats(0, 0.9e-3))
def test_unlike_devices_may_differ_a_little(truth: float, share: float) -> None:
    assert bears_out(claim(truth * (1 - share)), truth)


@given(truth=st.floats(1e-3, 1e3), share=st.floats(1.1e-3, 1.0))
def test_a_score_that_is_too_good_is_found_out(truth: float, share: float) -> None:
    assert not bears_out(claim(truth * (1 - share)), truth)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_parameters_without_a_finite_loss_bear_no_claim_out(score: float) -> None:
    assert not bears_out(claim(), score)


@given(seed=st.integers(0, 99), round_=st.integers(0, 99), num=st.integers(1, 9), ratio=st.floats(1e-9, 1))
def test_some_follower_checks_every_round_and_all_know_who(
    seed: int, round_: int, num: int, ratio: float
) -> None:
    followers = list(range(num))
    checking = rechecking(seed, round_, followers, ratio=ratio)
    assert checking
    assert checking == rechecking(seed, round_, followers[::-1], ratio=ratio)
    # More are asked at a higher ratio, never others.
    assert set(checking) <= set(rechecking(seed, round_, followers, ratio=(1 + ratio) / 2))


def test_followers_check_as_often_as_the_ratio_says_and_take_turns() -> None:
    counts = dict.fromkeys(range(20), 0)
    for round_ in range(500):
        for who in rechecking(3, round_, counts, ratio=0.25):
            counts[who] += 1
    # 125 expected each, with a standard deviation below 10: five of them.
    assert all(75 <= count <= 175 for count in counts.values())
    assert rechecking(3, 0, [], ratio=0.25) == ()


@pytest.mark.parametrize(
    ("checks", "is_lie"),
    [
        ({}, False),
        ({1: True}, False),
        ({1: False}, False),
        ({1: False, 2: True, 3: True, 4: True}, False),
        ({1: False, 2: False, 3: True, 4: True}, False),
        ({1: False, 2: False, 3: False}, True),
    ],
)
def test_neither_an_accuser_nor_a_leader_is_believed_alone(checks: dict[int, bool], is_lie: bool) -> None:
    assert is_refuted(checks, num_followers=4) is is_lie


@given(seed=st.integers(0, 99), round_=st.integers(0, 99), asked=st.integers(1, 80), size=st.integers(1, 60))
def test_a_probe_has_distinct_validation_positions(seed: int, round_: int, asked: int, size: int) -> None:
    positions = probe_positions(seed, round_, num_samples=asked, num_validation=size)
    assert len(set(positions)) == len(positions) == min(asked, size)
    assert set(positions) <= set(range(size))
    assert list(positions) == sorted(positions)
    assert positions == probe_positions(seed, round_, num_samples=asked, num_validation=size)


def test_every_round_draws_its_own_probe() -> None:
    drawn = {probe_positions(1, round_, num_samples=8, num_validation=1000) for round_ in range(50)}
    assert len(drawn) == 50
    assert drawn.isdisjoint(
        {probe_positions(2, round_, num_samples=8, num_validation=1000) for round_ in range(50)}
    )


def test_a_probe_needs_validation_samples() -> None:
    with pytest.raises(ValueError, match="empty"):
        probe_positions(0, 0, num_samples=8, num_validation=0)
