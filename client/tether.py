"""`python -m client.tether PARENT MODULE ...`: becomes `python -m MODULE ...`, and is told to end when PARENT does.

The kernel sends SIGTERM when the parent is gone, however it went; that survives the change of program.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def tethered_arguments(module: str, arguments: Sequence[str]) -> list[str]:
    """How `module` is run so that it ends with this process."""
    return [sys.executable, "-P", "-m", "client.tether", str(os.getpid()), module, *arguments]


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
    """Ties this process to its parent and becomes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        sys.exit(f"error: cannot be tied to process {parent}: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before it could be watched
        sys.exit(f"error: process {parent} is gone")
    os.execv(sys.executable, [sys.executable, "-P", "-m", *program])


if __name__ == "__main__":
    main()
