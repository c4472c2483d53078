"""Finding, reading and naming by content the files of a source.

Rules of this file
- A file is read once from end to end when it is opened first; what is read of it later is compared with that. A file
  that is changed meanwhile is an error that names it, and never other samples.
- A file or folder that is left out is named in the log.
"""

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import BinaryIO

from skein.config.data.spec import FIRST_RULES, NEWEST_RULES
from skein.errors import UnfitError, UserError
from skein.storage.outside import call_moved
from skein.storage.roots import Inside, Roots

_CHUNK_BYTES = 4 * 2**20
BLOCK_BYTES = 1 << 16
"""Bytes that are compared at once: what an operating system reads ahead, for a sample of some hundred bytes."""
BLOCK_DIGEST_BYTES = 8
"""128 MiB of digests stand for a terabyte. They find accidents: a worker is trusted with its own files."""
_MOST_NAMED = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """State of a file that changes with its content: cheap to ask, and asked at each read."""

    size: int
    modified_ns: int
    changed_ns: int
    """Time of the last change of content or attributes, which no program can set back."""

    @classmethod
    def of(cls, file: BinaryIO) -> "FileStamp":
        """Stamp of a file that is open."""
        state = os.fstat(file.fileno())
        return cls(size=state.st_size, modified_ns=state.st_mtime_ns, changed_ns=state.st_ctime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """File of a source, with size and hashes as of its opening, and its name relative to the source's path."""

    place: Inside
    name: str
    size: int
    sha256: str
    blocks: bytes = field(repr=False)
    """Digest of each `BLOCK_BYTES` of it, one after the other."""
    stamp: FileStamp

    @contextmanager
    def open(self, field: str) -> Iterator[BinaryIO]:
        """The file, to be read to its end, with the content that it had when it was opened first.

        Raises:
            UnfitError: it cannot be read, or was changed before or while it was read; `field` names its path.
        """
        with readable(field, self.place.path), self.place.open() as content:
            self._require_unchanged(content, field)
            yield content
            self._require_unchanged(content, field)

    def _require_unchanged(self, content: BinaryIO, field: str) -> None:
        now = FileStamp.of(content)
        if (now.size, now.modified_ns) != (self.stamp.size, self.stamp.modified_ns):
            raise UnfitError(field, str(self.place), "was changed while it was read: leave it as it is")

    def has_block(self, index: int, content: bytes) -> bool:
        """Whether `content` is the file's block of that number."""
        start = index * BLOCK_DIGEST_BYTES
        return self.blocks[start : start + BLOCK_DIGEST_BYTES] == _block_digest(content)


class FileDigest:
    """Size, hash and hashes of blocks of a file, as its bytes come."""

    def __init__(self) -> None:
        self.size = 0
        self._whole = hashlib.sha256()
        self._blocks = bytearray()
        self._rest = b""

    def update(self, piece: bytes) -> None:
        """Add the next bytes."""
        self._whole.update(piece)
        self.size += len(piece)
        waiting = self._rest + piece if self._rest else piece
        end = len(waiting) - len(waiting) % BLOCK_BYTES
        for start in range(0, end, BLOCK_BYTES):
            self._blocks += _block_digest(memoryview(waiting)[start : start + BLOCK_BYTES])
        self._rest = waiting[end:]

    def file(self, place: Inside, name: str, stamp: FileStamp) -> DataFile:
        """The file that was read, whole."""
        last = _block_digest(self._rest) if self._rest else b""
        return DataFile(
            place=place,
            name=name,
            size=self.size,
            sha256=self._whole.hexdigest(),
            blocks=bytes(self._blocks) + last,
            stamp=stamp,
        )


def _block_digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()[:BLOCK_DIGEST_BYTES]


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


def open_files(
    path: str, patterns: Sequence[str], *, field: str, roots: Roots, rules: int = NEWEST_RULES
) -> tuple[DataFile, ...]:
    """The file at `path`, or those in the folder `path` that match a pattern, sorted by relative path.

    Reads each once from end to end.

    Args:
        patterns: files that match any of them are taken; by the first rules, those of the first that matches one.
        field: the source in the job file, such as `data.sources[0]`, for error messages.
        roots: what lies elsewhere is not read.
        rules: version of the rules by which files become samples.

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
        names = _names(found.path, patterns, field, rules)
        if not names:
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


def _names(root: Path, patterns: Sequence[str], field: str, rules: int) -> list[str]:
    """Files below `root` that a source reads; the log says how many it leaves out."""
    others: list[set[str]] = [set() for _ in patterns]
    by_pattern = [_matches(root, x, field, seen) for x, seen in zip(patterns, others, strict=True)]
    every = set[str]().union(*by_pattern)
    names = sorted(every) if rules > FIRST_RULES else next(filter(None, by_pattern), [])
    left = sorted((set.intersection(*others) - every) | (every - set(names)))
    if names and left:
        shown = ", ".join(left[:_MOST_NAMED]) + (", ..." if len(left) > _MOST_NAMED else "")
        _log.warning(
            "%s.path=%s: %d files are read, %d are left out: %s", field, root, len(names), len(left), shown
        )
    return names


def _matches(root: Path, pattern: str, field: str, others: set[str]) -> list[str]:
    """Files that match, sorted; files beside them that do not are added to `others`."""
    names = PurePath(pattern)
    if ".." in names.parts:
        raise UserError(f"{field}.glob", pattern, "leads upwards: give a pattern of names below the folder")
    if not names.parts or names.is_absolute() or any("**" in name and name != "**" for name in names.parts):
        hint = "give a pattern relative to the folder, such as '**/*.txt', with ** only between slashes"
        raise UserError(f"{field}.glob", pattern, hint)
    return sorted(set(_below(root, "", names.parts, others)))


def _below(root: Path, folder: str, pattern: Sequence[str], others: set[str]) -> Iterator[str]:
    """Files in a folder of `root` that match, by their paths in `root`; one may come several times.

    Unlike `Path.glob` this tells that it gets further with each entry, not only with those that match. Folders that may
    not be looked into are passed over, and `**` follows no links, as there.
    """
    first, *rest = pattern
    if first == "**" and rest:
        yield from _below(root, folder, rest, others)
    try:
        entries = os.scandir(root / folder)
    except PermissionError:
        _log.warning("folder=%s is left out with all that is in it: this user may not read it", root / folder)
        return
    with entries:
        for entry in entries:
            call_moved()
            path = f"{folder}{entry.name}"
            if first == "**":
                if entry.is_dir(follow_symlinks=False):
                    yield from _below(root, f"{path}/", pattern, others)
            elif fnmatchcase(entry.name, first):
                if not _holds(entry.is_dir if rest else entry.is_file):
                    continue
                if rest:
                    yield from _below(root, f"{path}/", rest, others)
                else:
                    yield path
            elif not rest and entry.is_file(follow_symlinks=False):
                others.add(path)


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
    digest = FileDigest()
    with readable(f"{field}.path", place.path), place.open() as file:
        call_moved()
        stamp = FileStamp.of(file)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            call_moved()
    return digest.file(place, name, stamp)
