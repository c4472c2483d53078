"""A coordinator and workers on this machine, for as long as somebody needs them."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from client.api import Client
from client.connection import DEFAULT_TARGET
from client.errors import NotReachable
from skein.errors import SkeinError
from skein.wire.channel import split_address
from skein.wire.process.tether import start_tethered
from skein.wire.views import WorkerState

HOST = "127.0.0.1"
USUAL_PORT = split_address("coordinator", DEFAULT_TARGET)[1]
READY_S = 120.0
"""Ray's first start on a slow disk takes most of a minute."""
_STOP_S = 15.0
_TICK_S = 0.2


class NotStarted(SkeinError):
    """A service ended, or did not begin to answer; what its log says last is in the text."""


def last_words(log: Path, *, num_lines: int = 5) -> str:
    """The end of a log in one line, and where the rest is."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{' / '.join(lines[-num_lines:]) or 'it said nothing'} (all of it in {log})"


def check_runs(name: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns if the process runs.

    Raises:
        NotStarted: it has ended.
    """
    if process.poll() is not None:
        raise NotStarted(f"{name} ended (exit code {process.returncode}): {last_words(log)}")


class Services:
    """Programs in process groups of their own, the coordinator first; they end with this process, however it ends.

    Args:
        logs: folder of a file for each with what it prints.
        environment: of all.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs = logs
        self._environment = environment
        self.started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def log(self, name: str) -> Path:
        """File with what a service prints."""
        return self.logs / f"{name}.log"

    def run(self, name: str, module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program as one of the services."""
        process = start_tethered(module, arguments, log=self.log(name), environment=self._environment)
        self.started.append((name, process))
        return process

    def process_of(self, name: str) -> int | None:
        """The process id of a service that runs."""
        pids = (process.pid for each, process in self.started if each == name and process.poll() is None)
        return next(pids, None)

    def check(self) -> None:
        """Returns if everything still runs.

        Raises:
            NotStarted: something has ended.
        """
        for name, process in self.started:
            check_runs(name, process, self.log(name))

    def ask_to_end(self, seconds: float) -> None:
        """Asks workers, then the coordinator, to end, so that they can say goodbye, and waits so long for either."""
        processes = [process for _, process in self.started]
        for group in (processes[1:], processes[:1]):
            _signal(group, signal.SIGTERM)
            until = time.monotonic() + seconds
            for process in group:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))


class LocalFleet(Services):
    """A coordinator and workers that all end when it is left.

    Args:
        directory: for their logs and the coordinator's state.
        num_workers: how many.
        data_roots: where data, tokenizers and weights lie that jobs may read.
        checkpoint_root: where checkpoints may lie that jobs name a URL for; None: in a folder of their own.
        port: of the coordinator, if it is free; metrics have the next one. 0: any.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        data_roots: Sequence[Path] = (),
        checkpoint_root: Path | None = None,
        port: int = USUAL_PORT,
    ) -> None:
        super().__init__(directory / "logs", service_environment(num_workers))
        self.directory = directory
        self.num_workers = num_workers
        self.state = directory / "state"  # the coordinator's: run log and checkpoints
        self.port, self.metrics_port = free_port(port), free_port(port and port + 1)
        self.target = f"{HOST}:{self.port}"
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"
        self._checkpoints = ["--checkpoint-root", str(checkpoint_root or directory / "checkpoints")]
        self._data = [part for root in data_roots for part in ("--data-root", str(root))]

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, client: Client) -> None:
        """Starts everything; returns when the coordinator knows all workers.

        Raises:
            NotStarted: something ended, or took longer than `READY_S`.
        """
        self.start_coordinator()
        self._wait(lambda: answers(client), "the coordinator does not answer")
        for number in range(1, self.num_workers + 1):
            self.start_worker(f"worker-{number}")
        self._wait(lambda: _num_idle(client) == self.num_workers, "not all workers have joined")

    def start_coordinator(self) -> None:
        """Starts it on the state directory, without waiting for it to serve."""
        options = ["--host", HOST, "--port", str(self.port), "--metrics-port", str(self.metrics_port)]
        options += ["--state-dir", str(self.state), *self._checkpoints]
        self.run("coordinator", "coordinator", options)

    def start_worker(self, name: str) -> None:
        """Starts a worker; it dials until the coordinator answers."""
        options = ["--join", self.target, "--name", name, "--listen", HOST, *self._checkpoints, *self._data]
        self.run(name, "worker", options)

    def stop(self) -> None:
        """Ends everything; whoever takes long is killed."""
        self.ask_to_end(_STOP_S)
        processes = [process for _, process in self.started]
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        self.started = []

    def _wait(self, is_ready: Callable[[], bool], problem: str) -> None:
        until = time.monotonic() + READY_S
        while not is_ready():
            self.check()
            if time.monotonic() > until:
                raise NotStarted(f"{problem} after {READY_S:.0f} s: see the logs in {self.logs}")
            time.sleep(_TICK_S)


def free_port(wanted: int = 0) -> int:
    """`wanted` if nothing listens there, else another that is free; 0: any."""
    for port in (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise NotStarted("no port of this machine is free")


def service_environment(num_workers: int) -> dict[str, str]:
    """Workers share the cores, and keep big buffers instead of faulting in fresh pages for each."""
    threads = max(1, (os.cpu_count() or 1) // num_workers)
    return {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "2147483648",
        "MALLOC_TOP_PAD_": "16777216",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }


def answers(client: Client) -> bool:
    """Whether its coordinator serves."""
    try:
        client.version()
    except NotReachable:
        return False
    return True


def _num_idle(client: Client) -> int:
    return sum(worker.state is WorkerState.IDLE for worker in client.workers())


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """To all of their process groups, if any of them is left."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
