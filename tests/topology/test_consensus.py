"""The graph that agrees soonest: its model by hand, weights against known optima, and all graphs of five members."""

import math
from itertools import combinations, compress, product

import numpy as np
import pytest

from skein.topology.consensus import agreement, choose, fastest_weights, num_rounds, round_s
from skein.topology.graphs import F64, Adjacency, Mixing, adjacency_of, mesh, metropolis, ring
from skein.topology.links import LinkMatrices
from tests.support.extent import part

SEEDS = range(4)


def links_of(latency_s: F64, bytes_per_s: F64) -> LinkMatrices:
    np.fill_diagonal(latency_s, 0.0)
    np.fill_diagonal(bytes_per_s, np.inf)
    return LinkMatrices(
        latency_s=latency_s, bytes_per_s=bytes_per_s, crosses_sites=~np.eye(len(latency_s), dtype=bool)
    )


def equal_links(num_members: int, latency_s: float = 0.1, bytes_per_s: float = 1e6) -> LinkMatrices:
    shape = (num_members, num_members)
    return links_of(np.full(shape, latency_s), np.full(shape, bytes_per_s))


def drawn_links(num_members: int, seed: int) -> LinkMatrices:
    """Members at random places on a map: far apart is slow and narrow, and up is not down."""
    generator = np.random.default_rng(seed)
    place = generator.random((num_members, 2))
    apart = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    speed = 1e7 / (0.1 + apart) * generator.uniform(0.5, 1.5, apart.shape)
    return links_of(0.1 * apart, speed)


# --- the model ---


def test_a_round_takes_what_its_slowest_member_s_edges_and_longest_latency_take() -> None:
    links = equal_links(4)
    assert round_s(links, ring(4).rows > 0, num_bytes=1e6) == pytest.approx(2 * 1.0 + 0.1)
    assert round_s(links, adjacency_of(4, [(0, 1), (0, 2), (0, 3)]), num_bytes=1e6) == pytest.approx(3.1)
    assert round_s(links, np.zeros((4, 4), dtype=bool), num_bytes=1e6) == 0.0


def test_an_uplink_slower_than_its_downlink_decides() -> None:
    links = equal_links(3)
    links.bytes_per_s[1, :] = 1e5
    links.bytes_per_s[1, 1] = np.inf
    # Member 1 sends for 10 s to each; the others receive that beside the quick one.
    chain = adjacency_of(3, [(0, 1), (1, 2)])
    assert round_s(links, chain, num_bytes=1e6) == pytest.approx(20.1)
    assert round_s(links, adjacency_of(3, [(0, 1), (0, 2)]), num_bytes=1e6) == pytest.approx(11.1)


@pytest.mark.parametrize(
    "mixing", [ring(9), mesh(8), metropolis(adjacency_of(5, [(i, 0) for i in range(5)]))]
)
def test_after_so_many_rounds_a_thousandth_is_left_at_most(mixing: Mixing) -> None:
    values = np.linalg.eigh(mixing.rows)[1]
    rounds = math.ceil(num_rounds(mixing))
    left = [np.linalg.norm(np.linalg.matrix_power(mixing.rows, rounds) @ v) for v in values.T[:-1]]
    assert max(left) <= 1e-3
    before = [np.linalg.norm(np.linalg.matrix_power(mixing.rows, rounds - 1) @ v) for v in values.T[:-1]]
    assert max(before) > 1e-3


def test_exact_averaging_takes_one_round_and_two_parts_never_agree() -> None:
    assert num_rounds(metropolis(np.ones((5, 5), dtype=bool))) == 1.0
    assert num_rounds(metropolis(adjacency_of(4, [(0, 1), (2, 3)]))) == math.inf
    assert num_rounds(ring(1)) == 1.0


# --- weights ---


