"""What happened to each job, for those who watch: recorded happenings by sequence, and passing ones between them.

Rules of this file
- Happenings that come from records are numbered 1, 2, 3 ... within a job, in the order of the run log. So a number
  means the same after a restart, and whoever watches again misses none and sees none twice.
- Passing happenings (lines, changes of state) are kept for a while only, under the number of the record before them.
- `Fold` is the one way from records to happenings: live, at replay, and for what is kept no more.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import assert_never

from skein.protocol.records import (
    Averaged,
    CheckpointCommitted,
    Diverged,
    Drained,
    EpochOpened,
    Evaluated,
    GenerationOpened,
    Incident,
    JobEnded,
    JobSubmitted,
    PlanAdopted,
    Record,
    RolledBack,
    StepCommitted,
)
from skein.types import JobId, JobState, WorkerId
from skein.wire.extra import LogLine
from skein.wire.views import (
    CheckpointFinished,
    Ended,
    EvaluationFinished,
    GenerationBegun,
    IncidentEnded,
    JobEvent,
    JobHappening,
    LineLogged,
    StateChanged,
    StepFinished,
    WentBack,
)

ReadRecords = Callable[[], AsyncIterator[Sequence[Record]]]
"""The whole run log in pieces, oldest first."""

NUM_KEPT = 4096
"""Recorded happenings of a job kept in memory; older ones are read from the run log again."""
NUM_KEPT_ENDED = 64
"""The same once the job has ended: most who watch have seen the rest."""
NUM_LINES = 1024
"""Passing happenings of a job that are kept."""
_SMOOTHING = 0.2
"""Weight of the newest step in the smoothed rates: about the last ten steps count."""


@dataclass(slots=True)
class Fold:
    """Happenings of one job, made of its records in log order, with the rates that follow from their times."""

    sequence: int = 0
    step_s: float = 0.0
    """Seconds per step, smoothed; 0 before the second step."""
    last_step_s: float | None = None
    """Of the newest step; None where the step before it did not end right before."""
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
            case (
                EpochOpened() | PlanAdopted() | Drained() | Averaged() | Diverged()
            ):  # Others tell of the last two.
                return None
            case JobSubmitted():
                return StateChanged(state=JobState.PENDING, reason="submitted"), record.wall_s
            case GenerationOpened():
                self._began = None
                workers = tuple(member.worker for member in record.members)
                begun = GenerationBegun(generation=record.generation, workers=workers, reason=record.reason)
                return begun, record.wall_s
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A happening; positions order recorded and passing ones of all jobs together."""

    position: int
    is_recorded: bool
    event: JobEvent


@dataclass(slots=True)
class _Kept:
    """One job's newest happenings."""

    recorded: deque[_Entry]
    passing: deque[_Entry]
    fold: Fold = field(default_factory=Fold)
    state: tuple[JobState, str] = (JobState.PENDING, "submitted")
    is_over: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def first(self) -> int:
        """Number of the oldest recorded happening that is kept, or of the next one."""
        return self.recorded[0].event.sequence if self.recorded else self.fold.sequence + 1

    def since(self, position: int) -> list[_Entry]:
        """What is kept from `position` on, in order."""
        newest = (*_from(self.recorded, position), *_from(self.passing, position))
        return sorted(newest, key=lambda entry: entry.position)

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _from(entries: deque[_Entry], position: int) -> Iterator[_Entry]:
    return takewhile(lambda entry: entry.position >= position, reversed(entries))


def job_of(record: Record) -> JobId | None:
    """Whose record it is; None for one of the coordinator itself."""
    return None if isinstance(record, EpochOpened | Drained) else record.job


