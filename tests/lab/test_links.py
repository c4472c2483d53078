"""Emulated links in virtual time: how long what is sent takes, what is lost, and what a change does."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.lab.network.links import (
    MIN_QUEUE_S,
    SEGMENT_BYTES,
    Access,
    DirectionSpec,
    Drop,
    LabNetwork,
    Pipe,
    TimeSpan,
)
from skein.rng import stream
from tests.support.wan import make_network, sent_at

KB = 1000
SLOW = DirectionSpec(latency_s=1.0, bytes_per_s=1000.0)


def test_a_packet_takes_its_bytes_and_the_latency() -> None:
    line = make_network(SLOW).lines[0, 1]
    assert line.send(sent_at(10.0), 500) == TimeSpan(11.0, 11.5)


def test_packets_leave_one_after_the_other() -> None:
    line = make_network(SLOW).lines[0, 1]
    arrivals = [line.send(sent_at(0.0), 500) for _ in range(3)]
    assert [isinstance(x, TimeSpan) and x.last_s for x in arrivals] == [1.5, 2.0, 2.5]


def test_directions_do_not_wait_for_each_other() -> None:
    network = make_network(SLOW)
    assert network.lines[0, 1].send(sent_at(0.0), 500) == network.lines[1, 0].send(sent_at(0.0), 500)


def test_a_queue_holds_a_round_trip_and_drops_what_is_more() -> None:
    line = make_network(SLOW).lines[0, 1]
    answers = [line.send(sent_at(0.0), 500) for _ in range(7)]
    # Two seconds are a round trip: with 2.5 s waiting it is full.
    assert [x is Drop.QUEUE for x in answers] == [False] * 5 + [True] * 2
    assert isinstance(line.send(sent_at(0.5), 500), TimeSpan)


def test_a_short_link_has_a_queue_too() -> None:
    line = make_network(DirectionSpec(latency_s=0.0, bytes_per_s=1000.0)).lines[0, 1]
    num_bytes = round(MIN_QUEUE_S * 1000)
    assert [line.send(sent_at(0.0), num_bytes) is Drop.QUEUE for _ in range(3)] == [False, False, True]


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 2)), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.3]),
)
def test_nothing_is_reordered_nor_quicker_than_the_link(
    packets: Sequence[tuple[int, float]], jitter_s: float, loss: float
) -> None:
    """Against the sum of all bytes so far: a busy link never exceeds its bandwidth, whoever sends how much when."""
    spec = DirectionSpec(latency_s=0.25, bytes_per_s=1000.0, jitter_s=jitter_s, loss=loss)
    line = make_network(spec).lines[0, 1]
    now, newest_s, num_bytes, begin_s = 0.0, -math.inf, 0, math.inf
    for size, pause_s in packets:
        now += pause_s
        arrival = line.send(sent_at(now), size)
        if isinstance(arrival, Drop):
            continue
        begin_s, num_bytes = min(begin_s, now), num_bytes + size
        assert arrival.last_s >= newest_s
        assert arrival.last_s >= now + 0.25 + size / 1000 - 1e-9
        assert num_bytes / 1000 <= arrival.last_s - begin_s - 0.25 + 1e-9
        newest_s = arrival.last_s


def test_loss_is_as_often_as_said_and_repeats_under_its_seed() -> None:
    spec = DirectionSpec(latency_s=0.0, bytes_per_s=math.inf, loss=0.1)

    def lost(seed: int) -> list[bool]:
        line = make_network(spec, seed=seed).lines[0, 1]
        return [line.send(sent_at(float(i)), 100) is Drop.LOSS for i in range(10_000)]

    assert lost(3) == lost(3) != lost(4)
    # 10,000 draws of 0.1: the standard deviation is 0.003, and the seed is fixed.
    assert sum(lost(3)) / 10_000 == pytest.approx(0.1, abs=0.009)


def test_directions_have_luck_of_their_own() -> None:
    network = make_network(DirectionSpec(latency_s=0.0, bytes_per_s=math.inf, loss=0.5))
    ways = [
        [network.lines[pair].send(sent_at(float(i)), 1) is Drop.LOSS for i in range(50)]
        for pair in ((0, 1), (1, 0))
    ]
    assert ways[0] != ways[1]


def test_jitter_spreads_evenly_up_to_its_bound() -> None:
    spec = DirectionSpec(latency_s=1.0, bytes_per_s=math.inf, jitter_s=0.2)
    line = make_network(spec).lines[0, 1]
    late_s = [line.send_reliably(sent_at(10.0 * i), 1).last_s - 10.0 * i - 1.0 for i in range(2000)]
    assert 0 <= min(late_s) < 0.01
    assert 0.19 < max(late_s) <= 0.2
    # The mean of 2,000 even draws up to 0.2: its standard deviation is 0.0013.
    assert sum(late_s) / 2000 == pytest.approx(0.1, abs=0.005)


def test_what_a_stream_loses_comes_a_round_trip_later() -> None:
    spec = DirectionSpec(latency_s=1.0, bytes_per_s=math.inf, loss=0.5)
    line = make_network(spec).lines[0, 1]
    arrivals = {line.send_reliably(sent_at(100.0 * i), 1).last_s - 100.0 * i for i in range(50)}
    assert arrivals == {1.0, 3.0}


def test_a_stream_loses_the_more_the_longer_it_is() -> None:
    line = make_network(DirectionSpec(latency_s=1.0, bytes_per_s=math.inf, loss=0.01)).lines[0, 1]
    late = [
        line.send_reliably(sent_at(10.0 * i), 69 * SEGMENT_BYTES).last_s - 10.0 * i > 2 for i in range(1000)
    ]
    # 1 - 0.99 ** 69 is 0.5; of 1,000 draws the standard deviation is 0.016.
    assert sum(late) / 1000 == pytest.approx(0.5, abs=0.05)


def test_a_cut_drops_everything_one_way_until_it_is_healed() -> None:
    network = make_network(SLOW)
    network.cut((0, 1))
    assert network.lines[0, 1].send(sent_at(0.0), 1) is Drop.CUT
    assert isinstance(network.lines[1, 0].send(sent_at(0.0), 1), TimeSpan)
    network.heal((0, 1))
    assert isinstance(network.lines[0, 1].send(sent_at(0.0), 1), TimeSpan)


def test_slowing_changes_what_is_given_and_healing_all_of_it() -> None:
    network = make_network(SLOW)
    network.slow((0, 1), {"bytes_per_s": 10.0})
    network.slow((0, 1), {"latency_s": 5.0})
    assert network.lines[0, 1].spec == DirectionSpec(latency_s=5.0, bytes_per_s=10.0)
    assert network.lines[0, 1].send(sent_at(0.0), 10) == TimeSpan(5.0, 6.0)
    network.heal((0, 1))
    assert network.lines[0, 1].spec == SLOW


@pytest.mark.parametrize(
    "values", [{"latency_s": -1.0}, {"bytes_per_s": 0.0}, {"loss": 1.0}, {"jitter_s": math.nan}]
)
def test_impossible_links_are_refused_and_change_nothing(values: dict[str, float]) -> None:
    network = make_network(SLOW)
    with pytest.raises(ValueError, match="give"):
        network.slow((0, 1), values)
    assert network.lines[0, 1].spec == SLOW


@given(st.lists(st.sampled_from([200.0, 1000.0, 5000.0]), min_size=1, max_size=4), st.integers(1, 20))
def test_pipes_in_a_row_are_as_fast_as_the_slowest(rates: list[float], count: int) -> None:
    pipes = [Pipe(rate) for rate in rates]
    end_s = 0.0
    for _ in range(count):
        span = TimeSpan(0.0, 0.0)
        for pipe in pipes:
            span = pipe.carry(span, 100)
        end_s = span.last_s
    assert end_s == pytest.approx(count * 100 / min(rates))


def test_only_quick_endpoints_without_loss_send_in_batches() -> None:
    quick = DirectionSpec(latency_s=0.1, bytes_per_s=1e8)
    assert make_network(quick).may_batch(0)
    assert not make_network(quick, accesses=[Access(up_bytes_per_s=1e6), Access()]).may_batch(0)
    network = make_network(quick)
    network.slow((0, 1), {"loss": 0.001})
    assert (network.may_batch(0), network.may_batch(1)) == (False, True)


def test_random_streams_are_named_by_endpoints() -> None:
    """So that one endpoint more leaves the others' luck as it was."""
    spec = DirectionSpec(latency_s=0.0, bytes_per_s=math.inf, jitter_s=1.0)
    names = ("a", "b", "c")
    network = LabNetwork(names, {(0, 1): spec, (1, 2): spec}, seed=9)
    assert network.lines[1, 2].send_reliably(sent_at(0.0), 1).last_s == stream(9, "lab", "b", "c").random()
