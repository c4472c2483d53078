"""A standby on real Ray takes over from a leader that is frozen, or killed, while a job trains; no step is lost."""

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from bench.cluster import ROOTS
from client.api import Client, Job
from client.local import free_port
from coordinator.identity.office import ADMIN_FILE, FOLDER
from skein.types import JobState
from skein.wire.identity.passport import Passport
from skein.wire.process.tether import start_tethered
from skein.wire.views import StepFinished, WentBack, WorkerState
from tests.e2e.jobs import NUM_STEPS, losses_of, text_job, wait_for_step

START_S = 300.0
"""Two coordinators start their own Ray, on a busy machine."""
_POLL_S = 0.05


@dataclass
class Coordinator:
    """One of two on the same state directory."""

    port: int
    log: Path
    process: "subprocess.Popen[bytes]"

    def said(self, line: str) -> bool:
        return line in self.log.read_text(errors="replace")

    def until_said(self, line: str) -> None:
        until_s = time.monotonic() + START_S
        while not self.said(line):
            assert time.monotonic() < until_s, self.log.read_text(errors="replace")
            time.sleep(_POLL_S)

    def actor(self) -> psutil.Process:
        """The process that serves."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [process for process in below if process.cmdline()[:1] == ["ray::Host"]]
        return found


class Pair:
    """A leader, a standby, and workers that have joined by one line, which names both."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.leader = self._coordinator("leader")
        self.leader.until_said("ready on")
        self.standby = self._coordinator("standby", "--standby")
        self.standby.until_said("stands by on")
        self.target = f"127.0.0.1:{self.leader.port},127.0.0.1:{self.standby.port}"
        with self.client() as client:
            self._line, _ = client.create_token("worker", life_s=2 * START_S, uses=5)
        for index in range(4):
            self.join(f"pair-{index}")

    def client(self) -> Client:
        admin = Passport.load(self._directory / "state" / FOLDER / ADMIN_FILE)
        return Client(self.target, passport=admin, patience_s=START_S)

    def join(self, worker: str) -> None:
        own = ["--name", worker, "--state-dir", str(self._directory / worker)]
        self._start("worker", ["--join", self._line, *own, *ROOTS], worker)

    def wait_for_workers(self, count: int) -> None:
        until_s = time.monotonic() + START_S
        with self.client() as client:
            while sum(worker.state is not WorkerState.LOST for worker in client.workers()) < count:
                assert time.monotonic() < until_s
                time.sleep(_POLL_S)

    def _coordinator(self, name: str, *options: str) -> Coordinator:
        port = free_port()
        arguments = ["--port", str(port), "--metrics-port", "0", *options]
        arguments += ["--certificates", "--enrol-port", str(free_port())]
        process = self._start(
            "coordinator", [*arguments, "--state-dir", f"file://{self._directory}/state"], name
        )
        return Coordinator(port, self._directory / f"{name}.log", process)

    def _start(self, module: str, arguments: Sequence[str], name: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = start_tethered(
            module, arguments, log=self._directory / f"{name}.log", environment=environment
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@contextmanager
def pair(directory: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        both = Pair(directory, stack)
        both.wait_for_workers(4)
        yield both


def finished(job: Job) -> dict[int, float]:
    """The losses of a job that lost no step."""
    status = job.wait()
    events = job.history()
    assert status.state is JobState.FINISHED, status.reason
    assert not [event for event in events if isinstance(event.body, WentBack)]
    steps = [event.body.record.step for event in events if isinstance(event.body, StepFinished)]
    assert steps == list(range(NUM_STEPS))
    return losses_of(events)


def epochs_in(state: Path) -> list[int]:
    """Epochs of the entries, in order."""
    (newest,) = [path for path in state.glob("run*.sqlite3") if not (state / f"{path.name}-sealed").exists()]
    with sqlite3.connect(newest) as connection:
        return [epoch for (epoch,) in connection.execute("SELECT epoch FROM entries ORDER BY number")]


@pytest.mark.long
def test_a_frozen_leader_is_replaced_and_ends_itself_when_it_wakes(
    tmp_path: Path, text: Path, undisturbed: dict[int, float]
) -> None:
    with pair(tmp_path) as both, both.client() as client:
        job = client.submit(text_job("frozen", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        frozen = both.leader.actor()
        frozen.send_signal(signal.SIGSTOP)
        try:
            both.standby.until_said("ready on")
            # By the line that the other one made out, and that names it first.
            both.join("late")
            both.wait_for_workers(5)
            # The same client goes on with whoever leads.
            assert finished(job) == pytest.approx(undisturbed, rel=1e-5)  # another plan sums in another order
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert both.leader.process.wait(START_S) == 1
        assert both.leader.said("epoch 1 is over, another coordinator has opened the log")
        assert client.version().epoch == 2
        epochs = epochs_in(tmp_path / "state")
    assert epochs == sorted(epochs)
    assert set(epochs) == {1, 2}


@pytest.mark.long
def test_a_standby_replaces_a_leader_whose_machine_is_gone(tmp_path: Path, text: Path) -> None:
    with pair(tmp_path) as both, both.client() as client:
        job = client.submit(text_job("killed", text, steps=NUM_STEPS))
        wait_for_step(job, 8)
        both.leader.process.kill()
        both.standby.until_said("ready on")
        _ = finished(job)
        assert client.version().epoch == 2
