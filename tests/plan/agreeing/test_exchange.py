"""Which way shards travel, and what it costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.plan.agreeing.exchange import (
    Broadcast,
    Direct,
    Pattern,
    Ring,
    Tree,
    cheapest,
    exchange_s,
    owning_place,
    result_source,
    result_targets,
    sum_sources,
    sum_target,
)
from skein.topology.links import F64

LATENCY_S, BYTES_PER_S = 0.01, 1e6


def equal_links(
    num_places: int, *, latency_s: float = LATENCY_S, bytes_per_s: float = BYTES_PER_S
) -> tuple[F64, F64]:
    latency = np.full((num_places, num_places), latency_s)
    np.fill_diagonal(latency, 0.0)
    bandwidth = np.full((num_places, num_places), bytes_per_s)
    np.fill_diagonal(bandwidth, np.inf)
    return latency, bandwidth


@st.composite
def parents(draw: st.DrawFn, num_places: int) -> tuple[int, ...]:
    """Any tree: places in a drawn order, each below one that comes before it."""
    order = draw(st.permutations(range(num_places)))
    above = {order[0]: order[0]}
    for i, place in enumerate(order[1:], start=1):
        above[place] = order[draw(st.integers(0, i - 1))]
    return tuple(above[place] for place in range(num_places))


@st.composite
def patterns(draw: st.DrawFn) -> tuple[Pattern, int]:
    num_places = draw(st.integers(1, 9))
    tree = draw(parents(num_places))
    root = next(place for place, at in enumerate(tree) if at == place)
    choices: list[Pattern] = [
        Direct(),
        Ring(),
        Tree(),
        Tree(parents=tree),
        Broadcast(leader=root, parents=tree),
    ]
    return draw(st.sampled_from(choices)), num_places


@given(drawn=patterns(), shard=st.integers(0, 20))
def test_every_part_reaches_the_owner_and_every_result_everybody(
    drawn: tuple[Pattern, int], shard: int
) -> None:
    pattern, num_places = drawn
    owner = owning_place(pattern, num_places, shard)
    for place in range(num_places):
        at = place
        for _ in range(num_places):
            at = sum_target(pattern, num_places, owner, at)
        assert at == owner
    reached, fresh = {owner}, [owner]
    while fresh:
        targets = result_targets(pattern, num_places, owner, fresh.pop())
        assert not reached.intersection(targets), "somebody is sent the result twice"
        reached.update(targets)
        fresh.extend(targets)
    assert reached == set(range(num_places))


@given(drawn=patterns(), shard=st.integers(0, 20))
def test_both_ends_of_a_transfer_know_of_it(drawn: tuple[Pattern, int], shard: int) -> None:
    pattern, num_places = drawn
    owner, places = owning_place(pattern, num_places, shard), range(num_places)
    for place in places:
        targets = result_targets(pattern, num_places, owner, place)
        others = [x for x in places if x != owner]
        assert sorted(targets) == [x for x in others if result_source(pattern, num_places, owner, x) == place]
        if isinstance(pattern, Ring | Tree):
            sources = sum_sources(pattern, num_places, owner, place)
            assert sorted(sources) == [
                x for x in others if sum_target(pattern, num_places, owner, x) == place
            ]


def test_over_equal_links_times_are_those_of_the_books() -> None:
    # Reduce-scatter and all-gather: 2 (W - 1) / W of the vector through each worker; a ring pays each hop's latency.
    num_bytes, w = 8e6, 8
    links = equal_links(w)
    moved_s = 2 * (w - 1) / w * num_bytes / BYTES_PER_S
    assert exchange_s(Direct(), w, num_bytes, *links) == pytest.approx(2 * LATENCY_S + moved_s)
    assert exchange_s(Ring(), w, num_bytes, *links) == pytest.approx(2 * (w - 1) * LATENCY_S + moved_s)


def test_a_binary_tree_pays_its_depth_and_two_children() -> None:
    # Seven places, one shard: two levels of a latency each, and the root takes two vectors.
    assert exchange_s(Tree(), 1, 1e6, *equal_links(7)) == pytest.approx(2 * (2 * LATENCY_S + 2 * 1.0))


def test_a_chain_of_pieces_is_a_pipeline() -> None:
    # Every link carries the vector once, whatever the number of places; before that, one piece has come all the way.
    chain = Broadcast(leader=0, parents=(0, 0, 1, 2))
    assert exchange_s(chain, 100, 1e6, *equal_links(4)) == pytest.approx(3 * LATENCY_S + 1.0)
    assert exchange_s(chain, 1, 1e6, *equal_links(4)) == pytest.approx(3 * LATENCY_S + 3.0)


def test_two_exchange_directly() -> None:
    assert cheapest(2, 1e9, *equal_links(2)) == Direct()


def test_equal_links_want_no_detours() -> None:
    assert cheapest(8, 1e9, *equal_links(8)) == Direct()


def test_a_small_vector_of_many_members_goes_up_a_tree() -> None:
    # One shard: its owner would have to take 63 parts, one after the other.
    assert cheapest(1, 1e6, *equal_links(64, latency_s=1e-3)) == Tree()


def test_a_ring_avoids_links_that_only_others_need() -> None:
    latency_s, bytes_per_s = equal_links(6, latency_s=1e-3, bytes_per_s=1e6)
    for place in range(6):
        bytes_per_s[place, (place + 1) % 6] = 1e9
    assert cheapest(6, 1e8, latency_s, bytes_per_s) == Ring()
