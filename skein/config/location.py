"""Place that a URL in a job file names, or name under which workers offer data; read without opening anything.

A URL comes from whoever may submit a job, and file systems take far more from one than a place: other URLs, options,
archives to look into, programs. So it is read here, whole, and nothing but its scheme and path goes on.
"""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skein.errors import UserError

SCHEMES = ("file", "s3", "gs", "abfs")
"""Schemes of URLs where checkpoints may lie. `memory` is for tests."""

_NAMES = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "az": "abfs",
    "abfss": "abfs",
    "adl": "abfs",
    "local": "file",
}
"""Schemes of ours by the names that others have for them."""
OFFERED = "data://"
"""Begin of what names data that workers offer; a name follows, and maybe a way below it."""
DATA_OPTION = "--data"
MAX_OFFERS = 64
"""Names under which one worker may offer data."""
_MAX_CHARACTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMED = "begin it with a letter or a digit, and give up to 64 of these, dots, dashes and underscores"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")
_OPTIONS = {
    "?": "options",
    "#": "a fragment",
    "@": "an account or a password",
    "{": "a template",
    "}": "a template",
    "%": "an escape",
    "*": "a pattern",
    "[": "a pattern",
    "\\": "a backslash",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place: of `file` an absolute path, of the others bucket and key."""

    scheme: str
    path: str

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"{self.scheme}://{self.path}"

    def is_below(self, other: "Location") -> bool:
        """Whether it is `other` or lies in it, going by its text alone."""
        base = other.path.rstrip("/")
        return self.scheme == other.scheme and (self.path == other.path or self.path.startswith(f"{base}/"))


def parse_location(url: str, *, field: str, schemes: tuple[str, ...] = SCHEMES) -> Location:
    """The place that `url` names: an absolute path, or a URL of one of `schemes`.

    Raises:
        UserError: it is no such URL, or holds more than a place; the error says what would be right.

    >>> parse_location("s3://models/runs/", field="checkpoint.url")
    Location(scheme='s3', path='models/runs')
    >>> parse_location("s3//models", field="checkpoint.url")
    Traceback (most recent call last):
    skein.errors.UserError: checkpoint.url: 's3//models': a colon is missing: write s3://models
    """
    _refuse_what_is_no_place(url, field)
    match = _SCHEME.fullmatch(url)
    if match is None:
        return _path(url, field, url)
    scheme, rest = match[1].lower(), match[2]
    if scheme not in schemes:
        cure = f"write {_NAMES[scheme]}://{rest}" if scheme in _NAMES else _wanted(schemes)
        raise UserError(field, url, f"{scheme}:// is not taken: {cure}")
    return _path(url, field, rest) if scheme == "file" else _object(url, field, scheme, rest)


def _wanted(schemes: tuple[str, ...]) -> str:
    return f"give an absolute path, or {', '.join(f'{scheme}://...' for scheme in schemes)}"


def _refuse_what_is_no_place(url: str, field: str) -> None:
    if not url or len(url) > _MAX_CHARACTERS:
        raise UserError(field, url[:64], f"give 1 to {_MAX_CHARACTERS} characters")
    if not url.isprintable() or url != url.strip():
        raise UserError(field, url, "holds characters that are not shown, or space around it: leave them out")
    if "::" in url:
        raise UserError(field, url, "one URL within another is not taken: give the inner one alone")
    body = url.partition("://")[2] or url
    if not url.startswith("/") and not url.startswith("file:"):
        _refuse_options(url, field, body)


def _refuse_options(url: str, field: str, body: str) -> None:
    for sign, what in _OPTIONS.items():
        if sign in body:
            hint = f"holds {what} ({sign!r}): give a place alone; credentials come from the environment of each process"
            raise UserError(field, url, hint)


def _path(url: str, field: str, path: str) -> Location:
    if not path.startswith("/"):
        raise UserError(field, url, _cure_of_relative(url, path))
    if "\0" in path or ".." in path.split("/"):
        raise UserError(field, url, f"leads upwards: write {posixpath.normpath(path)}")
    return Location(scheme="file", path=posixpath.normpath("/" + path.lstrip("/")))


def _cure_of_relative(url: str, path: str) -> str:
    if url.lower().startswith("file://"):
        return f"a slash is missing: write file:///{path}"
    begin = re.match(r"(?i)(file|s3[an]?|gs|gcs|abfss?|az)(:/*|/{2,})(?!/)", url)
    if begin is not None:
        scheme = begin[1].lower()
        what = "slashes are" if ":" in begin[2] else "a colon is"
        slashes = ":///" if scheme == "file" else "://"
        return f"{what} missing: write {_NAMES.get(scheme, scheme)}{slashes}{url[begin.end() :]}"
    return "is no absolute path: begin it with /"


def _object(url: str, field: str, scheme: str, rest: str) -> Location:
    bucket, *keys = rest.rstrip("/").split("/")
    if _BUCKET.fullmatch(bucket) is None:
        hint = "is no name of a bucket: 3 to 63 lower-case letters, digits, hyphens, dots and underscores"
        raise UserError(field, url, f"{bucket!r} {hint}")
    if any(key in ("", ".", "..") for key in keys):
        raise UserError(field, url, "holds an empty part, '.' or '..': leave it out")
    return Location(scheme=scheme, path="/".join((bucket, *keys)))


def cure_of_path(path: str) -> str | None:
    """Mistake in a path that was meant as a URL, and its cure; None if nothing is wrong.

    >>> cure_of_path("s3:/models")
    'slashes are missing: write s3://models'
    """
    if path.startswith("/") or "://" in path:
        return None
    cure = _cure_of_relative(path, path)
    return cure if "missing" in cure else None


# --- data that workers offer ---


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedPath:
    """A file or folder that workers offer under a name, or one below it."""

    name: str
    below: tuple[str, ...]


def parse_offered(path: str, *, field: str) -> OfferedPath | None:
    """The offer that a job's `path` names; None for a path of its own.

    Raises:
        UserError: it is meant as one, and is none.

    >>> parse_offered("data://books/2024", field="data.sources[0].path")
    OfferedPath(name='books', below=('2024',))
    """
    if not path.startswith(OFFERED):
        if path.startswith("data:"):
            cure = f"slashes are missing: write {OFFERED}{path.removeprefix('data:').lstrip('/')}"
            raise UserError(field, path, cure)
        return None
    name, *below = path.removeprefix(OFFERED).rstrip("/").split("/")
    if _NAME.fullmatch(name) is None:
        raise UserError(field, path, f"{name!r} is no name of data: {_NAMED}")
    if any(part in ("", ".", "..") for part in below):
        raise UserError(field, path, "holds an empty part, '.' or '..': leave it out")
    return OfferedPath(name=name, below=tuple(below))


def check_offers(names: Sequence[str], *, field: str) -> None:
    """Returns if these are names under which one worker may offer data.

    Raises:
        UserError: one is no name, or there are too many.
    """
    if len(names) > MAX_OFFERS:
        raise UserError(field, len(names), f"give at most {MAX_OFFERS}: jobs name what lies below, too")
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise UserError(field, name[:_MAX_CHARACTERS], f"{name!r} is no name: {_NAMED}")


def parse_offers(texts: Sequence[str]) -> dict[str, Path]:
    """Paths that a worker offers, by name, from what its owner writes: NAME=PATH each.

    Raises:
        UserError: one is not of that form, or there are too many.

    >>> parse_offers(["books=/srv/books"])
    {'books': PosixPath('/srv/books')}
    """
    offers: dict[str, Path] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not path or "\0" in path:
            raise UserError(DATA_OPTION, text, "give a name and a path, such as books=/srv/books")
        if name in offers:
            raise UserError(DATA_OPTION, text, f"{name} is {offers[name]} already: give each name once")
        offers[name] = Path(path)
    check_offers(tuple(offers), field=DATA_OPTION)
    return offers
