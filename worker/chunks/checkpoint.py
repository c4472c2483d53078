"""Checkpoints: a stage's state as two safetensors files, and the state of any stage from whatever files hold it.

Rules of this file
- Under its final name a file is complete: it is written elsewhere and renamed, or the store checks its hash first.
- Tensors are found by name, so the cut that reads need not be the one that wrote. A tied tensor is saved once, by the
  stage that embeds.
- Of many walkers each has files of its own. Its tensors are named after it, but for those of the main one, number 0.
- A checkpoint lies in `<url>/<job>/v<version>/`, or at the coordinator under the same file names.
"""

import errno
import hashlib
import secrets
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from skein.errors import LocalError, UserError
from skein.protocol.log.records import StageFiles, checkpoint_folder, walker_prefix
from skein.protocol.messages.directives import CheckpointFile
from skein.storage.folders import RootedFolder
from skein.storage.outside import PIECE_BYTES, call_moved, copy_pieces, require_room
from skein.storage.places import ANYWHERE, FIELD, Places
from skein.types import Generation, JobId, StageIndex, Step

_PASSING = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
)
"""Errors that a place suffers from for a while; any other lies in the URL, or in who may write there."""


def file_names(stage: StageIndex, generation: Generation, walker: int = 0) -> tuple[str, str]:
    """Names of the files with a walker's parameters of a stage and with the rest of its state.

    Each generation writes its own: a late writer of an older one must not touch what a manifest names.

    >>> file_names(StageIndex(2), Generation(7))
    ('stage-002.g7.model.safetensors', 'stage-002.g7.optimizer.safetensors')
    >>> file_names(StageIndex(2), Generation(7), 1)[0]
    'stage-002.g7.w1.model.safetensors'
    """
    base = f"stage-{stage:03d}.g{generation}" + (f".w{walker}" if walker else "")
    return f"{base}.model.safetensors", f"{base}.optimizer.safetensors"


class Archive(Protocol):
    """Place of the files of one checkpoint. Methods block; they are called off the event loop."""

    def put(self, path: Path, name: str) -> None:
        """Keep a copy of the file at `path` as `name`, all of it or nothing.

        Raises:
            OSError | RemoteError: it could not be written.
        """

    def get(self, file: CheckpointFile, folder: Path) -> Path:
        """A local path with the file's bytes, inside `folder` unless the file is local anyway.

        Raises:
            OSError | RemoteError: it could not be read.
        """


class UrlArchive:
    """Files of one checkpoint under a URL that `places` takes; what that is, is found out when it is used."""

    def __init__(self, url: str, job: JobId, version: Step, *, places: Places = ANYWHERE) -> None:
        self._url = url
        self._places = places
        self._below = (job, checkpoint_folder(version))

    def put(self, path: Path, name: str) -> None:
        with _as_os_error():
            self._places.open(self._url, *self._below).put_file(name, path)

    def get(self, file: CheckpointFile, folder: Path) -> Path:
        with _as_os_error():
            files = self._places.open(self._url, *self._below)
            if isinstance(files, RootedFolder):
                return files.path_of(file.name)
            require_room(folder, file.num_bytes)
            with files.open(file.name) as source, (folder / file.name).open("xb") as target:
                copy_pieces(source, target)
        return folder / file.name


def check_url(url: str, *, places: Places = ANYWHERE) -> None:
    """Returns if checkpoints could be written under `url`, as far as can be told by trying.

    Raises:
        UserError: they could not.
        OSError: they cannot now, for what may pass by itself.
    """
    probe = f".{secrets.token_hex(4)}.part"
    try:
        with _as_os_error():
            files = places.open(url)
            files.put(probe, b"")
            files.delete(probe)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        raise UserError(FIELD, url, f"cannot be written to: {error.strerror or error}") from error


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Makes one kind of error of all that file systems raise; without credentials, for instance, each has its own."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


# --- writing ---


