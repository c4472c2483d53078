"""The database file of a run log: how it is opened, what is in it, and how it is left to a frozen process.

Rules of this file
- Each entry carries the digest of itself and of the one before, so two logs with one digest are one log up to there.
  Entries of the release before have none; the chain begins after them.
- What changes a log is one transaction, and SQLite lets one process write at a time. A process that is frozen within
  one would keep all others out, so a log can be sealed: an empty file beside it says that nothing written from then on
  counts. Who writes looks for the seal after the commit; who moves on seals first and copies then. So what anybody
  took for durable is in the copy, whichever of the two was quicker.
- The copy gets the next name by a link, which fails where that name exists: however many copy, one copy is the log.
"""

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from skein.errors import LocalError, RemoteError, SkeinError, UserError
from skein.protocol.log.records import EpochOpened, Record
from skein.storage.outside import is_full
from skein.types import Epoch
from skein.wire.codec import RECORD

LOG_FILE = "run.sqlite3"
FIELD = "state_dir"
BUSY_S = 10.0
RESTORE = "restore the directory from a backup, or move it away and submit again from the checkpoints"
_FORMAT = 3
_PIECE = 256
_ENTRIES = """
CREATE TABLE IF NOT EXISTS owner (epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    payload BLOB NOT NULL,
    crc32 INTEGER NOT NULL
);
INSERT INTO owner SELECT 0 WHERE NOT EXISTS (SELECT * FROM owner);
"""
_LEASE = """
ALTER TABLE owner ADD COLUMN holder TEXT NOT NULL DEFAULT '';
ALTER TABLE owner ADD COLUMN address TEXT NOT NULL DEFAULT '';
ALTER TABLE owner ADD COLUMN beats INTEGER NOT NULL DEFAULT 0;
ALTER TABLE owner ADD COLUMN has_lock INTEGER NOT NULL DEFAULT 1;
"""
"""Statements that format 2 added."""
_CHAIN = "ALTER TABLE entries ADD COLUMN digest BLOB"
"""Statement that format 3 added; the digest is NULL in entries that are older."""
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
_PERHAPS_FULL = {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_CANTOPEN,
}
"""Codes that SQLite gives, too, where it cannot make one of the files that it works with."""
_LEAST_BYTES = 1 << 16
"""With less than that free no log can be opened: its shared memory alone takes half of it."""
_SHARED = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "gfs2",
    "ocfs2",
    "9p",
    "virtiofs",
}
"""File systems that several machines mount; so may anything in user space (`fuse.`) be."""

Row = tuple[int, int, bytes, int, bytes | None]
"""Number, epoch, payload, checksum and digest of an entry."""
_ROW = "SELECT number, epoch, payload, crc32, digest FROM entries"


class LogFull(LocalError):
    """The disk takes no more (full, quota, limit); nothing was appended, and appending again may work later."""


class LogBusy(LocalError):
    """The log stays locked: another process writes, and does not come to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Owner of a log, or a candidate: a name that no other launcher has, and the address for workers and clients."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """End of a log: its last entry, the epoch in which that was written, and its digest.

    `entry` 0: it is empty. `digest` None: a release before this one wrote the entry.
    """

    entry: int
    epoch: Epoch
    digest: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Owner of a log, as the log says. Equal leases, read one after the other, mean no sign of life between.

    `holder` None: it was given back. `has_lock`: the holder also locks the directory, so a free lock means its death.
    """

    epoch: Epoch
    holder: Holder | None
    beats: int
    has_lock: bool


# --- which file, and how it is opened ---


def current(directory: Path) -> Path:
    """The file that is the log, or will be."""
    path, following = directory / LOG_FILE, _following(directory / LOG_FILE)
    while following.exists():
        path, following = following, _following(following)
    return path


def open_database(path: Path) -> sqlite3.Connection:
    """A connection that is durable when it says so.

    Raises:
        UserError: a newer release wrote it, or the file system cannot carry it.
        LocalError | sqlite3.Error: the disk failed, or this is no database.
    """
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    wanted = journal_mode(path.parent.resolve(), Path("/proc/self/mounts").read_text())
    ((mode,),) = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchall()
    if mode != wanted:
        hint = f"journals are kept as {mode}, not {wanted}; give a directory on a local disk"
        raise UserError(FIELD, str(path), hint)
    connection.execute("PRAGMA synchronous = FULL")
    if _format(connection, path) < _FORMAT:
        with transaction(connection, path):
            _upgrade(connection, path)
    return connection


def journal_mode(directory: Path, mounts: str) -> str:
    """WAL needs memory that all who open the file share, so it is for one machine. Elsewhere the slower way of SQLite.

    >>> journal_mode(Path("/home/me"), "/dev/sda / ext4 rw 0 0"), journal_mode(Path("/home/me"), "x /home nfs4 rw 0 0")
    ('wal', 'delete')
    """
    lines = [line.split(" ") for line in mounts.splitlines()]
    points = [(point.replace("\\040", " "), kind) for _, point, kind, *_ in lines]
    below = [(len(point), kind) for point, kind in points if directory.is_relative_to(point)]
    kind = max(below)[1] if below else ""
    return "delete" if kind in _SHARED or kind.startswith("fuse.") else "wal"


