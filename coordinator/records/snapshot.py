"""Snapshot of the state that a run log gives, in a file beside it: a start reads it and replays the entries after it.

Rules of this file
- A snapshot names the last entry that it covers, by number, epoch and digest. It counts only where the log has that
  very entry, only whole (its proof covers every row), and only if this release would have written it in this layout.
  Everywhere else it is ignored with a reason, and the log is replayed from its beginning: the file holds no fact that
  the log does not.
- A snapshot becomes the next one in one transaction, which rewrites only the jobs that have changed. It
  goes by the entry of the snapshot before, so of two writers one fails.
- Ended jobs are read one by one. Of them the file also has a row for lists, as bytes that a client understands.
- Beside the jobs lie the numbers of each job's entries, so that the log of one job is read without the entries of other
  jobs.
"""

import hashlib
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.records.logfile import BUSY_S, Tail, journal_mode
from skein.errors import LocalError
from skein.types import Epoch, JobId

SNAPSHOT_FILE = "run.snapshot"
_TABLES = """
CREATE TABLE IF NOT EXISTS head (
    layout TEXT NOT NULL, entry INTEGER NOT NULL, epoch INTEGER NOT NULL, digest BLOB,
    state BLOB NOT NULL, proof BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS jobs (
    place INTEGER PRIMARY KEY, job TEXT NOT NULL UNIQUE, entry INTEGER NOT NULL, num_entries INTEGER NOT NULL,
    card TEXT NOT NULL, body BLOB NOT NULL, line BLOB NOT NULL, digest BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS numbers (place INTEGER, number INTEGER, PRIMARY KEY (place, number)) WITHOUT ROWID;
"""
_ROW = "SELECT place, job, entry, num_entries, card, body, line, digest FROM jobs"
_PIECE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHead:
    """Reach of a snapshot: the log up to `tail`, in the given layout; `state` is all but the jobs, as text."""

    layout: str
    tail: Tail
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotJob:
    """A job in a snapshot, as texts in the layout that the snapshot's head names.

    `entry` changed it last. `card` is "" while it has not ended; `line`: its row in a list of jobs, b"" until then.
    """

    job: JobId
    entry: int
    card: str
    body: str
    line: bytes = b""


_Row = tuple[int, str, int, int, str, bytes, bytes, bytes]


def _digest(row: Sequence[object]) -> bytes:
    """Digest of a row without its own digest."""
    sha = hashlib.sha256()
    for value in row:
        data = value if isinstance(value, bytes) else str(value).encode()
        sha.update(b"%d:" % len(data))
        sha.update(data)
    return sha.digest()


def _proof(head: SnapshotHead, state: bytes, rows: Iterable[bytes]) -> bytes:
    """Digest of a whole snapshot, given the digests of its rows in order."""
    tail = head.tail
    sha = hashlib.sha256(_digest((head.layout, tail.entry, tail.epoch, tail.digest or b"", state)))
    for row in rows:
        sha.update(row)
    return sha.digest()


class SnapshotDamaged(LocalError):
    """The snapshot's file is not as it was written; a start without it replays the whole log."""


