"""A coordinator and workers as real processes on this machine, for tests and benchmarks; nothing outlives it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from client.api import Client
from client.errors import NotReachable
from client.local import free_port
from skein.wire.process.tether import start_tethered
from skein.wire.views import WorkerState

ANY_ROOT = Path("/")
"""Tests and benchmarks name files wherever they have made them."""
ROOTS = ("--data-root", str(ANY_ROOT), "--checkpoint-root", str(ANY_ROOT))
START_S = 300.0
"""Within which a coordinator must serve and workers must join, on a busy machine."""
_POLL_S = 0.1


class Cluster:
    """One coordinator on local Ray and named workers. Processes end with this one, however it ends."""

    def __init__(self, directory: Path, *, threads_per_worker: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.metrics_port = free_port()
        self._threads = threads_per_worker
        self._coordinator: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill_everything()

    @property
    def target(self) -> str:
        """host:port of the coordinator."""
        return f"127.0.0.1:{self.port}"

    def log_of(self, name: str) -> str:
        """What "coordinator" or a worker has written so far."""
        path = self.directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self) -> Client:
        """A client of the coordinator, which serves by then.

        Raises:
            AssertionError: it does not, after `START_S`; shows its log.
        """
        client = Client(self.target, patience_s=START_S)
        until_s = time.monotonic() + START_S
        while True:
            try:
                client.version()
            except NotReachable:
                assert time.monotonic() < until_s, self.log_of("coordinator")
                time.sleep(_POLL_S)
            else:
                return client

    def start_coordinator(self) -> None:
        """Start it on the state directory of this cluster; at once, without waiting for it to serve."""
        options = ["--port", str(self.port), "--metrics-port", str(self.metrics_port), *ROOTS]
        self._coordinator = self._start(
            "coordinator", [*options, "--state-dir", str(self.directory / "state")]
        )

    def start_workers(self, names: Sequence[str]) -> None:
        """Start workers; they dial until the coordinator answers."""
        for name in names:
            self.workers[name] = self._start(
                "worker", ["--join", self.target, "--name", name, *ROOTS], log=name
            )

    def start(self, names: Sequence[str]) -> None:
        """Start everything and wait until the coordinator serves and all workers have joined."""
        self.start_coordinator()
        self.start_workers(names)
        self.wait_for_workers(len(names))

    def wait_for_workers(self, count: int) -> None:
        """Until so many workers are alive, by the coordinator's word."""
        until_s = time.monotonic() + START_S
        with self.client() as client:
            while sum(worker.state is not WorkerState.LOST for worker in client.workers()) < count:
                assert time.monotonic() < until_s, [self.log_of(name) for name in self.workers]
                time.sleep(_POLL_S)

    def kill_worker(self, name: str) -> None:
        """SIGKILL, as a power cut would."""
        _kill(self.workers.pop(name))

    def freeze_worker(self, name: str) -> None:
        """SIGSTOP: it does nothing, and everything it had open stays open."""
        self.workers[name].send_signal(signal.SIGSTOP)

    def thaw_worker(self, name: str) -> None:
        """SIGCONT."""
        self.workers[name].send_signal(signal.SIGCONT)

    def stop_worker(self, name: str) -> int:
        """SIGTERM: the worker drains and exits; its exit code."""
        process = self.workers.pop(name)
        process.terminate()
        return process.wait(START_S)

    def kill_coordinator(self) -> None:
        """SIGKILL to the launcher; what it started must end by itself."""
        if self._coordinator is not None:
            _kill(self._coordinator)
            self._coordinator = None

    def kill_everything(self) -> None:
        """SIGKILL to all processes, the coordinator's launcher first."""
        self.kill_coordinator()
        for name in list(self.workers):
            self.kill_worker(name)

    def _start(self, module: str, arguments: list[str], *, log: str | None = None) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": str(self._threads), "PYTHONUNBUFFERED": "1"}
        path = self.directory / f"{log or module}.log"
        return start_tethered(module, arguments, log=path, environment=environment)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def running(directory: Path, num_workers: int, *, threads_per_worker: int = 1) -> Iterator[Cluster]:
    """A cluster of workers w0, w1, ... that all have joined; ended on the way out."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(directory, threads_per_worker=threads_per_worker))
        cluster.start([f"w{index}" for index in range(num_workers)])
        yield cluster
