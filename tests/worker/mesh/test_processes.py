"""Device processes that die, hang and run out of memory: all end together, and it is known which was lost."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from tests.worker.mesh.test_stage import job_of, zeroed
from tests.worker.model.builders import MODELS, NUM_TOKENS, part
from worker.mesh.mesh import Mesh
from worker.mesh.processes import MeshLostError
from worker.mesh.stage import MeshStage
from worker.model.base import Crossing

GONE_S = 60.0
"""Nothing here takes long; this only turns a hang into a failure."""


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = Mesh(["cpu", "cpu"], least_patience_s=0.5)
    yield made
    made.close()


def stage_on(mesh: Mesh) -> MeshStage:
    model = MODELS["tied"]
    return MeshStage(mesh, job_of(model, 2), zeroed(part(model, 1, 3)))


def forward(stage: MeshStage) -> Crossing:
    given = Crossing(torch.ones(2, NUM_TOKENS, 32, dtype=torch.float64))
    return stage.onward(given.followed(is_sample=False), None)


def backward(y: Crossing) -> None:
    torch.autograd.backward(y.differentiable, [torch.ones_like(y.hidden)])


def assert_all_gone(pids: tuple[int, ...]) -> None:
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_device_killed_amid_a_backward_ends_all_and_leaves_the_others(mesh: Mesh) -> None:
    y = forward(stage_on(mesh))
    # The other one waits for its part of a sum.
    os.kill(mesh.processes.pids[1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(backward, y)
        os.kill(mesh.processes.pids[1], signal.SIGKILL)
        with pytest.raises(MeshLostError, match=r"device 1 \(cpu\) was killed by signal 9") as lost:
            going.result(GONE_S)
    assert lost.value.left == ("cpu",)
    assert_all_gone(mesh.processes.pids)


def test_a_frozen_device_is_noticed_by_how_long_such_ops_take(mesh: Mesh) -> None:
    stage = stage_on(mesh)
    for _ in range(2):
        backward(forward(stage))
    y = forward(stage)
    os.kill(mesh.processes.pids[0], signal.SIGSTOP)
    with pytest.raises(MeshLostError, match=r"device 0 \(cpu\) hung"):
        backward(y)
    assert_all_gone(mesh.processes.pids)


@pytest.mark.long
def test_a_device_that_freezes_before_it_is_given_parameters_is_noticed_as_soon(mesh: Mesh) -> None:
    stage = stage_on(mesh)
    forward(stage)
    with torch.no_grad():
        for parameter in stage.parameters.values():
            parameter.add_(1.0)
    os.kill(mesh.processes.pids[1], signal.SIGSTOP)
    with pytest.raises(MeshLostError, match=r"device 1 \(cpu\) hung"):
        forward(stage)
    assert_all_gone(mesh.processes.pids)


@pytest.mark.long
def test_a_device_without_memory_is_told_as_such(mesh: Mesh) -> None:
    stage = stage_on(mesh)
    forward(stage)
    used = psutil.Process(mesh.processes.pids[1]).memory_info().vms
    resource.prlimit(mesh.processes.pids[1], resource.RLIMIT_AS, (used, used))
    given = Crossing(torch.ones(2000, NUM_TOKENS, 32, dtype=torch.float64))
    with pytest.raises(MeshLostError, match=r"device 1 \(cpu\) is out of memory"):
        stage.onward(given, None)
    assert_all_gone(mesh.processes.pids)


@pytest.mark.long
def test_a_device_that_dies_between_ops_is_noticed_without_any(mesh: Mesh) -> None:
    forward(stage_on(mesh))
    os.kill(mesh.processes.pids[0], signal.SIGKILL)
    assert "device 0" in str(mesh.processes.lost.result(GONE_S))
    assert_all_gone(mesh.processes.pids)


def test_a_worker_that_is_turned_away_while_a_device_owes_an_answer_has_lost_that_device() -> None:
    now_s, is_asked = [0.0], threading.Event()

    def clock() -> float:
        if is_read:
            is_asked.set()
        is_read.append(True)
        return now_s[0]

    is_read: list[bool] = []
    mesh = Mesh(["cpu", "cpu"], clock=clock)
    try:
        assert not mesh.ended_for_turned_away()
        os.kill(mesh.processes.pids[1], signal.SIGSTOP)
        os.waitpid(mesh.processes.pids[1], os.WUNTRACED)
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(mesh.measure)
            assert is_asked.wait(GONE_S)
            assert not mesh.ended_for_turned_away()
            now_s[0] = 1000.0
            assert mesh.ended_for_turned_away()
            with pytest.raises(MeshLostError, match=r"device 1 \(cpu\) hung") as lost:
                going.result(GONE_S)
        assert lost.value.left == ("cpu",)
        assert_all_gone(mesh.processes.pids)
    finally:
        mesh.close()


_PARENT = """
import signal, sys
from skein.config.mesh.tensor import MeshForm
from worker.mesh.mesh import Mesh
mesh = Mesh(["cpu", "cpu"])
mesh.form(MeshForm(size=2))
print(*mesh.processes.pids, flush=True)
signal.pause()
"""


def test_no_device_process_outlives_a_killed_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        # What runs goes by its parent's death alone: one is stopped, and reads nothing more.
        children[0].suspend()
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert alive == []