class LogSnapshot:
    """The snapshot of a state directory, to be read. From one thread at a time.

    Raises:
        FileNotFoundError: the directory has no snapshot.
        sqlite3.Error | UnicodeDecodeError: the file is no snapshot, or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / SNAPSHOT_FILE
        self._path = path
        self._connection = _connected(path, must_exist=True)
        self.head, self._state, self._told_proof = _read_head(self._connection)
        self._places: dict[JobId, tuple[int, bool]] | None = None

    def fault(self, layout: str, entry_at: Callable[[int], Tail | None], *, reads_all: bool) -> str | None:
        """Reason to ignore it, in words; None for a snapshot that fits the log and is whole.

        Args:
            layout: in which this release writes.
            entry_at: gives the log's entry of a number, if it has it.
            reads_all: read and compare all of it; else a job that is damaged is found when it is read.
        """
        tail = self.head.tail
        if self.head.layout != layout:
            return "it was written by another release"
        if entry_at(tail.entry) != tail:
            return f"it covers entry {tail.entry} of epoch {tail.epoch}, which the run log does not have"
        if not reads_all:
            return None
        try:
            # Each row by its place, as it is read later: so noise in an inner page of the database is found, too.
            rows = (self._at(place) for place, _ in self._placed().values())
            digests = [row[7] for row in rows if row is not None and _is_whole(row)]
        except (sqlite3.Error, UnicodeDecodeError) as error:
            return f"it is damaged: {error}"
        if _proof(self.head, self._state, digests) != self._told_proof:
            return "it is damaged"
        return None

    def jobs(self) -> Iterator[tuple[JobId, int, str]]:
        """Name, entry and card of each job, oldest first."""
        for job, entry, card in self._connection.execute("SELECT job, entry, card FROM jobs ORDER BY place"):
            yield JobId(job), entry, card

    def has_ended(self, job: JobId) -> bool:
        """Whether it has this job, as one that had ended."""
        return self._placed().get(job, (0, False))[1]

    def body(self, job: JobId) -> str:
        """The body of a job.

        Raises:
            SnapshotDamaged: it is not as it was written.
        """
        return zlib.decompress(self._row(job)[5]).decode()

    def lines(self, jobs: Sequence[JobId]) -> Mapping[JobId, bytes]:
        """Rows of lists of the named jobs, as far as they have one.

        Raises:
            SnapshotDamaged: one is not as it was written.
        """
        return {job: line for job in jobs if job in self._placed() and (line := self._row(job)[6])}

    def numbers(self, job: JobId) -> list[int]:
        """Numbers of a job's entries in the log, as far as the snapshot covers it.

        Raises:
            SnapshotDamaged: some are missing.
        """
        asked = "SELECT place, num_entries FROM jobs WHERE job = ?"
        found = self._connection.execute(asked, (job,)).fetchone()
        if found is None:
            return []
        numbers = [
            number
            for (number,) in self._connection.execute(
                "SELECT number FROM numbers WHERE place = ? ORDER BY number", (found[0],)
            )
        ]
        if len(numbers) != found[1]:
            raise SnapshotDamaged(f"{self._path}: entries of {job} are missing in the index")
        return numbers

    def close(self) -> None:
        """Read no more."""
        self._connection.close()

    def _row(self, job: JobId) -> _Row:
        try:
            found = self._placed().get(job)
            row = None if found is None else self._at(found[0])
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise SnapshotDamaged(f"{self._path}: {error}") from error
        if row is None or not _is_whole(row):
            raise SnapshotDamaged(f"{self._path}: {job} is damaged or missing; start the coordinator again")
        return row

    def _placed(self) -> Mapping[JobId, tuple[int, bool]]:
        """Place of each job, oldest first, and whether it had ended; read once."""
        if self._places is None:
            rows = self._connection.execute(
                "SELECT job, place, card <> '' FROM jobs ORDER BY place"
            ).fetchall()
            self._places = {JobId(job): (place, bool(has_ended)) for job, place, has_ended in rows}
        return self._places

    def _at(self, place: int) -> _Row | None:
        found: _Row | None = self._connection.execute(f"{_ROW} WHERE place = ?", (place,)).fetchone()
        return found


class SnapshotWriter:
    """The next snapshot of a directory, as it is made of the one before. Used by one thread.

    Args:
        directory: of the log.
        before: entry that the snapshot before covers; 0: no snapshot counts, so the file begins anew.
    """

    def __init__(self, directory: Path, before: int) -> None:
        self._directory = directory
        self._before = before

    def write(
        self, head: SnapshotHead, jobs: Iterable[SnapshotJob], numbers: Iterable[tuple[JobId, int]]
    ) -> bool:
        """Make it durable, whole or not at all; False: another writer was quicker.

        Args:
            head: of the new snapshot.
            jobs: that have changed since the one before, oldest first.
            numbers: job and number of each of the log's entries since then.

        Raises:
            OSError | sqlite3.Error: the disk refuses the write.
        """
        path = self._directory / SNAPSHOT_FILE
        if not self._before:
            remove_snapshot(self._directory)
        with closing(_connected(path, must_exist=False)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute("BEGIN IMMEDIATE")
            try:
                if not self._is_next(connection):
                    return False
                _write_jobs(connection, jobs, numbers)
                _write_head(connection, head)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        return True

    def _is_next(self, connection: sqlite3.Connection) -> bool:
        found = connection.execute("SELECT entry FROM head").fetchone()
        return (0 if found is None else found[0]) == self._before


def remove_snapshot(directory: Path) -> None:
    """Remove a snapshot that does not count; a process that has it open still reads it."""
    for end in ("", "-wal", "-shm", "-journal"):
        with suppress(FileNotFoundError):
            (directory / f"{SNAPSHOT_FILE}{end}").unlink()


def _write_jobs(
    connection: sqlite3.Connection, jobs: Iterable[SnapshotJob], numbers: Iterable[tuple[JobId, int]]
) -> None:
    counts: dict[JobId, int] = {}
    listed: list[tuple[int, JobId]] = []
    for name, number in numbers:
        counts[name] = counts.get(name, 0) + 1
        listed.append((number, name))
    for job in jobs:
        found = connection.execute("SELECT place, num_entries FROM jobs WHERE job = ?", (job.job,)).fetchone()
        if found is None:
            ((place,),) = connection.execute("SELECT coalesce(max(place), 0) + 1 FROM jobs").fetchall()
            found = place, 0
        place, num_entries = found[0], found[1] + counts.get(job.job, 0)
        row = (
            place,
            job.job,
            job.entry,
            num_entries,
            job.card,
            zlib.compress(job.body.encode(), 1),
            job.line,
        )
        connection.execute(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, _digest(row))
        )
    connection.executemany("INSERT INTO numbers SELECT place, ? FROM jobs WHERE job = ?", listed)


def _write_head(connection: sqlite3.Connection, head: SnapshotHead) -> None:
    state = zlib.compress(head.state.encode(), 1)
    digests = (digest for (digest,) in connection.execute("SELECT digest FROM jobs ORDER BY place"))
    tail = head.tail
    proof = _proof(head, state, digests)
    connection.execute("DELETE FROM head")
    values = (head.layout, tail.entry, tail.epoch, tail.digest, state, proof)
    connection.execute("INSERT INTO head VALUES (?, ?, ?, ?, ?, ?)", values)


def _is_whole(row: _Row) -> bool:
    return _digest(row[:7]) == row[7]


def _read_head(connection: sqlite3.Connection) -> tuple[SnapshotHead, bytes, bytes]:
    rows = connection.execute("SELECT layout, entry, epoch, digest, state, proof FROM head").fetchall()
    match rows:
        case [(str(layout), int(entry), int(epoch), bytes() | None as digest, bytes(state), bytes(proof))]:
            tail = Tail(entry=entry, epoch=Epoch(epoch), digest=digest)
            try:
                text = zlib.decompress(state).decode()
            except (zlib.error, UnicodeDecodeError) as error:
                raise sqlite3.DatabaseError(f"its head is damaged: {error}") from error
            return SnapshotHead(layout=layout, tail=tail, state=text), state, proof
        case _:
            raise sqlite3.DatabaseError("it has no head")


def _connected(path: Path, *, must_exist: bool) -> sqlite3.Connection:
    if must_exist and not path.exists():
        raise FileNotFoundError(path)
    made = path.parent.resolve()
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        wanted = journal_mode(made, Path("/proc/self/mounts").read_text())
        connection.execute(f"PRAGMA journal_mode = {wanted}").fetchall()
    except BaseException:
        connection.close()
        raise
    path.chmod(0o600)
    return connection