def _format(connection: sqlite3.Connection, path: Path) -> int:
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if version > _FORMAT:
        raise UserError(FIELD, str(path), "was written by a newer release; start that one")
    return int(version)


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Bring no log, or one of an older format, to this format; another process may have been quicker."""
    found = _format(connection, path)
    if found < _FORMAT:
        for statement in (("" if found == 2 else _ENTRIES + _LEASE) + _CHAIN).split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_FORMAT}")


@contextmanager
def transaction(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Commits at the end, durably; undoes everything when something fails. IMMEDIATE: no other writer meanwhile.

    Raises:
        LogBusy | LogFull: nothing was written.
        LocalError: the disk failed.
        UserError: the file is damaged.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
    except UnicodeDecodeError as error:
        raise _damaged(path) from error
    except sqlite3.Error as error:
        raise _failure(error, path) from error


def _failure(error: sqlite3.Error, path: Path) -> SkeinError:
    code = getattr(error, "sqlite_errorcode", None)
    if code in _FULL:
        return LogFull(f"{path}: {error}")
    if code == sqlite3.SQLITE_BUSY:
        return LogBusy(f"{path}: {error}")
    if _is_damage(error):
        return UserError(FIELD, str(path), f"{error}; {RESTORE}")
    return LocalError(f"{path}: {error}")


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite found bytes in the file that it did not write."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and not isinstance(error, sqlite3.ProgrammingError):
        # Raised by the sqlite3 module or by this one: what a row holds is not what was written.
        return True
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _damaged(path: Path) -> UserError:
    """The refusal of a file whose names of tables, which SQLite's own message quotes, are no text any more."""
    return UserError(FIELD, str(path), f"the database's schema is damaged; {RESTORE}")


@contextmanager
def damage_explained(path: Path) -> Iterator[None]:
    """Turns what SQLite says of a file into what its owner can do about it."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise LogFull(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _damaged(path) from error
    except sqlite3.OperationalError as error:
        if _is_damage(error):
            raise _failure(error, path) from error
        if _is_for_room(error, path):
            raise LogFull(f"{path}: {error}, and no room is left") from error
        raise UserError(
            FIELD, str(path), f"{error}; give a directory on a local disk that you can write"
        ) from error
    except sqlite3.DatabaseError as error:
        raise UserError(FIELD, str(path), f"{error}; {RESTORE}") from error


def _is_for_room(error: sqlite3.Error, path: Path) -> bool:
    """Whether a file could not be made or written because the disk is full."""
    code = getattr(error, "sqlite_errorcode", None)
    if code not in _PERHAPS_FULL:
        return code in _FULL
    room = os.statvfs(path.parent)
    has_files = room.f_favail > 0 or room.f_files == 0  # some file systems do not count them
    return room.f_bavail * room.f_frsize < _LEAST_BYTES or not has_files


def sync_directory(directory: Path) -> None:
    """A new file's name is durable only when its directory is."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- moving on ---


def is_sealed(path: Path) -> bool:
    """Whether this file is sealed: what is written to it from now on is not in the log."""
    return _seal(path).exists()


