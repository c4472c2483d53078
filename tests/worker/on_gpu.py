"""GPUs whose memory is full, and what is measured of them. `make gpu` alone runs these: nothing else has any."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from skein.protocol.messages.tensors import Phase
from skein.protocol.worker.ops import LossOp, OpFailed
from skein.types import MicrobatchId, Step
from tests.support.device import DEVICE
from tests.worker.lab import Lab, tiny_job
from tests.worker.mesh.test_processes import stage_on
from tests.worker.model.builders import NUM_TOKENS
from worker.executor import Executor, Ran
from worker.mesh.mesh import Mesh
from worker.mesh.processes import MeshLostError
from worker.model.base import Crossing
from worker.probe import measure_device


@pytest.fixture
def hoard() -> Iterator[list[torch.Tensor]]:
    """Whatever is put here takes memory until the test is over."""
    kept: list[torch.Tensor] = []
    yield kept
    kept.clear()
    torch.cuda.empty_cache()


def rest() -> Iterator[torch.Tensor]:
    """All memory that can still be had, in pieces."""
    torch.cuda.empty_cache()
    for size in (1 << 30, 1 << 25, 1 << 21, 1 << 16, 1 << 9):
        while True:
            try:
                yield torch.empty(size, dtype=torch.uint8, device=DEVICE)
            except torch.OutOfMemoryError:
                break


def test_a_device_whose_memory_is_full_amid_an_op_is_told_as_such(hoard: list[torch.Tensor]) -> None:
    mesh = Mesh([str(DEVICE)])
    try:
        stage = stage_on(mesh, size=1)
        stage.onward(Crossing(torch.ones(2, NUM_TOKENS, 32, dtype=torch.float64)), None)
        hoard.extend(rest())
        given = Crossing(torch.ones(9000, NUM_TOKENS, 32, dtype=torch.float64))
        with pytest.raises(MeshLostError, match=rf"device 0 \({DEVICE}\) is out of memory") as lost:
            stage.onward(given, None)
        assert lost.value.left == ()
    finally:
        mesh.close()


def test_an_op_that_finds_the_memory_full_fails_and_the_next_one_does_not(
    text: Path, labs: list[Lab], hoard: list[torch.Tensor]
) -> None:
    lab = Lab(tiny_job(text, stages=1))
    labs.append(lab)
    (bench,) = lab.benches.values()
    executor = Executor(bench.compute)
    executor.start()
    path = lab.arrangement.paths[0]

    def run(step: int) -> object:
        ran = Future[Ran]()
        op = LossOp(phase=Phase.TRAIN, step=Step(step), microbatch=MicrobatchId(0), hop=0, path=path)
        executor.run(op, {}, ran.set_result)
        return ran.result(timeout=60).done.outcome

    hoard.extend(rest())
    failed = run(0)
    assert isinstance(failed, OpFailed)
    assert not failed.is_fatal
    assert re.search("OutOfMemoryError|ALLOC_FAILED", failed.reason)
    hoard.clear()
    # Not to this process alone: libraries beside torch need some too.
    torch.cuda.empty_cache()
    assert not isinstance(run(0), OpFailed)
    executor.stop()


def test_memory_that_others_take_is_none_to_plan_with(hoard: list[torch.Tensor]) -> None:
    torch.cuda.empty_cache()
    before = measure_device(DEVICE, seconds=0.02).memory_bytes
    hoard.append(torch.empty(8 << 30, dtype=torch.uint8, device=DEVICE))
    after = measure_device(DEVICE, seconds=0.02).memory_bytes
    assert before - after == pytest.approx(0.8 * (8 << 30), rel=0.05)
