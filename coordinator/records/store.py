"""The run log on disk: append only, one owner at a time, and a lease that says who that is.

Rules of this file
- `append` returns only when its records would survive a power cut.
- What keeps a second owner out is the epoch: it lies in the log, every opening raises it, and each append and each
  renewal is conditional on it. The lease only tells a standby when to try, so no clock has to be right for safety.
- The lock on the directory is a courtesy: it refuses a second coordinator at once, and shows that one before has died.
  A frozen process keeps it, so a standby goes by the lease alone.
- A log that has lost its end is refused: what comes after would be taken for what was lost. `mirror` knows.
- All calls block; the caller gives them a thread.
"""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from coordinator.records.logfile import (
    FIELD,
    RESTORE,
    Holder,
    Lease,
    LogBusy,
    LogFull,
    Tail,
    current,
    damage_explained,
    digest_before,
    drop_torn_tail,
    entry_at,
    insert,
    is_sealed,
    is_whole,
    is_whole_alone,
    move_on,
    open_database,
    read_lease,
    read_tail,
    record_of,
    rows_after,
    rows_numbered,
    sync_directory,
    take_epoch,
    transaction,
)
from coordinator.records.mirror import (
    KEY_FILE,
    LogLost,
    Mirror,
    clear_unfinished,
    read_mirror,
    take_key,
    what_is_lost,
    write_mirror,
)
from coordinator.records.snapshot import LogSnapshot, SnapshotDamaged
from skein.errors import LocalError, SkeinError, UserError
from skein.protocol.log.records import Record, job_of_record
from skein.storage.outside import is_full
from skein.types import Epoch, JobId

LOCK_FILE = "lock"
SOMEBODY = Holder(name="somebody", address="")
"""For whoever opens a log and does not serve."""
_NEW_KEY = (
    "made anew, as none was left, or the log is of a release without: workers cannot prove any more what they heard of "
    "it. If one is refused below for knowing a newer entry, stop, and look whether the log has lost its end"
)
_PIECE = 256
_BLOCKED_MS = 1000
"""Milliseconds that a standby waits for a writer that may be frozen: hundreds of times what a write takes."""


class Fenced(LocalError):
    """The log was opened by another coordinator since; this one must not act any more."""


class LogHeld(UserError):
    """The directory is owned by another process."""


class LeaseHeld(LogHeld):
    """Its lock is free, but that says nothing: the owner took over from one that kept the lock.

    `lease`: for `RunLog.open`, should it turn out that the owner is silent.
    """

    def __init__(self, directory: Path, lease: Lease) -> None:
        address = "elsewhere" if lease.holder is None else lease.holder.address
        hint = f"the coordinator at {address} is using it; stop that one, or stand by"
        super().__init__(FIELD, str(directory), hint)
        self.lease = lease


