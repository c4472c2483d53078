"""Checkpoints on disk: the coordinator's own store, or wherever a job's URL points.

Layout: `<base>/<job>/v00000100/stage-000.g7.model.safetensors ...` and `manifest.json`, where base is the URL or the
`checkpoints` folder of the state directory.

Rules of this file
- A checkpoint exists when its manifest does: the manifest is written last and deleted first, and each file appears
  whole, under its own name, or not at all.
- Names come from other machines, so they are matched, never cleaned.
- All calls block; the caller gives them a thread.
"""

import hashlib
import json
import os
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self

from coordinator.records.logfile import sync_directory
from skein.config.job import JobSpec
from skein.errors import RemoteError, SkeinError, UserError
from skein.protocol.log.records import CheckpointCommitted, checkpoint_folder
from skein.protocol.messages.directives import CheckpointFile
from skein.storage.folders import Folder, RootedFolder
from skein.storage.outside import PIECE_BYTES, Synced, call_moved, require_room, room_explained
from skein.storage.places import ANYWHERE, FIELD, Places
from skein.storage.roots import Inside
from skein.types import JobId, Step

MANIFEST = "manifest.json"
FORMAT = 1
MAX_FILE_BYTES = 1 << 40
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library for a file's header."""
_HEADER_BYTES, _ENTRY_BYTES = 1 << 16, 512
"""Room in a header for what is no tensor, and for the shape and place of each."""
RESERVED_BYTES = 256 << 20
"""Bytes that uploads leave free on the disk, so that the run log goes on."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_JOB = re.compile(r"[a-z0-9][a-z0-9-]*")
_VERSION = re.compile(r"v(\d{8,})")


class DamagedError(SkeinError):
    """A checkpoint's file is not there, or not what was written."""


class MissingError(DamagedError):
    """A checkpoint's file is not there."""


class MistoldError(DamagedError):
    """A checkpoint's file is what was written, but that is not what its writer told, or nothing was told."""


def manifest_bytes(checkpoint: CheckpointCommitted, spec: JobSpec) -> bytes:
    """The text of manifest.json."""
    files = [
        {
            "name": file.name,
            "stage": stage.stage,
            "num_bytes": file.num_bytes,
            "sha256": file.sha256,
            "tensors": list(file.tensors),
        }
        for stage in checkpoint.stages
        for file in stage.files
    ]
    manifest = {
        "format": FORMAT,
        "job": checkpoint.job,
        "version": checkpoint.version,
        "spec": spec.canonical_json(),
        "data_fingerprint": checkpoint.data_fingerprint,
        "files": files,
    }
    return json.dumps(manifest, indent=1).encode() + b"\n"


