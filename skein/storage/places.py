"""Checkpoint URLs opened: by scheme, from a short list, with nothing but a path taken from the URL.

fsspec is never given a URL. Its file systems are made by name, without options, so that what is chained, cached or
rendered by one of its others cannot be reached from a job file.
"""

from dataclasses import dataclass

import fsspec
from fsspec.implementations.local import LocalFileSystem

from skein.config.location import SCHEMES, Location, parse_location
from skein.errors import UserError

FIELD = "checkpoint.url"
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where one process finds the checkpoints of jobs that name a URL. `schemes`: those that it takes."""

    schemes: tuple[str, ...] = SCHEMES

    def admit(self, url: str) -> Location:
        """What `url` names, if checkpoints may lie there; nothing is opened.

        Raises:
            UserError: it is no URL that is taken.
        """
        return parse_location(url, field=FIELD, schemes=self.schemes)

    def open(self, url: str) -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system behind `url`, and the path in it.

        Raises:
            UserError: see `admit`; or the package that opens it is not installed here.
        """
        location = self.admit(url)
        return _files_of(location.scheme, url), location.path


ANYWHERE = Places()
"""For a process whose own user names the place."""


def _files_of(scheme: str, url: str) -> fsspec.AbstractFileSystem:
    if scheme == "file":
        return LocalFileSystem()
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme, scheme)
        hint = f"this process lacks what opens {scheme}:// ({error}): pip install {package}"
        raise UserError(FIELD, url, hint) from error
