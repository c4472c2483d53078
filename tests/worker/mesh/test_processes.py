"""Device processes that die, hang and run out of memory: all end together, and it is known which was lost."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
import torch
from torch.distributed import DistBackendError, Work

from skein.config.mesh.tensor import MeshForm
from tests.support.device import mesh_of
from tests.worker.mesh.test_stage import job_of, zeroed
from tests.worker.model.builders import MODELS, NUM_TOKENS, part
from worker.compute.payload import GRADIENT, HIDDEN
from worker.mesh.device import DeviceShare
from worker.mesh.frames import DeviceAnswer, DeviceLink, DropAsk, ReturnAsk, StageAsk, VisitAsk
from worker.mesh.groups import DeviceGroup, GroupBackend, SumBrokenError
from worker.mesh.mesh import Mesh
from worker.mesh.processes import MeshLostError
from worker.mesh.stage import MeshStage
from worker.mesh.traffic import CollectiveCount
from worker.model.base import Crossing

CPU, PAIR = torch.device("cpu"), mesh_of(2)
GONE_S = 60.0
"""Nothing here takes long; this only turns a hang into a failure."""


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    made = Mesh(PAIR, least_patience_s=0.5)
    yield made
    made.close()


def stage_on(mesh: Mesh, size: int = 2) -> MeshStage:
    model = MODELS["tied"]
    return MeshStage(mesh, job_of(model, size), zeroed(part(model, 1, 3)))


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
        with pytest.raises(MeshLostError, match=rf"device 1 \({PAIR[1]}\) was killed by signal 9") as lost:
            going.result(GONE_S)
    assert lost.value.left == PAIR[:1]
    assert_all_gone(mesh.processes.pids)


def test_a_frozen_device_is_noticed_by_how_long_such_ops_take(mesh: Mesh) -> None:
    stage = stage_on(mesh)
    for _ in range(2):
        backward(forward(stage))
    y = forward(stage)
    os.kill(mesh.processes.pids[0], signal.SIGSTOP)
    with pytest.raises(MeshLostError, match=rf"device 0 \({PAIR[0]}\) hung"):
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
    with pytest.raises(MeshLostError, match=rf"device 1 \({PAIR[1]}\) hung"):
        forward(stage)
    assert_all_gone(mesh.processes.pids)


@pytest.mark.long
def test_a_device_without_memory_is_told_as_such(mesh: Mesh) -> None:
    stage = stage_on(mesh)
    forward(stage)
    used = psutil.Process(mesh.processes.pids[1]).memory_info().vms
    resource.prlimit(mesh.processes.pids[1], resource.RLIMIT_AS, (used, used))
    given = Crossing(torch.ones(2000, NUM_TOKENS, 32, dtype=torch.float64))
    with pytest.raises(MeshLostError, match=rf"device 1 \({PAIR[1]}\) is out of memory"):
        stage.onward(given, None)
    assert_all_gone(mesh.processes.pids)


def test_a_question_that_breaks_half_way_ends_all_for_the_next_answers_would_be_those_to_it(
    mesh: Mesh,
) -> None:
    asked = DropAsk(tickets=(), sums=(), chunks=())
    with pytest.raises(
        MeshLostError, match=rf"device 1 \({PAIR[1]}\) was not understood: .*complex64 may not travel"
    ):
        # The first device has been asked by then.
        mesh.ask_each([(asked, {}), (asked, {"x": torch.zeros(1, dtype=torch.complex64)})])
    assert_all_gone(mesh.processes.pids)
    with pytest.raises(MeshLostError):
        mesh.measure()


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
    mesh = Mesh(PAIR, clock=clock)
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
            with pytest.raises(MeshLostError, match=rf"device 1 \({PAIR[1]}\) hung") as lost:
                going.result(GONE_S)
        assert lost.value.left == PAIR[:1]
        assert_all_gone(mesh.processes.pids)
    finally:
        mesh.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), DistBackendError),
        (DistBackendError("NCCL error: remote process exited"), SumBrokenError),
    ],
)
def test_a_device_whose_memory_is_full_amid_a_sum_is_no_device_that_lost_the_others(
    error: Exception, expected: type[Exception]
) -> None:
    def full(_tensors: list[torch.Tensor]) -> Work:
        raise error

    backend = cast(GroupBackend, SimpleNamespace(allreduce=full))
    with pytest.raises(expected):
        DeviceGroup(backend, 0, 2, CollectiveCount()).sum_in_place(torch.zeros(1))


def test_what_comes_to_a_device_is_computed_with_where_it_is() -> None:
    elsewhere = torch.device("meta")
    share = DeviceShare(0, elsewhere)
    job = job_of(MODELS["tied"], 1).model_dump_json()
    share.carry_out(StageAsk(chunk=1, job=job, stage=(1, 1, 3), form=MeshForm(size=1)), {})
    visit = VisitAsk(chunk=1, ticket=2, follows=True, scores=False, num_valid=None, num_tokens=NUM_TOKENS)
    x = torch.ones(2, NUM_TOKENS, 32, dtype=torch.float64)
    _, made = share.carry_out(visit, {HIDDEN: x})
    _, gradients = share.carry_out(ReturnAsk(chunk=1, ticket=2, puts_aside=False), {GRADIENT: x})
    assert {x.device for x in (*made.values(), *gradients.values())} == {elsewhere}


def test_who_is_waited_for_has_the_time_that_turns_out_to_be_left() -> None:
    ours, theirs = (DeviceLink(end) for end in socket.socketpair())
    with ThreadPoolExecutor(1) as pool:

        def in_time(act: Callable[[], object]) -> Callable[[], float]:
            """A moment at first, and then all the time for `act`, which begins only then."""
            begun: list[object] = []

            def left_s() -> float:
                if begun:
                    begun.append(pool.submit(act))
                    return GONE_S
                begun.append(None)
                return 0.01

            return left_s

        # More than lies between both ends unread.
        large = {"x": torch.ones(1 << 22)}
        ours.send(DeviceAnswer(), large, in_time(lambda: theirs.receive(CPU)))
        answer, found = ours.receive(CPU, in_time(lambda: theirs.send(DeviceAnswer(num_tokens=3), large)))
    assert answer == DeviceAnswer(num_tokens=3)
    assert torch.equal(found["x"], large["x"])
    with pytest.raises(TimeoutError):
        ours.receive(CPU, iter([0.01, 0.0]).__next__)
    ours.close()
    theirs.close()


def test_a_device_has_the_memory_that_was_free_at_first_and_that_plans_know_of(mesh: Mesh) -> None:
    profile = mesh.measure(seconds=0.01)
    free_bytes = mesh.device_bytes
    mesh.bound_memory(profile.memory_bytes)
    planned_bytes = mesh.device_bytes
    assert planned_bytes == profile.memory_bytes // 2 < free_bytes
    mesh.measure(seconds=0.01)
    assert mesh.device_bytes == planned_bytes


_PARENT = """
import signal, sys
from skein.config.mesh.tensor import MeshForm
from worker.mesh.mesh import Mesh
mesh = Mesh(["cpu", "cpu"])
mesh.form(MeshForm(size=2))
print(*mesh.processes.pids, flush=True)
signal.pause()
"""


def test_no_device_process_outlives_a_killed_worker(tmp_path: Path) -> None:
    # What lies in the folder that a worker is started in is not what its devices run.
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "__init__.py").write_text("raise SystemExit('this is no worker of ours')")
    command = [sys.executable, "-P", "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        # What runs goes by its parent's death alone: one is stopped, and reads nothing more.
        children[0].suspend()
        parent.kill()
    _, alive = psutil.wait_procs(children, timeout=GONE_S)
    assert alive == []