class RunLog:
    """The entries of one state directory, for as long as this process owns it. Made by `open`, or by `Lookout.take`."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, opening: "_Opening", lock: int | None
    ) -> None:
        self._connection = connection
        self._path = path
        self.epoch: Epoch = opening.lease.epoch
        """Number of this opening; goes into every directive."""
        self.key: bytes = opening.key
        """Random, and as old as the log: whoever shows what was signed with it has heard of this log."""
        self.warnings: tuple[str, ...] = opening.warnings
        """Faults of the log that were found at opening and could be mended or borne, a line each."""
        self._lock = lock
        self._tail = opening.tail
        self._mirrored: Tail | None = None
        # Renewals have a connection of their own: they come from another thread, and need not outlive a power cut.
        self._renewing = open_database(path)
        self._renewing.execute("PRAGMA synchronous = NORMAL")

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        wall_s: float,
        holder: Holder = SOMEBODY,
        lapsed: Lease | None = None,
        accepts_loss: bool = False,
    ) -> "RunLog":
        """Takes the log in `directory`, made if absent, and appends `EpochOpened` under the next epoch.

        Args:
            wall_s: Unix time, for the record.
            holder: who takes it.
            lapsed: a lease that this process has seen unchanged for so long that its owner must be dead.
            accepts_loss: an operator wants to go on with what is left of a log that has lost its end.

        Raises:
            LogHeld: another process owns it, and perhaps lives.
            LogLost: it has lost its end, or another log has taken its place.
            UserError: it cannot be written, or it is damaged or of a newer release.
            LogFull: no room for the first entry.
        """
        with ExitStack() as undo:
            lock = _take_lock(directory)
            undo.callback(os.close, lock)
            path = current(directory)
            undo.enter_context(damage_explained(path))
            # Who sealed it may have died before the copy was there.
            path = move_on(path) if is_sealed(path) else path
            connection = open_database(path)
            undo.callback(connection.close)
            sync_directory(directory)
            with transaction(connection, path):
                before = read_lease(connection)
                is_free = before.holder is None or before.has_lock or before.holder.name == holder.name
                if not is_free and before != lapsed:
                    raise LeaseHeld(directory, before)
                opening = _begin(
                    connection, path, before, wall_s, holder, has_lock=True, accepts_loss=accepts_loss
                )
            log = cls(connection, path, opening, lock)
            if accepts_loss:
                # Until then whoever starts next would hear of the loss again.
                with suppress(OSError):
                    log.mirror()
            undo.pop_all()
        return log

    def append(self, records: Sequence[Record]) -> None:
        """Makes all of `records` durable, or none.

        Raises:
            Fenced: another coordinator has taken the log; `records` may be in it, or not.
            LogFull: no room.
            LocalError: the disk failed. Only opening the log again tells what is in it, so this process must end.
        """
        with self._owning(self._connection):
            tail = insert(self._connection, self.epoch, records)
        self._tail = tail

    def renew(self, address: str) -> None:
        """Give a sign of life; a standby that sees none for long takes the log. From one thread at a time.

        Args:
            address: host:port at which workers and clients find the owner.

        Raises:
            Fenced: one has.
            LogFull: no room.
            LocalError: the disk failed, or something else writes.
        """
        if self._lock is None:
            # The one before has died at last, or its frozen process still has it.
            with suppress(LogHeld):
                self._lock = _take_lock(self._path.parent)
        with self._owning(self._renewing):
            self._renewing.execute(
                "UPDATE owner SET beats = beats + 1, address = ?, has_lock = ?",
                (address, self._lock is not None),
            )

    def mirror(self) -> None:
        """Have the file beside the log know where that ends. By the thread that renews.

        Raises:
            OSError: the disk takes nothing; the file is as it was.
        """
        tail = self._tail
        if tail != self._mirrored:
            write_mirror(self._path.parent, Mirror(tail=tail, key=self.key))
            self._mirrored = tail

    def read(self, job: JobId | None = None, *, after: int = 0) -> Iterator[Record]:
        """All entries but the first `after`, oldest first; of one job alone where it is named.

        Raises:
            UserError: an entry is damaged, missing, or of a newer release; it names the file and the entry.
        """
        if job is None:
            yield from self._read(after)
            return
        numbers, covered = self._numbers_of(job)
        for begin in range(0, len(numbers), _PIECE):
            piece = numbers[begin : begin + _PIECE]
            with damage_explained(self._path):
                rows = rows_numbered(self._connection, piece)
            for number, row in zip_longest(piece, rows):
                if row is None or row[0] != number or not is_whole_alone(row):
                    raise UserError(FIELD, str(self._path), f"entry {number} is damaged; {RESTORE}")
                yield record_of(row, self._path)
        for record in self._read(max(after, covered)):
            if job_of_record(record) == job:
                yield record

    def _numbers_of(self, job: JobId) -> tuple[Sequence[int], int]:
        """Numbers of a job's entries by the snapshot beside the log, and the last entry that this covers."""
        try:
            with closing(LogSnapshot(self._path.parent)) as snapshot:
                tail = snapshot.head.tail
                if entry_at(self._connection, tail.entry) == tail:
                    return snapshot.numbers(job), tail.entry
        except (FileNotFoundError, sqlite3.Error, UnicodeDecodeError, SnapshotDamaged):
            # Without an index all entries are looked through.
            pass
        return (), 0

    def _read(self, after: int) -> Iterator[Record]:
        number = after
        with damage_explained(self._path):
            before = digest_before(self._connection, number + 1)
            while rows := rows_after(self._connection, number):
                for row in rows:
                    number += 1
                    if row[0] != number or not is_whole(row, before):
                        raise UserError(FIELD, str(self._path), f"entry {number} is damaged; {RESTORE}")
                    before = row[4]
                    yield record_of(row, self._path)

    def close(self) -> None:
        """Gives the log back. Idempotent."""
        # Whoever comes next finds out without this, only later.
        with suppress(LocalError, OSError):
            with self._owning(self._connection):
                self._connection.execute("UPDATE owner SET holder = '', address = ''")
            self.mirror()
        self._renewing.close()
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _owning(self, connection: sqlite3.Connection) -> Iterator[None]:
        """A transaction that counts only while the log is this one's."""
        with transaction(connection, self._path):
            now = read_lease(connection)
            if now.epoch != self.epoch:
                raise self._fenced(now)
            yield
        if is_sealed(self._path):
            raise self._fenced(None)

    def _fenced(self, now: Lease | None) -> Fenced:
        over = f"{self._path}: epoch {self.epoch} is over, another coordinator has opened the log"
        holder = None if now is None else now.holder
        return Fenced(
            f"{over}: {holder.address} leads now" if holder is not None and holder.address else over
        )