def move_on(path: Path) -> Path:
    """Seals the log at `path`, which somebody may write for ever, and gives its copy, which goes on as the log.

    Raises:
        UserError | OSError: the copy cannot be written.
    """
    following = _following(path)
    if following.exists():
        return following
    _seal(path).touch(mode=0o600)
    sync_directory(path.parent)
    with TemporaryDirectory(prefix=".moving-", dir=path.parent) as folder, damage_explained(path):
        copy = Path(folder) / path.name
        with (
            closing(sqlite3.connect(path, timeout=BUSY_S)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        with copy.open("rb") as file:
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            following.hardlink_to(copy)
    sync_directory(path.parent)
    return following


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}-sealed")


def _following(path: Path) -> Path:
    """`run.sqlite3`, `run.2.sqlite3`, `run.3.sqlite3` ..."""
    first, *number, last = path.name.split(".")
    return path.with_name(f"{first}.{int(number[0]) + 1 if number else 2}.{last}")


# --- what is in it ---


def read_lease(connection: sqlite3.Connection) -> Lease:
    """Lease that says who owns the log."""
    rows = connection.execute("SELECT epoch, holder, address, beats, has_lock FROM owner").fetchall()
    match rows:
        case [(int(epoch), str(name), str(address), int(beats), int(has_lock))]:
            holder = Holder(name=name, address=address) if name else None
            return Lease(epoch=Epoch(epoch), holder=holder, beats=beats, has_lock=bool(has_lock))
        case _:
            raise sqlite3.DatabaseError("the row that names the owner is damaged")


def take_epoch(
    connection: sqlite3.Connection,
    wall_s: float,
    holder: Holder,
    *,
    has_lock: bool,
    least: Epoch,
    accepts: bool,
) -> tuple[Lease, Tail]:
    """Within a transaction: the lease under the next epoch, which is above `least`, and where the log ends then.

    `accepts`: an operator goes on with a log that has lost its end, and the first entry says so.
    """
    values = (least, holder.name, holder.address, has_lock)
    connection.execute(
        "UPDATE owner SET epoch = max(epoch, ?) + 1, beats = 0, holder = ?, address = ?, has_lock = ?", values
    )
    lease = read_lease(connection)
    opened = EpochOpened(epoch=lease.epoch, wall_s=wall_s, accepts_loss=accepts)
    return lease, insert(connection, lease.epoch, (opened,))


def drop_torn_tail(connection: sqlite3.Connection, path: Path) -> str | None:
    """Within a transaction: what was wrong with the last entry, if anything; it is gone then."""
    last = _last_row(connection)
    # One that is whole by itself and does not follow the one before says that more is wrong; who reads finds out.
    if last is None or is_whole_alone(last):
        return None
    connection.execute("DELETE FROM entries WHERE number = ?", (last[0],))
    return f"{path}: the last entry, {last[0]}, was damaged and is dropped"


def read_tail(connection: sqlite3.Connection) -> Tail:
    """End of the log: its last entry."""
    last = _last_row(connection)
    if last is None:
        return Tail(entry=0, epoch=Epoch(0), digest=None)
    return Tail(entry=last[0], epoch=Epoch(last[1]), digest=last[4])


def _last_row(connection: sqlite3.Connection) -> Row | None:
    found: list[Row] = connection.execute(f"{_ROW} ORDER BY number DESC LIMIT 1").fetchall()
    return found[0] if found else None


def digest_before(connection: sqlite3.Connection, number: int) -> bytes | None:
    """The digest of the entry before `number`; None where there is none."""
    found = connection.execute("SELECT digest FROM entries WHERE number = ?", (number - 1,)).fetchone()
    return None if found is None else found[0]


def entry_at(connection: sqlite3.Connection, number: int) -> Tail | None:
    """The entry of that number; None: there is none."""
    found = connection.execute("SELECT epoch, digest FROM entries WHERE number = ?", (number,)).fetchone()
    return None if found is None else Tail(entry=number, epoch=Epoch(found[0]), digest=found[1])


def insert(connection: sqlite3.Connection, epoch: Epoch, records: Sequence[Record]) -> Tail:
    """Within a transaction: new entries; gives where the log ends with them."""
    tail = read_tail(connection)
    for payload in map(RECORD.to_bytes, records):
        number = tail.entry + 1
        digest = chained(tail.digest, number, epoch, payload)
        row = (number, epoch, payload, entry_checksum(number, epoch, payload), digest)
        connection.execute(
            "INSERT INTO entries (number, epoch, payload, crc32, digest) VALUES (?, ?, ?, ?, ?)", row
        )
        tail = Tail(entry=number, epoch=epoch, digest=digest)
    return tail


def rows_after(connection: sqlite3.Connection, number: int) -> list[Row]:
    """The next entries; few at a time, for an open cursor would hold up who writes."""
    return connection.execute(f"{_ROW} WHERE number > ? ORDER BY number LIMIT ?", (number, _PIECE)).fetchall()


def rows_numbered(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[Row]:
    """The entries of these numbers, in order; those that are missing are left out."""
    marks = ",".join("?" * len(numbers))
    return connection.execute(f"{_ROW} WHERE number IN ({marks}) ORDER BY number", numbers).fetchall()


def record_of(row: Row, path: Path) -> Record:
    """Record that an entry holds.

    Raises:
        UserError: a newer release wrote it.
    """
    try:
        return RECORD.from_bytes(row[2])
    except RemoteError as error:
        hint = f"entry {row[0]} was written by another release ({error}); start that release or a newer one"
        raise UserError(FIELD, str(path), hint) from error


def entry_checksum(number: int, epoch: int, payload: bytes) -> int:
    """Checksum that an entry carries beside its bytes: CRC-32 over its place and its payload."""
    return zlib.crc32(payload, zlib.crc32(f"{number}/{epoch}/".encode()))


def chained(before: bytes | None, number: int, epoch: int, payload: bytes) -> bytes:
    """An entry's digest: SHA-256 over that of the one before, its place and its payload."""
    return hashlib.sha256((before or b"") + f"{number}/{epoch}/".encode() + payload).digest()


def is_whole(row: Row, before: bytes | None) -> bool:
    """The entry is as it was written, after one whose digest is `before`."""
    number, epoch, payload, _, digest = row
    if not is_whole_alone(row):
        return False
    # What an older release wrote has no digest, and nothing comes before it that has one.
    return before is None if digest is None else chained(before, number, epoch, payload) == digest


def is_whole_alone(row: Row) -> bool:
    """The entry is as it was written, whatever comes before it."""
    return _has_types(row) and entry_checksum(*row[:3]) == row[3]


def _has_types(row: Sequence[object]) -> bool:
    """Whether payload and digest are bytes: SQLite stores values of any type in any column, so damage may change it."""
    return isinstance(row[2], bytes) and isinstance(row[4], bytes | None)
