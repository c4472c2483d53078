"""`python -m skein.wire.process.tether PARENT SIGNAL COMMAND ...`: becomes COMMAND, and gets SIGNAL when PARENT ends.

The kernel sends it, however the parent went, and also after the change of program. It watches the thread that started
this process, so start from one that stays.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def tethered(
    command: Sequence[str], *, number: signal.Signals = signal.SIGTERM, python: str = sys.executable
) -> list[str]:
    """The command that runs `command` so that it gets signal `number` when this process ends; `python` ties it."""
    return [python, "-P", "-m", "skein.wire.process.tether", str(os.getpid()), str(int(number)), *command]


def tethered_arguments(module: str, arguments: Sequence[str], *, python: str = sys.executable) -> list[str]:
    """Command line with which `python` runs `module` so that it ends with this process."""
    return tethered([python, "-P", "-m", module, *arguments], python=python)


def start_tethered(
    module: str, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """`module` in a process group of its own that ends with this process; what it prints is added to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            tethered_arguments(module, arguments),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def main() -> None:
    """Ties this process to its parent and becomes the command."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.exit(f"error: cannot be tied to process {parent}: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(f"error: process {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
