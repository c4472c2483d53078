import pytest

from bench.aggregating import one_bit_bytes, one_bit_digits
from bench.aggregating.digits_mlp import accuracy, initial, split
from bench.aggregating.one_bit_digits import LAMB, ONE_BIT, WITHOUT, Trained, rows_of, train


def test_signs_weigh_a_thirtieth_of_full_precision_in_small_models_too() -> None:
    rows = list(one_bit_bytes.rows(is_quick=True))
    assert len(rows) == 4
    assert all(row.holds for row in rows)


def test_the_warm_up_of_one_bit_lamb_is_lamb_and_the_rest_weighs_less() -> None:
    lamb, one_bit = (train(method, num_peers=2, seed=0, num_steps=20) for method in (LAMB, ONE_BIT))
    data = split(0)
    assert lamb.curve[-1][1] > accuracy(initial(0), data.held_out)
    assert lamb.num_bytes == 20 * 4 * (64 * 64 * 2 + 64 * 10 + 64 * 2 + 10)
    # Three of twenty steps are warm-up; the others weigh a thirty-second and a few scales.
    assert lamb.num_bytes / one_bit.num_bytes == pytest.approx(1 / (0.15 + 0.85 / 32), rel=0.02)


@pytest.mark.parametrize(
    ("one_bit", "without", "holds"),
    [(0.976, 0.90, (True, True)), (0.974, 0.90, (False, True)), (0.98, 0.97, (True, False))],
)
def test_one_bit_lamb_is_held_to_lamb_and_to_what_feedback_gives(
    one_bit: float, without: float, holds: tuple[bool, bool]
) -> None:
    runs = {
        method: [Trained(curve=((20, share),), num_bytes=1.0)]
        for method, share in ((LAMB, 0.98), (ONE_BIT, one_bit), (WITHOUT, without))
    }
    rows = rows_of(runs, num_peers=4, num_steps=20)
    assert tuple(row.holds for row in rows[1:3]) == holds
    assert one_bit_digits.chart_of(runs, num_peers=4).lines[0].label == LAMB