class Journal:
    """All jobs' happenings. Writers call `recorded`, `line` and `state`; any number of watchers follow, at their pace.

    Args:
        read: the run log, for watchers that begin before what is kept.
        num_kept: recorded happenings kept of each job.
    """

    def __init__(self, read: ReadRecords, *, num_kept: int = NUM_KEPT, num_lines: int = NUM_LINES) -> None:
        self._read = read
        self._num_kept = num_kept
        self._num_lines = num_lines
        self._position = 0
        self._kept: dict[JobId, _Kept] = {}

    def recorded(self, records: Iterable[Record]) -> None:
        """These records are durable."""
        for record in records:
            job = job_of(record)
            event = None if job is None else self._of(job).fold.take(record)
            if job is not None and event is not None:
                self._keep(job, event, is_recorded=True)

    def line(self, job: JobId, worker: WorkerId | None, line: LogLine) -> None:
        """A worker, or the coordinator itself, said something while it worked on a job."""
        self._pass(job, LineLogged(worker=worker, line=line), line.wall_s)

    def state(self, job: JobId, state: JobState, reason: str, *, wall_s: float) -> None:
        """The job is in this state; told to watchers if it is another than before."""
        kept = self._of(job)
        if kept.state == (state, reason):
            return
        kept.state = (state, reason)
        if not state.is_final:
            self._pass(job, StateChanged(state=state, reason=reason), wall_s)

    def rates(self, job: JobId) -> Fold:
        """Seconds per step and tokens per second of a job's newest steps."""
        return self._of(job).fold

    async def watch(self, job: JobId, *, since: int) -> AsyncIterator[JobEvent]:
        """Everything recorded after number `since`, once and in order, then what happens, until the job ends.

        Passing happenings since then are told as far as they are kept, perhaps again; a slow watcher loses only those.
        """
        kept, seen, position = self._of(job), since, 0
        while True:
            if seen + 1 < kept.first:
                until = kept.first - 1
                passing = [entry for entry in kept.since(position) if since <= entry.event.sequence <= until]
                async for event in self._older(job, since=seen, until=until, passing=passing):
                    yield event
                seen, position = until, passing[-1].position + 1 if passing else position
                continue
            changed, entries = kept.changed, kept.since(position)
            for entry in entries:
                position = entry.position + 1
                sequence = entry.event.sequence
                if sequence > seen or (sequence >= since and not entry.is_recorded):
                    seen = max(seen, sequence)
                    yield entry.event
            if not entries:
                if kept.is_over:
                    return
                await changed.wait()

    async def _older(
        self, job: JobId, *, since: int, until: int, passing: Sequence[_Entry]
    ) -> AsyncIterator[JobEvent]:
        """What the run log has, with what passed between."""
        fold, left = Fold(), deque(entry.event for entry in passing)
        async for records in self._read():
            for record in records:
                event = fold.take(record) if job_of(record) == job else None
                if event is not None and event.sequence > since:
                    while left and left[0].sequence < event.sequence:
                        yield left.popleft()
                    yield event
                if fold.sequence >= until:
                    for after in left:
                        yield after
                    return

    def _pass(self, job: JobId, body: JobHappening, wall_s: float) -> None:
        event = JobEvent(sequence=self._of(job).fold.sequence, wall_s=wall_s, body=body)
        self._keep(job, event, is_recorded=False)

    def _keep(self, job: JobId, event: JobEvent, *, is_recorded: bool) -> None:
        kept = self._of(job)
        self._position += 1
        entries = kept.recorded if is_recorded else kept.passing
        entries.append(_Entry(self._position, is_recorded, event))
        if isinstance(event.body, Ended):
            kept.is_over = True
            kept.recorded = deque(kept.recorded, maxlen=NUM_KEPT_ENDED)
            kept.passing = deque(kept.passing, maxlen=NUM_KEPT_ENDED)
        kept.wake()

    def _of(self, job: JobId) -> _Kept:
        kept = self._kept.get(job)
        if kept is None:
            recorded: deque[_Entry] = deque(maxlen=self._num_kept)
            kept = self._kept[job] = _Kept(recorded, deque(maxlen=self._num_lines))
        return kept