class Lookout:
    """A run log that another owns, as a standby sees it: it reads, and writes nothing until it takes over.

    Raises:
        UserError: the directory cannot be had, or the log is damaged or of a newer release.
    """

    def __init__(self, directory: Path) -> None:
        _make(directory)
        self._path = current(directory)
        self._connection = _patient(self._path)
        self.tail = Tail(entry=0, epoch=Epoch(0), digest=None)
        """The last entry that `news` has given so far, or that was skipped."""

    @property
    def num_read(self) -> int:
        """Entries that `news` has given so far, those that were skipped included."""
        return self.tail.entry

    def entry_at(self, number: int) -> Tail | None:
        """The log's entry of that number; None: there is none."""
        with damage_explained(self._path):
            return entry_at(self._connection, number)

    def skip(self, tail: Tail) -> None:
        """Give what follows this entry of the log, which is known already."""
        self.tail = tail

    def num_left(self) -> int:
        """Entries that the log has after those that were given."""
        with damage_explained(self._path):
            return read_tail(self._connection).entry - self.num_read

    def lease(self) -> Lease:
        """Lease of this moment: who owns the log, and how often that one has renewed."""
        self._follow(current(self._path.parent))
        with damage_explained(self._path):
            return read_lease(self._connection)

    def news(self) -> list[Record]:
        """The next entries that this has not given yet, a piece at a time; [] for none.

        A damaged one ends them: whoever opens the log next drops it if it is the last, or refuses the log.
        """
        found: list[Record] = []
        with damage_explained(self._path):
            rows = rows_after(self._connection, self.num_read)
        # What is not in the copy was never said to anybody.
        for row in () if is_sealed(self._path) else rows:
            if row[0] != self.num_read + 1 or not is_whole(row, self.tail.digest):
                break
            found.append(record_of(row, self._path))
            self.tail = Tail(entry=row[0], epoch=Epoch(row[1]), digest=row[4])
        return found

    def take(self, seen: Lease, *, wall_s: float, holder: Holder) -> RunLog | None:
        """The log, taken from an owner that gave no sign of life since `seen`; None if it did, or another came.

        Raises:
            LogFull: no room for the first entry.
            LogLost: the log has lost its end.
            LocalError: the disk failed, or something else writes.
        """
        if is_sealed(self._path):
            self._follow(move_on(self._path))
        try:
            return self._take(seen, wall_s, holder)
        except LogBusy:
            if not self._may_move():
                raise
            self._follow(move_on(self._path))
            return self._take(seen, wall_s, holder)

    def close(self) -> None:
        """Look no more."""
        self._connection.close()

    def _take(self, seen: Lease, wall_s: float, holder: Holder) -> RunLog | None:
        with damage_explained(self._path):
            with transaction(self._connection, self._path):
                if read_lease(self._connection) != seen:
                    return None
                opening = _begin(self._connection, self._path, seen, wall_s, holder, has_lock=False)
            return RunLog(open_database(self._path), self._path, opening, None)

    def _may_move(self) -> bool:
        """On a shared file system whoever is frozen in a transaction keeps readers out, too, so nothing is gained."""
        ((mode,),) = self._connection.execute("PRAGMA journal_mode").fetchall()
        return bool(mode == "wal")

    def _follow(self, path: Path) -> None:
        if path != self._path:
            self._connection.close()
            self._path, self._connection = path, _patient(path)


