"""What the gossip benchmarks are made of: problems, simulated time, and the verdicts that are compared."""

import numpy as np
import pytest

from bench.aggregating.consensus_topology import simulated
from bench.aggregating.gossip_bias import course, regression
from bench.aggregating.stability import Pair, growth, pairs
from skein.topology.graphs import Mixing, mesh, ring
from skein.topology.links import LinkMatrices


def links_of(latency_s: float, bytes_per_s: float, num_peers: int) -> LinkMatrices:
    apart = ~np.eye(num_peers, dtype=bool)
    return LinkMatrices(
        latency_s=np.where(apart, latency_s, 0.0),
        bytes_per_s=np.where(apart, bytes_per_s, np.inf),
        crosses_sites=apart,
    )


def test_the_minimum_is_where_the_sum_of_all_gradients_is_zero() -> None:
    problem = regression()
    everywhere = np.tile(problem.minimum_D, (8, 1))
    # Eight sums of fifty products of about 1, and what a linear system of condition 10 leaves.
    assert np.abs(problem.gradient(everywhere).sum(axis=0)).max() < 1e-9
    assert problem.bias(everywhere) == 0.0
    assert problem.bias(np.zeros_like(everywhere)) == pytest.approx(1.0)


def test_a_course_begins_at_zero_and_comes_down() -> None:
    found = course("decentlam", mesh(8), regression(), rate=1e-3, momentum=0.8, num_steps=40)
    assert found.biases[0] == pytest.approx(1.0)
    assert found.biases[40] < 0.01


def test_two_peers_agree_after_one_exchange() -> None:
    # They average exactly; up and down at the same time: 2 s for the bytes, and half a second on the way.
    found = simulated(ring(2), links_of(0.5, 1e6, 2), 2_000_000)
    assert found.seconds == (0.0, 2.5)
    assert found.distances[1] < 1e-9


def test_a_peer_with_two_neighbours_needs_its_line_twice() -> None:
    star = Mixing(rows=np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 0.0], [1.0, 0.0, 2.0]]) / 3)
    found = simulated(star, links_of(0.0, 1e6, 3), 1_000_000)
    # The middle one sends for 2 s a round, and receives meanwhile; nobody can begin the next before.
    assert found.seconds[1] == pytest.approx(2.0)
    assert found.seconds[-1] == pytest.approx(2.0 * (len(found.seconds) - 1))
    assert found.distances[-1] <= 1e-3 < found.distances[-2]


def test_the_source_has_thirteen_unstable_pairs_of_twenty_four() -> None:
    assert sum(pair.is_stable for pair in pairs()) == 11
    assert sum(1 for _ in pairs()) == 24
    assert all(pair.is_accepted == pair.is_stable for pair in pairs())


def test_growth_is_that_of_the_rule() -> None:
    # A constant from its eigenvectors, of which the 240th root is taken.
    pair = Pair(method="decentlam", kind="one_peer_exponential", num_peers=8, momentum=0.9)
    assert growth(pair) == pytest.approx(1.114, rel=0.01)