class Upload:
    """A file that is being written beside its name, and gets it at `finish`. A context manager: no end, no file."""

    def __init__(self, target: Path, num_bytes: int) -> None:
        self._target = target
        self._left = self._num_bytes = num_bytes
        self._digest = hashlib.sha256()
        self._part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        self._file: BinaryIO | None = None
        self._synced: Synced | None = None

    def __enter__(self) -> Self:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("xb")
        self._synced = Synced(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        # A thread that was left behind may be about to finish.
        if (file := self._file) is not None:
            # What is still in memory may have no room either.
            with suppress(OSError):
                file.close()
            self._part.unlink(missing_ok=True)

    @property
    def sha256(self) -> str:
        """Hex digest of what was written."""
        return self._digest.hexdigest()

    @property
    def num_missing(self) -> int:
        """Bytes that are still to come."""
        return self._left

    def write(self, data: bytes) -> None:
        """The next bytes.

        Raises:
            RemoteError: more than announced.
            NoRoomError: the disk has become full.
        """
        assert self._synced is not None
        self._left -= len(data)
        if self._left < 0:
            raise RemoteError(f"{self._target.name}: {-self._left} bytes more than announced")
        self._digest.update(data)
        with self._room_explained():
            self._synced.write(data)

    def _room_explained(self) -> AbstractContextManager[None]:
        return room_explained(self._num_bytes, self._target.parent)

    def finish(self, *, replaces: bool) -> None:
        """Make the file durable under its name.

        Args:
            replaces: whether a checkpoint of that version, such as a damaged one, ends to exist.

        Raises:
            NoRoomError: the disk has become full.
        """
        assert self._file is not None
        with self._room_explained():
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        if replaces:
            self._target.with_name(MANIFEST).unlink(missing_ok=True)
        self._part.replace(self._target)
        sync_directory(self._target.parent)


class CheckpointStore:
    """All jobs' checkpoints. Files without a URL lie in `directory`.

    Args:
        directory: made at the first upload.
        places: where those with a URL may lie.
        reserved_bytes: what uploads leave free on that disk.
    """

    def __init__(
        self, directory: Path, *, places: Places = ANYWHERE, reserved_bytes: int = RESERVED_BYTES
    ) -> None:
        self.places = places
        self._directory = directory
        self._reserved_bytes = reserved_bytes

    # --- for the driver ---

    def write_manifest(self, checkpoint: CheckpointCommitted, spec: JobSpec) -> None:
        """Make the checkpoint exist, if all its files do and can be read as they were written.

        Raises:
            UserError: a file is missing or another, or the place cannot be written.
            RemoteError: a name that no checkpoint's file has, or a file with other content than its writer told.
        """
        with _explained(checkpoint.url):
            files = self._folder(checkpoint.job, checkpoint.url)
            try:
                _verify(files, checkpoint)
            except MistoldError as error:
                raise RemoteError(f"{error}: have all workers run this release") from error
            except DamagedError as error:
                hint = f"{error}: give a URL that is the same place for all workers and the coordinator"
                raise UserError(FIELD, checkpoint.url, hint) from error
            folder = checkpoint_folder(checkpoint.version)
            files.put(f"{folder}/{MANIFEST}", manifest_bytes(checkpoint, spec))

    def verify(self, checkpoint: CheckpointCommitted) -> None:
        """Read all of a checkpoint; returns if it is what was written.

        Raises:
            DamagedError: it is not, or not there while others are.
            UserError: the place cannot be read, or has no file of any checkpoint, as where it is not mounted.
        """
        with _explained(checkpoint.url):
            files = self._folder(checkpoint.job, checkpoint.url)
            try:
                _verify(files, checkpoint)
            except MissingError as error:
                if _has_any(files):
                    raise
                place = self._directory if checkpoint.url is None else checkpoint.url
                hint = "no file of any checkpoint of this job is there: is the place mounted?"
                raise UserError(FIELD, str(place), hint) from error

    def prune(self, job: JobId, url: str | None, keep: Sequence[Step], drop: Sequence[Step] = ()) -> None:
        """Delete `drop`, and what is older than the newest of `keep` and not in it. What is newer may be in the making.

        Raises:
            UserError: the place cannot be written.
        """
        if not keep and not drop:
            return
        newest = max(keep, default=Step(0))
        with _explained(url):
            files = self._folder(job, url)
            for name in files.list(""):
                match = _VERSION.fullmatch(name)
                version = None if match is None else int(match[1])
                if version is not None and (version in drop or (version < newest and version not in keep)):
                    _delete_checkpoint(files, name)

    # --- for uploads and downloads: the coordinator's own store ---

    def upload(self, job: JobId, version: Step, name: str, num_bytes: int) -> Upload:
        """A file to be written.

        Raises:
            RemoteError: a name that no checkpoint has.
            NoRoomError: the disk is full.
        """
        target = self._path(job, version, name)
        if num_bytes > MAX_FILE_BYTES:
            raise RemoteError(f"{name}: {num_bytes} bytes, at most {MAX_FILE_BYTES} are taken")
        self._directory.mkdir(parents=True, exist_ok=True)
        require_room(self._directory, num_bytes, reserved_bytes=self._reserved_bytes)
        return Upload(target, num_bytes)

    def pieces(self, job: JobId, version: Step, name: str, offset: int, piece_bytes: int) -> Iterator[bytes]:
        """The bytes of a file from `offset` on."""
        with self._path(job, version, name).open("rb") as file:
            file.seek(offset)
            while piece := file.read(piece_bytes):
                yield piece

    def _path(self, job: JobId, version: Step, name: str) -> Path:
        if name == MANIFEST:
            raise RemoteError("the coordinator writes the manifest itself")
        return self._directory / _checked(_JOB, job) / checkpoint_folder(version) / _checked(_NAME, name)

    def _folder(self, job: JobId, url: str | None) -> Folder:
        name = _checked(_JOB, job)
        if url is None:
            return RootedFolder(Inside(root=self._directory, parts=(name,)))
        return self.places.open(url, name)


def _has_any(files: Folder) -> bool:
    """Whether a job's place has a file of a checkpoint."""
    return any(_VERSION.fullmatch(name) and files.list(name) for name in files.list(""))


def _verify(files: Folder, checkpoint: CheckpointCommitted) -> None:
    """Sizes first, for what is missing is found at once.

    Raises:
        DamagedError: a file is not what was written.
    """
    folder = checkpoint_folder(checkpoint.version)
    for stage in checkpoint.stages:
        if not stage.files:
            raise MistoldError(f"{folder}: no file of stage {stage.stage} was told of")
    listed = [file for stage in checkpoint.stages for file in stage.files]
    for file in listed:
        path = f"{folder}/{_checked(_NAME, file.name)}"
        size = files.size(path)
        if size != file.num_bytes:
            if size is None:
                raise MissingError(f"{path} is not there")
            raise DamagedError(f"{path} has {size} bytes instead of {file.num_bytes}")
        call_moved()
    for file in listed:
        digest = hashlib.sha256()
        with files.open(f"{folder}/{file.name}") as opened:
            while piece := opened.read(PIECE_BYTES):
                digest.update(piece)
                call_moved()
        if digest.hexdigest() != file.sha256:
            raise DamagedError(f"{folder}/{file.name} is not what was written: its SHA-256 is another")
        with files.open(f"{folder}/{file.name}") as opened:
            _verify_names(opened, file, folder)


def _verify_names(opened: BinaryIO, file: CheckpointFile, folder: str) -> None:
    """Tensors are found by the names that the file's writer told: those must be the names inside.

    Raises:
        MistoldError: they are others, or the file is no safetensors file.
    """
    try:
        inside = _names_inside(opened, file)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise MistoldError(f"{folder}/{file.name} is no safetensors file: {error}") from error
    if inside != set(file.tensors):
        other = min(inside.symmetric_difference(file.tensors))
        raise MistoldError(
            f"{folder}/{file.name} holds other tensors than its writer told, {other[:128]!r} for one"
        )


def _names_inside(opened: BinaryIO, file: CheckpointFile) -> set[str]:
    """Names of the tensors in a safetensors file whose numbers follow one another to its end.

    Raises:
        ValueError | TypeError | KeyError | AttributeError | RecursionError | struct.error: it is none.
    """
    (header_bytes,) = struct.unpack("<Q", opened.read(8))
    # What was told bounds what is parsed: a long header would hold up all threads of this process.
    most = _HEADER_BYTES + sum(6 * len(name) + _ENTRY_BYTES for name in file.tensors)
    if header_bytes > min(most, MAX_HEADER_BYTES):
        raise ValueError(f"its header has {header_bytes} bytes, more than names and shapes take")
    header = json.loads(opened.read(header_bytes).decode())
    entry_by_name = {name: entry for name, entry in header.items() if name != "__metadata__"}
    stop = 0
    for begin, end in sorted(entry["data_offsets"] for entry in entry_by_name.values()):
        if begin != stop or end < begin:
            raise ValueError("its tensors do not follow one another")
        stop = end
    if 8 + header_bytes + stop != file.num_bytes:
        raise ValueError("its tensors end elsewhere than the file")
    return set(entry_by_name)


def _delete_checkpoint(files: Folder, folder: str) -> None:
    """The manifest first: half a checkpoint must not look like one."""
    files.delete(f"{folder}/{MANIFEST}")
    for name in files.list(folder):
        files.delete(f"{folder}/{name}")
        call_moved()
    files.delete(folder)
    call_moved()


def _checked(pattern: re.Pattern[str], name: str) -> str:
    if len(name) > 128 or pattern.fullmatch(name) is None:
        raise RemoteError(f"{name[:128]!r} is no name of a checkpoint's file or job")
    return name


@contextmanager
def _explained(url: str | None) -> Iterator[None]:
    try:
        yield
    except SkeinError:
        raise
    except Exception as error:
        # File systems raise what they like; without credentials, for instance, each has an error of its own.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        hint = f"{reason}; give a URL that workers and the coordinator can write"
        raise UserError(FIELD, url, hint) from error
