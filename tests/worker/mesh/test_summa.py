"""Products of matrices in blocks over q times q devices, over gloo, on integers: exact, and what they must carry."""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import extent
from worker.mesh.forms.cuts import BlockCut
from worker.mesh.forms.grid import Grid, GridShare
from worker.mesh.groups import DeviceGroup
from worker.mesh.traffic import Collective, CollectiveCount
from worker.model.pending import Tray

CPU = torch.device("cpu")
M, K, N = 5, 2, 3
"""Sizes of each block: of `x` (M, K), of the matrix (N, K), of what is made (M, N)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What one device has made, and what it cost there and back."""

    made: Tensor
    grad_x: Tensor
    grad_weight: Tensor
    there: Mapping[Collective, tuple[int, int]]
    back: Mapping[Collective, tuple[int, int]]
    peak: int
    """Elements that were there at most in the product, beside the operands."""


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it without types
    """Counts the elements of storages that ops have made, and that somebody still has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._tensors: Counter[int] = Counter()
        self._elements: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not any(x is made for x in args):
            self._take(made)
        return made

    def _take(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        place = storage.data_ptr()
        self._tensors[place] += 1
        self._elements[place] = storage.nbytes() // made.itemsize
        weakref.finalize(made, self._drop, place)
        self.peak = max(self.peak, sum(self._elements.values()))

    def _drop(self, place: int) -> None:
        self._tensors[place] -= 1
        if not self._tensors[place]:
            del self._elements[place]


def operands(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole matrices of small integers, and a gradient of their product."""
    draw = torch.Generator().manual_seed(side)
    sizes = ((side * M, side * K), (side * N, side * K), (side * M, side * N))
    x, weight, grad = (torch.randint(-9, 10, size, generator=draw).to(torch.float64) for size in sizes)
    return x, weight, grad


def act(side: int, folder: Path, index: int) -> Blocks:
    row, column = divmod(index, side)
    count = CollectiveCount()
    meet = partial(DeviceGroup.met, CPU, folder, epoch=1, size=side, traffic=count)
    of_row = meet(index=column, name=f"row{row}")
    grid = Grid(of_row, meet(index=row, name=f"column{column}"), torch.float64)
    whole_x, whole_weight, whole_grad = operands(side)
    x = block(whole_x, index, side).requires_grad_()
    weight = BlockCut.MATRIX.part(whole_weight, index, side**2).clone().requires_grad_()
    with Live() as live:
        (y,) = GridShare(grid).products(x, (weight,), Tray())
    there = taken(count)
    torch.autograd.backward(y, block(whole_grad, index, side))
    assert x.grad is not None
    assert weight.grad is not None
    return Blocks(y.detach(), x.grad, weight.grad, there, taken(count), live.peak)


def block(whole: Tensor, index: int, side: int) -> Tensor:
    """Block in the row and the column of this device."""
    return BlockCut.LOOKUP.part(whole, index, side**2).clone()


def taken(count: CollectiveCount) -> dict[Collective, tuple[int, int]]:
    counts, elements = count.taken()
    return {kind: (counts[kind], elements[kind]) for kind in counts}


def on_grid(side: int, folder: Path, pool: Executor) -> list[Blocks]:
    with pool:
        return list(pool.map(partial(act, side, folder), range(side**2)))


def threads(side: int) -> Executor:
    return ThreadPoolExecutor(side**2)


def processes(side: int) -> Executor:
    return ProcessPoolExecutor(side**2, mp_context=get_context("spawn"))


POOLS = [(side, threads) for side in (1, 2, 3, 4)] + [(2, processes)] * extent.ENTIRE


@pytest.mark.parametrize(("side", "pool_of"), POOLS)
def test_a_product_in_blocks_and_its_gradients_are_exact_and_cost_what_is_told(
    tmp_path: Path, side: int, pool_of: Callable[[int], Executor]
) -> None:
    x, weight, grad = operands(side)
    others = side - 1
    for index, found in enumerate(on_grid(side, tmp_path, pool_of(side))):
        assert torch.equal(found.made, block(x @ weight.t(), index, side))
        assert torch.equal(found.grad_x, block(grad @ weight, index, side))
        assert torch.equal(found.grad_weight, BlockCut.MATRIX.part(grad.t() @ x, index, side**2))
        # Of q by q blocks of M x K and K x N: (q - 1) (MK + KN) / q**2 of the whole ones, in 2 q messages.
        assert found.there == {Collective.SPREAD: (2 * side, others * (M * K + K * N))}
        assert found.back == {
            Collective.SPREAD: (2 * side, others * (K * N + M * K)),
            Collective.REDUCE: (2 * side, others * (M * K + K * N)),
        }
        # One block of each operand at a time, the sum, and what is added to it, whatever q; gloo may hold on to the
        # operands until the next have come.
        assert found.peak <= 2 * (M * K + K * N + M * N)
