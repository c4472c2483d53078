"""The halves of a relayed connection in virtual time: order, ends, windows, and what waits for a cut to be healed."""

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from bench.emulated.lines import Lines
from client.lab.network.halves import ArrivalTiming, Half
from client.lab.network.links import Access, DirectionSpec
from client.lab.network.proxies import StreamTimes
from tests.support.wan import make_network

BULK = 4000
"""Bytes that take 4 s on a link of 1,000 bytes/s."""
LINES = Lines([[1.0, 1.0]] * 2, [[1000.0, 1000.0]] * 2)
LINK = DirectionSpec(latency_s=1.0, bytes_per_s=1000.0)


class VirtualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        heappush(self._due, (when, len(self._due), callback))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, callback = heappop(self._due)
            callback()


class Wire(asyncio.Transport):
    """A socket that notes when it was given what, and whether it is read from."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.told: list[tuple[float, bytes]] = []
        self.closed_at: list[float] = []
        self.is_read = True
        self._clock = clock

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.told.append((self._clock.now, bytes(data)))

    def is_closing(self) -> bool:
        return bool(self.closed_at)

    def close(self) -> None:
        self.closed_at.append(self._clock.now)

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class Relayed:
    """Both halves of a connection over `timing`, and their sockets."""

    def __init__(self, timing: ArrivalTiming, *, window_bytes: float = inf) -> None:
        self.clock = VirtualClock()
        self.here = Half(timing, 0, 1, clock=self.clock, window_bytes=window_bytes)
        self.there = Half(timing, 1, 0, clock=self.clock)
        self.source, self.out = Wire(self.clock), Wire(self.clock)
        self.here.connection_made(self.source)
        self.there.connection_made(self.out)
        self.was_read_before_joined = self.source.is_read
        self.here.join(self.there)
        self.there.join(self.here)

    def told(self) -> list[tuple[float, bytes]]:
        """(time, first byte) of each piece that came out."""
        return [(at, data[:1]) for at, data in self.out.told]


def test_bytes_arrive_when_the_lines_say_and_in_the_order_they_were_sent() -> None:
    relayed = Relayed(Lines([[1.0, 1.0]] * 2, [[1000.0, 1000.0]] * 2))
    relayed.here.data_received(b"a" * BULK)
    relayed.here.data_received(b"b")  # would pass, were it not the same connection
    relayed.clock.run()
    assert relayed.told() == [(5.0, b"a"), (5.0, b"b")]


def test_what_comes_while_others_are_under_way_waits_for_its_own_time() -> None:
    relayed = Relayed(StreamTimes(make_network(LINK)))
    relayed.here.data_received(b"a" * BULK)
    relayed.clock.now = 2.0
    relayed.here.data_received(b"b" * BULK)
    relayed.clock.run()
    assert relayed.told() == [(5.0, b"a"), (9.0, b"b")]


def test_a_closed_end_closes_the_other_after_what_was_under_way() -> None:
    relayed = Relayed(StreamTimes(make_network(LINK)))
    relayed.here.data_received(b"a" * BULK)
    relayed.here.connection_lost(None)
    assert not relayed.out.closed_at
    relayed.clock.run()
    assert relayed.out.closed_at == [5.0]
    assert relayed.told() == [(5.0, b"a")]


def test_an_end_travels_as_long_as_a_byte() -> None:
    relayed = Relayed(StreamTimes(make_network(LINK)))
    relayed.here.connection_lost(None)
    relayed.clock.run()
    assert relayed.out.closed_at == [1.0]


def test_nothing_is_read_before_it_is_known_where_it_goes() -> None:
    relayed = Relayed(LINES)
    assert not relayed.was_read_before_joined
    assert relayed.source.is_read


def test_a_sender_waits_while_its_window_is_under_way() -> None:
    relayed = Relayed(StreamTimes(make_network(LINK)), window_bytes=BULK)
    relayed.here.data_received(b"a" * (BULK - 1))
    read = [relayed.source.is_read]
    relayed.here.data_received(b"b")
    read.append(relayed.source.is_read)
    relayed.clock.run()
    assert [*read, relayed.source.is_read] == [True, False, True]


def test_a_sender_waits_for_a_receiver_who_does_not_read() -> None:
    relayed = Relayed(LINES)
    relayed.there.pause_writing()
    read = relayed.source.is_read
    relayed.there.resume_writing()
    assert (read, relayed.source.is_read) == (False, True)


def test_a_cut_holds_bytes_and_ends_until_it_is_healed() -> None:
    network = make_network(LINK)
    relayed = Relayed(StreamTimes(network))
    relayed.here.data_received(b"a" * 1000)
    network.cut((0, 1))
    relayed.here.data_received(b"b" * 1000)
    relayed.here.connection_lost(None)
    relayed.clock.run()
    assert (relayed.told(), relayed.out.closed_at) == ([(2.0, b"a")], [])
    relayed.clock.now = 50.0
    network.heal((0, 1))
    relayed.here.resume()
    relayed.clock.run()
    assert (relayed.told()[1:], relayed.out.closed_at) == ([(52.0, b"b")], [52.0])


def test_a_cut_leaves_the_other_direction_alone() -> None:
    network = make_network(LINK)
    relayed = Relayed(StreamTimes(network))
    network.cut((0, 1))
    relayed.there.data_received(b"x" * 1000)
    relayed.clock.run()
    assert [at for at, _ in relayed.source.told] == [2.0]


def test_streams_share_uplinks_and_downlinks() -> None:
    quick = DirectionSpec(latency_s=1.0, bytes_per_s=1e9)
    slow = [Access(up_bytes_per_s=1000.0), Access(), Access(down_bytes_per_s=500.0)]
    times = StreamTimes(make_network(quick, 3, accesses=slow))
    assert [round(times.arrival_s(0, to, 500, now=0.0), 3) for to in (1, 2)] == [1.5, 2.5]
    assert round(times.arrival_s(1, 2, 500, now=0.0), 3) == 3.5


def test_outsiders_wait_for_nothing() -> None:
    times = StreamTimes(make_network(LINK))
    assert times.arrival_s(-1, 0, BULK, now=7.0) == times.arrival_s(0, -1, BULK, now=7.0) == 7.0
