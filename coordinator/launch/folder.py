"""A private folder for Ray's sockets and logs: below the state directory if that is short enough, else beside it.

Rules of this file
- Ray makes its folders writable for everybody, so each lies in one that only its owner can enter.
- A folder belongs to whoever holds its lock: a launcher, and then the guard that clears up after it. One without a
  holder was left behind by a kill; what still writes there is ended, and it is removed, before a folder is used.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from coordinator.launch.guard import sweep
from coordinator.records.logfile import FIELD, journal_mode
from skein.errors import UserError

MAX_BYTES = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Limit on the path of Ray's folder: what the kernel takes as the path of a socket, less what Ray appends."""
_NUMBERS = 64


class RayFolder:
    """A folder that is this process's, until it is closed here and in whoever inherits `lock`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    def close(self) -> None:
        """Give the folder up in this process."""
        os.close(self.lock)


def take_folder(state_dir: Path, *, elsewhere: Sequence[Path] | None = None) -> RayFolder:
    """An empty folder of which nobody else knows; what others left behind when they were killed is cleared away.

    Args:
        elsewhere: places to use where the state directory cannot be; None: the runtime and the temporary directory.

    Raises:
        UserError: nowhere is a private place with a short name.
    """
    reasons: list[str] = []
    own = [] if _is_shared(state_dir) else [state_dir / "ray"]
    for base in [*own, *(_usual() if elsewhere is None else elsewhere)]:
        try:
            _make_private(base)
            return _first_free(base)
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
    raise UserError(
        FIELD, str(state_dir), f"no place for Ray's sockets: {'; '.join(reasons)}; give a shorter one"
    )


def _usual() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime).resolve() / "skein-ray"
    for folder in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108 - made private, or not used
        yield Path(folder).resolve() / f"skein-ray-{os.geteuid()}"


def _is_shared(directory: Path) -> bool:
    """Whether it is on a file system that several machines mount: sockets and locks there are of no use."""
    return journal_mode(directory, Path("/proc/self/mounts").read_text()) != "wal"


def _make_private(base: Path) -> None:
    """A folder that its owner alone can enter, whatever it was before.

    Raises:
        OSError: its name is too long, or it is somebody else's, or no folder.
    """
    if len(os.fsencode(base)) + len(f"/{_NUMBERS}") > MAX_BYTES:
        raise OSError(0, f"its path has more than {MAX_BYTES - len(f'/{_NUMBERS}')} bytes")
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(0, "another user's, or no folder")
    base.chmod(0o700)


def _first_free(base: Path) -> RayFolder:
    """The first folder of `base` that nobody holds; all such folders are emptied."""
    free: RayFolder | None = None
    for number in range(_NUMBERS):
        path = base / str(number)
        if free is not None and not path.exists():
            continue
        lock = _lock(base / f"{number}.lock")
        if lock is None:
            continue
        _clear(path)
        if free is None:
            free = RayFolder(path, lock)
        else:
            os.close(lock)
    if free is None:
        raise OSError(0, f"{_NUMBERS} coordinators use it")
    free.path.mkdir(mode=0o700)
    return free


def _lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _clear(path: Path) -> None:
    """End whoever writes in a folder that was left behind, and remove it."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    sweep(path, spared=os.getpid())
    shutil.rmtree(path)
