"""How long a peer may be silent, and how large parts may be, by what was seen of it."""

import pytest

from skein.wire.channel import PART_BYTES
from worker.transport.pace import LEAST_PART_BYTES, PeerPace, PeerPatience

MIB = 1 << 20
PATIENCE = PeerPatience()


def bound_s(pace: PeerPace, num_bytes: int, *, now: float = 0.0) -> float:
    return PATIENCE.bound_s(pace.usual_s(num_bytes, now=now))


def test_a_peer_that_answers_at_once_may_be_silent_for_the_least_time_only() -> None:
    pace = PeerPace()
    pace.heard(0.01, MIB, now=0.0)
    assert bound_s(pace, 100 * MIB) == PATIENCE.least_s


def test_bulk_over_a_link_that_carried_none_may_take_longer_and_what_is_small_may_not() -> None:
    pace = PeerPace()
    assert bound_s(pace, MIB) == PATIENCE.first_s
    assert bound_s(pace, LEAST_PART_BYTES) == PATIENCE.least_s
    pace.heard(0.1, LEAST_PART_BYTES, now=0.0)
    assert bound_s(pace, MIB) == PATIENCE.first_s


def test_three_times_the_longest_silence_is_borne_and_that_is_forgotten_in_time() -> None:
    pace = PeerPace()
    pace.heard(2.0, MIB, now=0.0)
    pace.heard(0.1, MIB, now=0.1)
    assert bound_s(pace, MIB, now=0.1) == pytest.approx(6.0, rel=0.01)
    assert bound_s(pace, MIB, now=10.0) == pytest.approx(3.0)  # one half-life later
    assert bound_s(pace, MIB, now=60.0) == PATIENCE.least_s


def test_no_patience_is_without_end() -> None:
    pace = PeerPace()
    pace.heard(1000.0, MIB, now=0.0)
    assert bound_s(pace, MIB) == PATIENCE.most_s


def test_a_probe_tells_what_the_first_answers_take() -> None:
    pace = PeerPace()
    pace.probed(0.3, 2**20, now=0.0)
    assert pace.answer_s == 1.3
    assert bound_s(pace, LEAST_PART_BYTES) == pytest.approx(3 * 1.3)


def test_a_probe_does_not_tell_what_bulk_takes_that_shares_the_link() -> None:
    pace = PeerPace()
    pace.probed(0.3, 2**20, now=0.0)
    assert bound_s(pace, 100 * MIB) == PATIENCE.first_s
    pace.heard(0.5, MIB, now=1.0)
    assert bound_s(pace, 100 * MIB, now=1.0) < PATIENCE.first_s


def test_answers_are_smoothed() -> None:
    pace = PeerPace()
    pace.answered(0.8)
    pace.answered(1.6)
    assert pace.answer_s == pytest.approx(0.9)


def test_parts_shrink_while_signs_come_slowly_and_grow_again_when_they_are_quick() -> None:
    pace = PeerPace()
    sizes = []
    for silent_s in (2.0, 2.0, 0.3, 0.05):
        pace.heard(silent_s, 0, now=0.0)
        sizes.append(pace.part_bytes)
    assert sizes == [PART_BYTES // 2, PART_BYTES // 4, PART_BYTES // 4, PART_BYTES // 2]
    for _ in range(20):
        pace.heard(9.0, 0, now=0.0)
    least = pace.part_bytes
    for _ in range(20):
        pace.heard(0.0, 0, now=0.0)
    assert (least, pace.part_bytes) == (LEAST_PART_BYTES, PART_BYTES)
