"""Tokens on disk, made once and mapped from then on, for all jobs and workers of one machine and user.

Rules of this file
- An entry has its name when it is whole, and is checked from end to end before it is used. One that is damaged is made
  anew, and said.
- The folder has a bound, computed from its disk; what was not used for longest goes first. What somebody has mapped
  stays readable for them, though its name is gone.
- Without a folder that can be written, tokens lie in an unnamed file: nothing is ever held in memory whole.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from skein.storage.outside import call_moved
from skein.units import format_bytes
from worker.data.samples import Integers

_log = logging.getLogger(__name__)

MOST_BYTES = 64 << 30
_SHARE = 4
"""The cache takes one part of so many of what it could take of its disk."""
_HEADER = struct.Struct("<16s8sQ32s")
_MAGIC = b"skein tokens 1\n\0"
_CHUNK_BYTES = 4 << 20
_POLL_S = 0.1
_STALE_S = 86_400.0
"""A draft or a lock that nobody has touched for so long is nobody's."""

_WORK = (".part", ".lock")
"""Drafts and locks; whatever else lies in the folder is not the cache's, such as the `lost+found` of a disk."""

Parts = Callable[[], Iterator[Integers]]


def usual_cache() -> Path:
    """Folder in which tokens are kept: below XDG_CACHE_HOME, or the place that it stands for."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "skein" / "tokens"


class TokenCache:
    """Entries by key, in `folder`.

    Args:
        folder: made when it is first used; None: nothing is kept.
        most_bytes: that entries may take together; None: computed from the disk.
    """

    def __init__(self, folder: Path | None, *, most_bytes: int | None = None) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def tokens(self, key: str, dtype: np.dtype[np.integer], parts: Parts) -> Integers:
        """The tokens called `key`, mapped; where they are not here, they are what `parts` gives.

        Raises:
            OSError: there is no room for them.
        """
        folder = self._usable()
        if folder is None:
            with tempfile.TemporaryFile() as file:
                _write(file, dtype, parts())
                return _mapped(file, dtype)
        found = self._found(folder, key, dtype)
        if found is not None:
            return found
        with _locked(folder, key):
            found = self._found(folder, key, dtype)  # another process may have made it meanwhile
            return self._made(folder, key, dtype, parts) if found is None else found

    def _usable(self) -> Path | None:
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                return self._folder
        except OSError as error:
            _log.warning("tokens are not kept: %s: %s", self._folder, error.strerror or error)
            return None

    def _found(self, folder: Path, key: str, dtype: np.dtype[np.integer]) -> Integers | None:
        path = _entry(folder, key)
        with suppress(FileNotFoundError), path.open("rb") as file:
            problem = _problem(file, dtype)
            if problem is None:
                os.utime(path)
                return _mapped(file, dtype)
            _log.warning("tokens=%s are made anew: %s", path, problem)
            path.unlink(missing_ok=True)
        return None

    def _made(self, folder: Path, key: str, dtype: np.dtype[np.integer], parts: Parts) -> Integers:
        began_s = time.monotonic()
        draft = folder / f".{key}.{secrets.token_hex(4)}.part"
        try:
            with draft.open("xb+") as file:
                num_bytes = _write(file, dtype, parts())
                os.fsync(file.fileno())
                found = _mapped(file, dtype)
            self._keep(folder, key, draft, num_bytes)
        finally:
            draft.unlink(missing_ok=True)
        _log.info("tokens=%s made in %.1f s: %d", key[:12], time.monotonic() - began_s, len(found))
        return found

    def _keep(self, folder: Path, key: str, draft: Path, num_bytes: int) -> None:
        """Give the draft its name, if there is room for it among the others."""
        others = sorted(_entries(folder), key=lambda entry: entry[0])
        taken_bytes = sum(size for _, size, _ in others)
        free_bytes = shutil.disk_usage(folder).free + num_bytes
        most_bytes = min(MOST_BYTES, (free_bytes + taken_bytes) // _SHARE)
        most_bytes = most_bytes if self._most_bytes is None else self._most_bytes
        if num_bytes > most_bytes:
            sizes = f"{format_bytes(num_bytes)}, the cache may take {format_bytes(most_bytes)}"
            _log.warning("tokens=%s are not kept for later: %s", key[:12], sizes)
            return
        for _, size, path in others:
            if taken_bytes + num_bytes <= most_bytes:
                break
            path.unlink(missing_ok=True)
            taken_bytes -= size
        draft.replace(_entry(folder, key))


def _entry(folder: Path, key: str) -> Path:
    return folder / f"{key}.tokens"


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of last use, bytes and path of each entry; files that nobody works on any more are removed."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            found = path.stat()
            if path.suffix == ".tokens":
                yield found.st_mtime, found.st_size, path
            elif path.suffix in _WORK and time.time() - found.st_mtime > _STALE_S:
                path.unlink()


@contextmanager
def _locked(folder: Path, key: str) -> Iterator[None]:
    """Lock that keeps others from making `key` meanwhile. While another has it, a growing draft is a sign of life."""
    path, size = folder / f".{key}.lock", -1
    with path.open("ab") as lock:
        os.utime(path)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = sum(_drafted(folder, key))
                if now != size:
                    size = now
                    call_moved()
                time.sleep(_POLL_S)
        yield


def _drafted(folder: Path, key: str) -> Iterator[int]:
    """Bytes of each draft of `key`."""
    for draft in folder.glob(f".{key}.*.part"):
        # It may get its name, or be given up, at this moment.
        with suppress(FileNotFoundError):
            yield draft.stat().st_size


def _write(file: BinaryIO, dtype: np.dtype[np.integer], parts: Iterator[Integers]) -> int:
    """Bytes of the whole entry, its header written last."""
    digest, count = hashlib.sha256(), 0
    file.write(bytes(_HEADER.size))
    for part in parts:
        data = np.ascontiguousarray(part, dtype).data
        digest.update(data)
        file.write(data)
        count += len(part)
        call_moved()
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, dtype.str.encode(), count, digest.digest()))
    file.flush()
    return _HEADER.size + count * dtype.itemsize


def _problem(file: BinaryIO, dtype: np.dtype[np.integer]) -> str | None:
    """Fault of an entry, in words; None: it is what was written."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return "it is cut short"
    magic, name, count, sha256 = _HEADER.unpack(header)
    if magic != _MAGIC or name.rstrip(b"\0") != dtype.str.encode():
        return "it is no entry of this release"
    if os.fstat(file.fileno()).st_size != _HEADER.size + count * dtype.itemsize:
        return "it is cut short"
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        call_moved()
    return None if digest.digest() == sha256 else "its SHA-256 is another"


def _mapped(file: BinaryIO, dtype: np.dtype[np.integer]) -> Integers:
    count = (os.fstat(file.fileno()).st_size - _HEADER.size) // dtype.itemsize
    if not count:
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r", offset=_HEADER.size, shape=(count,))
