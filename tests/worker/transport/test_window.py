from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.errors import RemoteError
from worker.transport.receiving.window import INITIAL_BYTES, MAX_BYTES, Window

PART = 1 << 20


def settled_size(bytes_per_s: float, round_trip_s: float, num_parts: int = 1500) -> int:
    """The window after `num_parts` parts over a link that a sender keeps as full as its credit allows."""
    window = Window()
    grants = deque([(round_trip_s / 2, window.open(now=0.0))])
    credit, sender_s, link_free_s = 0, 0.0, 0.0
    for _ in range(num_parts):
        while credit < PART:
            arrives_s, granted = grants.popleft()
            sender_s, credit = max(sender_s, arrives_s), credit + granted
        credit -= PART
        link_free_s = max(link_free_s, sender_s) + PART / bytes_per_s
        now = link_free_s + round_trip_s / 2
        if granted := window.take(PART, now=now):
            grants.append((now + round_trip_s / 2, granted))
    return window.size


@pytest.mark.parametrize(
    ("bytes_per_s", "round_trip_s"), [(125e6, 0.1), (125e6, 0.2), (1e9, 0.02), (50e6, 0.3), (400e6, 0.1)]
)
def test_the_window_settles_near_the_bandwidth_delay_product(bytes_per_s: float, round_trip_s: float) -> None:
    product = bytes_per_s * round_trip_s
    # Doubling overshoots by less than two; one trial, another factor of two, may be running as we look.
    assert product <= settled_size(bytes_per_s, round_trip_s) <= 4.5 * product


@pytest.mark.parametrize(("bytes_per_s", "round_trip_s"), [(1e6, 0.1), (10e6, 0.05), (1e9, 0.0002)])
def test_a_link_that_the_initial_window_fills_keeps_it(bytes_per_s: float, round_trip_s: float) -> None:
    # Twice, if a trial is running as we look.
    assert settled_size(bytes_per_s, round_trip_s) in (INITIAL_BYTES, 2 * INITIAL_BYTES)


def test_the_window_has_an_upper_bound() -> None:
    assert settled_size(10e9, 0.5) == MAX_BYTES


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 2 * PART), st.floats(0, 1, allow_nan=False)), min_size=1, max_size=80
    )
)
def test_a_sender_that_waits_for_credit_can_always_send_its_largest_part(
    parts: list[tuple[int, float]],
) -> None:
    window = Window()
    now, credit = 0.0, window.open(now=0.0)
    for num_bytes, pause_s in parts:
        assert credit >= 2 * PART
        now += pause_s
        credit += window.take(num_bytes, now=now) - num_bytes
        assert INITIAL_BYTES <= window.size <= MAX_BYTES
        assert 0 <= credit <= 2 * window.size


def test_bytes_beyond_the_credit_are_the_peers_fault() -> None:
    window = Window()
    granted = window.open(now=0.0)
    with pytest.raises(RemoteError, match="1 bytes more"):
        window.take(granted + 1, now=1.0)


def test_bytes_that_come_slowly_are_told_four_times_a_second() -> None:
    window = Window()
    window.open(now=0.0)
    small = INITIAL_BYTES // 64
    grants = [window.take(small, now=0.1 * i) for i in range(1, 7)]
    assert grants == [0, 0, 3 * small, 0, 0, 3 * small]
