"""Happenings of each job, for those who watch: recorded ones by sequence, and passing ones between them.

Rules of this file
- Happenings that come from records are numbered 1, 2, 3 ... within a job, in the order of the run log. So a number
  means the same after a restart, and whoever watches again misses none and sees none twice.
- Passing happenings (lines, changes of state) have the number of the record before them, and one of their own that
  grows within a job, over restarts too. So both together, `JobEvent.key`, order all that happens to a job.
- `Fold` is the one way from records to happenings: live, at replay, and for what is kept no more.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import takewhile
from operator import attrgetter
from typing import Protocol, assert_never

from coordinator.telling.joblines import JobLines
from skein.protocol.coordinator.sweeping.totals import KnownTotals
from skein.protocol.log.records import (
    Averaged,
    CheckpointChecked,
    CheckpointCommitted,
    CheckpointDeleted,
    CoresetChosen,
    DataCounted,
    Diverged,
    Drained,
    EpochOpened,
    Evaluated,
    GenerationOpened,
    HaltAsked,
    Incident,
    JobEnded,
    JobHeld,
    JobResumed,
    JobSubmitted,
    PlanAdopted,
    Quarantined,
    Record,
    RolledBack,
    StepCommitted,
    job_of_record,
)
from skein.types import JobId, JobState, WorkerId
from skein.wire.extra import LogLine
from skein.wire.views import (
    CheckpointFinished,
    Ended,
    EpochsCounted,
    EvaluationFinished,
    GenerationBegun,
    IncidentEnded,
    JobEvent,
    JobHappening,
    Key,
    LineLogged,
    StateChanged,
    StepFinished,
    WentBack,
)

ReadRecords = Callable[[JobId], AsyncIterator[Sequence[Record]]]
"""A job's entries of the run log in pieces, oldest first."""


class EventShelf(Protocol):
    """Ended jobs that are no longer in memory."""

    def fold(self, job: JobId) -> "Fold":
        """The fold of a job's events, of the reader's own."""
        ...

    def has(self, job: JobId) -> bool:
        """Whether it has this job."""
        ...

    def lines(self, jobs: Sequence[JobId]) -> Mapping[JobId, bytes]:
        """Rows of lists of those of the jobs that it has."""
        ...


NUM_KEPT = 4096
"""Recorded happenings of a job kept in memory; older ones are read from the run log again."""
NUM_KEPT_ENDED = 64
"""The same once the job has ended: most who watch have seen the rest."""
NUM_LINES = 1024
"""Passing happenings of a job kept in memory; older ones are read from where lines are kept."""
_LINES_OF_EPOCH = 1 << 32
"""Passing happenings that one epoch may number: a later one begins above, and never uses a number again."""
_SMOOTHING = 0.2
"""Weight of the newest step in the smoothed rates: about the last ten steps count."""


