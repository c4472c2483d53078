"""Worker daemons as processes of this machine, none of which outlives the process that starts them."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from skein.errors import UserError
from skein.wire.process.tether import tethered

STOP_S = 20.0
"""What workers may take to hand over their work before they are killed."""
MAX_WORKERS = 256


def worker_command(join: str, options: Sequence[str] = ()) -> list[str]:
    """Arguments that run one worker; `options` as of `skein worker up`."""
    return [sys.executable, "-P", "-m", "worker", "--join", join, *options]


class WorkerProcesses:
    """So many workers, started by `with` and gone after it.

    Args:
        join: host:port of the coordinator.
        num_workers: from 1 to 256; they are named `prefix-1`, `prefix-2`, ...
        options: the same for all, as of `skein worker up`.

    Raises:
        UserError: no such number of workers.
    """

    def __init__(
        self, join: str, num_workers: int, *, prefix: str = "worker", options: Sequence[str] = ()
    ) -> None:
        if not 1 <= num_workers <= MAX_WORKERS:
            raise UserError("workers", num_workers, f"give a number from 1 to {MAX_WORKERS}")
        names = [f"{prefix}-{number}" for number in range(1, num_workers + 1)]
        self._commands = {name: worker_command(join, ["--name", name, *options]) for name in names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name, command in self._commands.items():
            self.processes[name] = subprocess.Popen(
                tethered(command, number=signal.SIGKILL), stdin=subprocess.DEVNULL
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def failed(self) -> str | None:
        """The first worker that has ended with an error; None if there is none."""
        return next((name for name, process in self.processes.items() if process.poll()), None)

    def num_running(self) -> int:
        """Workers that live."""
        return sum(1 for process in self.processes.values() if process.poll() is None)

    def stop(self) -> None:
        """Ask all to hand over and go; kill those that do not."""
        for process in self.processes.values():
            process.terminate()
        give_up = time.monotonic() + STOP_S
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, give_up - time.monotonic()))
            process.kill()
            process.wait()
