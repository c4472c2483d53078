"""Device processes: started with the worker, watched, and ended all together when one of them is no good any more.

Rules of this file
- None outlives the worker: the kernel kills each with the thread that started it, and what it reads from closes.
- Whichever ends first is the one that is lost; others, whose sums it broke, end because of that.
- They are ended on one thread, which watches them, whoever finds that they must be.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from skein.errors import LocalError
from skein.protocol.worker.mesh.losing import HUNG, SUM_BROKEN, DeviceLoss, loss_of
from worker.mesh.frames import DeviceLink

_log = logging.getLogger(__name__)

_LOOK_MS = 1000
"""For a process whose end breaks the others' sums to be seen to have ended, or for one that is killed."""
_END_S = 2.0
"""For each process to end once it is killed: what a driver holds in the kernel may never, and nobody waits for that."""


class MeshLostError(LocalError):
    """Device processes have ended, and with them all that they held; `left` are devices that are still good."""

    def __init__(self, loss: DeviceLoss) -> None:
        super().__init__(loss.reason)
        self.left = loss.left


class DeviceProcesses:
    """Processes, one for each device, with a link to each.

    Start it on a thread that lives as long as the worker: they die with it.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self.lost: Future[MeshLostError] = Future()
        """Done once a device is lost, and all processes have ended."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.links: list[DeviceLink] = []
        for index, device in enumerate(self.devices):
            self._start(index, device)
        self._blamed: tuple[int, str] | None = None
        self._blaming = threading.Lock()
        self._is_closing = False
        self._is_killed = False
        self._watching = threading.Thread(target=self._watch, name="mesh", daemon=True)
        self._watching.start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Their process ids, in the order of the devices."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """End them all."""
        self._is_closing = True
        self._kill()
        self._watching.join()
        for link in self.links:
            link.close()

    def blame(self, index: int, why: str) -> None:
        """End all because of what a device did; who finds it first says which.

        Of those that hang it is the one that is stopped: the others wait for it.
        """
        with self._blaming:
            # Once they are killed none of them is seen to be stopped.
            if self._blamed is None:
                stopped = [i for i, pid in enumerate(self.pids) if why == HUNG and _is_stopped(pid)]
                self._blamed = (stopped or [index])[0], why
            self._kill()

    def waited_s(self) -> tuple[float, ...]:
        """Seconds that threads of each process were ready to run so far, and others had the processors."""
        return tuple(_waited_s(pid) for pid in self.pids)

    def _start(self, index: int, device: str) -> None:
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(index), device]
        with theirs:
            process = subprocess.Popen(
                # Not what lies in the folder that somebody happens to start a worker in.
                [sys.executable, "-P", "-m", "worker.mesh", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _settings(len(self.devices)),
                start_new_session=True,
            )
        self._processes.append(process)
        self.links.append(DeviceLink(ours))

    def _kill(self) -> None:
        self._is_killed = True
        for process in self._processes:
            process.kill()

    # --- on a thread of its own ---

    def _watch(self) -> None:
        """Until one has ended: then end all, and tell who it was."""
        ends = {os.pidfd_open(process.pid): index for index, process in enumerate(self._processes)}
        poll = select.poll()
        for end in ends:
            poll.register(end, select.POLLIN)
        codes: dict[int, int] = {}
        while set(codes.values()) <= {SUM_BROKEN} and len(codes) < len(ends):
            is_awaited = bool(codes) or self._is_killed
            ended = poll.poll(_LOOK_MS)
            if is_awaited and not ended:
                break
            for end, _ in ended:
                poll.unregister(end)
                codes[ends[end]] = self._processes[ends[end]].wait()
        self._kill()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _log.error("the device process %d is killed, and does not end", process.pid)
        for end in ends:
            os.close(end)
        if not self._is_closing:
            self.lost.set_result(MeshLostError(loss_of(self.devices, codes, blamed=self._blamed)))


def _settings(num_devices: int) -> dict[str, str]:
    """Environment of a device process: its share of the processors, and this machine alone to talk on."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    num_threads = int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, num_threads // num_devices)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _is_stopped(pid: int) -> bool:
    """Whether a process was sent SIGSTOP."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False


def _waited_s(pid: int) -> float:
    """Seconds that a process's threads have waited for a processor, all together: an op waits for sums of others."""
    waited_ns = 0
    with suppress(OSError, ValueError, IndexError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            waited_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    return waited_ns / 1e9
