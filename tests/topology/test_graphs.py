"""Graphs of gossip: laws that every one obeys for any number of members, and the numbers that others publish."""

from itertools import product
from typing import get_args

import numpy as np
import pytest

from skein.rng import stream
from skein.topology.graphs import (
    GraphKind,
    Mixing,
    adjacency_of,
    graph_of,
    mesh,
    metropolis,
    mixing_at,
    residual,
    ring,
    without,
)
from tests.support.extent import part

KINDS: tuple[GraphKind, ...] = get_args(GraphKind)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 33)
ROUNDS = range(7)
EACH = part(list(product(COUNTS, KINDS)), every=3)


@pytest.mark.parametrize(("num_members", "kind"), EACH)
def test_every_round_of_every_graph_keeps_the_mean(kind: GraphKind, num_members: int) -> None:
    for round_ in ROUNDS:
        mixing = mixing_at(kind, num_members, round_, seed=3)
        assert mixing.num_members == num_members
        assert mixing.is_doubly_stochastic
        assert np.all(np.diag(mixing.rows) > 0)


@pytest.mark.parametrize(("num_members", "kind"), EACH)
def test_what_a_graph_says_of_itself_is_so(kind: GraphKind, num_members: int) -> None:
    graph = graph_of(kind, num_members)
    rounds = [graph.at(round_, seed=1) for round_ in range(8)]
    if graph.is_symmetric:
        assert all(mixing.is_symmetric for mixing in rounds)
    if graph.period is not None:
        again = [graph.at(round_ + graph.period, seed=2) for round_ in range(8)]
        assert all(np.array_equal(a.rows, b.rows) for a, b in zip(rounds, again, strict=True))


@pytest.mark.parametrize(("num_members", "kind"), EACH)
def test_everybody_agrees_in_the_end(kind: GraphKind, num_members: int) -> None:
    graph = graph_of(kind, num_members)
    once = [graph.at(round_, seed=0) for round_ in range(graph.period or 250)]
    # The slowest is the ring of 33, which shrinks by 0.988 a round.
    assert residual(once * (2000 // len(once))) < 1e-9


@pytest.mark.parametrize(
    ("kind", "num_members", "rho"),
    [
        ("ring", 8, 0.805),
        ("ring", 16, 0.949),
        ("ring", 32, 0.987),
        ("ring", 64, 0.997),
        ("static_exponential", 8, 0.5),
        ("static_exponential", 16, 0.6),
        ("static_exponential", 32, 0.667),
        ("static_exponential", 64, 0.714),
    ],
)
def test_one_round_shrinks_disagreement_as_published(kind: GraphKind, num_members: int, rho: float) -> None:
    # Three digits are given.
    assert mixing_at(kind, num_members, 0, seed=0).rho == pytest.approx(rho, abs=5e-4)


@pytest.mark.parametrize("num_members", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("kind", ["one_peer_exponential", "one_peer_hypercube"])
def test_one_peer_graphs_average_exactly_in_a_period_of_a_power_of_two(
    kind: GraphKind, num_members: int
) -> None:
    graph = graph_of(kind, num_members)
    assert graph.period is not None
    assert residual([graph.at(round_, seed=0) for round_ in range(graph.period)]) == 0.0


def test_six_members_are_left_with_a_twelfth() -> None:
    assert residual([mixing_at("one_peer_exponential", 6, k, seed=0) for k in range(3)]) == pytest.approx(
        1 / 12
    )


def test_a_mesh_is_as_square_as_it_gets_and_its_last_row_may_be_short() -> None:
    assert mesh(8).senders_to(1) == (0, 2, 5)
    assert mesh(9).senders_to(4) == (1, 3, 5, 7)
    assert mesh(7).senders_to(6) == (2, 5)
    assert mesh(3).senders_to(1) == (0, 2)


def test_a_chain_mixes_slower_than_the_ring_closed_again() -> None:
    chain = metropolis(adjacency_of(7, [(i, i + 1) for i in range(6)]))
    # Three digits are given.
    assert chain.rho == pytest.approx(0.934, abs=5e-4)
    assert ring(7).rho == pytest.approx(0.749, abs=5e-4)


def test_exponential_members_send_ahead_and_hear_from_behind() -> None:
    mixing = mixing_at("static_exponential", 8, 0, seed=0)
    assert mixing.senders_to(0) == (4, 6, 7)
    assert mixing.receivers_of(0) == (1, 2, 4)


def test_matchings_depend_on_round_and_seed_alone() -> None:
    def rows(round_: int, seed: int) -> list[list[float]]:
        drawn: list[list[float]] = mixing_at("random_matching", 9, round_, seed=seed).rows.tolist()
        return drawn

    assert rows(4, 1) == rows(4, 1)
    assert rows(4, 1) != rows(5, 1)
    assert rows(4, 1) != rows(4, 2)
    assert sum(row[i] == 1.0 for i, row in enumerate(rows(0, 0))) == 1


# --- members that are missing ---


@pytest.mark.parametrize(("num_members", "kind"), EACH)
def test_the_mean_is_kept_whoever_is_missing(kind: GraphKind, num_members: int) -> None:
    for round_ in ROUNDS:
        mixing = mixing_at(kind, num_members, round_, seed=0)
        drawn = stream(round_, "missing").permutation(num_members)
        for num_missing in (0, 1, num_members // 2, num_members):
            missing = drawn[:num_missing].tolist()
            left = without(mixing, missing)
            assert left.is_doubly_stochastic
            assert all(left.rows[i, i] == 1.0 for i in missing)
            assert np.all((left.rows <= mixing.rows) | np.eye(num_members, dtype=bool))


def test_a_lost_neighbour_s_weight_goes_to_oneself() -> None:
    left = without(ring(8), {3})
    # Three weights of a third each, up to rounding of their sum.
    assert left.rows[2].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 0, 0, 0, 0, 0])
    values = np.array([0.0, 0, 0, 5, 0, 0, 0, 7])
    assert (left.rows @ values).sum() == pytest.approx(12.0)


def test_a_directed_graph_still_mixes_what_is_left_of_it() -> None:
    left = without(mixing_at("static_exponential", 8, 0, seed=0), {0})
    survivors = Mixing(rows=left.rows[1:, 1:].copy())
    assert survivors.is_doubly_stochastic
    # A chain of seven shrinks by 0.934 a round.
    assert survivors.rho < 0.85


# --- what is refused ---


@pytest.mark.parametrize(
    "rows", [[[0.5, 0.4], [0.5, 0.5]], [[1.5, -0.5], [-0.5, 1.5]], [[float("nan")]], [[1.0, 0.0]]]
)
def test_what_is_no_average_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"weights|square"):
        Mixing(rows=np.array(rows))


def test_rows_that_do_not_keep_the_mean_lose_no_member() -> None:
    with pytest.raises(ValueError, match="doubly stochastic"):
        without(Mixing(rows=np.array([[0.5, 0.5], [0.0, 1.0]])), {0})


def test_graphs_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="0 members"):
        graph_of("ring", 0)
    with pytest.raises(ValueError, match="from 0"):
        mixing_at("ring", 4, -1, seed=0)
    with pytest.raises(ValueError, match="symmetric"):
        metropolis(np.array([[False, True], [False, False]]))
