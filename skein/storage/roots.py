"""Folders of this machine outside of which nothing that a job names is opened, and what is offered under names.

Rules of this file
- What is offered under a name is a root of its own: links out of it are not followed, into another root neither.
- A path is judged after every symlink in it was followed, and opened from its root on, one part at a time, following
  none: what changes between the two opens nothing else.
- Only ordinary files are read: no device, no pipe that never answers.
- What lies outside is not looked at, so that errors tell nothing of it.
"""

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from skein.config.location import DATA_OPTION, OFFERED, OfferedPath, parse_offered
from skein.errors import UnfitError

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A path in a root, or the root itself, without a symlink in it when it was looked at."""

    root: Path
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.path)

    @property
    def path(self) -> Path:
        """For messages, and for looking; what is opened by it may have changed."""
        return self.root.joinpath(*self.parts)

    @property
    def name(self) -> str:
        return self.path.name

    def child(self, *parts: str) -> "Inside":
        """Path of that name in this folder, or in a folder of it."""
        assert not any(part in ("", ".", "..") or "/" in part for part in parts), parts
        return Inside(root=self.root, parts=(*self.parts, *parts))

    def open(self) -> BinaryIO:
        """The ordinary file there, to be read.

        Raises:
            OSError: it is not there, cannot be read, or is something else.
        """
        with self._parent() as (folder, name):
            descriptor = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, "not a regular file", str(self))
        return open(descriptor, "rb")

    def is_folder(self) -> bool:
        """Whether a folder is there.

        Raises:
            OSError: something is there, or on the way there, that cannot be looked at; or nothing at all.
        """
        with self._parent() as (folder, name):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return stat.S_ISDIR(found.st_mode)

    @contextmanager
    def folder(self, *, makes: bool = False) -> Iterator[int]:
        """A descriptor of the folder there, for as long as it is wanted.

        Args:
            makes: have folders made that are not there, the root included.

        Raises:
            OSError: it is no folder, or cannot be opened.
        """
        if makes:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        current = os.open(self.root, _FOLDER if self.parts else os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for number, part in enumerate(self.parts, start=1):
                if makes:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=current)
                is_last = number == len(self.parts)
                inner = os.open(part, _FOLDER | (os.O_RDONLY if is_last else os.O_PATH), dir_fd=current)
                os.close(current)
                current = inner
            yield current
        finally:
            os.close(current)

    @contextmanager
    def _parent(self) -> Iterator[tuple[int, str]]:
        """The folder that it lies in, and its name there."""
        with Inside(root=self.root, parts=self.parts[:-1]).folder() as descriptor:
            yield descriptor, self.parts[-1] if self.parts else "."


def usual_folder(name: str) -> Path:
    """A folder of Skein's own: below XDG_DATA_HOME, or the place it stands for."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "skein" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Some folders with the option that names them, and what is offered under names."""

    option: str
    folders: tuple[Path, ...]
    offers: Mapping[str, Path] = field(default_factory=dict)

    @staticmethod
    def of(
        option: str, folders: Sequence[Path], *, usual: str, offers: Mapping[str, Path] | None = None
    ) -> "Roots":
        """Roots as an operator names them; links in their own names are followed. Where there are none, the usual one.

        Args:
            option: that names them, such as `--data-root`.
            usual: name of the folder, below the user's data, that is the root where the operator names nothing.
            offers: what jobs may name without knowing where it lies, by name.
        """
        named = {name: _absolute(path) for name, path in (offers or {}).items()}
        found = tuple(map(_absolute, folders))
        return Roots(option=option, folders=found or (() if named else (usual_folder(usual),)), offers=named)

    def __str__(self) -> str:
        return " or ".join(map(str, self.folders)) or "nothing"

    def may_hold(self, path: str) -> bool:
        """Whether `path`, absolute, lies in a root by its text alone: nothing is looked at."""
        given = Path(os.path.normpath(path))
        return any(given.is_relative_to(folder) for folder in self.folders)

    def find(self, path: str, *, field: str) -> Inside:
        """Place to which `path` leads; whether something is there is not asked.

        Args:
            path: absolute, or below a name that is offered.
            field: of the job file, for the error.

        Raises:
            UnfitError: it leads out of all roots, is not offered here, or is no path.
            OSError: its links cannot be followed.
        """
        if "\0" in path:
            raise UnfitError(field, path, "holds a zero byte, which no path does: leave it out")
        if (offered := parse_offered(path, field=field)) is not None:
            return self._find_offered(offered, path, field)
        real = Path(os.path.realpath(path))
        for folder in self.folders:
            root = Path(os.path.realpath(folder))
            if real.is_relative_to(root):
                return Inside(root=root, parts=real.relative_to(root).parts)
        raise self.outside(path, field=field)

    def _find_offered(self, offered: OfferedPath, path: str, field: str) -> Inside:
        name = offered.name
        if name not in self.offers:
            cure = f"name one of those, or start it with {DATA_OPTION} {name}=PATH"
            hint = f"is not offered by this worker, which offers {self._offered()}: {cure}"
            raise UnfitError(field, path, hint)
        root = Path(os.path.realpath(self.offers[name]))
        real = Path(os.path.realpath(root.joinpath(*offered.below)))
        if not real.is_relative_to(root):
            hint = f"leads out of what is offered as {name}: put it there, or offer a folder that holds both"
            raise UnfitError(field, path, hint)
        if offered.below or root.is_dir():
            return Inside(root=root, parts=real.relative_to(root).parts)
        return Inside(root=root.parent, parts=(root.name,))

    def _offered(self) -> str:
        return ", ".join(f"{OFFERED}{name}" for name in sorted(self.offers)) or "nothing by name"

    def outside(self, path: str, *, field: str) -> UnfitError:
        """The error about a path that leads out of all roots."""
        if not self.folders:
            cure = f"name one of those, or start it with {self.option} FOLDER"
            hint = f"is a bare path, and this worker lets jobs name {self._offered()} alone: {cure}"
            return UnfitError(field, path, hint)
        place = f"the {self.option[2:].replace('-', ' ')} {self}"
        hint = f"leads out of {place}: put it there, or start the process with {self.option} FOLDER"
        return UnfitError(field, path, hint)


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))


EVERYTHING = Roots(option="--data-root", folders=(Path("/"),))
"""For a process whose own user names the files."""
