"""A coordinator and workers as real processes on this machine, for tests and benchmarks; nothing outlives it."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from client.api import Client
from client.local import LocalFleet, answers, free_port
from coordinator.identity.office import ADMIN_FILE
from coordinator.identity.office import FOLDER as AUTHORITY
from coordinator.records.store import LOCK_FILE
from skein.wire.identity.enrolling import enrol
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.passport import Passport
from skein.wire.views import WorkerState

ANY_ROOT = Path("/")
"""Tests and benchmarks name files wherever they have made them."""
ROOTS = ("--data-root", str(ANY_ROOT), "--checkpoint-root", str(ANY_ROOT))
START_S = 300.0
"""Within which a coordinator must serve and workers must join, on a busy machine."""
_POLL_S = 0.1


class Cluster(LocalFleet):
    """One coordinator on local Ray and named workers, each of which can be struck, and all of which are killed."""

    def __init__(
        self, directory: Path, *, threads_per_worker: int = 1, has_certificates: bool = False
    ) -> None:
        super().__init__(directory, num_workers=1, data_roots=[ANY_ROOT], checkpoint_root=ANY_ROOT, port=0)
        self._environment = {**self._environment, "OMP_NUM_THREADS": str(threads_per_worker)}
        self._coordinator: subprocess.Popen[bytes] | None = None
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._has_certificates = has_certificates
        self._enrol_port = free_port()

    def stop(self) -> None:
        """Ends everything at once."""
        self.kill_everything()

    def log_of(self, name: str) -> str:
        """What "coordinator" or a worker has written so far."""
        path = self.log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self) -> Client:
        """A client of the coordinator, which serves by then.

        Raises:
            AssertionError: it does not, after `START_S`; shows its log.
        """
        until_s = time.monotonic() + START_S

        def wait() -> None:
            assert time.monotonic() < until_s, self.log_of("coordinator")
            time.sleep(_POLL_S)

        while self._has_certificates and not self._admin_file.exists():
            wait()
        passport = self.admin() if self._has_certificates else None
        client = Client(self.target, passport=passport, patience_s=START_S)
        while not answers(client):
            wait()
        return client

    def admin(self) -> Passport:
        """The identity of whoever can read the coordinator's state."""
        return Passport.load(self._admin_file)

    @property
    def _admin_file(self) -> Path:
        return self.state / AUTHORITY / ADMIN_FILE

    def line(self, role: str) -> str:
        """A line by which one more may join."""
        with self.client() as client:
            return client.create_token(role, life_s=START_S, uses=1)[0]

    def passport(self, name: str, role: str) -> Passport:
        """An identity that somebody has got by a line."""
        return asyncio.run(enrol(JoinLine.parse("line", self.line(role)), name, clock=time.time))

    def run(self, name: str, module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a program under the name of the coordinator or of a worker."""
        if self._has_certificates:
            given = (
                ("--certificates", "--enrol-port", str(self._enrol_port))
                if name == "coordinator"
                else ("--join", self.line("worker"), "--state-dir", str(self.directory / name))
            )
            arguments = [*arguments, *given]
        process = super().run(name, module, arguments)
        if name == "coordinator":
            self._coordinator = process
        else:
            self.workers[name] = process
        return process

    def start_all(self, names: Sequence[str]) -> None:
        """Start everything and wait until the coordinator serves and all workers have joined."""
        self.start_coordinator()
        for name in names:
            self.start_worker(name)
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

    def kill_actor(self) -> None:
        """SIGKILL to the process that owns the state directory; its launcher lives. Nothing if there is none."""
        with suppress(FileNotFoundError, ValueError, ProcessLookupError):
            os.kill(int((self.state / LOCK_FILE).read_text()), signal.SIGKILL)

    def kill_host(self) -> None:
        """SIGKILL to that process and to its launcher, whose end is the end of Ray."""
        self.kill_actor()
        self.kill_coordinator()

    def kill_everything(self) -> None:
        """SIGKILL to all processes, the coordinator's launcher first."""
        self.kill_coordinator()
        for name in list(self.workers):
            self.kill_worker(name)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def running(
    directory: Path, num_workers: int, *, threads_per_worker: int = 1, has_certificates: bool = False
) -> Iterator[Cluster]:
    """A cluster of workers w0, w1, ... that all have joined; ended on the way out."""
    with Cluster(
        directory, threads_per_worker=threads_per_worker, has_certificates=has_certificates
    ) as cluster:
        cluster.start_all([f"w{index}" for index in range(num_workers)])
        yield cluster
