"""Sums of gradients beside layers of experts: what is summed and what is left add up to what there was."""

from random import Random

import pytest
import torch
from torch import Tensor, nn

from worker.mesh.pieces.idle import IdleSums

NUM_DEVICES = 3
LAYERS = [[7], [4, 5], [], [6]]
"""Sizes of parameters, by layers of experts."""


class Sum:
    """A sum that is under way, until all devices have given their part."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def wait(self) -> Tensor:
        assert len(self.parts) == NUM_DEVICES
        return torch.stack(self.parts).sum(0)


class Device:
    """Group of one of several devices that give their parts of each sum in turn."""

    def __init__(self, index: int, begun: list[Sum]) -> None:
        self.index = index
        self.num_elements: list[int] = []
        self._begun = begun

    def begin_sum(self, tensor: Tensor) -> Sum:
        self.num_elements.append(len(tensor))
        if self.index == 0:
            self._begun.append(Sum())
        found = self._begun[len(self.num_elements) - 1]
        found.parts.append(tensor)
        return found


def parameters(draw: Random) -> list[list[nn.Parameter]]:
    """Of one device, with a part of the gradient of each."""
    made = [[nn.Parameter(torch.zeros(size)) for size in sizes] for sizes in LAYERS]
    for one in (x for some in made for x in some):
        one.grad = torch.tensor([float(draw.randrange(100)) for _ in range(len(one))])
    return made


def gradients(layers: list[list[nn.Parameter]]) -> Tensor:
    return torch.cat([x.grad for some in layers for x in some if x.grad is not None])


@pytest.mark.parametrize(
    ("room", "summed"),
    [
        (0, []),
        (3, [3, 3, 3, 3]),
        (5, [5, 5, 5, 5]),
        (8, [7, 8, 1, 6]),
        (100, [7, 9, 6]),
    ],
)
def test_what_is_summed_and_what_is_left_add_up(room: int, summed: list[int]) -> None:
    draw, begun = Random(5), list[Sum]()
    devices = [Device(index, begun) for index in range(NUM_DEVICES)]
    held = [parameters(draw) for _ in devices]
    own = [gradients(x) for x in held]
    sums = [IdleSums(device, x) for device, x in zip(devices, held, strict=True)]
    for turn in range(2):
        for one in sums:
            for _ in LAYERS:
                one.begin(room)
        for one in sums:
            one.finish()
        found = [gradients(x) for x in held]
        # Small whole numbers: exact, summed once or over again.
        assert torch.equal(sum(found, torch.zeros(22)), sum(own, torch.zeros(22)))
        num_left = [int((x == mine).sum()) for x, mine in zip(found, own, strict=True)]
        assert all(device.num_elements == summed * (turn + 1) for device in devices)
        for other in found[1:]:
            assert int((other == 0).sum()) >= sum(summed)
        assert all(num >= 22 - sum(summed) for num in num_left)


def test_gradients_that_come_meanwhile_are_kept() -> None:
    begun = list[Sum]()
    devices = [Device(index, begun) for index in range(NUM_DEVICES)]
    held = [nn.Parameter(torch.zeros(2)) for _ in devices]
    for parameter in held:
        parameter.grad = torch.ones(2)
    sums = [IdleSums(device, [[own]]) for device, own in zip(devices, held, strict=True)]
    for one in sums:
        one.begin(2)
    for parameter in held:
        assert parameter.grad is not None
        parameter.grad += 10
    for one in sums:
        one.finish()
    assert [x.grad.tolist() for x in held if x.grad is not None] == [[13, 13], [10, 10], [10, 10]]
