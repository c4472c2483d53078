"""Ends every process of a launcher that is gone, however it went: `python -m coordinator.launch.guard MARK FOLDER`.

It runs in a session of its own and waits for the end of its standard input, whose other end only the launcher holds.
Then it kills whatever carries `SKEIN_MARK=MARK` in its environment, and removes FOLDER. Ray's processes are children of
children and change their names and groups; the environment they were started with stays readable.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "SKEIN_MARK"
GIVE_UP_S = 10.0
_POLL_S = 0.02
_QUIET_SCANS = 3
"""A process that is being started shows up late; so many scans in a row must find none."""


def marked(mark: str) -> Iterator[int]:
    """Ids of living processes with the mark."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            yield int(entry.name)


def sweep(mark: str) -> bool:
    """Kills all that carry the mark; whether none is left."""
    give_up, quiet = time.monotonic() + GIVE_UP_S, 0
    while quiet < _QUIET_SCANS:
        if time.monotonic() > give_up:
            return False
        found = list(marked(mark))
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
    mark, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    is_clean = sweep(mark)
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
