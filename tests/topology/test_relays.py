"""What relays carry is divided among the workers that meet there."""

from dataclasses import replace
from itertools import permutations

import pytest

from skein.topology.fleet import Link
from skein.topology.relays import shared_links
from skein.types import WorkerId
from tests.plan.builders import link

COORDINATOR = WorkerId("")


def by(relay: str, *workers: str, bytes_per_s: float = 8e6) -> list[Link]:
    """Links among workers, all by way of a relay."""
    pairs = permutations(workers, 2)
    return [replace(link(a, b, 0.01, bytes_per_s), via=WorkerId(relay)) for a, b in pairs]


def rates(links: tuple[Link, ...]) -> set[float]:
    return {each.bytes_per_s for each in links}


@pytest.mark.parametrize(("workers", "rate"), [("ab", 8e6), ("abcd", 4e6), ("abcdefgh", 2e6)])
def test_workers_that_meet_at_a_relay_have_among_them_what_a_pair_had_alone(
    workers: str, rate: float
) -> None:
    links = by(COORDINATOR, *workers)
    assert rates(shared_links(links, links)) == {rate}


def test_what_is_slower_than_its_share_stays() -> None:
    links = [*by(COORDINATOR, "a", "b"), *by(COORDINATOR, "c", "d", bytes_per_s=1e6)]
    assert rates(shared_links(links, links)) == {4e6, 1e6}
    assert {each.latency_s for each in shared_links(links, links)} == {0.01}


def test_relays_are_apart_and_links_without_one_as_they_were() -> None:
    direct, called_back = link("a", "c", 0.01, 3e9), replace(link("c", "a", 0.01, 3e9), via=WorkerId("c"))
    links = [*by(COORDINATOR, "a", "b"), *by("r", "c", "d"), direct, called_back]
    assert shared_links(links, links) == tuple(links)


def test_a_worker_that_relays_carries_what_its_own_links_do() -> None:
    links = by("r", "a", "b", "c", "d")
    own = [link("r", "a", 0.01, 16e6), link("d", "r", 0.01, 12e6), link("b", "r", 0.01, 9e6)]
    assert rates(shared_links(links, [*links, *own])) == {6e6}


def test_who_meets_elsewhere_does_not_count_and_what_is_known_of_a_relay_does() -> None:
    ours, others = by(COORDINATOR, "a", "b", "c"), by(COORDINATOR, "x", "y", bytes_per_s=30e6)
    assert rates(shared_links(ours, [*ours, *others])) == {8e6}
