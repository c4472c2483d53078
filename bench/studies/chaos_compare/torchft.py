"""torchft's environment and its lighthouse. None of our dependencies, it is fetched when it is compared with."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from client.local import free_port

_NEEDED = ("torch", "torchft", "numpy", "pydantic", "PyYAML", "safetensors")
"""torchft, and what the replica's program imports."""
_CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
_PATIENCE_S = 20.0
_SETTINGS = ("--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000")
"""Quicker than its defaults of 5 s and 60 s, and than its examples."""


class NotToBeHad(Exception):
    """torchft could not be installed or does not run here; the text says why."""


def make_environment(folder: Path) -> Path:
    """An environment of its own with torchft and our own version of torch; its interpreter.

    Raises:
        NotToBeHad: there is no network, or no build for this machine.
    """
    python = folder / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "-c", str(_CONSTRAINTS), *_NEEDED])
    _run([str(python), "-c", "import torchft"])
    return python


def version(python: Path) -> str:
    """Of torchft there."""
    words = "import importlib.metadata as m; print(m.version('torchft'))"
    return subprocess.run(
        [str(python), "-c", words], capture_output=True, text=True, check=True
    ).stdout.strip()


def _run(command: list[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        lines = (ran.stderr or ran.stdout).strip().splitlines() or ["no output"]
        raise NotToBeHad(f"{' '.join(command[1:4])}: {lines[-1]}")


@contextmanager
def lighthouse(python: Path, log: Path) -> Iterator[str]:
    """host:port of a lighthouse that answers; it ends on the way out."""
    meeting = f"127.0.0.1:{free_port()}"
    command = [str(python.with_name("torchft_lighthouse")), "--bind", meeting, *_SETTINGS]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            _wait_for(f"http://{meeting}/status", log)
            yield meeting
        finally:
            process.kill()


def _wait_for(url: str, log: Path) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except (URLError, OSError) as error:
            if time.monotonic() > until_s:
                raise NotToBeHad(f"the lighthouse does not answer: {log.read_text()[-300:]}") from error
            time.sleep(0.1)
