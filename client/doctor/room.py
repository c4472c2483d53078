"""Checks of room: disks, shared memory, memory; and of the folders that a job reads."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from client.doctor.finding import DoctorFinding, doubtful, fine, wrong
from skein.config.data.sources import (
    ArraysSource,
    DigitsSource,
    JsonlSource,
    ParquetSource,
    SourceSpec,
    TextSource,
    TokenSource,
)
from skein.config.data.spec import BYTES
from skein.config.job import JobSpec
from skein.errors import UserError
from skein.storage.roots import Roots
from skein.units import format_bytes

MIN_SHM_BYTES = 256 << 20
MIN_DISK_BYTES = 1 << 30
MIN_MEMORY_BYTES = 2 << 30
_DISK_HINT = "free some space: run log, checkpoints and logs need it"
_SHARED = Path("/dev/shm")  # noqa: S108 - where Linux has shared memory, not a place for files of ours
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def look_for_room(state_dir: Path, role: str | None) -> Iterator[DoctorFinding]:
    """Findings on memory and disks.

    Args:
        state_dir: where a service keeps its state; need not be there yet.
        role: see `look_at_installation`.
    """
    if role in (None, "coordinator"):
        yield free_space(str(_SHARED), _SHARED, MIN_SHM_BYTES, "give it more: Ray keeps its objects there")
    yield writable_space("disk", state_dir)
    yield memory_finding(usable_memory(), MIN_MEMORY_BYTES)


def free_space(check: str, path: Path, least_bytes: int, cure: str) -> DoctorFinding:
    """Whether a file system has room."""
    place = _nearest(path)
    free_bytes = shutil.disk_usage(place).free
    found = f"{format_bytes(free_bytes)} free in {place}"
    if free_bytes >= least_bytes:
        return fine(check, found)
    return doubtful(check, found, f"{cure} ({format_bytes(least_bytes)} or more)")


def writable_space(check: str, path: Path) -> DoctorFinding:
    """Whether a folder, or the nearest one above it that is there, can be written, and has room."""
    place = _nearest(path)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        full = "free some space there, or name another folder with --state-dir"
        closed = "let this user write there (chown, or mount it rw), or name another folder with --state-dir"
        is_full = shutil.disk_usage(place).free < 4096
        return wrong(check, f"{place} cannot be written: {error.strerror}", full if is_full else closed)
    return free_space(check, place, MIN_DISK_BYTES, _DISK_HINT)


def _nearest(path: Path) -> Path:
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))


def usable_memory() -> int:
    """Bytes that a process here may still take: free ones, within the limits of its container and of its shell."""
    limits = [psutil.virtual_memory().available]
    text = _CGROUP_LIMIT.read_text(encoding="ascii").strip() if _CGROUP_LIMIT.exists() else ""
    if text.isdecimal():
        limits.append(int(text))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits)


def memory_finding(usable_bytes: int, least_bytes: int) -> DoctorFinding:
    """Whether so much memory is enough for a service."""
    found = f"{format_bytes(usable_bytes)} can be used"
    if usable_bytes >= least_bytes:
        return fine("memory", found)
    cure = f"end other programs, or raise the container's limit or ulimit -v ({format_bytes(least_bytes)} or more)"
    return doubtful("memory", found, cure)


def look_at_data(job: JobSpec, roots: Roots) -> Iterator[DoctorFinding]:
    """Findings on all that a job reads, as a worker here would find it.

    Args:
        job: with absolute paths.
        roots: where a worker here reads.
    """
    for field, source in job.data.named_sources:
        yield _source(field, source, roots)
    if job.data.tokenizer != BYTES:
        yield _readable("data.tokenizer", job.data.tokenizer, (), roots)


def _source(field: str, source: SourceSpec, roots: Roots) -> DoctorFinding:
    match source:
        case DigitsSource():
            return fine(field, "needs no file")
        case TextSource() | ParquetSource():
            return _readable(f"{field}.path", source.path, (source.glob,), roots)
        case JsonlSource() | TokenSource() | ArraysSource():
            return _readable(f"{field}.path", source.path, (), roots)


def _readable(field: str, path: str, patterns: Sequence[str], roots: Roots) -> DoctorFinding:
    try:
        place = roots.find(path, field=field)
        if not place.is_folder():
            place.open().close()
            return fine(field, path)
    except UserError as error:
        return wrong(field, str(error.value), error.hint)
    except FileNotFoundError:
        cure = "copy the data here, or name where they lie: each worker of the first stage reads its own"
        return wrong(field, f"{path}: no such file or folder", cure)
    except OSError as error:
        cure = f"let the user of the worker read it (it is read as number {os.geteuid()} here)"
        return wrong(field, f"{path}: {error.strerror}", cure)
    return _folder(field, place.path, patterns)


def _folder(field: str, path: Path, patterns: Sequence[str]) -> DoctorFinding:
    if not os.access(path, os.R_OK | os.X_OK):
        return wrong(
            field, f"{path}: Permission denied", f"let the user of the worker read it: chmod -R a+rX {path}"
        )
    for pattern in patterns:
        found = next((file for file in path.glob(pattern) if file.is_file()), None)
        if found is None:
            return wrong(
                field, f"{path}: nothing there is called {pattern}", "give another glob, or another folder"
            )
        if not os.access(found, os.R_OK):
            return wrong(
                field, f"{found}: Permission denied", f"let the user of the worker read it: chmod a+r {found}"
            )
    return fine(field, str(path))
