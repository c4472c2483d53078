"""Calls to what may never answer, such as a file system on a network.

Rules of this file
- Each call has a thread of its own. One that gives no sign of life for too long is left behind, for nothing can end it;
  it keeps no process from ending, and what it comes to in the end is forgotten.
- Silence is what counts, not time: whoever reads or writes large files says `call_moved` with each piece.
"""

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from skein.errors import LocalError
from skein.units import format_bytes

T = TypeVar("T")

SILENT_S = 30.0
"""Without a sign of life; raise it for stores that take longer than that for a first byte, such as tape."""
MAX_LEFT = 32
"""Threads left behind, beyond which nothing more is asked: each costs memory, and the next would not come back."""
PIECE_BYTES = 1 << 22
SYNC_BYTES = 1 << 24
"""Written between two syncs, so that none is so long that it counts as silence, though many share a slow disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEAST_ROOM_BYTES = 1 << 20
"""With less room than that a disk counts as full."""
_here = threading.local()


class SilentError(LocalError):
    """A call to the outside gives no sign of life."""


class NoRoomError(LocalError):
    """A place is full; in words how much is needed there, and how much is free."""

    def __init__(self, num_bytes: int, place: str, free_bytes: int) -> None:
        free = f"{format_bytes(max(0, free_bytes))} are free"
        super().__init__(f"needs {format_bytes(num_bytes)} at {place}, {free}")


class _Call(Generic[T]):
    """Call of one function on a thread of its own, and when it last gave a sign of life."""

    def __init__(self, function: Callable[[], T], outside: "Outside") -> None:
        self.moved_at = time.monotonic()
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.is_left = False
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._outside = outside

    def moved(self) -> None:
        self.moved_at = time.monotonic()
        self._outside.num_moved += 1

    def run(self) -> None:
        _here.call = self
        try:
            end: Callable[[], None] = _ended(self.answer.set_result, self._function())
        except StopIteration as error:
            # No future takes one: it would end whatever loop awaits it.
            end = _ended(self.answer.set_exception, RuntimeError(f"raised {error!r}"))
        except BaseException as error:  # noqa: BLE001 - the outermost of this thread: whoever asked gets it
            end = _ended(self.answer.set_exception, error)
        # Who asked may be gone, and the loop with it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, end)

    def _finish(self, end: Callable[[], None]) -> None:
        if self.is_left:
            self._outside.num_left -= 1
        elif not self.answer.done():
            end()


class Outside:
    """Outside calls of one process. `num_moved` grows with each sign of life of any, `num_left` are the silent ones."""

    def __init__(self, *, silent_s: float = SILENT_S) -> None:
        self.num_moved = 0
        self.num_left = 0
        self._silent_s = silent_s

    async def answer(self, function: Callable[[], T], what: str) -> T:
        """Result of `function`, which may block; its errors are raised.

        Args:
            function: says `call_moved` now and then if it takes long.
            what: is asked, for people.

        Raises:
            SilentError: it does not come to an end, or too many before it have not.
        """
        if self.num_left >= MAX_LEFT:
            raise SilentError(f"{what}: {self.num_left} earlier calls are still without an answer")
        call = _Call(function, self)
        threading.Thread(target=call.run, name="outside", daemon=True).start()
        try:
            while (left_s := call.moved_at + self._silent_s - time.monotonic()) > 0:
                await asyncio.wait({call.answer}, timeout=left_s)
                if call.answer.done():
                    return call.answer.result()
            raise SilentError(f"{what} gave no sign of life for {self._silent_s:.0f} s")
        finally:
            if not call.answer.done():
                call.is_left = True
                self.num_left += 1


def _ended(tell: Callable[[T], None], value: T) -> Callable[[], None]:
    return lambda: tell(value)


def call_moved() -> None:
    """The call that runs on this thread has got further; without one this says nothing."""
    call: _Call[object] | None = getattr(_here, "call", None)
    if call is not None:
        call.moved()


def require_room(folder: Path, num_bytes: int, *, reserved_bytes: int = 0) -> None:
    """Returns if so many bytes more have room in a folder that is there.

    Raises:
        NoRoomError: they have not.
    """
    free_bytes = shutil.disk_usage(folder).free - reserved_bytes
    if num_bytes > free_bytes:
        raise NoRoomError(num_bytes, str(folder), free_bytes)


def is_full(error: OSError) -> bool:
    """Whether a write failed for want of room, or of quota."""
    return error.errno in _FULL


def obstacle_to_writing(folder: Path) -> str:
    """Reason for which `folder` takes no writes, with the cure, as far as the operating system says.

    Call it on a thread that may block: storage that does not answer does not answer this either.
    """
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be reached ({error.strerror}): is it mounted?"
    if state.f_flag & os.ST_RDONLY:
        return f"the file system of {folder} is read-only: mount it for writing"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"this user may not write to {folder}: give it the permission"
    has_files = state.f_favail > 0 or state.f_files == 0  # some file systems do not count them
    if state.f_bavail * state.f_frsize < _LEAST_ROOM_BYTES or not has_files:
        return f"the disk of {folder} is full: make room"
    return f"the storage of {folder} fails, or a quota is used up: see the log of the operating system"


@contextmanager
def room_explained(num_bytes: int, folder: Path) -> Iterator[None]:
    """Makes of a write that found the disk full one that says how much is needed, and where.

    Raises:
        NoRoomError: it did.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise NoRoomError(num_bytes, str(folder), shutil.disk_usage(folder).free) from error


def copy_pieces(source: BinaryIO, target: BinaryIO, *, syncs: bool = False) -> None:
    """Copy all that is left of a file, telling with each piece that it moves; `syncs`: to the disk itself."""
    write: Callable[[bytes], object] = Synced(target).write if syncs else target.write
    while piece := source.read(PIECE_BYTES):
        write(piece)
        call_moved()


class Synced:
    """A file that is made durable as it is written, which is a sign of life each time: none is long in coming."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """Write it, and make durable what was written before once that is much."""
        self._file.write(data)
        self._num_bytes += len(data)
        if self._num_bytes >= SYNC_BYTES:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._num_bytes = 0
            call_moved()
