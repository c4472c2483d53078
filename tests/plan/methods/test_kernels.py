"""Matchings, tours and scores against enumeration and by hand."""

from itertools import pairwise, permutations

import numpy as np
import pytest

from skein.plan.methods.genetic import dt_fm_scoring, skippipe_scoring
from skein.plan.methods.kernels import MOST_STAGES, bottleneck, circulate, score, tour
from skein.plan.route.problem import F64, I64, Problem, Reduction
from skein.types import Layout


@pytest.mark.parametrize("seed", range(30))
def test_bottleneck_is_the_least_of_all_matchings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 5))
    num_columns = int(rng.integers(num_rows, 6))
    # Whole numbers, so that many are equal.
    cost = rng.integers(0, 9, (num_rows, num_columns)).astype(np.float64)
    match = np.full(num_rows, -1)
    largest = bottleneck(cost, match)
    rows = np.arange(num_rows)
    ways = permutations(range(num_columns), num_rows)
    assert largest == min(float(cost[rows, list(way)].max()) for way in ways)
    assert len(set(match.tolist())) == num_rows
    assert cost[rows, match].max() == largest


def length(links: F64, order: tuple[int, ...], is_closed: bool) -> float:
    hops = [*pairwise(order), *([(order[-1], order[0])] if is_closed else [])]
    return float(sum(links[a, b] for a, b in hops))


def drawn_links(num_stages: int, seed: int) -> F64:
    links = np.random.default_rng(seed).uniform(1, 9, (num_stages, num_stages))
    return links + links.T


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("sizes", [(3,), (3, 2), (5, 3, 3, 3, 3, 3), (2, 3, 4, 3, 4, 3), (2, 1, 2, 3, 4)])
def test_a_tour_is_the_shortest_that_puts_groups_where_their_size_belongs(
    sizes: tuple[int, ...], is_closed: bool
) -> None:
    links = drawn_links(len(sizes), seed=len(sizes))
    order = np.empty(len(sizes), np.int64)
    found = tour(links, np.array(sizes), is_closed, order)
    allowed = [
        (0, *rest)
        for rest in permutations(range(1, len(sizes)))
        if all(sizes[group] == sizes[place] for place, group in enumerate(rest, 1))
    ]
    lengths = {way: length(links, way, is_closed) for way in allowed}
    # Sums in another order differ in their last digits.
    assert found == pytest.approx(min(lengths.values()) if len(sizes) > 1 else 0.0, rel=1e-12)
    assert len(sizes) == 1 or lengths[tuple(order.tolist())] == pytest.approx(found, rel=1e-12)


def test_a_long_tour_cannot_be_bettered_by_an_exchange() -> None:
    num_stages = MOST_STAGES + 2
    links, sizes = drawn_links(num_stages, seed=1), np.array([4, 2, 3, *[2] * (num_stages - 3)])
    order = np.empty(num_stages, np.int64)
    found = tour(links, sizes, True, order)
    assert sorted(order) == list(range(num_stages))
    assert (sizes[order] == sizes).all()
    assert found == pytest.approx(length(links, tuple(order.tolist()), True), rel=1e-12)
    for i in range(1, num_stages):
        for j in range(i + 1, num_stages):
            other = order.copy()
            other[[i, j]] = order[[j, i]]
            if (sizes[other] == sizes).all():
                assert length(links, tuple(other.tolist()), True) >= found - 1e-9


def by_hand(layout: Layout) -> Problem:
    """Six workers on a line, a and b |a - b| seconds apart; the gradient takes 10 seconds on any link."""
    away_s = np.abs(np.subtract.outer(np.arange(6.0), np.arange(6.0)))
    bytes_per_s = np.full((6, 6), 1e6)
    np.fill_diagonal(bytes_per_s, np.inf)
    return Problem(
        name="by hand",
        layout=layout,
        stage_sizes=(2, 2, 2),
        path_len=2,
        num_by_origin=(2, 2),
        max_swaps=0,
        max_jump=2,
        forward_s=np.ones((6, 3)),
        backward_s=np.ones((6, 3)),
        loss_s=np.ones(6),
        transfer_s=away_s,
        wire_s=np.zeros((6, 6)),
        slots=np.ones((6, 3), np.int64),
        reduction=Reduction(num_bytes=np.full(3, 1e7), latency_s=0.5 * (away_s > 0), bytes_per_s=bytes_per_s),
    )


GROUPS = np.array([0, 0, 1, 2, 1, 2])
"""Workers 0, 1 | 2, 4 | 3, 5. Bottlenecks of the distances: 0-1: 3 (0 to 2, 1 to 4 or 0 to 4 is 4), 0-2: 4, 1-2: 1."""


def test_skippipe_scores_the_slowest_activation_in_a_group_and_the_closed_tour() -> None:
    terms = skippipe_scoring(by_hand(Layout.LOOP))
    order = np.empty(3, np.int64)
    found = score(
        GROUPS, np.array([2, 2, 2]), terms.hop_s, terms.share_s, terms.split_s, terms.adds_up,
        terms.is_closed, order,
    )  # fmt: skip
    # Slowest in a group: 2 s. Hops: bottleneck and a forward of 1 s.
    assert found == 2 + 2 * ((3 + 1) + (1 + 1) + (4 + 1))


@pytest.mark.parametrize(("layout", "tour_s"), [(Layout.LOOP, 3 + 1 + 4), (Layout.LINE, 3 + 1)])
def test_dt_fm_scores_the_exchange_of_gradients_and_its_own_tour(layout: Layout, tour_s: int) -> None:
    terms = dt_fm_scoring(by_hand(layout))
    order = np.empty(3, np.int64)
    found = score(
        GROUPS, np.array([2, 2, 2]), terms.hop_s, terms.share_s, terms.split_s, terms.adds_up,
        terms.is_closed, order,
    )  # fmt: skip
    # Each member to its one partner: 2 x (latency 0.5 s + half of 10 s).
    assert found == pytest.approx(2 * (0.5 + 10 / 2) + 2 * tour_s, rel=1e-12)


def test_the_local_pass_brings_friends_together() -> None:
    pull_s = np.zeros((4, 4))
    for a, b in ((0, 2), (1, 3)):
        pull_s[a, b] = pull_s[b, a] = 1.0
    moved = circulate(np.array([0, 0, 1, 1]), 2, 2, pull_s)
    assert moved[0] == moved[2] != moved[1] == moved[3]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_idle", [0, 3])
def test_the_local_pass_keeps_sizes(seed: int, num_idle: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [5, 3, 3, 3, *([num_idle] if num_idle else [])]
    group_of: I64 = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    pull_s = rng.normal(size=(len(group_of), len(group_of)))
    moved = circulate(group_of, len(sizes), 4, pull_s + pull_s.T)
    assert np.bincount(moved).tolist() == sizes


def test_nothing_draws_a_worker_to_the_idle() -> None:
    pull_s = np.zeros((4, 4))
    # Worker 0, alone in its group, and worker 3, one of two idle ones, are drawn to each other.
    pull_s[0, 3] = pull_s[3, 0] = 1.0
    assert circulate(np.array([0, 1, 2, 2]), 3, 2, pull_s).tolist() == [0, 1, 2, 2]
