"""Choice of pieces from measured times, and when these are measured anew."""

from itertools import pairwise

from skein.plan.pieces.choice import Drift, ExpertLines, TimedRows, sizes_to_time, slowest
from skein.plan.pieces.lanes import Pieces
from skein.plan.pieces.line import LEAST_SIZES

ROWS = 800


def times(exchange_s: float, expert_s: float, each_s: float = 1e-4) -> list[TimedRows]:
    """Of devices that take so long for a row, and so long for each call."""
    return [
        TimedRows(
            num_rows=rows,
            exchange_s=each_s + exchange_s * rows,
            forward_s=each_s + expert_s * rows,
            backward_s=each_s + 2 * expert_s * rows,
            weights_s=expert_s * rows,
        )
        for rows in sizes_to_time(ROWS, 2)
    ]


def test_sizes_divide_among_devices_and_reach_all_rows() -> None:
    for devices in (2, 3, 8):
        sizes = sizes_to_time(ROWS, devices)
        assert len(sizes) >= LEAST_SIZES
        assert all(size % devices == 0 for size in sizes)
        assert ROWS <= sizes[-1] < ROWS + devices


def test_pieces_overlap_what_takes_equally_long_and_cost_what_does_not() -> None:
    alike = ExpertLines.of(times(1e-5, 1e-5))
    found = alike.pieces(ROWS)
    assert found.forward > 1
    assert alike.end_s(ROWS, found, is_forward=True) < 0.8 * alike.end_s(ROWS, Pieces(), is_forward=True)
    assert ExpertLines.of(times(1e-9, 1e-5)).pieces(ROWS) == Pieces()
    # Weights' gradients cover the way back of the only piece.
    assert ExpertLines.of(times(1e-6, 1e-5, each_s=1e-3)).pieces(ROWS).backward == 1


def test_the_slowest_device_counts_at_each_size() -> None:
    fast, slow = times(1e-5, 1e-5), times(1e-6, 2e-5)
    both = slowest([fast, slow])
    assert [x.exchange_s for x in both] == [x.exchange_s for x in fast]
    assert [x.backward_s for x in both] == [x.backward_s for x in slow]


def test_times_that_are_off_are_measured_anew_less_and_less_often() -> None:
    drift = Drift()
    assert all(drift.observe(1.0, 1.14) is None for _ in range(100))
    asked = [i for i in range(200) if drift.observe(1.0, 1.3) is not None]
    gaps = [after - before for before, after in pairwise(asked)]
    assert asked[0] < 8
    assert gaps == [16, 32, 64][: len(gaps)]
    assert len(asked) == 4


def test_one_slow_layer_is_no_drift() -> None:
    drift = Drift()
    assert all(drift.observe(1.0, 9.0 if i % 8 == 0 else 1.0) is None for i in range(80))
