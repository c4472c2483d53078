import math

from tests.support.device import DEVICE
from worker.probe import measure_device, median_and_spread


def test_a_device_measures_itself_in_positive_finite_numbers() -> None:
    profile = measure_device(DEVICE, seconds=0.02)
    assert profile.device == str(DEVICE)
    assert profile.device_name
    assert 0 < profile.flops_per_s < math.inf
    assert 0 <= profile.spread < math.inf
    assert 0 < profile.memory_bytes < 2**50


def test_one_run_at_a_bad_moment_changes_the_doubt_and_hardly_the_speed() -> None:
    calm = median_and_spread([100.0, 101.0, 102.0, 103.0, 104.0])
    for odd in (6.0, 326.0):
        speed, spread = median_and_spread([odd, 101.0, 102.0, 103.0, 104.0])
        assert math.isclose(speed, calm[0], rel_tol=0.01)
        assert spread > 0.9 > calm[1]