def state_path(text: str) -> Path:
    """The directory that a path or a `file://` URL names.

    Raises:
        UserError: another kind of URL.

    >>> state_path("file:///var/lib/skein"), state_path("state")
    (PosixPath('/var/lib/skein'), PosixPath('state'))
    """
    url = urlsplit(text)
    if "://" not in text:
        return Path(text)
    if url.scheme == "file" and url.netloc in ("", "localhost") and url.path:
        return Path(unquote(url.path))
    hint = (
        "a run log needs compare-and-swap, so that appends fail once another coordinator has taken over; that is not "
        "built for such URLs. Give a directory, or file:// and its full path; checkpoints may lie anywhere"
    )
    raise UserError(FIELD, text, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """A log that has just been taken: by what lease, where it ends, its key, and what was wrong with it."""

    lease: Lease
    tail: Tail
    key: bytes
    warnings: tuple[str, ...]


def _begin(
    connection: sqlite3.Connection,
    path: Path,
    before: Lease,
    wall_s: float,
    holder: Holder,
    *,
    has_lock: bool,
    accepts_loss: bool = False,
) -> _Opening:
    """Within a transaction: the next epoch, if the log has all that is known of it, or if its loss is accepted."""
    clear_unfinished(path.parent)
    torn, unread, mirror = drop_torn_tail(connection, path), None, None
    try:
        mirror = read_mirror(path.parent)
    except (OSError, ValueError) as error:
        unread = (
            f"{path.parent}: what the log should end with cannot be read ({error}), so it is not compared"
        )
    ended = read_tail(connection)
    lost = None if mirror is None else what_is_lost(connection, ended, mirror.tail)
    if lost is not None and not accepts_loss:
        raise LogLost(path, lost)
    # A restart by the launcher that was told to accept the loss has nothing more to accept.
    is_again = lost is None and before.holder is not None and before.holder.name == holder.name
    accepts = accepts_loss and not is_again
    least = Epoch(0) if mirror is None else mirror.tail.epoch
    key, is_new = take_key(path.parent, mirror)
    keyless = f"{path.parent / KEY_FILE}: {_NEW_KEY}" if is_new and ended.entry else None
    lease, tail = take_epoch(connection, wall_s, holder, has_lock=has_lock, least=least, accepts=accepts)
    gone_on = None if lost is None else f"{path}: {lost}; going on without, as asked"
    warnings = tuple(line for line in (torn, unread, keyless, gone_on) if line is not None)
    return _Opening(lease=lease, tail=tail, key=key, warnings=warnings)


def _patient(path: Path) -> sqlite3.Connection:
    with damage_explained(path):
        connection = open_database(path)
        connection.execute(f"PRAGMA busy_timeout = {_BLOCKED_MS}")
    return connection


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> SkeinError:
    if is_full(error):
        return LogFull(f"{directory}: {error.strerror}")
    return UserError(FIELD, str(directory), f"{error.strerror}; give a directory that you can write")


def _take_lock(directory: Path) -> int:
    """A descriptor whose exclusive lock ends with this process; the file says whose it is."""
    _make(directory)
    try:
        lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        hint = (
            f"the coordinator with process id {holder} is using it; stop that one, or give another directory"
        )
        raise LogHeld(FIELD, str(directory), hint) from error
    # The lock counts; what it says is for people, and on a full disk nobody can say it.
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
