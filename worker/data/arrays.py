"""Arrays of an `.npz` file: plain numbers only, no larger than is allowed, whatever the file says of itself.

A member is read in pieces by the header that NumPy's own reader of `.npy` files makes out. Whoever gives objects, which
would have to be unpickled, is refused.
"""

import zipfile
import zlib
from collections.abc import Mapping
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from skein.config.data.sources import ArraysSource
from skein.errors import UnfitError, UserError
from skein.storage.outside import call_moved
from skein.storage.roots import Roots
from skein.units import format_bytes
from worker.data.files import readable

MOST_BYTES = 4 << 30
"""Samples of one source take no more, in float32 neither."""
_PIECE_BYTES = 4 << 20
_HEADER_BYTES = 10_000
_KINDS: Mapping[str, str] = {"x": "fiu", "y": "iu"}
_WANTED: Mapping[str, str] = {
    "x": "an array (N, ...) of floats or whole numbers",
    "y": "an array (N,) of whole numbers",
}

Numbers = NDArray[np.floating | np.integer]


def read_arrays(source: ArraysSource, *, field: str, roots: Roots) -> tuple[Numbers, Numbers]:
    """Samples (N, ...) and classes (N,), whole numbers, of a file, as they are in it.

    Raises:
        UserError: the file is not there, is no `.npz` file with both, or one is not what it should be.
    """
    where = f"{field}.path"
    with readable(where, source.path):
        try:
            content = roots.find(source.path, field=where).open()
        except (FileNotFoundError, IsADirectoryError) as error:
            hint = "no such file on this worker: give an .npz file with x and y"
            raise UnfitError(where, source.path, hint) from error
        with content:
            try:
                with zipfile.ZipFile(content) as archive:
                    x, y = (_member(archive, name, where, source.path) for name in ("x", "y"))
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
                hint = f"is no .npz file ({error}): write it with numpy.savez(path, x=..., y=...)"
                raise UserError(where, source.path, hint) from error
    if len(x) != len(y):
        hint = f"x has {len(x)} rows and y {len(y)}: give a class for each sample"
        raise UserError(where, source.path, hint)
    if not len(x):
        raise UserError(where, source.path, "has no rows: give at least one sample")
    return x, y


def _member(archive: zipfile.ZipFile, name: str, field: str, path: str) -> Numbers:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError as error:
        names = ", ".join(sorted(archive.namelist())[:8]) or "nothing"
        hint = f"has no array {name} (it has: {names}): write it with numpy.savez(path, x=..., y=...)"
        raise UserError(field, path, hint) from error
    with archive.open(info) as member:
        try:
            shape, is_fortran, dtype = _header(member)
        except ValueError as error:
            raise UserError(field, path, f"{name} is no array ({error}): write it again") from error
        is_odd = not shape or min(shape) < 0 or (name == "y" and len(shape) > 1)
        if is_odd or dtype.kind not in _KINDS[name]:
            hint = f"{name} is {dtype} of shape {shape}: give {_WANTED[name]}"
            raise UserError(field, path, hint)
        count = int(np.prod(shape, dtype=object))
        kept_bytes = count * max(4, dtype.itemsize)
        if kept_bytes > MOST_BYTES:
            most = format_bytes(MOST_BYTES)
            hint = f"{name} is {format_bytes(kept_bytes)}: give at most {most} in one source"
            raise UserError(field, path, hint)
        if count * dtype.itemsize > info.file_size:
            raise UserError(field, path, f"{name} is shorter than its header says: write it again")
        flat = np.empty(count, dtype)
        _fill(flat, member)
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(member)
    if version == (1, 0):
        return npy.read_array_header_1_0(member, max_header_size=_HEADER_BYTES)
    if version == (2, 0):
        return npy.read_array_header_2_0(member, max_header_size=_HEADER_BYTES)
    raise ValueError(f"version {version}")


def _fill(flat: Numbers, member: IO[bytes]) -> None:
    """Read what a member holds, to the end of `flat`."""
    room = flat.view(np.uint8).data
    place = 0
    while place < len(room):
        found = member.read(min(_PIECE_BYTES, len(room) - place))
        if not found:
            raise EOFError("cut short")
        room[place : place + len(found)] = found
        place += len(found)
        call_moved()
