"""A coordinator that `uv run`, `pipx run` or `python -m` starts in a folder of the user's: Ray never gets that folder.

Below `uv run` Ray packs the current folder for its workers, and with the state directory below that folder the archive
contains itself.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from client.local import free_port
from skein.wire.process.tether import tethered

START_S = 150.0
"""Ray's first start on a busy machine takes most of a minute."""
FOLDER_BYTES = 100 << 20
STATE_BYTES = 20 << 20
"""Far above what a coordinator without jobs and Ray's logs take: 0.3 MiB."""
_START = "import runpy\nrunpy.run_module('coordinator', run_name='__main__', alter_sys=True)\n"
_UV = "import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n"
"""Stand-in for uv: Ray knows `uv run` by the program's name and first argument among its parent processes."""


def by_uv(folder: Path) -> list[str]:
    """`uv run`, or a parent process that Ray takes for it where uv is not installed."""
    program = _installed("uv")
    command = [sys.executable, "-m", "coordinator"]
    if program is not None:
        return [program, "run", "--active", "--no-project", "--offline", *command]
    (folder / "run").write_text(_UV)
    named = "import os, sys; os.execv(sys.executable, ['uv', *sys.argv[1:]])"
    return [sys.executable, "-c", named, "run", *command]


def by_pipx(folder: Path) -> list[str]:
    """`pipx run` of a script, or what pipx executes then where it is not installed."""
    program = _installed("pipx")
    if program is None:
        return [sys.executable, "-c", _START]
    script = folder / "start.py"
    script.write_text(_START)
    return [program, "run", "--python", sys.executable, "--path", str(script)]


def by_module(_folder: Path) -> list[str]:
    """`python -m`."""
    return [sys.executable, "-m", "coordinator"]


def _installed(program: str) -> str | None:
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else shutil.which(program)


@pytest.fixture
def user_folder() -> Iterator[Path]:
    """A folder with a name so short that Ray's own folder fits below the state directory in it."""
    with tempfile.TemporaryDirectory(prefix="skein", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.mark.parametrize("start", [by_uv, by_pipx, by_module])
async def test_ray_never_gets_the_folder_of_the_user(
    start: Callable[[Path], list[str]], user_folder: Path
) -> None:
    (user_folder / "dataset.bin").write_bytes(os.urandom(FOLDER_BYTES))  # an archive of it is as large
    # The actor would import this one if the folder were on its path.
    (user_folder / "psutil.py").write_text("raise ImportError('this is the psutil of the user')\n")
    ports = ["--port", str(free_port()), "--metrics-port", str(free_port())]
    arguments = [*start(user_folder), "--state-dir", "state", *ports]
    environment = {
        **os.environ,
        "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
        "PYTHONSAFEPATH": "1",
        "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
    }
    process = begun(arguments, user_folder, environment)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            ready = await asyncio.to_thread(process.stdout.readline)
        assert " ready on 127.0.0.1:" in ready, (user_folder / "errors").read_text()
        assert copies_below(user_folder / "state") == []
        assert bytes_below(user_folder / "state") < STATE_BYTES
        assert (user_folder / "state" / "ray" / "0").is_dir()
        (host,) = [below for below in children_of(process.pid) if "ray::Host" in below.cmdline()]
        assert Path(host.cwd()) != user_folder
    finally:
        # A launcher that is a child of uv outlives it.
        for below in reversed([psutil.Process(process.pid), *children_of(process.pid)]):
            with suppress(psutil.NoSuchProcess):
                below.kill()
        process.communicate()


def begun(arguments: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """A process in `folder` that ends with this one; its errors go to a file there."""
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(
            tethered(arguments, number=signal.SIGKILL),
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def children_of(pid: int) -> list[psutil.Process]:
    """All processes below one, parents first."""
    return psutil.Process(pid).children(recursive=True)


def copies_below(folder: Path) -> list[Path]:
    """Archives, and copies of the user's file."""
    return [*folder.rglob("*.zip"), *folder.rglob("dataset.bin")]


def bytes_below(folder: Path) -> int:
    """Bytes of all files below `folder`; one that is removed meanwhile counts nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total
