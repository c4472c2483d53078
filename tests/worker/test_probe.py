import math

import torch

from worker.probe import measure_device


def test_a_device_measures_itself_in_positive_finite_numbers() -> None:
    profile = measure_device(torch.device("cpu"), seconds=0.02)
    assert profile.device == "cpu"
    assert profile.device_name
    assert 0 < profile.flops_per_s < math.inf
    assert 0 < profile.memory_bytes < 2**50
