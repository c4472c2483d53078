"""Rows that a worker has memory for, as reckoned and as measured."""

from skein.plan.sweeping.fitting import array_bytes
from tests.worker.sweep.trials import array_of


def test_what_was_measured_counts_for_what_is_reckoned() -> None:
    four, reckoned = array_of(0, 1, 2, 3), array_bytes(array_of(0, 1, 2, 3))
    assert array_bytes(array_of(0, 1)) == reckoned // 2
    assert array_bytes(four, (1000, reckoned // 2)) == 1000 + 2 * reckoned


def test_a_worker_that_lies_of_memory_ends_no_sweep() -> None:
    one = array_of(0)
    reckoned = array_bytes(one)
    assert array_bytes(one, (0, 1 << 60)) == 8 * reckoned
    assert array_bytes(one, (0, 1)) == reckoned // 8
