"""The router of packets in virtual time: frames go in at one endpoint and come out at another when they are due."""

import math

import pytest

from client.lab.network.links import Access, DirectionSpec, Drop, LabNetwork
from client.lab.network.router import HEADER_BYTES, Router, destination, wire_bytes
from tests.support.wan import ADDRESSES, make_frame, make_network

LINK = DirectionSpec(latency_s=1.0, bytes_per_s=1000.0)
QUICK = DirectionSpec(latency_s=1.0, bytes_per_s=math.inf)


def make_router(network: LabNetwork) -> Router:
    return Router(network, {address: i for i, address in enumerate(ADDRESSES[: len(network.names)])})


def drain(router: Router) -> list[tuple[float, int, bytes]]:
    """(time to the microsecond, receiver, frame) of all that still comes."""
    found = []
    while (due_s := router.deadline()) is not None:
        found += [(round(due_s, 6), receiver, frame) for receiver, frame in router.pop(now=due_s)]
    return found


def test_a_frame_comes_out_unchanged_at_its_address_when_it_is_due() -> None:
    router = make_router(make_network(LINK, 3))
    frame = make_frame(2, 500, mark=7)
    router.push(0, frame, now=3.0)
    assert router.deadline() == 4.5
    assert router.pop(now=4.4999) == []
    assert router.pop(now=4.5) == [(2, frame)]
    assert router.deadline() is None


def test_frames_of_several_senders_come_out_in_the_order_of_their_times() -> None:
    links = {(a, b): LINK for a in range(3) for b in range(3) if a != b}
    links[0, 2] = DirectionSpec(latency_s=5.0, bytes_per_s=1000.0)
    router = make_router(LabNetwork(("a", "b", "c"), links))
    router.push(0, make_frame(2, mark=1), now=0.0)
    router.push(1, make_frame(2, mark=2), now=1.0)
    assert [(at, frame[-1]) for at, _, frame in drain(router)] == [
        (2.1, 2),
        (5.1, 1),
    ]


def test_frames_of_one_instant_keep_their_order() -> None:
    router = make_router(make_network(QUICK))
    for mark in range(20):
        router.push(0, make_frame(1, mark=mark), now=0.0)
    assert [frame[-1] for _, _, frame in drain(router)] == list(range(20))


def test_a_cut_holds_back_one_direction_and_lets_what_is_under_way_arrive() -> None:
    network = make_network(QUICK)
    router = make_router(network)
    router.push(0, make_frame(1, mark=1), now=0.0)
    network.cut((0, 1))
    router.push(0, make_frame(1, mark=2), now=0.5)
    router.push(1, make_frame(0, mark=3), now=0.5)
    assert [(receiver, frame[-1]) for _, receiver, frame in drain(router)] == [(1, 1), (0, 3)]
    assert router.traffic[0, 1].num_dropped == {Drop.CUT: 1}
    network.heal((0, 1))
    router.push(0, make_frame(1, mark=4), now=2.0)
    assert [frame[-1] for _, _, frame in drain(router)] == [4]


def test_an_uplink_is_shared_by_all_receivers() -> None:
    accesses = [Access(up_bytes_per_s=1000.0), Access(), Access()]
    router = make_router(make_network(QUICK, 3, accesses=accesses))
    router.push(0, make_frame(1, 100), now=0.0)
    router.push(0, make_frame(2, 100), now=0.0)
    assert [(at, receiver) for at, receiver, _ in drain(router)] == [
        (1.1, 1),
        (1.2, 2),
    ]


def test_a_downlink_is_shared_by_all_senders_who_comes_first_first() -> None:
    links = {(a, b): QUICK for a in range(3) for b in range(3) if a != b}
    links[0, 2] = DirectionSpec(latency_s=1.05, bytes_per_s=math.inf)
    accesses = [Access(), Access(), Access(down_bytes_per_s=1000.0)]
    router = make_router(LabNetwork(("a", "b", "c"), links, accesses=accesses))
    router.push(0, make_frame(2, 100, mark=1), now=0.0)
    router.push(1, make_frame(2, 100, mark=2), now=0.0)
    assert [(at, frame[-1]) for at, _, frame in drain(router)] == [
        (1.1, 2),
        (1.2, 1),
    ]


def test_full_uplinks_and_downlinks_drop() -> None:
    for access in (Access(up_bytes_per_s=1000.0), Access(down_bytes_per_s=1000.0)):
        router = make_router(make_network(QUICK, accesses=[access, access]))
        for _ in range(5):
            router.push(0, make_frame(1, 90), now=0.0)
        # 0.2 s may wait: the third packet still comes in, and makes it 0.27 s.
        assert len(drain(router)) == 3
        assert router.traffic[0, 1].num_dropped == {Drop.QUEUE: 2}


def test_throughput_is_the_bandwidth() -> None:
    """A sender who offers twice what the link carries gets what it carries."""
    router = make_router(make_network(DirectionSpec(latency_s=0.5, bytes_per_s=10_000.0)))
    arrived: list[float] = []
    for i in range(2000):
        now = i * 0.005
        arrived += [now] * len(router.pop(now=now))
        router.push(0, make_frame(1, 100), now=now)
    # From 0.5 s on; one packet more or less at either end.
    assert len(arrived) == pytest.approx((2000 * 0.005 - 0.5) * 100, abs=2)
    assert router.traffic[0, 1].num_bytes == 100 * len(arrived)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes(HEADER_BYTES + 19),
        bytes(HEADER_BYTES) + bytes([0x60]) + bytes(60),
        make_frame(2),
        make_frame(0),
    ],
    ids=["empty", "short", "IPv6", "unknown-address", "to-itself"],
)
def test_what_is_for_nobody_here_is_counted_and_dropped(frame: bytes) -> None:
    router = make_router(make_network(QUICK))
    router.push(0, frame, now=0.0)
    assert (router.num_unroutable, router.deadline()) == (1, None)


def test_the_address_is_read_from_the_packet() -> None:
    assert destination(make_frame(1)) == ADDRESSES[1]


def test_each_packet_of_a_batch_has_headers_on_the_wire() -> None:
    # 3,500 bytes behind 40 of headers, 1,000 in each packet: four packets.
    batch = make_frame(1, 3540, segment_bytes=1000)
    assert (wire_bytes(make_frame(1, 540)), wire_bytes(batch)) == (540, 3540 + 3 * 40)


def test_the_same_seed_gives_the_same_fate_to_every_packet() -> None:
    def fate(seed: int) -> list[tuple[float, int, bytes]]:
        network = make_network(
            DirectionSpec(latency_s=0.1, bytes_per_s=1e6, jitter_s=0.05, loss=0.2), seed=seed
        )
        router = make_router(network)
        for i in range(200):
            router.push(i % 2, make_frame(1 - i % 2, mark=i), now=0.001 * i)
        return drain(router)

    assert fate(1) == fate(1) != fate(2)
