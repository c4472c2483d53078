"""Finding, reading and naming by content the files of a source."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from skein.errors import UserError

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a source, what it held when it was opened, and its name relative to the source's path."""

    path: Path
    name: str
    size: int
    sha256: str


@contextmanager
def readable(field: str, path: Path | str) -> Iterator[None]:
    """Turns a failure to read `path` into the user's error about `field`."""
    try:
        yield
    except OSError as error:
        hint = (
            f"cannot be read on this worker ({error.strerror or error}): check the path and its permissions"
        )
        raise UserError(field, str(path), hint) from error


def open_files(path: str, pattern: str, *, field: str) -> tuple[DataFile, ...]:
    """The file at `path`, or those in the folder `path` that match `pattern`, sorted by relative path.

    Reads each once from end to end.

    Args:
        field: the source in the job file, such as `data.sources[0]`, for error messages.

    Raises:
        UserError: nothing there, nothing that matches, or something that cannot be read.
    """
    with readable(f"{field}.path", path):
        root = Path(path)
        if root.is_file():
            return (_examined(root, root.name, field),)
        if not root.is_dir():
            what = "not a regular file" if root.exists() else "no such file or folder on this worker"
            raise UserError(
                f"{field}.path", path, f"{what}: give a path that every worker of the first stage can read"
            )
        names = _matches(root, pattern, field)
        if not names:
            raise _nothing_found(root, pattern, field)
    return tuple(_examined(root / name, name, field) for name in names)


def digest_of(files: Iterable[DataFile]) -> str:
    """A hash over the names, sizes and contents of `files`, in their order."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file.size}\0{file.sha256}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _matches(root: Path, pattern: str, field: str) -> list[str]:
    try:
        found = [path for path in root.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        hint = f"{error}: give a pattern relative to the folder, such as '**/*.txt'"
        raise UserError(f"{field}.glob", pattern, hint) from error
    return sorted(path.relative_to(root).as_posix() for path in found)


def _nothing_found(root: Path, pattern: str, field: str) -> UserError:
    if not any(root.iterdir()):
        return UserError(f"{field}.path", str(root), "the folder is empty: give one that holds files")
    return UserError(f"{field}.glob", pattern, f"matches no file in {root}: '**/*' matches every file")


def _examined(path: Path, name: str, field: str) -> DataFile:
    content, size = hashlib.sha256(), 0
    with readable(f"{field}.path", path), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            content.update(chunk)
            size += len(chunk)
    return DataFile(path=path, name=name, size=size, sha256=content.hexdigest())
