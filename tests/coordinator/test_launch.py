"""Processes that end with those who started them, whatever kills these."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.launch.guard import writers

WAIT_S = 120.0
"""Far above what a process takes to start or to end; reached only when something hangs."""
FOREVER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
HOLDS = [
    sys.executable,
    "-c",
    "import signal, sys; f = open(*sys.argv[1:]); print('up', flush=True); signal.pause()",
]
TIES_ONE = """
import signal, subprocess, sys
from skein.wire.process.tether import tethered
child = subprocess.Popen(tethered(sys.argv[1:], number=signal.SIGKILL), stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
child.wait()
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever a test starts; killed after it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[bytes]], command: list[str]) -> subprocess.Popen[bytes]:
    """A process that has said "up"."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or only waits for its new parent to notice."""
    gone, _ = psutil.wait_procs([process], timeout=WAIT_S)
    return bool(gone) or process.status() == psutil.STATUS_ZOMBIE


def test_a_process_is_killed_with_the_parent_that_wants_it(started: list[subprocess.Popen[bytes]]) -> None:
    parent = start(started, [sys.executable, "-c", TIES_ONE, *FOREVER])
    (child,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert has_ended(child)


def test_the_guard_ends_who_writes_into_the_folder_and_nobody_else(
    started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder, beside = tmp_path / "session", tmp_path / "session2"
    for place in (folder, beside):
        place.mkdir()
        (place / "log").write_text("words")
    ours = start(started, [*HOLDS, str(folder / "log"), "a"])
    neighbour = start(started, [*HOLDS, str(beside / "log"), "a"])
    reader = start(started, [*HOLDS, str(folder / "log"), "r"])
    assert list(writers(folder)) == [ours.pid]
    guard = subprocess.Popen(
        [sys.executable, "-m", "coordinator.launch.guard", str(folder)], stdin=subprocess.PIPE
    )
    started.append(guard)
    with (folder / "log").open("a"):
        # Its standard input ends: the launcher, which is spared, is gone or has nothing more to do.
        guard.communicate(timeout=WAIT_S)
    assert guard.returncode == 0
    assert ours.wait(timeout=WAIT_S) == -signal.SIGKILL
    assert (neighbour.poll(), reader.poll()) == (None, None)
    assert not folder.exists()
