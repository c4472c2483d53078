"""The audit log of a coordinator: who did what, on disk before it is answered.

Rules of this file
- One thread writes, so entries stand in the order in which they were noted.
- Coordinators that share a state directory share the log: each append is made under a lock, after the last line there.
- A line is acknowledged when the head knows it. A piece of one that a crash left was not, and goes.
- Refusals, and workers' coming and going, cost whoever causes them nothing: of each host, and of each worker, a few a
  minute are written, and then their number.
"""

import asyncio
import fcntl
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator.records.logfile import sync_directory
from coordinator.records.mirror import replace_file
from skein.storage.chain import (
    BEGIN,
    HEAD_FILE,
    MAX_CHARACTERS,
    AuditEntry,
    ChainPosition,
    audit_line,
    chain_files,
    file_name,
    first_of,
    position_of,
    read_head,
)
from skein.types import WorkerId

FILE_BYTES = 8 << 20
"""Size at which the chain goes on in another file."""
MAX_FREE = 20
"""Entries of a host that are written in a window, of those that cost it nothing."""
MAX_HOSTS = 256
"""Hosts that are told apart in a window; the others count as one."""
WINDOW_S = 60.0
_LAST_BYTES = 16 * MAX_CHARACTERS * 6
_LOCK_FILE = "lock"
_OTHERS = "others"
_log = logging.getLogger("coordinator")


class AuditLog:
    """Appends to the chain in a folder, which is made with the first entry.

    Args:
        clock: gives Unix time.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="audit")
        self._num_free: Counter[str] = Counter()
        self._turning: asyncio.TimerHandle | None = None
        self._is_closed = False

    def note(
        self, who: str, did: str, what: str, outcome: str, *, namespace: str = "", host: str = ""
    ) -> asyncio.Future[None]:
        """Begin to write an entry; done when it is durable, and OSError when it cannot be."""
        entry = AuditEntry(
            wall_s=self._clock(),
            who=who,
            namespace=namespace,
            host=host,
            did=did,
            what=what,
            outcome=outcome,
        )
        writing = asyncio.get_running_loop().run_in_executor(self._writer, self.append, entry)
        writing.add_done_callback(_tell)
        return writing

    def note_worker(self, worker: WorkerId, words: str) -> None:
        """Note that a worker came, was turned away or went."""
        if self.has_room(f"worker {worker}"):
            _ = self.note("coordinator", "Decide", f"worker={worker}", words)

    def has_room(self, host: str) -> bool:
        """Whether another entry that costs a host nothing is to be written; it is counted in any case."""
        known = host if host in self._num_free or len(self._num_free) < MAX_HOSTS else _OTHERS
        self._num_free[known] += 1
        if self._turning is None:
            self._turning = asyncio.get_running_loop().call_later(WINDOW_S, self.turn)
        return self._num_free[known] <= MAX_FREE

    def turn(self) -> None:
        """Begin another window, and tell how many entries the last one left out."""
        if self._turning is not None:
            self._turning.cancel()
        self._turning = None
        counted, self._num_free = self._num_free, Counter()
        for host, number in counted.items():
            if number > MAX_FREE:
                text = f"{number - MAX_FREE} more were left out"
                _ = self.note("coordinator", "Omit", host, text)

    async def close(self) -> None:
        """Write what waits, and no more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.turn()
            await asyncio.to_thread(self._writer.shutdown)

    def append(self, entry: AuditEntry) -> None:
        """Write an entry; it is on disk when this returns.

        Raises:
            OSError: the disk takes nothing.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._folder / _LOCK_FILE, "a", opener=_own) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path, before = self._last()
            line = audit_line(entry, before)
            if path is None or path.stat().st_size + len(line) > FILE_BYTES:
                path = self._folder / file_name(before.number + 1)
            with open(path, "ab", opener=_own) as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._folder)
            after = position_of(line)
            assert after is not None
            head = {"number": after.number, "digest": after.digest}
            replace_file(self._folder / HEAD_FILE, json.dumps(head) + "\n")

    def _last(self) -> tuple[Path | None, ChainPosition]:
        """The file to go on in, and the position to go on from: what the head knows, or a line beyond it."""
        head = read_head(self._folder) or BEGIN
        files = chain_files(self._folder)
        if not files:
            return None, head
        found = _end_of(files[-1], head) or BEGIN
        # A last line that was changed must not become what the next one vouches for.
        return files[-1], found if found.number > head.number else head


def _end_of(path: Path, head: ChainPosition) -> ChainPosition | None:
    """The position of a file's last whole line; a piece after it is taken away, unless it was acknowledged."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LAST_BYTES))
        *whole, piece = file.read().split(b"\n")
        found = position_of(whole[-1]) if whole else None
        if piece:
            last = found.number if found is not None else first_of(path) - 1
            if head.number > last:
                file.write(b"\n")
            else:
                file.truncate(size - len(piece))
            file.flush()
            os.fsync(file.fileno())
        return found


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tell(writing: "asyncio.Future[None]") -> None:
    if not writing.cancelled() and (error := writing.exception()) is not None:
        _log.error("audit log: nothing is written: %s", error)
