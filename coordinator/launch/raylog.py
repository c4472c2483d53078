"""Ray's own log of a start that failed: kept in the state directory, and its last lines quoted.

Ray writes its log into a private folder that is removed with the cluster, so it has to be copied while the launcher
reports the failure.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from skein.errors import LocalError

KEPT_FOLDER = "ray-failed-log"
MOST_FILES = 40
MOST_FILE_BYTES = 256 << 10
"""Bytes of each file that are kept: its end. All files together take 10 MiB at most."""
_NUM_QUOTED = 3
_MOST_LINE = 200
_TELLING = re.compile(r"\[[^\]]*\b[EFC]\b|\b(error|exception|fatal|failed|denied|no space)\b", re.IGNORECASE)
"""A line with severity error, fatal or check of Ray's C++ processes, or with such a word."""
_DUMP = "debug_state.txt"
_COUNTERS = "[state-dump]"
"""Ray's regular counters, which have a row for each kind of error."""


class RayFailedError(LocalError):
    """Ray did not start, or ended; its own log may say why."""


class RayGoneError(RayFailedError):
    """A process without which Ray is broken has ended."""


def with_ray_log(error: RayFailedError, folder: Path, state_dir: Path) -> RayFailedError:
    """The same failure with the last telling lines of Ray's log and the place where that log is kept.

    Args:
        folder: Ray's own, which is about to be removed.
        state_dir: the log is copied below it, in place of that of the failure before.
    """
    files = list(_log_files(folder))
    if not files:
        return type(error)(f"{error}; Ray has written no log")
    try:
        where = f"Ray's log is kept in {_keep(files, state_dir / KEPT_FOLDER)}"
    except OSError as failure:
        where = f"Ray's log cannot be kept ({failure.strerror or failure})"
    quoted = "".join(f" | {line}" for line in _last_lines(files) or _very_last(files[-1]))
    return type(error)(f"{error}; {where}{'; it ends:' if quoted else ''}{quoted}")


def _log_files(folder: Path) -> Iterator[Path]:
    """Files of the newest session's log that are not empty, oldest first."""
    found = [path for path in folder.glob("session_*/logs/**/*") if path.is_file() and not path.is_symlink()]
    sized = [(path.stat().st_mtime, path) for path in found if path.stat().st_size and path.name != _DUMP]
    yield from (path for _, path in sorted(sized)[-MOST_FILES:])


def _keep(files: list[Path], kept: Path) -> Path:
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(mode=0o700)
    for path in files:
        (kept / path.name).write_bytes(_end_of(path))
    return kept


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_FILE_BYTES))
        return file.read(MOST_FILE_BYTES)


def _very_last(path: Path) -> list[str]:
    return [
        f"{path.name}: {line.strip()[:_MOST_LINE]}"
        for line in _end_of(path).decode(errors="replace").splitlines()[-1:]
    ]


def _is_telling(line: str) -> bool:
    return _COUNTERS not in line and _TELLING.search(line) is not None


def _last_lines(files: list[Path]) -> list[str]:
    """The last lines that speak of an error, of the files that changed last."""
    telling: list[str] = []
    for path in reversed(files):
        lines = _end_of(path).decode(errors="replace").splitlines()
        matching = [line.strip()[:_MOST_LINE] for line in lines if _is_telling(line)]
        telling += [f"{path.name}: {line}" for line in matching[-1:]]
        if len(telling) == _NUM_QUOTED:
            break
    return telling
