"""Ends what a launcher leaves behind, however it went: `python -m coordinator.launch.guard FOLDER`.

It runs in a session of its own and waits for the end of its standard input, whose other end only the launcher holds.
Then it kills every process that has a file in FOLDER open for writing, and removes FOLDER. That is how Ray's processes
are known: they are children of children, have groups, titles and even environments of their own making, but each
writes its log into the session's folder from its first moment on.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GIVE_UP_S = 10.0
_POLL_S = 0.02
_QUIET_SCANS = 3
"""A process that is being started shows up late; so many scans in a row must find none."""


def writers(folder: Path) -> Iterator[int]:
    """Ids of processes that have a file below `folder` open for writing; readers of its logs are nobody's business."""
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and _writes_in(process, f"{folder}/"):
            yield int(process.name)


def _writes_in(process: Path, prefix: str) -> bool:
    try:
        for descriptor in (process / "fd").iterdir():
            if str(descriptor.readlink()).startswith(prefix) and _is_writable(process, descriptor.name):
                return True
    except OSError:
        # Another user's, or gone.
        return False
    return False


def _is_writable(process: Path, descriptor: str) -> bool:
    (flags,) = (
        line.split()[1]
        for line in (process / "fdinfo" / descriptor).read_text().splitlines()
        if line.startswith("flags:")
    )
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def sweep(folder: Path, *, spared: int) -> bool:
    """Kills all who write below `folder` but `spared`; whether none is left."""
    give_up, quiet = time.monotonic() + GIVE_UP_S, 0
    while quiet < _QUIET_SCANS:
        if time.monotonic() > give_up:
            return False
        found = [pid for pid in writers(folder) if pid != spared]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        quiet = 0 if found else quiet + 1
        time.sleep(_POLL_S)
    return True


def main() -> int:
    """Waits, sweeps, tidies up."""
    folder, launcher = Path(sys.argv[1]), os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    is_clean = sweep(folder, spared=launcher)
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
