"""Checkpoints of one job as a folder of names, on a disk or in an object store. All calls block."""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
from fsspec.callbacks import Callback

from skein.storage.outside import call_moved, copy_pieces, require_room, room_explained
from skein.storage.roots import Inside


class RootedFolder:
    """In a root of this machine; what is written survives a power cut."""

    def __init__(self, base: Inside) -> None:
        self._base = base

    def _at(self, path: str) -> Inside:
        return self._base.child(*path.split("/")) if path else self._base

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            with self.open(path) as file:
                return os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None

    def list(self, path: str) -> Sequence[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        try:
            with self._at(path).folder() as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return ()

    def open(self, path: str) -> BinaryIO:
        """Open a file, to be read."""
        return self._at(path).open()

    def path_of(self, path: str) -> Path:
        """Path of an ordinary file on this machine.

        Raises:
            OSError: none is there.
        """
        with self.open(path):
            return self._at(path).path

    def put(self, path: str, data: bytes) -> None:
        """Write a small file."""
        with self._draft(path) as draft:
            draft.write(data)

    def put_file(self, path: str, source: Path) -> None:
        """Copy a file of this machine."""
        num_bytes = source.stat().st_size
        with self._at(path.rpartition("/")[0]).folder(makes=True):
            where = self._at(path).path.parent
            require_room(where, num_bytes)
        with room_explained(num_bytes, where), source.open("rb") as given, self._draft(path) as draft:
            copy_pieces(given, draft, syncs=True)

    def delete(self, path: str) -> None:
        """Delete a file or an empty folder; none there is no error."""
        parent, _, name = path.rpartition("/")
        with suppress(FileNotFoundError), self._at(parent).folder() as folder:
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=folder)

    @contextmanager
    def _draft(self, path: str) -> Iterator[BinaryIO]:
        """A file beside the one that is wanted, which gets its name when it is whole."""
        parent, _, name = path.rpartition("/")
        draft = f".{name}.{secrets.token_hex(4)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._at(parent).folder(makes=True) as folder:
            try:
                with open(os.open(draft, flags, 0o666, dir_fd=folder), "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)


class _Moving(Callback):  # type: ignore[misc]  # fsspec has no types
    """Tells with each piece that a file system copies that it does."""

    def relative_update(self, inc: int = 1) -> None:
        call_moved()

    def absolute_update(self, value: int) -> None:
        call_moved()


class ObjectFolder:
    """Behind an fsspec file system whose objects appear whole."""

    def __init__(self, files: fsspec.AbstractFileSystem, root: str) -> None:
        self._files = files
        self._root = root.rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def size(self, path: str) -> int | None:
        """See `RootedFolder`."""
        self._files.invalidate_cache()
        try:
            return int(self._files.info(self._at(path))["size"])
        except FileNotFoundError:
            return None

    def list(self, path: str) -> Sequence[str]:
        """See `RootedFolder`."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return ()
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def open(self, path: str) -> BinaryIO:
        """See `RootedFolder`."""
        return cast("BinaryIO", self._files.open(self._at(path), "rb"))

    def put(self, path: str, data: bytes) -> None:
        """See `RootedFolder`."""
        target = self._at(path)
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(target, data)

    def put_file(self, path: str, source: Path) -> None:
        """See `RootedFolder`."""
        target = self._at(path)
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), target, callback=_Moving())

    def delete(self, path: str) -> None:
        """See `RootedFolder`."""
        with suppress(FileNotFoundError):
            self._files.rm(self._at(path), recursive=True)


Folder = RootedFolder | ObjectFolder
"""Files by relative path, with one slash at most. Each appears whole under its name, or not at all."""
