"""The run log on disk: SQLite, append only, one owner at a time.

Rules: `append` returns only when its records would survive a power cut. The directory's lock keeps a second
coordinator out; where the lock does not hold (its file was deleted, a shared file system forgot it), the epoch does: it
lies in the database, every opening raises it, and each append is conditional on it. All calls block; the caller gives
them a thread.
"""

import fcntl
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from skein.errors import LocalError, RemoteError, UserError
from skein.protocol.records import EpochOpened, Record
from skein.types import Epoch
from skein.wire.codec import RECORD

LOG_FILE = "run.sqlite3"
LOCK_FILE = "lock"

_FORMAT = 1
_FIELD = "state_dir"
_BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS owner (epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    payload BLOB NOT NULL,
    crc32 INTEGER NOT NULL
);
INSERT INTO owner SELECT 0 WHERE NOT EXISTS (SELECT * FROM owner);
"""
_RESTORE = "restore the directory from a backup, or move it away and submit again from the checkpoints"
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}


class Fenced(LocalError):
    """Another coordinator has opened the log since; this one must not act any more."""


class LogHeld(UserError):
    """Another process owns the directory."""


class LogFull(LocalError):
    """The disk takes no more (full, quota, limit); nothing was appended, and appending again may work later."""


class RunLog:
    """The entries of one state directory, for as long as this process owns it."""

    def __init__(self, connection: sqlite3.Connection, lock: int, directory: Path) -> None:
        self._connection = connection
        self._lock = lock
        self._path = directory / LOG_FILE
        self._epoch = Epoch(0)
        self._warning: str | None = None

    @classmethod
    def open(cls, directory: Path, *, wall_s: float) -> "RunLog":
        """Takes the log in `directory`, made if absent, and appends `EpochOpened` under the next epoch.

        Raises:
            UserError: another process owns it, it cannot be written, or it is damaged or of a newer release.
            LogFull: no room for the first entry.
        """
        with ExitStack() as undo, _damage_explained(directory / LOG_FILE):
            lock = _take_lock(directory)
            undo.callback(os.close, lock)
            connection = _connect(directory / LOG_FILE)
            undo.callback(connection.close)
            sync_directory(directory)
            log = cls(connection, lock, directory)
            log._drop_torn_tail()
            log._take_epoch(wall_s)
            undo.pop_all()
        return log

    @property
    def epoch(self) -> Epoch:
        """This opening's number; goes into every directive."""
        return self._epoch

    @property
    def warning(self) -> str | None:
        """What was wrong with the log when it was opened and could be mended, in one line."""
        return self._warning

    def append(self, records: Sequence[Record]) -> None:
        """Makes all of `records` durable, or none.

        Raises:
            Fenced: another coordinator has taken the log.
            LogFull: no room.
            LocalError: the disk failed. Only opening the log again tells what is in it, so this process must end.
        """
        with self._transaction():
            ((owner,),) = self._connection.execute("SELECT epoch FROM owner").fetchall()
            if owner != self._epoch:
                raise Fenced(
                    f"{self._path}: epoch {self._epoch} is over, another coordinator has opened the log"
                )
            self._insert(records)

    def read(self) -> Iterator[Record]:
        """All entries, oldest first.

        Raises:
            UserError: an entry is damaged, missing, or of a newer release; it names the file and the entry.
        """
        expected = 1
        with _damage_explained(self._path):
            rows = self._connection.execute(
                "SELECT number, epoch, payload, crc32 FROM entries ORDER BY number"
            )
            for number, epoch, payload, crc32 in rows:
                if number != expected or not _is_whole(number, epoch, payload, crc32):
                    raise UserError(_FIELD, str(self._path), f"entry {expected} is damaged; {_RESTORE}")
                yield self._record(number, payload)
                expected += 1

    def close(self) -> None:
        """Gives the log back. Idempotent."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, number: int, payload: bytes) -> Record:
        try:
            return RECORD.from_bytes(payload)
        except RemoteError as error:
            hint = (
                f"entry {number} was written by another release ({error}); start that release or a newer one"
            )
            raise UserError(_FIELD, str(self._path), hint) from error

    def _drop_torn_tail(self) -> None:
        last = self._connection.execute(
            "SELECT number, epoch, payload, crc32 FROM entries ORDER BY number DESC LIMIT 1"
        ).fetchone()
        if last is None or _is_whole(*last):
            return
        with self._transaction():
            self._connection.execute("DELETE FROM entries WHERE number = ?", (last[0],))
        self._warning = f"{self._path}: the last entry, {last[0]}, was damaged and is dropped"

    def _take_epoch(self, wall_s: float) -> None:
        with self._transaction():
            ((epoch,),) = self._connection.execute(
                "UPDATE owner SET epoch = epoch + 1 RETURNING epoch"
            ).fetchall()
            self._epoch = Epoch(epoch)
            self._insert((EpochOpened(epoch=self._epoch, wall_s=wall_s),))

    def _insert(self, records: Sequence[Record]) -> None:
        ((last,),) = self._connection.execute("SELECT coalesce(max(number), 0) FROM entries").fetchall()
        rows = [
            (number, self._epoch, payload, checksum(number, self._epoch, payload))
            for number, payload in enumerate(map(RECORD.to_bytes, records), start=last + 1)
        ]
        self._connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits at the end, durably; undoes everything when something fails. IMMEDIATE: no other writer meanwhile."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            kind = LogFull if getattr(error, "sqlite_errorcode", None) in _FULL else LocalError
            raise kind(f"{self._path}: {error}") from error


def _take_lock(directory: Path) -> int:
    """A descriptor whose exclusive lock ends with this process; the file says whose it is."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(
            _FIELD, str(directory), f"{error.strerror}; give a directory that you can write"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        hint = (
            f"the coordinator with process id {holder} is using it; stop that one, or give another directory"
        )
        raise LogHeld(_FIELD, str(directory), hint) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise UserError(
            _FIELD, str(path), "this file system has no shared memory; give a directory on a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if version > _FORMAT:
        raise UserError(_FIELD, str(path), "was written by a newer release; start that one")
    connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_FORMAT}; COMMIT;")
    return connection


def sync_directory(directory: Path) -> None:
    """A new file's name is durable only when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise UserError(
            _FIELD, str(path), f"{error}; give a directory on a local disk that you can write"
        ) from error
    except sqlite3.DatabaseError as error:
        raise UserError(_FIELD, str(path), f"{error}; {_RESTORE}") from error


def checksum(number: int, epoch: int, payload: bytes) -> int:
    """What an entry carries beside its bytes: CRC-32 over its place and its payload."""
    return zlib.crc32(payload, zlib.crc32(f"{number}/{epoch}/".encode()))


def _is_whole(number: int, epoch: int, payload: bytes, crc32: int) -> bool:
    return checksum(number, epoch, payload) == crc32