def write_stage(
    stage: StageIndex,
    generation: Generation,
    archive: Archive,
    *,
    params: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    walker: int = 0,
) -> tuple[CheckpointFile, ...]:
    """Writes a chunk's parameters and the rest of its state, as `generation` asked for them; what was written.

    Args:
        stage: the chunk's.
        generation: that asked.
        archive: where to.
        params: by name.
        state: all else, by name.
        walker: the number in this checkpoint of the walker that the chunk is of.

    Raises:
        NoRoomError | OSError | RemoteError: it could not be.
    """
    names, prefix = file_names(stage, generation, walker), walker_prefix(walker)
    with tempfile.TemporaryDirectory(prefix="skein-checkpoint-") as folder:
        # One after the other is here, so the larger one must fit.
        num_bytes = max(sum(tensor.nbytes for tensor in held.values()) for held in (params, state))
        require_room(Path(folder), num_bytes)
        return tuple(
            _write(Path(folder) / name, {f"{prefix}{x}": tensor for x, tensor in tensors.items()}, archive)
            for name, tensors in zip(names, (params, state), strict=True)
        )


def _write(draft: Path, tensors: dict[str, Tensor], archive: Archive) -> CheckpointFile:
    try:
        save_file(tensors, draft, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{draft}: {error}") from error
    file = CheckpointFile(
        name=draft.name,
        num_bytes=draft.stat().st_size,
        sha256=sha256_of(draft),
        tensors=tuple(sorted(tensors)),
    )
    call_moved()
    archive.put(draft, draft.name)
    draft.unlink()
    return file


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            call_moved()
    return digest.hexdigest()


# --- reading ---


def read_state(
    stages: Iterable[StageFiles],
    names: Collection[str],
    archive: Archive,
    *,
    if_there: Collection[str] = (),
    walker: int = 0,
) -> dict[str, Tensor]:
    """A walker's tensors called `names` in a checkpoint, from whichever files hold them; every file read is checked.

    Args:
        stages: of the checkpoint.
        names: as they are called outside the checkpoint.
        archive: where the files are.
        if_there: names of others that are read where the checkpoint has them.
        walker: number of the walker in the checkpoint.

    Raises:
        LocalError: a tensor is in no file, or a file is not what was written.
        OSError | RemoteError: a file could not be read.
    """
    file_by_tensor = {name: file for held in stages for file in held.files for name in file.tensors}
    prefix = walker_prefix(walker)
    required, others = ({f"{prefix}{name}" for name in some} for some in (names, if_there))
    missing = sorted(required - file_by_tensor.keys())
    if missing:
        raise LocalError(f"the checkpoint lacks {missing[0]} and {len(missing) - 1} other tensors")
    wanted: dict[str, list[str]] = {}
    for name in sorted(required | (others & file_by_tensor.keys())):
        wanted.setdefault(file_by_tensor[name].name, []).append(name)
    files = {file.name: file for file in file_by_tensor.values()}
    state: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="skein-checkpoint-") as folder:
        for file_name, inside in sorted(wanted.items()):
            with _checked(files[file_name], archive, Path(folder)) as path:
                state |= _read(path, inside)
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@contextmanager
def _checked(file: CheckpointFile, archive: Archive, folder: Path) -> Iterator[Path]:
    if Path(file.name).name != file.name:
        raise LocalError(f"{file.name!r} is not the name of a file in a checkpoint")
    path = archive.get(file, folder)
    found = sha256_of(path)
    if found != file.sha256:
        raise LocalError(f"{path}: SHA-256 is {found}, {file.sha256} was written: the file has been changed")
    yield path
    if path.parent == folder:
        path.unlink()


def _read(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as tensors:
            # Cloned: a view of a mapped file would keep it, and a file that is then cut short kills the process.
            return {name: _moving(tensors.get_tensor(name).clone()) for name in names}
    except SafetensorError as error:
        raise LocalError(f"{path}: not what was written: {error}") from error


def _moving(tensor: Tensor) -> Tensor:
    call_moved()
    return tensor
