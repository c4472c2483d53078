"""Where tests of workers compute: on the processors, or on a GPU by `make gpu`."""

import os

import torch

DEVICE = torch.device(os.environ.get("SKEIN_TEST_DEVICE", "cpu"))


def mesh_of(num_devices: int) -> tuple[str, ...]:
    """Devices of a mesh: GPUs in turn, so that where there are fewer some have several processes."""
    if DEVICE.type == "cpu":
        return ("cpu",) * num_devices
    assert torch.cuda.is_available(), "SKEIN_TEST_DEVICE: torch finds no GPU"
    return tuple(f"cuda:{index % torch.cuda.device_count()}" for index in range(num_devices))
