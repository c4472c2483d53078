"""`python -m coordinator.launch.leash PARENT SIGNAL COMMAND ...`: becomes COMMAND, and gets SIGNAL when PARENT ends.

The kernel keeps the leash across exec. It watches the thread that started this process, so start from one that stays.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def leashed(command: list[str], *, number: int) -> list[str]:
    """The command that runs `command` so that it gets signal `number` when this process ends, however it ends."""
    return [sys.executable, "-m", "coordinator.launch.leash", str(os.getpid()), str(int(number)), *command]


def main() -> None:
    """Ties this process to its parent and becomes the command."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.exit(f"error: prctl: {os.strerror(ctypes.get_errno())}")
    # It may have ended before the leash was on.
    if os.getppid() != parent:
        sys.exit(f"error: process {parent} has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
