"""Ways around what cannot be dialled: on drawn networks, whose workers answer probes as they would."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.protocol.coordinator.relaying import Relaying, Told
from skein.protocol.coordinator.runs.placing.planning import fleet_of
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.directives import Probe
from skein.protocol.messages.reports import LinksMeasured
from skein.protocol.messages.ways import COORDINATOR_RELAY, Unreached, Ways
from skein.topology.fleet import Link
from skein.types import WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.reports import hello

A, B, R, S = (WorkerId(name) for name in "abrs")
Pair = tuple[WorkerId, WorkerId]
QUICK, SLOW = 10e6, 1e6


@dataclass
class Ground:
    """A network with all that workers on it would say: who can dial whom, and what relays give."""

    shut: set[Pair] = field(default_factory=set)
    offered: Collection[WorkerId] = ()
    rates: dict[WorkerId, float] = field(default_factory=dict)
    """Of what a relay carries; 0: nothing comes through."""
    live: dict[WorkerId, Entry] = field(default_factory=dict)
    told: dict[WorkerId, Ways] = field(default_factory=dict)
    num_probes: int = 0

    def __post_init__(self) -> None:
        self.relaying = Relaying(self.live, lambda member: member)

    def dials(self, sender: WorkerId, receiver: WorkerId) -> bool:
        return (sender, receiver) not in self.shut

    def join(self, *workers: WorkerId) -> None:
        for worker in workers:
            said = replace(hello(worker), offers_relay=worker in self.offered)
            self.live[worker] = Entry(hello=said, heard_at=0.0, lease_until=3.0)
            self.obey(self.relaying.joined(worker))
            self.probe(worker, [other for other in sorted(self.live) if other != worker])

    def lose(self, worker: WorkerId) -> None:
        del self.live[worker]
        self.told.pop(worker, None)
        self.obey(self.relaying.lost(worker))

    def lose_at_once(self, *workers: WorkerId) -> None:
        """Leases that end at the same time: none of them is here when the first is told of."""
        for worker in workers:
            del self.live[worker]
            self.told.pop(worker, None)
        for worker in workers:
            self.obey(self.relaying.lost(worker))

    def obey(self, told: Iterable[Told]) -> None:
        """Do what is asked, and what comes of it, until nothing does."""
        waiting = deque(told)
        while waiting:
            each = waiting.popleft()
            if isinstance(each.directive, Ways):
                self.told[each.worker] = each.directive
            else:
                assert isinstance(each.directive, Probe)
                waiting += self.relaying.measured(
                    each.worker, self.found(each.worker, [peer.worker for peer in each.directive.peers])
                )

    def probe(self, worker: WorkerId, peers: Collection[WorkerId]) -> None:
        self.obey(self.relaying.measured(worker, self.found(worker, peers)))

    def found(self, worker: WorkerId, peers: Collection[WorkerId]) -> LinksMeasured:
        """Report of a worker that measures the links to its peers."""
        self.num_probes += 1
        assert self.num_probes < 200, "probes without end"
        links: list[Link] = []
        unreached: list[Unreached] = []
        for peer in peers:
            if self.dials(worker, peer):
                links += both(worker, peer, QUICK)
                continue
            unreached.append(Unreached(peer=peer))
            known = self.told.get(worker, Ways(ways=(), listens=())).ways
            for relay in (way.relay.worker for way in known if way.peer == peer):
                if self.carries(relay, worker, peer):
                    links += both(worker, peer, self.rates.get(relay, SLOW), via=relay)
                else:
                    unreached.append(Unreached(peer=peer, via=relay))
        shut_out = tuple(peer for peer in peers if self.dials(worker, peer) and not self.dials(peer, worker))
        return LinksMeasured(links=tuple(links), unreached=tuple(unreached), shut_out=shut_out)

    def carries(self, relay: WorkerId, *ends: WorkerId) -> bool:
        """Whether both ends reach a relay that works."""
        if relay == COORDINATOR_RELAY:
            return self.rates.get(relay, SLOW) > 0
        is_reached = all(end == relay or self.dials(end, relay) for end in ends)
        return relay in self.live and is_reached and self.rates.get(relay, SLOW) > 0

    def way(self, sender: WorkerId, receiver: WorkerId) -> WorkerId | None:
        """Relay that the sender was told for the receiver, which listens there; None: it dials."""
        known = self.told.get(sender, Ways(ways=(), listens=())).ways
        relays = [way.relay.worker for way in known if way.peer == receiver]
        if not relays:
            return None
        assert relays[0] in (
            sender,
            *(place.worker for place in self.told[receiver].listens),
        ), "nobody listens there"
        return relays[0]


def both(sender: WorkerId, receiver: WorkerId, rate: float, via: WorkerId | None = None) -> tuple[Link, Link]:
    there = Link(sender=sender, receiver=receiver, latency_s=0.01, bytes_per_s=rate, via=via)
    return there, replace(there, sender=receiver, receiver=sender)


def behind_nat(*workers: WorkerId) -> set[Pair]:
    return {(sender, receiver) for receiver in workers for sender in (A, B, R, S) if sender != receiver}


def test_where_everybody_can_be_dialled_nobody_is_told_anything() -> None:
    ground = Ground()
    ground.join(A, B, R)
    assert ground.told == {}


@pytest.mark.parametrize("order", [(A, B), (B, A)])
def test_who_cannot_be_dialled_is_called_back_by_a_peer_that_can(order: tuple[WorkerId, WorkerId]) -> None:
    ground = Ground(shut=behind_nat(A))
    ground.join(*order)
    assert (ground.way(A, B), ground.way(B, A)) == (None, B)


def test_two_that_cannot_be_dialled_meet_at_the_coordinator() -> None:
    ground = Ground(shut=behind_nat(A, B))
    ground.join(A, B)
    assert (ground.way(A, B), ground.way(B, A)) == (COORDINATOR_RELAY, COORDINATOR_RELAY)
    assert {link.via for link in ground.relaying.links} == {COORDINATOR_RELAY}


@pytest.mark.parametrize(
    ("rate", "best"), [(QUICK, R), (SLOW / 2, COORDINATOR_RELAY), (0.0, COORDINATOR_RELAY)]
)
def test_of_the_relays_that_both_reach_the_quickest_is_taken(rate: float, best: WorkerId) -> None:
    ground = Ground(shut=behind_nat(A, B), offered={R}, rates={R: rate})
    ground.join(R, A, B)
    assert (ground.way(A, B), ground.way(B, A)) == (best, best)


@pytest.mark.parametrize("order", [(R, A, B), (A, R, B), (A, B, R)])
def test_a_relay_is_taken_whenever_it_comes(order: tuple[WorkerId, ...]) -> None:
    ground = Ground(shut=behind_nat(A, B), offered={R}, rates={R: QUICK})
    ground.join(*order)
    assert (ground.way(A, B), ground.way(B, A)) == (R, R)


def test_a_worker_that_does_not_offer_itself_carries_for_nobody() -> None:
    ground = Ground(shut=behind_nat(A, B), rates={R: QUICK})
    ground.join(R, A, B)
    assert ground.way(A, B) == COORDINATOR_RELAY


def test_when_a_relay_dies_the_next_best_is_taken_at_once() -> None:
    ground = Ground(shut=behind_nat(A, B), offered={R, S}, rates={R: 2 * QUICK, S: QUICK})
    ground.join(R, S, A, B)
    assert ground.way(A, B) == R
    ground.lose(R)
    assert (ground.way(A, B), ground.way(B, A)) == (S, S)


@pytest.mark.parametrize(("gone", "way"), [((S, R), COORDINATOR_RELAY), ((R, B), None), ((B, R), None)])
def test_relays_and_ends_may_be_lost_at_once(gone: tuple[WorkerId, ...], way: WorkerId | None) -> None:
    ground = Ground(shut=behind_nat(A, B), offered=[R], rates={R: QUICK})
    ground.join(A, B, R, S)
    assert ground.way(A, B) == R
    ground.lose_at_once(*gone)
    assert ground.way(A, B) == way


def test_a_relay_that_no_longer_carries_gives_way_once_somebody_doubts_it() -> None:
    ground = Ground(shut=behind_nat(A, B), offered={R}, rates={R: QUICK})
    ground.join(R, A, B)
    ground.rates[R] = 0.0
    ground.obey(ground.relaying.doubted(A, B))
    assert (ground.way(A, B), ground.way(B, A)) == (COORDINATOR_RELAY, COORDINATOR_RELAY)


def test_a_link_that_breaks_amid_a_job_is_gone_around_and_taken_again_once_it_is_whole() -> None:
    ground = Ground()
    ground.join(A, B)
    ground.shut |= {(A, B), (B, A)}
    ground.obey(ground.relaying.doubted(A, B))
    ground.obey(ground.relaying.doubted(A, B))
    assert (ground.way(A, B), ground.way(B, A)) == (COORDINATOR_RELAY, COORDINATOR_RELAY)
    ground.shut.clear()
    ground.obey(ground.relaying.doubted(A, B))
    assert (ground.way(A, B), ground.way(B, A)) == (None, None)


def test_a_relay_that_a_report_makes_up_is_neither_taken_nor_kept() -> None:
    ground = Ground(shut=behind_nat(A, B))
    ground.join(A, B)
    before = ground.relaying.num_tried
    for number in range(100):
        nobody = WorkerId(f"nobody-{number}")
        made_up = LinksMeasured(
            links=both(A, B, 1e12, via=nobody), unreached=(Unreached(peer=B, via=WorkerId(f"no-{number}")),)
        )
        ground.obey(ground.relaying.measured(A, made_up))
    assert ground.way(A, B) == COORDINATOR_RELAY
    assert ground.relaying.num_tried == before


@given(st.data())
def test_every_pair_has_a_way_that_carries_and_settles_on_it(data: st.DataObject) -> None:
    workers = (A, B, R, S)
    pairs = [(one, other) for one in workers for other in workers if one != other]
    ground = Ground(
        shut=set(data.draw(st.lists(st.sampled_from(pairs), unique=True))),
        offered=set(data.draw(st.lists(st.sampled_from(workers), unique=True))),
        rates={worker: data.draw(st.sampled_from([QUICK, SLOW])) for worker in workers},
    )
    ground.join(*data.draw(st.permutations(workers)))
    if data.draw(st.booleans()):
        ground.lose(gone := data.draw(st.sampled_from(workers)))
        pairs = [pair for pair in pairs if gone not in pair]
    for sender, receiver in pairs:
        relay = ground.way(sender, receiver)
        if relay is None:
            assert ground.dials(sender, receiver)
        else:
            assert ground.carries(relay, sender, receiver), relay


def test_plans_are_made_with_a_share_of_what_a_relay_carries() -> None:
    ground = Ground(shut=behind_nat(A, B, R, S))
    ground.join(A, B, R, S)
    links = {(link.sender, link.receiver): link for link in ground.relaying.links}
    fleet = fleet_of(ground.live.values(), links, Measured(small_job()))
    assert [link.bytes_per_s for link in fleet.links] == pytest.approx([SLOW / 2] * 12, rel=0.01)


def test_a_coordinator_plans_with_the_links_of_the_relay_and_tells_of_it() -> None:
    desk = Desk()
    desk.join(A, B)
    desk.report(A, LinksMeasured(links=(), unreached=(Unreached(peer=B),)))
    assert [peer.worker for peer in desk.told(Probe)[B].peers] == [A]
    desk.report(B, LinksMeasured(links=(), unreached=(Unreached(peer=A),)))
    [probe] = desk.told(Probe).values()
    assert {place.worker for place in desk.told(Ways)[B].listens} == {COORDINATOR_RELAY}
    assert [peer.worker for peer in probe.peers] == [B]
    there = both(A, B, SLOW, via=COORDINATOR_RELAY)
    desk.report(A, LinksMeasured(links=there, unreached=(Unreached(peer=B),)))
    assert desk.machine.links[A, B] == there[0]
    assert desk.machine.view.relays == {(A, B): COORDINATOR_RELAY, (B, A): COORDINATOR_RELAY}
