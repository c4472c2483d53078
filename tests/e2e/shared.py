"""A coordinator and workers that most tests of real processes use one after another; each finds it whole."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from bench.cluster import START_S, Cluster
from bench.emulated.fleet import write_whole
from bench.recovering.fate import Orders
from client.api import Client
from skein.wire.views import WorkerState

_POLL_S = 0.05
_GONE_S = 60.0
"""It takes 0.2 s when nothing else runs."""


class SharedCluster(Cluster):
    """Workers w0, w1, ... are ordinary ones that end where they are ordered to; whoever is missing comes again."""

    def gather(self, num_workers: int) -> None:
        """Until exactly the first so many workers are there, idle, and nothing is left of what a test has done."""
        if self._coordinator is None:
            self.start_coordinator()
        with self.client() as client:
            _end_jobs(client)
        names = [f"w{index}" for index in range(num_workers)]
        for name in set(self.workers) - set(names):
            if self._runs(name):
                assert self.stop_worker(name) == 0
        for name in names:
            self._orders_of(name).unlink(missing_ok=True)
            if name in self.workers:
                self.thaw_worker(name)
        came = {name: self._num_joined(name) for name in names if not self._runs(name)}
        for name in came:
            self.start_worker(name)
        self._wait_for(names, came)

    def start_worker(self, name: str) -> None:
        """As of a cluster."""
        arguments = ["--join", self.target, "--name", name, "--orders", str(self._orders_of(name))]
        self.run(name, "tests.e2e.dying_worker", arguments)

    def restart(self, name: str) -> None:
        """Nobody is there; somebody new comes under the name, at once."""
        self.kill_worker(name)
        self.start_worker(name)

    # --- orders ---

    def order(self, name: str, orders: Orders) -> None:
        """Where it is to end."""
        write_whole(self._orders_of(name), orders.model_dump_json())

    def has_ended(self, name: str) -> bool | None:
        """Whether it is dead rather than frozen by its orders; None before it has carried them out."""
        wanted = os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        changed = os.waitid(os.P_PID, self.workers[name].pid, wanted)
        return None if changed is None else changed.si_code != os.CLD_STOPPED

    def _orders_of(self, name: str) -> Path:
        return self.directory / f"{name}.orders"

    # --- who is there ---

    def _runs(self, name: str) -> bool:
        return name in self.workers and self.workers[name].poll() is None

    def _num_joined(self, name: str) -> int:
        return self.log_of("coordinator").count(f"worker={name} joined")

    def _wait_for(self, names: list[str], came: dict[str, int]) -> None:
        """Until those of `came` have joined once more, and all are idle."""
        until_s = time.monotonic() + START_S
        with self.client() as client:
            while (
                any(self._num_joined(name) <= before for name, before in came.items())
                or [worker.worker for worker in client.workers() if worker.state is WorkerState.IDLE] != names
            ):
                assert time.monotonic() < until_s, client.workers()
                time.sleep(_POLL_S)


def _end_jobs(client: Client) -> None:
    """Whatever a failed test has left running."""
    for status in client.jobs():
        if not status.state.is_final:
            client.job(status.job).cancel(discard=True)


# --- programs beside it ---


def marked(folder: Path) -> Mapping[str, str]:
    """An environment by which `left_running` knows all processes of a program again."""
    return os.environ | {"SKEIN_TEST_FOLDER": str(folder)}


def left_running(folder: Path) -> list[psutil.Process]:
    """Processes of a program that was `marked`, whoever is their parent by now, if they do not end by themselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SKEIN_TEST_FOLDER") == str(folder):
                found.append(process)
    _, left = psutil.wait_procs(found, timeout=_GONE_S)
    return left
