"""A checkpoint's weights brought here, wherever they lie, with their hashes checked."""

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

from grpc import aio

from client.connection import Connection
from skein.config.job import JobSpec
from skein.config.rule import ExportOf
from skein.errors import RemoteError, UserError
from skein.model.parameters import parameter_shapes
from skein.protocol.log.records import checkpoint_folder, num_walkers, walker_prefix
from skein.protocol.messages.directives import CheckpointFile
from skein.storage.places import ANYWHERE, FIELD
from skein.wire import codec
from skein.wire.extra import FileData, FileEnd, GetRequest, GetStart, ManifestReply

OnBytes = Callable[[int, int], None]
"""Told how many bytes of how many are here."""

_READ_BYTES = 4 << 20


_GLOBAL = "global_params."
"""Before the name of a parameter: the tensor in which every walker of DiLoCo has what all of them agreed on."""


def weight_prefixes(manifest: ManifestReply, job: JobSpec, row: int = 0) -> tuple[str, ...]:
    """Prefixes of a parameter's name in those tensors of a checkpoint of which the exported one is the mean.

    DiLoCo exports what its walkers agreed on, leader SGD one walker's or the mean of all, as the job says, and gossip
    the mean, which is what all would come to if they went on to average. Of an array it is that `row`.
    """
    if job.rows:
        return (walker_prefix(row),)
    match job.aggregation.export_of:
        case ExportOf.AGREED:
            return (_GLOBAL,)
        case ExportOf.MEAN:
            return tuple(walker_prefix(walker) for walker in range(num_walkers(manifest.stages)))
        case _:
            return (walker_prefix(0),)


def weight_files(manifest: ManifestReply, job: JobSpec, row: int = 0) -> tuple[CheckpointFile, ...]:
    """The files of a checkpoint that hold the parameters of an export; what else there is stays where it is."""
    prefixes = weight_prefixes(manifest, job, row)
    wanted = {f"{prefix}{name}" for prefix in prefixes for name in parameter_shapes(job.model)}
    files = (file for stage in manifest.stages for file in stage.files)
    return tuple(file for file in files if not wanted.isdisjoint(file.tensors))


async def fetch_weights(
    connection: Connection,
    manifest: ManifestReply,
    job: JobSpec,
    folder: Path,
    *,
    row: int = 0,
    on_bytes: OnBytes | None,
) -> list[Path]:
    """Copies the weights of a checkpoint into `folder`; gives the files' paths.

    Raises:
        RemoteError: a file is not what the manifest says.
        UserError: `folder` cannot be written, or the checkpoint's URL not read.
    """
    files = weight_files(manifest, job, row)
    total = sum(file.num_bytes for file in files)
    paths, done = [], 0
    for file in files:
        # Names come from elsewhere; ours have no folders in them.
        path = folder / Path(file.name).name
        started = done

        def told(num_bytes: int, started: int = started) -> None:
            if on_bytes is not None:
                on_bytes(started + num_bytes, total)

        if manifest.url is None:
            await _from_coordinator(connection, manifest, file, path, told)
        else:
            await asyncio.to_thread(_from_url, manifest.url, manifest, file, path, told)
        done += file.num_bytes
        paths.append(path)
    return paths


async def _from_coordinator(
    connection: Connection,
    manifest: ManifestReply,
    file: CheckpointFile,
    path: Path,
    told: Callable[[int], None],
) -> None:
    """Downloads one file; a broken download goes on where it stopped."""
    patience = connection.patience()
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as target:
        while True:
            asked = GetRequest(job=manifest.job, version=manifest.version, name=file.name, offset=size)
            try:
                async with aclosing(connection.file_parts(asked)) as parts:
                    async for message in parts:
                        match codec.GET_PART.decode(message):
                            case GetStart(num_bytes=num_bytes):
                                _check_size(file, num_bytes)
                            case FileData(data=data):
                                patience.renew()
                                size += len(data)
                                _check_size(file, max(size, file.num_bytes))
                                await asyncio.to_thread(_append, target, data, digest.update)
                                told(size)
                            case FileEnd():
                                break
                break
            except aio.AioRpcError as error:
                await patience.endure(error)
    _check_digest(file, size, digest.hexdigest())


def _append(target: BinaryIO, data: bytes, update: Callable[[bytes], None]) -> None:
    target.write(data)
    update(data)


def _from_url(
    url: str, manifest: ManifestReply, file: CheckpointFile, path: Path, told: Callable[[int], None]
) -> None:
    version = checkpoint_folder(manifest.version)
    source = f"{url.rstrip('/')}/{manifest.job}/{version}/{path.name}"
    digest, size = hashlib.sha256(), 0
    try:
        files = ANYWHERE.open(url, manifest.job, version)
        with files.open(path.name) as file_there, path.open("wb") as target:
            while data := file_there.read(_READ_BYTES):
                _append(target, data, digest.update)
                size += len(data)
                told(size)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        hint = f"{reason}; run this where the checkpoint's URL can be read"
        raise UserError(FIELD, source, hint) from error
    _check_digest(file, size, digest.hexdigest())


def _check_size(file: CheckpointFile, num_bytes: int) -> None:
    if num_bytes != file.num_bytes:
        raise RemoteError(
            f"{file.name} has {num_bytes} bytes instead of {file.num_bytes}: export another version"
        )


def _check_digest(file: CheckpointFile, num_bytes: int, sha256: str) -> None:
    _check_size(file, num_bytes)
    if sha256 != file.sha256:
        raise RemoteError(f"{file.name} is damaged (SHA-256 {sha256[:12]}...): export another version")
