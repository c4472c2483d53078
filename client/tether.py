"""`python -m client.tether PARENT MODULE ...`: becomes `python -m MODULE ...`, and is told to end when PARENT does.

The kernel sends SIGTERM when the parent is gone, however it went; that survives the change of program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tethered_arguments(module: str, arguments: list[str]) -> list[str]:
    """How `module` is run so that it ends with this process."""
    return [sys.executable, "-P", "-m", "client.tether", str(os.getpid()), module, *arguments]


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
