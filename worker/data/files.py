"""Finding, reading and naming by content the files of a source."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from skein.errors import UnfitError, UserError
from skein.storage.outside import call_moved
from skein.storage.roots import Inside, Roots

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """File of a source, with size and hash as of its opening, and its name relative to the source's path."""

    place: Inside
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
        raise UnfitError(field, str(path), hint) from error


def open_files(path: str, patterns: Sequence[str], *, field: str, roots: Roots) -> tuple[DataFile, ...]:
    """The file at `path`, or those in the folder `path` that match a pattern, sorted by relative path.

    Reads each once from end to end.

    Args:
        patterns: the first that matches anything is taken.
        field: the source in the job file, such as `data.sources[0]`, for error messages.
        roots: what lies elsewhere is not read.

    Raises:
        UserError: nothing there, nothing that matches, or something that cannot be read.
    """
    with readable(f"{field}.path", path):
        found = roots.find(path, field=f"{field}.path")
        try:
            is_folder = found.is_folder()
        except FileNotFoundError as error:
            hint = "no such file or folder on this worker: give a path that every worker of the first stage can read"
            raise UnfitError(f"{field}.path", path, hint) from error
        if not is_folder:
            return (_examined(found, Path(path).name, field),)
        names = next(filter(None, (_matches(found.path, pattern, field) for pattern in patterns)), None)
        if names is None:
            raise _nothing_found(found.path, path, patterns[0], field)
        # A name below the folder may be a link.
        places = [_moving(roots.find(f"{path}/{name}", field=f"{field}.path")) for name in names]
    return tuple(_examined(place, name, field) for place, name in zip(places, names, strict=True))


def digest_of_files(files: Iterable[DataFile]) -> str:
    """A hash over the names, sizes and contents of `files`, in their order."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.name}\0{file.size}\0{file.sha256}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _matches(root: Path, pattern: str, field: str) -> list[str]:
    names = PurePath(pattern)
    if ".." in names.parts:
        raise UserError(f"{field}.glob", pattern, "leads upwards: give a pattern of names below the folder")
    if not names.parts or names.is_absolute() or any("**" in name and name != "**" for name in names.parts):
        hint = "give a pattern relative to the folder, such as '**/*.txt', with ** only between slashes"
        raise UserError(f"{field}.glob", pattern, hint)
    return sorted(set(_below(root, "", names.parts)))


def _below(root: Path, folder: str, pattern: Sequence[str]) -> Iterator[str]:
    """Files in a folder of `root` that match, by their paths in `root`; one may come several times.

    Unlike `Path.glob` this tells that it gets further with each entry, not only with those that match. Folders that may
    not be looked into are passed over, and `**` follows no links, as there.
    """
    first, *rest = pattern
    if first == "**" and rest:
        yield from _below(root, folder, rest)
    try:
        entries = os.scandir(root / folder)
    except PermissionError:
        return
    with entries:
        for entry in entries:
            call_moved()
            path = f"{folder}{entry.name}"
            if first == "**":
                if entry.is_dir(follow_symlinks=False):
                    yield from _below(root, f"{path}/", pattern)
            elif fnmatchcase(entry.name, first):
                if not _holds(entry.is_dir if rest else entry.is_file):
                    continue
                if rest:
                    yield from _below(root, f"{path}/", rest)
                else:
                    yield path


def _holds(asked: Callable[[], bool]) -> bool:
    """Whether an entry is what is asked; a link that leads to itself is nothing."""
    try:
        return asked()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _moving(place: Inside) -> Inside:
    call_moved()
    return place


def _nothing_found(folder: Path, path: str, pattern: str, field: str) -> UnfitError:
    if not any(folder.iterdir()):
        return UnfitError(f"{field}.path", path, "the folder is empty: give one that holds files")
    return UnfitError(f"{field}.glob", pattern, f"matches no file in {path}: '**/*' matches every file")


def _examined(place: Inside, name: str, field: str) -> DataFile:
    content, size = hashlib.sha256(), 0
    with readable(f"{field}.path", place.path), place.open() as file:
        call_moved()
        while chunk := file.read(_CHUNK_BYTES):
            content.update(chunk)
            size += len(chunk)
            call_moved()
    return DataFile(place=place, name=name, size=size, sha256=content.hexdigest())
