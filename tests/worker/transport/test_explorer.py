"""What a worker makes of peers that it cannot dial, with links that answer as the test says."""

from dataclasses import dataclass, field
from typing import cast

from skein.errors import RemoteError
from skein.protocol.messages.directives import Member
from skein.protocol.messages.ways import COORDINATOR_RELAY, Obstacle, Unreached
from skein.protocol.worker.worker_io import Identity
from skein.topology.fleet import Link
from skein.types import Incarnation, SiteId, WorkerId
from skein.wire.extra import DialBack
from tests.support.reports import profile
from worker.transport.links import FullPacketsVanishError, MeasuredLinks, Sight
from worker.transport.peers import Peers
from worker.transport.reach.explorer import Explorer
from worker.transport.reach.ways import WorkerWays

ME, PEER = WorkerId("me"), WorkerId("peer")
MEMBER = Member(worker=PEER, incarnation=Incarnation("1"), address="10.0.0.1:7")


@dataclass
class Around:
    """Peers and ways: who can be dialled, by which relay one goes, and whether that carries."""

    is_dialled_by_me: bool = True
    dials_me: bool = True
    relay: WorkerId | None = None
    carries: bool = True
    takes_bulk: bool = True
    """Whether tensors pass where the peer is dialled."""
    passes_full_packets: bool = True
    asked_back: list[DialBack | None] = field(default_factory=list)

    async def is_dialled(self, _member: Member) -> bool:
        if not self.passes_full_packets:
            raise FullPacketsVanishError("small messages only")
        return self.is_dialled_by_me

    async def look_at(self, _member: Member) -> Sight:
        return Sight.GONE

    async def measure_link(
        self, member: Member, *, back_to: DialBack | None, via: WorkerId | None
    ) -> MeasuredLinks:
        self.asked_back.append(back_to)
        if not (self.carries if via is not None else self.carries and self.takes_bulk):
            raise RemoteError("nothing came through")
        there = Link(sender=ME, receiver=member.worker, latency_s=0.1, bytes_per_s=1.0, via=via)
        return MeasuredLinks(links=(there, there), is_dialled=None if back_to is None else self.dials_me)

    def via(self, _peer: WorkerId) -> WorkerId | None:
        return self.relay

    def forget(self, _peer: WorkerId) -> None:
        self.relay = None


def explorer(around: Around) -> Explorer:
    me = Identity(
        worker=ME, incarnation=Incarnation("i"), site=SiteId("here"), address="me:1", profile=profile()
    )
    return Explorer(me, cast(Peers, around), cast(WorkerWays, around))


async def test_a_peer_that_is_dialled_is_asked_to_dial_back_and_shut_out_where_it_cannot() -> None:
    around = Around(dials_me=False)
    found = await explorer(around).explore([MEMBER])
    assert (len(found.links), found.unreached, found.shut_out) == (2, (), (PEER,))
    [back_to] = around.asked_back
    assert back_to == DialBack(worker=ME, incarnation=Incarnation("i"), address="me:1")


async def test_a_peer_that_cannot_be_dialled_is_measured_by_the_relay_that_was_told() -> None:
    around = Around(is_dialled_by_me=False, relay=COORDINATOR_RELAY)
    found = await explorer(around).explore([MEMBER])
    assert {link.via for link in found.links} == {COORDINATOR_RELAY}
    assert (found.unreached, around.asked_back) == ((Unreached(peer=PEER),), [None])


async def test_a_relay_that_carries_nothing_is_told_of() -> None:
    around = Around(is_dialled_by_me=False, relay=COORDINATOR_RELAY, carries=False)
    found = await explorer(around).explore([MEMBER])
    assert found.links == ()
    assert found.unreached == (Unreached(peer=PEER), Unreached(peer=PEER, via=COORDINATOR_RELAY))


async def test_a_refusal_is_a_death_only_where_the_peer_could_be_dialled() -> None:
    around = Around()
    looking = explorer(around)
    assert await looking.look_at(MEMBER) is Sight.GONE
    around.is_dialled_by_me = False
    await looking.explore([MEMBER])
    assert await looking.look_at(MEMBER) is Sight.SILENT
    around.is_dialled_by_me = True
    await looking.explore([MEMBER])
    assert await looking.look_at(MEMBER) is Sight.GONE


async def test_a_peer_that_can_be_dialled_and_takes_no_bulk_is_unreached_and_its_relay_is_measured() -> None:
    around = Around(takes_bulk=False, relay=COORDINATOR_RELAY)
    found = await explorer(around).explore([MEMBER])
    assert found.unreached == (Unreached(peer=PEER),)
    assert {link.via for link in found.links} == {COORDINATOR_RELAY}
    assert around.relay == COORDINATOR_RELAY


async def test_a_path_that_loses_full_packets_is_told_of_as_that_and_its_peer_is_no_less_alive() -> None:
    around = Around(passes_full_packets=False, relay=COORDINATOR_RELAY)
    looking = explorer(around)
    found = await looking.explore([MEMBER])
    assert found.unreached == (Unreached(peer=PEER, obstacle=Obstacle.FULL_PACKETS_VANISH),)
    assert {link.via for link in found.links} == {COORDINATOR_RELAY}
    assert await looking.look_at(MEMBER) is Sight.GONE


async def test_a_try_of_the_direct_way_alone_measures_no_relay() -> None:
    around = Around(is_dialled_by_me=False, relay=COORDINATOR_RELAY)
    found = await explorer(around).explore([MEMBER], only_direct=True)
    assert (found.links, found.unreached, around.asked_back) == ((), (Unreached(peer=PEER),), [])
