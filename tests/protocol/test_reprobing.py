"""When links are probed again: after growing pauses, no sooner and no later, and no worse for it."""

from itertools import pairwise

import pytest

from skein.protocol.coordinator.reprobing import (
    FIRST_PAUSE_S,
    GROWTH,
    LAST_PAUSE_S,
    MAX_AT_ONCE,
    SLOW_BYTES_PER_S,
    Reprobing,
    Retry,
)
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Unreached
from skein.topology.fleet import Link
from skein.types import WorkerId

A, B, C = (WorkerId(name) for name in "abc")
Pair = tuple[WorkerId, WorkerId]
RELAYED = {(A, B): COORDINATOR_RELAY, (B, A): COORDINATOR_RELAY}
FAILED = LinksMeasured(links=(), unreached=(Unreached(peer=B),))


def found(rate: float, *, back: float = 1e9, via: WorkerId | None = None) -> LinksMeasured:
    """Report of A that measures the links to B and back."""
    there = Link(sender=A, receiver=B, latency_s=0.01, bytes_per_s=rate, via=via)
    return LinksMeasured(links=(there, Link(sender=B, receiver=A, latency_s=0.01, bytes_per_s=back, via=via)))


def retries(reprobing: Reprobing, *, until_s: float) -> list[tuple[float, Retry]]:
    """Probes that are asked for until then, each at its time."""
    asked = []
    while (at := reprobing.deadline()) is not None and at <= until_s:
        asked += [(at, retry) for retry in reprobing.due(now=at)]
    return asked


def test_a_pair_on_a_relay_tries_the_direct_way_after_growing_pauses() -> None:
    reprobing = Reprobing({A, B}, {(A, B): False, (B, A): False})
    reprobing.measured(A, FAILED, RELAYED, now=0.0)
    asked = retries(reprobing, until_s=4000.0)
    assert all(retry.only_direct for _, retry in asked)
    assert {retry.prober for _, retry in asked} == {A, B}
    times = [at for at, _ in asked]
    assert times[0] == FIRST_PAUSE_S
    for before, after in pairwise(times):
        assert after - before <= min(GROWTH * max(before, FIRST_PAUSE_S), LAST_PAUSE_S)
    assert times[-1] > 4000.0 - LAST_PAUSE_S


def test_the_worker_that_cannot_dial_the_other_one_is_the_one_that_tries() -> None:
    reprobing = Reprobing({A, B}, {(A, B): True, (B, A): False})
    reprobing.measured(A, found(1e9), {(B, A): A}, now=0.0)
    assert {retry.prober for _, retry in retries(reprobing, until_s=100.0)} == {B}


def test_a_pair_that_is_back_on_the_direct_way_is_left_alone() -> None:
    reprobing = Reprobing({A, B}, {})
    reprobing.measured(A, FAILED, RELAYED, now=0.0)
    reprobing.measured(A, found(1e9), {}, now=6.0)
    assert retries(reprobing, until_s=1000.0) == []
    assert reprobing.deadline() is None


def test_a_pair_that_fails_again_soon_waits_longer_and_after_quiet_as_at_first() -> None:
    reprobing = Reprobing({A, B}, {})
    pauses, now = [], 0.0
    for _ in range(4):
        reprobing.measured(A, FAILED, RELAYED, now=now)
        [(at, _), *_] = retries(reprobing, until_s=now + LAST_PAUSE_S)[:1]
        pauses.append(at - now)
        now = at + 1.0
        reprobing.measured(A, found(1e9), {}, now=now)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 2 * pauses[0]
    assert retries(reprobing, until_s=now + 10 * LAST_PAUSE_S) == []
    reprobing.measured(A, FAILED, RELAYED, now=now + 10 * LAST_PAUSE_S)
    assert reprobing.deadline() == now + 10 * LAST_PAUSE_S + FIRST_PAUSE_S


@pytest.mark.parametrize("via", [None, COORDINATOR_RELAY])
@pytest.mark.parametrize("first", [61e3, SLOW_BYTES_PER_S / 2])
def test_a_slow_link_is_measured_again_by_the_way_that_it_has_until_it_is_quick(
    first: float, via: WorkerId | None
) -> None:
    reprobing, relays = Reprobing({A, B}, {}), {} if via is None else RELAYED
    reprobing.measured(A, found(first, via=via), relays, now=0.0)
    [(at, retry)] = retries(reprobing, until_s=FIRST_PAUSE_S)
    assert not retry.only_direct
    reprobing.measured(A, found(1e9, via=via), relays, now=at)
    later = retries(reprobing, until_s=1000.0)
    assert all(retry.only_direct for _, retry in later)
    assert bool(later) == (via is not None)


def test_a_link_far_slower_than_it_was_is_measured_again_and_believed_in_the_end() -> None:
    reprobing = Reprobing({A, B}, {})
    reprobing.measured(A, found(1e9), {}, now=0.0)
    reprobing.measured(A, found(1e8), {}, now=10.0)
    asked = []
    while (at := reprobing.deadline()) is not None:
        asked += [(at, retry) for retry in reprobing.due(now=at)]
        reprobing.measured(A, found(1e8), {}, now=at)
    assert 8 < len(asked) < 20


@pytest.mark.parametrize(("again", "believed"), [(3e5, 5e5), (9e6, 9e6)])
def test_a_repeated_measurement_raises_a_rate_and_never_lowers_it(again: float, believed: float) -> None:
    reprobing = Reprobing({A, B}, {})
    before = found(5e5)
    links = {(link.sender, link.receiver): link for link in before.links}
    assert reprobing.believed(before, {}) == before
    reprobing.measured(A, before, {}, now=0.0)
    list(reprobing.due(now=FIRST_PAUSE_S))
    assert reprobing.believed(found(again), links).links[0].bytes_per_s == believed
    by_relay = found(again, via=COORDINATOR_RELAY)
    assert reprobing.believed(by_relay, links) == by_relay


def test_workers_that_are_not_here_are_not_watched_whatever_a_report_names() -> None:
    reprobing = Reprobing({A, B}, {})
    reprobing.measured(A, LinksMeasured(links=(), unreached=(Unreached(peer=C),)), {(A, C): B}, now=0.0)
    stranger = Link(sender=C, receiver=B, latency_s=0.1, bytes_per_s=1.0)
    reprobing.measured(A, LinksMeasured(links=(stranger,)), {}, now=0.0)
    assert reprobing.deadline() is None
    reprobing.measured(A, FAILED, RELAYED, now=0.0)
    reprobing.lost(B)
    assert retries(reprobing, until_s=1000.0) == []


def test_a_worker_is_asked_for_few_peers_at_a_time() -> None:
    peers = [WorkerId(f"w{number:02d}") for number in range(3 * MAX_AT_ONCE)]
    dials = {(A, peer): False for peer in peers} | {(peer, A): True for peer in peers}
    reprobing = Reprobing({A, *peers}, dials)
    report = LinksMeasured(links=(), unreached=tuple(Unreached(peer=peer) for peer in peers))
    reprobing.measured(A, report, {(A, peer): peer for peer in peers}, now=0.0)
    asked = retries(reprobing, until_s=FIRST_PAUSE_S + 3.0)
    assert {retry.prober for _, retry in asked} == {A}
    assert [len(retry.peers) for _, retry in asked] == [MAX_AT_ONCE] * 3
    assert {peer for _, retry in asked for peer in retry.peers} == set(peers)
