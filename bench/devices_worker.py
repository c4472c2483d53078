"""`python -m bench.devices_worker ADDRESS NAME FOLDER`: a mesh of two whose second device is struck amid a backward.

NAME.strike in FOLDER says how: `kill`, `freeze` or `fill`. When it is done the time is in NAME.struck.
"""

import os
import resource
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from bench.devices import device_processes
from bench.emulated.fleet import write_whole
from bench.stub import run_stub
from worker.process import WorkerSetting

AMID = 0.6
"""Share of an op's processor time at which it is struck: a backward is the last two thirds of an op with the loss."""
_OPS = ("Backward", "Loss")
_LOOK_S = 0.001


class Striker:
    """Knows what ops with a backward take, and strikes in the middle of one once it is told to."""

    def __init__(self, folder: Path, name: str) -> None:
        self._orders, self._done = folder / f"{name}.strike", folder / f"{name}.struck"
        self._began_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._devices: tuple[int, ...] | None = None

    def moment(self, name: str) -> None:
        """The worker has come to a moment."""
        when, _, op = name.rpartition(" ")
        struck = self._device() if op in _OPS else None
        if struck is None:
            return
        if when == "after RunOp":
            self._began_s[op] = _ran_s(struck)
            if op in self._took_s and self._orders.exists():
                how = self._orders.read_text(encoding="utf-8")
                self._orders.unlink()
                threading.Thread(target=self._strike, args=(struck, op, how), daemon=True).start()
        elif when == "after OpEnded" and op in self._began_s:
            self._took_s[op] = _ran_s(struck) - self._began_s[op]

    def _device(self) -> int | None:
        """Process of the last device; None: there is one device, which is this process."""
        if self._devices is None or not all(map(psutil.pid_exists, self._devices)):
            self._devices = tuple(process.pid for process in device_processes())
        return self._devices[-1] if self._devices else None

    def _strike(self, pid: int, op: str, how: str) -> None:
        # At the beginning of an op least is held: it cannot do with the room that is taken then.
        until_s = self._began_s[op] + (0.0 if how == "fill" else AMID * self._took_s[op])
        while _ran_s(pid) < until_s:
            time.sleep(_LOOK_S)
        strike(pid, how)
        write_whole(self._done, str(time.time()))


def strike(pid: int, how: str) -> None:
    """End a process, stop it, or leave it no more room than it has taken."""
    if how == "fill":
        used_bytes = psutil.Process(pid).memory_info().vms
        resource.prlimit(pid, resource.RLIMIT_AS, (used_bytes, used_bytes))
    else:
        os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def _ran_s(pid: int) -> float:
    """Seconds that the first thread of a process has run, which computes."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def watched(folder: Path, name: str, setting: WorkerSetting) -> WorkerSetting:
    """`setting` of a worker that can be struck."""
    return replace(setting, watch=Striker(folder, name).moment)


def main() -> int:
    """Be that worker."""
    join, name, folder = sys.argv[1:]
    return run_stub(partial(watched, Path(folder), name), join=join, name=name, devices="cpu:2")


if __name__ == "__main__":
    sys.exit(main())
