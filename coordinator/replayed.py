"""State that a run log gives: by a snapshot beside it and the entries since, or by all entries.

Rules of this file
- A snapshot is made by the code that starts a coordinator: it takes up the snapshot before, replays the entries since,
  and writes the jobs that have changed. So a start from a snapshot and a replay of everything are one computation.
- The coordinator that serves is never asked for it: a snapshot is made on a thread of its own, of a state of its own.
- Ended jobs are let go of once a snapshot has them, and read from there (`skein.protocol.log.shelved`).
"""

import hashlib
import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from coordinator.checkpoints import CheckpointStore
from coordinator.driver import AnswerChoice, AnswerPlan, Driver
from coordinator.lead.lease import PatientLog
from coordinator.records.audit import AuditLog
from coordinator.records.journal import Fold, Journal
from coordinator.records.logfile import Tail
from coordinator.records.snapshot import LogSnapshot, SnapshotHead, SnapshotJob, SnapshotWriter
from coordinator.records.store import Lookout
from coordinator.telling.joblines import FOLDER, JobLines
from coordinator.telling.metrics import CoordinatorMetrics, MetricsState
from coordinator.telling.status import brief_status
from coordinator.telling.tracing import traced
from skein.config.quota import QuotasSpec
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.log.history import HistoryHead, JobHistory, KnownJob
from skein.protocol.log.records import EpochOpened, Record, job_of_record
from skein.protocol.log.shelved import JobCard
from skein.storage.typed import TextShape, text_shape
from skein.types import JobId
from skein.wire import codec

SNAPSHOT_ENTRIES = 4096
"""Entries after which the next snapshot is made; a start replays so many in about half a second."""
MOST_REPLAYED = 4 * SNAPSHOT_ENTRIES
"""Entries since a snapshot above which a start makes the next one first, a piece at a time, so that no ended job of a
long log has to stay in memory."""
PIECE_ENTRIES = 1 << 15
"""Entries between two snapshots of such a start."""
_NUM_BODIES = 64
_PAUSE_S = 0.001
"""Pause of the thread that makes a snapshot after each piece of the log, so that the event loop is never held up."""
UNREADABLE = (sqlite3.Error, UnicodeDecodeError, OSError)
"""Errors of a snapshot's file that cannot be read or written; the log itself is as good as before."""
_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotState:
    """All of a snapshot but the jobs."""

    head: HistoryHead
    metrics: MetricsState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBody:
    """A job in a snapshot: its history, and the fold of its events."""

    history: JobHistory
    fold: Fold


@cache
def _state_shape() -> TextShape[SnapshotState]:
    return text_shape(SnapshotState)  # type: ignore[return-value]


@cache
def _body_shape() -> TextShape[JobBody]:
    return text_shape(JobBody)  # type: ignore[return-value]


@cache
def _card_shape() -> TextShape[JobCard]:
    return text_shape(JobCard)  # type: ignore[return-value]


@cache
def snapshot_layout() -> str:
    """Digest of how this release lays out a snapshot: it changes with each field of the state."""
    shapes = (_state_shape(), _body_shape(), _card_shape())
    return hashlib.sha256("\n".join(shape.words for shape in shapes).encode()).hexdigest()


class Shelf:
    """Ended jobs of one snapshot; the most recently read stay in memory."""

    def __init__(self, snapshot: LogSnapshot) -> None:
        self.snapshot = snapshot
        self._recent: OrderedDict[JobId, JobBody] = OrderedDict()

    @property
    def entry(self) -> int:
        """The last entry that the snapshot covers."""
        return self.snapshot.head.tail.entry

    def body(self, job: JobId) -> JobBody:
        """A job as the snapshot has it.

        Raises:
            SnapshotDamaged: it is not as it was written.
        """
        if job not in self._recent:
            self._recent[job] = _body_shape().from_text(self.snapshot.body(job))
            if len(self._recent) > _NUM_BODIES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(job)
        return self._recent[job]

    def history(self, job: JobId) -> JobHistory:
        """A job's history, which its reader may change: it is read anew the next time."""
        body = self.body(job)
        del self._recent[job]
        return body.history

    def fold(self, job: JobId) -> Fold:
        """The fold of a job's events, of the reader's own."""
        return replace(self.body(job).fold)

    def has(self, job: JobId) -> bool:
        """Whether the snapshot has this job, and as one that has ended."""
        return self.snapshot.has_ended(job)

    def lines(self, jobs: Sequence[JobId]) -> Mapping[JobId, bytes]:
        """Rows of lists."""
        return self.snapshot.lines(jobs)