@dataclass(slots=True)
class Fold:
    """Happenings of one job, made of its records in log order, with the rates that follow from their times."""

    sequence: int = 0
    step_s: float = 0.0
    """Seconds per step, smoothed; 0 before the second step."""
    last_step_s: float | None = None
    """Seconds of the newest step; None where the step before it did not end right before."""
    tokens_per_s: float = 0.0
    _began: float | None = None

    def take(self, record: Record) -> JobEvent | None:
        """The happening that a record of this job is; None for a record that nobody watches."""
        found = self._happening(record)
        if found is None:
            return None
        body, wall_s = found
        self.sequence += 1
        return JobEvent(sequence=self.sequence, wall_s=wall_s, body=body)

    def _happening(self, record: Record) -> tuple[JobHappening, float] | None:
        match record:
            case EpochOpened() | PlanAdopted() | Drained() | HaltAsked():
                return None
            case Averaged() | Diverged() | CheckpointChecked() | CheckpointDeleted() | Quarantined():
                return None  # Others tell of them.
            case JobSubmitted():
                return StateChanged(state=JobState.PENDING, reason="submitted"), record.wall_s
            case GenerationOpened():
                self._began = None
                workers = tuple(member.worker for member in record.members)
                begun = GenerationBegun(generation=record.generation, workers=workers, reason=record.reason)
                return begun, record.wall_s
            case DataCounted(num_train_samples=num_samples, num_steps=num_steps):
                if num_steps is None:
                    return None
                return EpochsCounted(num_train_samples=num_samples, num_steps=num_steps), record.wall_s
            case StepCommitted():
                self._step_ended(record)
                step = StepFinished(record=record.record, tokens_per_s=self.tokens_per_s, step_s=self.step_s)
                return step, record.wall_s
            case Evaluated():
                # The next step began when this ended.
                self._began = record.wall_s
                done = EvaluationFinished(
                    version=record.version, loss=record.loss, num_tokens=record.num_tokens
                )
                return done, record.wall_s
            case CoresetChosen():
                self._began = record.wall_s
                return None
            case CheckpointCommitted():
                return CheckpointFinished(version=record.version, url=record.url), record.wall_s
            case RolledBack():
                back = WentBack(
                    from_version=record.from_version, to_version=record.to_version, reason=record.reason
                )
                return back, record.wall_s
            case Incident():
                # Its own time is that of the notice; it is told when it is over.
                return IncidentEnded(incident=record), record.wall_s + record.seconds
            case JobHeld():
                return StateChanged(state=JobState.HELD, reason=record.reason), record.wall_s
            case JobResumed():
                self._began = None
                return StateChanged(state=JobState.PENDING, reason="resumed"), record.wall_s
            case JobEnded():
                return Ended(state=record.state, reason=record.reason), record.wall_s
            case _:
                assert_never(record)

    def _step_ended(self, record: StepCommitted) -> None:
        began, self._began = self._began, record.wall_s
        self.last_step_s = None
        if began is None or record.wall_s <= began:
            return
        self.last_step_s = seconds = record.wall_s - began
        rate = record.record.num_tokens / seconds
        if self.step_s == 0.0:
            self.step_s, self.tokens_per_s = seconds, rate
        else:
            self.step_s += _SMOOTHING * (seconds - self.step_s)
            self.tokens_per_s += _SMOOTHING * (rate - self.tokens_per_s)


@dataclass(slots=True)
class _Kept:
    """Newest happenings of one job."""

    recorded: deque[JobEvent]
    passing: deque[JobEvent]
    fold: Fold = field(default_factory=Fold)
    num_lines: int = 0
    """Passing happenings of this epoch."""
    on_disk: Key = (0, 0)
    """Passing happenings up to this are not all in memory: older epochs told them, or there were too many."""
    state: tuple[JobState, str] = (JobState.PENDING, "submitted")
    is_over: bool = False
    num_watchers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def first(self) -> int:
        """Number of the oldest recorded happening that is kept, or of the next one."""
        return self.recorded[0].sequence if self.recorded else self.fold.sequence + 1

    @property
    def newest(self) -> Key:
        """Key of the newest happening so far."""
        passing = self.passing[-1].key if self.passing else (0, 0)
        return max((self.fold.sequence, 0), passing, self.on_disk)

    def after(self, key: Key) -> list[JobEvent]:
        """Kept happenings that are newer than `key`, in order."""
        return list(merge(_after(self.recorded, key), _after(self.passing, key), key=attrgetter("key")))

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _after(events: deque[JobEvent], key: Key) -> Iterator[JobEvent]:
    return reversed(list(takewhile(lambda event: event.key > key, reversed(events))))