@pytest.mark.parametrize(
    ("adjacency", "rho"),
    [
        # A hub of three: 1 - w twice and 1 - 4 w, and 3 w <= 1.
        (adjacency_of(4, [(0, 1), (0, 2), (0, 3)]), 2 / 3),
        # A ring of eight: 1 - 2 w (1 - cos 45°) = 4 w - 1.
        (ring(8).rows > 0, (1 + math.cos(math.pi / 4)) / (3 - math.cos(math.pi / 4))),
        # A chain of three: 1 - w and 1 - 3 w, at w = 1/2.
        (adjacency_of(3, [(0, 1), (1, 2)]), 1 / 2),
        (np.ones((6, 6), dtype=bool), 0.0),
    ],
    ids=["star", "ring", "chain", "all"],
)
def test_weights_come_near_the_known_optimum(adjacency: Adjacency, rho: float) -> None:
    # Descent stops a little short of where several eigenvalues meet.
    assert fastest_weights(adjacency).rho == pytest.approx(rho, rel=0.01, abs=1e-9)


@pytest.mark.parametrize("seed", part(SEEDS, every=3))
def test_weights_are_never_worse_than_metropolis_and_keep_to_the_graph(seed: int) -> None:
    generator = np.random.default_rng(seed)
    edges = [pair for pair in combinations(range(10), 2) if generator.random() < 0.2]
    adjacency = adjacency_of(10, [*edges, *((i, i + 1) for i in range(9))])
    found = fastest_weights(adjacency)
    assert found.rho <= metropolis(adjacency).rho
    assert found.is_symmetric
    assert found.is_doubly_stochastic
    assert not np.any((found.rows > 0) & ~adjacency & ~np.eye(10, dtype=bool))


# --- the choice ---


@pytest.mark.parametrize(
    ("num_members", "num_bytes"), part(list(product((1, 2, 3, 4, 7, 12), (0.0, 1e4, 1e8))), every=4)
)
def test_the_choice_is_symmetric_connected_and_no_slower_than_the_ring(
    num_members: int, num_bytes: float
) -> None:
    links = drawn_links(num_members, seed=num_members)
    found = choose(links, num_bytes=num_bytes)
    assert found.mixing.num_members == num_members
    assert found.mixing.is_symmetric
    assert found.mixing.is_doubly_stochastic
    assert math.isfinite(found.seconds)
    assert found.seconds <= agreement(links, ring(num_members), num_bytes=num_bytes).seconds


@pytest.mark.parametrize("seed", part(SEEDS, every=4))
def test_of_all_graphs_of_five_hardly_one_is_better(seed: int) -> None:
    links, pairs = drawn_links(5, seed), list(combinations(range(5), 2))
    graphs = [adjacency_of(5, list(compress(pairs, bits))) for bits in product((0, 1), repeat=len(pairs))]
    best = min(agreement(links, metropolis(graph), num_bytes=1e6).seconds for graph in graphs)
    # The choice has better weights than Metropolis' besides, and so may be quicker than all of these.
    assert choose(links, num_bytes=1e6).seconds <= 1.0001 * best


def test_equal_links_give_equal_graphs() -> None:
    first, second = (choose(drawn_links(6, 3), num_bytes=1e6) for _ in range(2))
    assert np.array_equal(first.mixing.rows, second.mixing.rows)


def test_a_ring_that_zigzags_between_two_sites_is_left_for_one_that_stays_inside() -> None:
    site = np.arange(8) % 2
    far = site[:, None] != site[None, :]
    links = links_of(np.where(far, 0.1, 0.001), np.where(far, 1e6, 1e9))
    found = choose(links, num_bytes=1e6)
    assert agreement(links, ring(8), num_bytes=1e6).seconds / found.seconds > 3
    assert np.all(found.mixing.rows[~far] > 0)


def test_links_that_carry_nothing_are_refused() -> None:
    links = equal_links(3)
    links.bytes_per_s[0, 1] = 0.0
    with pytest.raises(ValueError, match="bytes/s"):
        choose(links, num_bytes=1.0)
    with pytest.raises(ValueError, match="bytes"):
        choose(equal_links(3), num_bytes=math.nan)