class ReplayedLog:
    """State that the run log gives, as far as it has been replayed, and the driver that goes on from there."""

    def __init__(self, state_dir: Path, *, lease_s: float, quotas: QuotasSpec) -> None:
        self.machine = Coordinator(lease_s=lease_s, key=os.urandom(32), quotas=quotas)
        self.metrics = CoordinatorMetrics()
        # Events that are no longer in memory are read from the run log, through the driver.
        self.lines = JobLines(state_dir / FOLDER)
        self.journal = Journal(lambda job: self.driver.read_records(job), lines=self.lines)
        self._state_dir = state_dir
        self._shelf: Shelf | None = None

    @property
    def num_records(self) -> int:
        """Entries of the log that were replayed, including the entries that the snapshot covers."""
        return self.machine.history.num_records

    @property
    def openings(self) -> list[EpochOpened]:
        """Openings of the log so far."""
        return [opening.record for opening in self.machine.history.openings]

    @property
    def num_covered(self) -> int:
        """Entries that the snapshot covers from which ended jobs are read."""
        return 0 if self._shelf is None else self._shelf.entry

    def replay(self, records: Sequence[Record]) -> None:
        """Take the next ones."""
        self.machine.replay(records)
        self.journal.recorded(records)
        self.metrics.recorded(records)

    # --- snapshots ---

    def recall(self, lookout: Lookout) -> str | None:
        """Begin with the snapshot beside the log, if one fits; gives the reason where one is ignored.

        `lookout` reads on after the entries that the snapshot covers.
        """
        shelf, reason = self._fitting(lookout, is_checked=True)
        if shelf is None:
            return reason
        self._shelf = shelf
        state = _state_shape().from_text(shelf.snapshot.head.state)
        known = [
            KnownJob(
                job=job,
                entry=entry,
                card=_card_shape().from_text(card) if card else None,
                read=partial(shelf.history, job),
            )
            for job, entry, card in shelf.snapshot.jobs()
        ]
        self.machine.recall(state.head, known, shelf.history)
        history = self.machine.history
        folds = {job.job: shelf.fold(job.job) for job in history.jobs.resident()}
        self.journal.recall(history.epoch, folds, {x.job for x in history.jobs.resident() if x.end}, shelf)
        self.metrics.recall(state.metrics, shelf.fold)
        lookout.skip(shelf.snapshot.head.tail)
        return None

    def save(self, tail: Tail, numbers: Iterable[tuple[JobId, int]]) -> bool:
        """Write the next snapshot; False: another writer was quicker.

        Args:
            tail: end of the log as replayed here.
            numbers: job and number of each entry since the snapshot that this began with.

        Raises:
            OSError | sqlite3.Error: the disk refuses the write.
        """
        before, history = self.num_covered, self.machine.history
        head = SnapshotHead(
            layout=snapshot_layout(),
            tail=tail,
            state=_state_shape().to_text(SnapshotState(head=history.head(), metrics=self.metrics.kept())),
        )
        jobs = (self._snapshot_of(entry, job) for entry, job in history.jobs.changed_since(before))
        return SnapshotWriter(self._state_dir, before).write(head, jobs, numbers)

    def let_go(self, lookout: Lookout) -> int:
        """Let go of ended jobs that the newest snapshot has; gives how many these were."""
        shelf, _ = self._fitting(lookout, is_checked=False)
        if shelf is None or shelf.entry <= self.num_covered or shelf.entry > self.num_records:
            return 0
        if self._shelf is not None:
            self._shelf.snapshot.close()
        self._shelf = shelf
        gone = self.machine.history.let_go(shelf.entry, shelf.history, keep=self.machine.view.runs)
        self.journal.let_go(gone, shelf)
        return len(gone)

    def close(self) -> None:
        """Read no snapshot any more."""
        if self._shelf is not None:
            self._shelf.snapshot.close()

    def _fitting(self, lookout: Lookout, *, is_checked: bool) -> tuple[Shelf | None, str | None]:
        """Ended jobs of the snapshot beside the log, or the reason why it does not count."""
        try:
            snapshot = LogSnapshot(self._state_dir)
        except FileNotFoundError:
            return None, None
        except UNREADABLE as error:
            return None, f"it cannot be read: {error}"
        reason = snapshot.fault(snapshot_layout(), lookout.entry_at, reads_all=is_checked)
        if reason is not None:
            snapshot.close()
            return None, reason
        return Shelf(snapshot), None

    def _snapshot_of(self, entry: int, job: JobHistory) -> SnapshotJob:
        card = job.card
        body = JobBody(history=job, fold=self.journal.rates(job.job))
        line = b""
        if card is not None and card.sweep is None:
            status = brief_status(self.machine.view, self.journal, job.job)
            # What its namespace has of its quotas is another matter when the row is read.
            line = codec.JOB_STATUS.to_bytes(replace(status, quotas=()))
        return SnapshotJob(
            job=job.job,
            entry=entry,
            card="" if card is None else _card_shape().to_text(card),
            body=_body_shape().to_text(body),
            line=line,
        )

    # --- serving ---

    def drive(
        self,
        log: PatientLog,
        store: CheckpointStore,
        plan: AnswerPlan,
        choose: AnswerChoice,
        now: Callable[[], float],
        audit: AuditLog,
    ) -> Driver:
        """The driver, once all is replayed."""
        self.driver = Driver(
            self.machine,
            traced(log),
            plan=plan,
            choose=choose,
            checkpoints=store,
            clock=now,
            journal=self.journal,
            meter=self.metrics,
            note_worker=audit.note_worker,
            obstacle=lambda: log.obstacle,
        )
        return self.driver