class Journal:
    """All jobs' happenings. Writers call `recorded`, `line` and `state`; any number of watchers follow, at their pace.

    Args:
        read: the run log, for watchers that begin before what is in memory.
        lines: keeps what passes, for them and for those who ask after a restart; None: nobody does.
        num_kept: recorded happenings of each job in memory.
        num_lines: passing happenings of each job in memory.
    """

    def __init__(
        self,
        read: ReadRecords,
        *,
        lines: JobLines | None = None,
        num_kept: int = NUM_KEPT,
        num_lines: int = NUM_LINES,
    ) -> None:
        self._read = read
        self._lines = lines
        self._num_kept = num_kept
        self._num_lines = num_lines
        self.totals = KnownTotals()
        """Totals of the sweeps that somebody has listed."""
        self._epoch = 0
        self._kept: dict[JobId, _Kept] = {}
        self._shelf: EventShelf | None = None

    def recall(
        self, epoch: int, folds: Mapping[JobId, Fold], over: Collection[JobId], shelf: EventShelf
    ) -> None:
        """Begin with what a snapshot has, before any record.

        Args:
            epoch: newest one that the snapshot covers.
            folds: of jobs in memory.
            over: those of them that have ended.
            shelf: reads all other jobs, which have ended.
        """
        self._epoch, self._shelf = epoch, shelf
        for job, fold in folds.items():
            self._kept[job] = self._read_back(fold, is_over=job in over)

    def let_go(self, jobs: Iterable[JobId], shelf: EventShelf) -> None:
        """Let go of ended jobs that nobody watches now."""
        self._shelf = shelf
        for job in jobs:
            if job in self._kept and not self._kept[job].num_watchers:
                del self._kept[job]

    def recorded(self, records: Iterable[Record]) -> None:
        """Take records that are durable."""
        for record in records:
            if isinstance(record, EpochOpened):
                self._epoch = record.epoch
                for kept in self._kept.values():
                    kept.on_disk = kept.fold.sequence, record.epoch * _LINES_OF_EPOCH
            job = job_of_record(record)
            event = None if job is None else self._of(job).fold.take(record)
            if job is not None and event is not None:
                kept = self._of(job)
                kept.recorded.append(event)
                if isinstance(event.body, Ended):
                    self._end(kept)
                elif kept.is_over:
                    self._begin_again(kept)
                kept.wake()

    def line(self, job: JobId, worker: WorkerId | None, line: LogLine) -> None:
        """A worker, or the coordinator itself, said something while it worked on a job."""
        self._pass(job, LineLogged(worker=worker, line=line), line.wall_s)

    def state(self, job: JobId, state: JobState, reason: str, *, wall_s: float) -> None:
        """The job is in this state; told to watchers if it is another than before."""
        kept = self._of(job)
        if kept.state == (state, reason):
            return
        kept.state = (state, reason)
        if not state.is_final and state is not JobState.HELD:
            self._pass(job, StateChanged(state=state, reason=reason), wall_s)

    def rates(self, job: JobId) -> Fold:
        """Seconds per step and tokens per second of a job's newest steps."""
        return self._of(job).fold

    def lines(self, jobs: Sequence[JobId]) -> Mapping[JobId, bytes]:
        """Rows of lists, encoded, of those of the jobs that are on the shelf."""
        return {} if self._shelf is None else self._shelf.lines(jobs)

    async def watch(
        self, job: JobId, *, since: int, since_line: int = 0, is_following: bool = True
    ) -> AsyncIterator[JobEvent]:
        """All that happened after the event with these numbers, once and in order, then what happens.

        Ends with the job, or where it does not follow with what is known when it begins. Lines are told as far as
        they are kept.
        """
        kept = self._of(job)
        kept.num_watchers += 1
        try:
            async for event in self._watched(job, kept, (since, since_line), is_following=is_following):
                yield event
        finally:
            kept.num_watchers -= 1

    async def _watched(
        self, job: JobId, kept: _Kept, told: Key, *, is_following: bool
    ) -> AsyncIterator[JobEvent]:
        until = kept.newest
        is_first = True
        while True:
            if is_first or told[0] + 1 < kept.first or told < kept.on_disk:
                newest = until if is_first else kept.newest
                async for event in self._older(job, after=told, until=newest):
                    yield event
                is_first, told = False, max(told, newest)
                if not is_following:
                    return
                continue
            changed, events = kept.changed, kept.after(told)
            for event in events:
                told = event.key
                yield event
            if not events:
                if kept.is_over:
                    return
                await changed.wait()

    async def _older(self, job: JobId, *, after: Key, until: Key) -> AsyncIterator[JobEvent]:
        """Happenings after one event and up to another, from memory and from what is kept on disk."""
        kept = self._of(job)
        is_whole, in_memory = after >= kept.on_disk, list(_after(kept.passing, after))
        stored = [] if is_whole or self._lines is None else await self._lines.read(job)
        lines = {event.key: event for event in (*stored, *in_memory)}
        left = deque(lines[key] for key in sorted(lines) if after < key <= until)
        async for event in self._recorded(job, since=after[0], until=until[0]):
            while left and left[0].key < event.key:
                yield left.popleft()
            yield event
        for event in left:
            yield event

    async def _recorded(self, job: JobId, *, since: int, until: int) -> AsyncIterator[JobEvent]:
        """Recorded happenings after one number and up to another: from the run log what is not in memory."""
        kept = self._of(job)
        first, in_memory = kept.first, list(kept.recorded)
        if since + 1 < first:
            async for event in self._logged(job, since=since, until=min(first - 1, until)):
                yield event
        for event in in_memory:
            if since < event.sequence <= until:
                yield event

    async def _logged(self, job: JobId, *, since: int, until: int) -> AsyncIterator[JobEvent]:
        fold = Fold()
        async for records in self._read(job):
            for record in records:
                event = fold.take(record)
                if event is not None and event.sequence > since:
                    yield event
                if fold.sequence >= until:
                    return

    def _pass(self, job: JobId, body: JobHappening, wall_s: float) -> None:
        kept = self._of(job)
        kept.num_lines += 1
        number = self._epoch * _LINES_OF_EPOCH + kept.num_lines
        event = JobEvent(sequence=kept.fold.sequence, line=number, wall_s=wall_s, body=body)
        if len(kept.passing) == kept.passing.maxlen and kept.passing:
            kept.on_disk = kept.passing[0].key
        kept.passing.append(event)
        if self._lines is not None:
            self._lines.append(job, event)
        kept.wake()

    def _end(self, kept: _Kept) -> None:
        """The job is over: most who watch have seen it, others read it from disk."""
        kept.is_over = True
        kept.recorded = deque(kept.recorded, maxlen=NUM_KEPT_ENDED)
        if len(kept.passing) > NUM_KEPT_ENDED:
            kept.on_disk = kept.passing[-NUM_KEPT_ENDED - 1].key
        kept.passing = deque(kept.passing, maxlen=NUM_KEPT_ENDED)

    def _begin_again(self, kept: _Kept) -> None:
        """Keep a bounded number of happenings again: the job goes on."""
        kept.is_over = False
        kept.recorded = deque(kept.recorded, maxlen=self._num_kept)
        kept.passing = deque(kept.passing, maxlen=self._num_lines)

    def _of(self, job: JobId) -> _Kept:
        kept = self._kept.get(job)
        if kept is None:
            is_shelved = self._shelf is not None and self._shelf.has(job)
            kept = self._kept[job] = (
                self._read_back(self._shelf.fold(job), is_over=True)
                if self._shelf is not None and is_shelved
                else _Kept(deque(maxlen=self._num_kept), deque(maxlen=self._num_lines))
            )
        return kept

    def _read_back(self, fold: Fold, *, is_over: bool) -> _Kept:
        """A job of a snapshot: all that happened to it so far is on disk."""
        num_recorded, num_passing = (
            (NUM_KEPT_ENDED, NUM_KEPT_ENDED) if is_over else (self._num_kept, self._num_lines)
        )
        return _Kept(
            deque(maxlen=num_recorded),
            deque(maxlen=num_passing),
            fold=fold,
            is_over=is_over,
            on_disk=(fold.sequence, self._epoch * _LINES_OF_EPOCH),
        )