class SnapshotMaker:
    """Makes snapshots of one state directory. Its calls block, and belong on a thread of their own.

    Args:
        make: gives a state without any records.
    """

    def __init__(self, state_dir: Path, make: Callable[[], ReplayedLog]) -> None:
        self.state_dir = state_dir
        self._make = make

    def catch_up(self) -> None:
        """Make snapshots until one covers the log but for its newest entries, as before a start.

        If the disk refuses a snapshot, this logs a warning and returns; the start then replays the whole log.
        """
        try:
            while self.advance(most=PIECE_ENTRIES, least=MOST_REPLAYED):
                pass
        except UNREADABLE as error:
            _log.warning("no snapshot of the run log is written: %s", error)

    def follow(self) -> None:
        """Make the next snapshot beside a coordinator that serves, a little slower.

        Raises:
            OSError | sqlite3.Error: the disk refuses the write.
            UserError: the log is damaged.
        """
        self.advance(most=PIECE_ENTRIES, pause_s=_PAUSE_S)

    def advance(self, *, most: int, least: int = 1, pause_s: float = 0.0) -> bool:
        """Make the next snapshot; False: it would cover fewer than `least` entries more, or another writer was quicker.

        Args:
            most: entries that it covers beyond the one before.
            least: see above.
            pause_s: of this thread after each piece of the log, for others.

        Raises:
            OSError | sqlite3.Error: the disk refuses the write.
            UserError: the log is damaged.
        """
        memory = self._make()
        with closing(memory), closing(Lookout(self.state_dir)) as lookout:
            reason = memory.recall(lookout)
            if reason is not None:
                _log.warning("the snapshot of the run log is made anew: %s", reason)
            if lookout.num_left() < least:
                return False
            numbers: list[tuple[JobId, int]] = []
            while len(numbers) < most and (records := lookout.news()):
                first = lookout.num_read - len(records) + 1
                numbers += _numbered(records, first)
                memory.replay(records)
                time.sleep(pause_s)
            return lookout.num_read > memory.num_covered and memory.save(lookout.tail, numbers)


def _numbered(records: Sequence[Record], first: int) -> Iterable[tuple[JobId, int]]:
    for number, record in enumerate(records, start=first):
        job = job_of_record(record)
        if job is not None:
            yield job, number
