"""The driver of the Coordinator machine: all that happens waits in one inbox, and one task alone calls the machine.

Rules of this file
- Servicers and timers only post. The task takes all that waits, hands it to the machine, and carries out what comes
  back in order; what follows an Append waits until all records of the turn are durable (group commit).
- Time is wall clock at the start plus monotonic seconds since, so it never steps back.
- Nothing in here knows about training.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from itertools import islice
from typing import Protocol, assert_never

from coordinator.checkpoints import CheckpointStore
from coordinator.filing import Filing
from coordinator.records.journal import Journal
from coordinator.streams import Stream
from coordinator.telling.metrics import CoordinatorMetrics
from skein.errors import LocalError
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import (
    Append,
    Asked,
    CheckpointVerified,
    ChooseRows,
    CoordinatorCommand,
    CoordinatorEvent,
    Halt,
    Log,
    MakePlan,
    PlanMade,
    PruneCheckpoints,
    ReportArrived,
    ReportRefused,
    RowsChosen,
    Send,
    StreamBroken,
    VerifyCheckpoint,
    WriteManifest,
)
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import CheckpointCommitted, Record
from skein.protocol.messages.directives import Refused
from skein.protocol.messages.reports import Hello, Report
from skein.types import Incarnation, JobId, JobState, WorkerId
from skein.wire.extra import LogLevel, LogLine
from skein.wire.greeting import Coordinators

MAX_WAITING = 8192
"""Events that may wait in the inbox; streams are read no further until there is room."""
MAX_TURN = 1024
"""Events handled in one turn, so that what they cause is not put off for long."""
SETTLE_S = 1.0
"""Seconds that a caller waits for what is being recorded; appends take milliseconds where a disk has room."""
_LONG_TURN_S, _READ_S = 0.25, 0.1
"""Turn in which nobody was heard for long, and seconds for which what was said meanwhile is read before time passes."""
_LAPS, _LAP_S = 5, 0.01
"""Turns of the event loop, and their pauses, in which whatever has reached this process is read from its streams.

A report takes three turns from the socket to the inbox, and gRPC's own thread has its share of the processor before.
"""
_CALM_S, MOST_DEAF_S = 0.1, 10.0
"""Seconds for these turns, above which the loop was too busy to have read all; and for how long that is believed.

A worker that dies while the loop is always busy is lost after this bound and its lease.
"""
_READ_PIECE = 256
_log = logging.getLogger("coordinator")


class AppendLog(Protocol):
    """The run log: durable when `append` returns. Both block; the driver gives them a thread."""

    def append(self, records: Sequence[Record]) -> None: ...

    def read(self, job: JobId | None = None) -> Iterator[Record]:
        """All records, or those of one job."""
        ...


CLOCK_S = 30.0
"""Seconds by which recorded times may differ from the wall clock before the coordinator acts on it."""

AnswerPlan = Callable[[MakePlan], Awaitable[PlanMade]]
AnswerChoice = Callable[[ChooseRows], Awaitable[RowsChosen]]


async def choose_beside(asked: ChooseRows) -> RowsChosen:
    """The answer, from a thread of this process."""
    return await asyncio.to_thread(asked.answer)


def wall_clock() -> Callable[[], float]:
    """Unix seconds that never step back: the wall clock is read once."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class ClockSetError(Exception):
    """The machine's wall clock was set forward: a coordinator that begins anew reads it."""


def check_wall_clock(now_s: float, *, wall_s: float, was_behind: bool) -> bool:
    """Whether the wall clock is far behind the clock of this coordinator; that is logged when it begins.

    Args:
        now_s: Unix time by this coordinator, which read the wall clock when it began.
        wall_s: Unix time by the wall clock now.
        was_behind: what this said before.

    Raises:
        ClockSetError: the wall clock is far ahead. Leases are measured by a steady clock, so only a new epoch may jump.
    """
    ahead_s = wall_s - now_s
    if ahead_s > CLOCK_S:
        raise ClockSetError(f"the wall clock is {ahead_s:.0f} s ahead: it was set, or the machine slept")
    is_behind = ahead_s < -CLOCK_S
    if is_behind and not was_behind:
        _log.warning(
            "the wall clock was set back by %.0f s: recorded times never step back, so they stay ahead of it "
            "until the coordinator is started again",
            -ahead_s,
        )
    return is_behind


# --- what waits in the inbox ---


@dataclass(frozen=True, slots=True)
class _Opened:
    stream: Stream
    hello: Hello


@dataclass(frozen=True, slots=True)
class _Heard:
    """Event of a stream; it counts only while the stream is the one of its worker."""

    stream: Stream
    event: ReportArrived | ReportRefused | StreamBroken


@dataclass(frozen=True, slots=True)
class _Asked:
    event: Asked | CheckpointVerified
    done: asyncio.Future[tuple[Record, ...]]


@dataclass(frozen=True, slots=True)
class _Marked:
    """Reports that had reached this process at `since` are handled before this."""

    since: float


_Item = CoordinatorEvent | _Opened | _Heard | _Asked | _Marked | None
"""Item of the inbox; None has no event, and is a reason to look up."""


class Driver:
    """Runs one Coordinator machine on the current event loop.

    Args:
        machine: replayed already; only this driver may call its `handle`.
        log: the run log that it was replayed from.
        plan: answers MakePlan; must not raise.
        choose: answers ChooseRows; must not raise.
        checkpoints: answers WriteManifest and PruneCheckpoints.
        clock: Unix seconds, never stepping back.
        journal: told what is durable, which states jobs are in, and what is logged about them.
        meter: counts.
        note_worker: told which workers come, are turned away and go, for the audit log.
        obstacle: says why the log takes nothing; "" where it is not known.
    """

    def __init__(
        self,
        machine: Coordinator,
        log: AppendLog,
        *,
        plan: AnswerPlan,
        choose: AnswerChoice = choose_beside,
        checkpoints: CheckpointStore,
        clock: Callable[[], float],
        journal: Journal,
        meter: CoordinatorMetrics,
        note_worker: Callable[[WorkerId, str], None],
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self.machine = machine
        self.now = clock
        self.journal = journal
        self._log = log
        self._plan = plan
        self._choose = choose
        self.files = Filing(checkpoints)
        self._meter = meter
        self._note_worker = note_worker
        self._obstacle = obstacle
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue(MAX_WAITING)
        self._streams: dict[tuple[WorkerId, Incarnation], Stream] = {}
        self.coordinators: Coordinators | None = None
        """Addresses of all coordinators, for workers and clients; None while no standby is there."""
        self._told: dict[JobId, tuple[JobState, int]] = {}
        """State of each sweep, and turns of the log, when watchers were told of them last."""
        self._unanswered: set[asyncio.Future[tuple[Record, ...]]] = set()
        self._settled = asyncio.Event()
        self._settled.set()
        self._appending_since = 0.0
        self._is_behind = False
        """Whether the last turn was so long that much may have been said that is not read yet."""
        self._heard_until = clock()
        self._is_stopping = False
        self._is_over = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="run-log")
        self._group = asyncio.TaskGroup()
        self._planning: dict[JobId, asyncio.Task[None]] = {}
        self._choosing: dict[JobId, asyncio.Task[None]] = {}

    # --- for servicers: on the loop of `run` ---

    @property
    def num_streams(self) -> int:
        """Control streams that are open."""
        return len(self._streams)

    def name_coordinators(self, coordinators: Coordinators | None) -> None:
        """Have connected workers, and workers that connect from now on, know these coordinators."""
        if coordinators == self.coordinators:
            return
        self.coordinators = coordinators
        if coordinators is not None:
            for stream in self._streams.values():
                stream.offer(coordinators)
            names, num_known = ",".join(coordinators.addresses), len(self._streams)
            _log.info("coordinators=%s, told to %d connected workers", names, num_known)

    @property
    def num_unaware(self) -> int:
        """Workers that have no stream, and so cannot be told of all coordinators; 0 while no standby is there."""
        if self.coordinators is None:
            return 0
        return len(self.machine.view.live.keys() - {worker for worker, _ in self._streams})

    async def opened(self, stream: Stream, hello: Hello) -> None:
        """A worker said Hello on a new stream; directives for it go there from the moment this is handled."""
        await self._inbox.put(_Opened(stream, hello))

    def statistic(self, name: str) -> Mapping[WorkerId, Mapping[str, float]]:
        """Newest values of a statistic that workers report, by worker and label."""
        return self._meter.reported(name)

    async def reported(self, stream: Stream, report: Report) -> None:
        """A worker reported. Waits while the inbox is full."""
        self._meter.heard(stream.worker, report)
        event = ReportArrived(worker=stream.worker, incarnation=stream.incarnation, report=report)
        await self._inbox.put(_Heard(stream, event))

    async def refused(self, stream: Stream, reason: str) -> None:
        """A worker sent what no worker of this release sends. Waits while the inbox is full."""
        self._meter.refused("Session", "malformed")
        event = ReportRefused(worker=stream.worker, incarnation=stream.incarnation, reason=reason)
        await self._inbox.put(_Heard(stream, event))

    async def closed(self, stream: Stream, reason: str) -> None:
        """A stream ended."""
        stream.close(reason)
        event = StreamBroken(worker=stream.worker, incarnation=stream.incarnation, reason=reason)
        await self._inbox.put(_Heard(stream, event))

    async def ask(self, event: Asked | CheckpointVerified) -> tuple[Record, ...]:
        """Have a client's wish handled; gives what it recorded, once that is durable and carried out.

        Raises:
            LocalError: the coordinator is stopping; whether it was handled is not known.
        """
        done: asyncio.Future[tuple[Record, ...]] = asyncio.get_running_loop().create_future()
        self._unanswered.add(done)
        try:
            await self._inbox.put(_Asked(event, done))
            if self._is_over:
                self._turn_away()
            return await done
        finally:
            self._unanswered.discard(done)

    async def settled(self, patience_s: float = SETTLE_S) -> str:
        """Waits until all that the machine knows now is durable, so that an answer made of it stays true.

        Where the disk takes nothing it gives, after `patience_s`, a warning to send with the answer; else "".
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._settled.wait()
                return ""
        waited_s = time.monotonic() - self._appending_since
        why = self._obstacle() or "the storage of the state directory does not answer"
        return f"the run log has taken nothing for {waited_s:.0f} s, so nothing is decided: {why}"

    def said(self, worker: WorkerId, lines: Sequence[LogLine]) -> None:
        """A worker's log lines go to those who watch the job that it is with."""
        run = self.machine.view.run_of(worker)
        if run is not None:
            for line in lines:
                self.journal.line(run.job.job, worker, line)

    async def read_records(self, job: JobId | None = None) -> AsyncIterator[Sequence[Record]]:
        """The run log, or one job's entries of it, in pieces; the loop stays free, and appends go between pieces."""
        loop = asyncio.get_running_loop()
        records = self._log.read(job)
        while piece := await loop.run_in_executor(self._writer, lambda: list(islice(records, _READ_PIECE))):
            yield piece

    # --- the one task ---

    async def run(self) -> None:
        """Handle events until `stop`. A log that takes no more, or that has another owner, ends it.

        Raises:
            Fenced: another coordinator has the log.
            LocalError: it has lost its end, as a worker knows.
            LogFull: the disk is full; nothing that was not recorded has been said to anybody.
        """
        try:
            async with self._group:
                self._group.create_task(self._turns())
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self._end()

    def stop(self) -> None:
        """End after the current turn; idempotent."""
        self._is_stopping = True
        # A full inbox needs no waking.
        with suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)

    async def _turns(self) -> None:
        await self._carry_out(self._time_passed())
        marking = self._group.create_task(self._mark())
        while not self._is_stopping:
            await self._turn(await self._take())
        marking.cancel()
        for beside in (*self._planning.values(), *self._choosing.values()):
            beside.cancel()

    async def _mark(self) -> None:
        """Put a mark into the inbox again and again, behind all reports that had come when it was begun, while calm."""
        calm_since: float | None = None
        while True:
            since, began_s = self.now(), time.monotonic()
            for _ in range(_LAPS):
                await asyncio.sleep(_LAP_S)
            is_calm = time.monotonic() - began_s <= _CALM_S
            if since - self._heard_until > MOST_DEAF_S:
                await self._inbox.put(_Marked(since))
            elif is_calm and calm_since is not None:
                # After a long turn one calm round may be one in which gRPC's thread has not come to its sockets.
                await self._inbox.put(_Marked(calm_since))
            calm_since = since if is_calm else None

    def _time_passed(self) -> list[CoordinatorCommand]:
        return self._machine(TimePassed(heard_until=self._heard_until))

    async def _take(self) -> list[_Item]:
        """All that waits; the first may be waited for until the machine's deadline."""
        items: list[_Item] = []
        if self._is_behind:
            await asyncio.sleep(_READ_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._until_deadline()):
                items.append(await self._inbox.get())
        while len(items) < MAX_TURN and not self._inbox.empty():
            items.append(self._inbox.get_nowait())
        return items

    def _until_deadline(self) -> float | None:
        deadline = self.machine.deadline()
        # Never 0: a deadline that handling did not move must not starve the loop.
        return None if deadline is None else max(0.001, deadline - self.now())

    async def _turn(self, items: Sequence[_Item]) -> None:
        commands: list[CoordinatorCommand] = []
        asked: list[tuple[_Asked, tuple[Record, ...]]] = []
        began_s = self.now()
        for item in items:
            caused = self._handle(item)
            commands += caused
            if isinstance(item, _Asked):
                asked.append((item, tuple(c.record for c in caused if isinstance(c, Append))))
        # Not twice in a row, or a busy machine's time would never pass.
        self._is_behind = not self._is_behind and self.now() - began_s > _LONG_TURN_S
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.now() and not self._is_behind:
            commands += self._time_passed()
        await self._carry_out(commands)
        for item, records in asked:
            if not item.done.done():
                item.done.set_result(records)

    def _handle(self, item: _Item) -> list[CoordinatorCommand]:
        """Hand an item to the machine, as an event. Streams are known only here."""
        match item:
            case _Opened():
                stream = item.stream
                older = self._streams.get(stream.key)
                is_other = older is not None and not compare_digest(
                    older.secret.encode(), stream.secret.encode()
                )
                if is_other and not self.machine.membership.is_from_holder(item.hello):
                    # What the machine said to this name and incarnation would go to the one who has them.
                    reason = f"another process is {stream.worker}, incarnation {stream.incarnation}"
                    stream.offer(Refused(reason=reason))
                    return []
                if older is not None:
                    older.close("the worker opened another stream")
                self._streams[stream.key] = stream
                if self.coordinators is not None:
                    stream.offer(self.coordinators)
                worker, incarnation = stream.key
                return self._machine(ReportArrived(worker=worker, incarnation=incarnation, report=item.hello))
            case _Heard():
                if self._streams.get(item.stream.key) is not item.stream:
                    return []
                if isinstance(item.event, StreamBroken):
                    del self._streams[item.stream.key]
                return self._machine(item.event)
            case _Asked():
                return self._machine(item.event)
            case _Marked():
                self._heard_until = item.since
                return []
            case None:
                return []
            case _:
                return self._machine(item)

    def _machine(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        return self.machine.handle(event, now=self.now())

    # --- commands ---

    async def _carry_out(self, commands: Sequence[CoordinatorCommand]) -> None:
        records = tuple(command.record for command in commands if isinstance(command, Append))
        is_durable = not records
        for command in commands:
            if not isinstance(command, Append):
                self._do(command)
            elif not is_durable:
                await self._append(records)
                is_durable = True
        self._tell_states()

    async def _append(self, records: tuple[Record, ...]) -> None:
        """Make a turn's records durable, all at once."""
        self._settled.clear()
        self._appending_since = began = time.monotonic()
        await asyncio.get_running_loop().run_in_executor(self._writer, self._log.append, records)
        self._meter.appended(records, time.monotonic() - began)
        self.journal.recorded(records)
        self._settled.set()

    def _do(self, command: CoordinatorCommand) -> None:
        begin = self._group.create_task
        match command:
            case Append():
                pass
            case Send():
                stream = self._streams.get((command.worker, command.incarnation))
                if stream is not None:
                    stream.offer(command.directive)
            case MakePlan():
                if (planning := self._planning.get(command.run)) is not None:
                    planning.cancel()
                self._planning[command.run] = begin(self._make_plan(command))
            case ChooseRows():
                if (choosing := self._choosing.get(command.run)) is not None:
                    choosing.cancel()
                self._choosing[command.run] = begin(self._choose_rows(command))
            case WriteManifest():
                _ = begin(self._write_manifest(command.checkpoint))
            case VerifyCheckpoint():
                _ = begin(self._verify(command.checkpoint))
            case PruneCheckpoints():
                _ = begin(self.files.prune(command))
            case Halt():
                raise LocalError(command.reason)
            case Log():
                self._say(command)
            case _:
                assert_never(command)

    def _say(self, said: Log) -> None:
        _log.info(said.line)
        if (worker := said.worker) is not None:
            self._note_worker(worker, said.words)
        if said.job is not None:
            text = LogLine(level=LogLevel.INFO, wall_s=self.now(), text=said.line)
            self.journal.line(said.job, None, text)

    def _tell_states(self) -> None:
        view = self.machine.view
        for job in view.runs:
            self.journal.state(job, view.state_of(job), view.reason_of(job), wall_s=self.now())
        for job in (sweep.job for sweep in view.history.sweeps()):
            # Its reason goes over all trials, and is another when one of its arrays begins or ends.
            told = (state := view.state_of(job)), view.history.num_turns
            if self._told.get(job) != told:
                self._told[job] = told
                self.journal.state(job, state, view.reason_of(job), wall_s=self.now())

    async def _make_plan(self, command: MakePlan) -> None:
        began = time.monotonic()
        made = await self._plan(command)
        self._meter.planned(made.result, time.monotonic() - began)
        await self._inbox.put(made)

    async def _choose_rows(self, command: ChooseRows) -> None:
        await self._inbox.put(await self._choose(command))

    async def _write_manifest(self, checkpoint: CheckpointCommitted) -> None:
        spec = self.machine.view.history.jobs[checkpoint.job].spec
        await self._inbox.put(await self.files.write_manifest(checkpoint, spec))

    async def _verify(self, checkpoint: CheckpointCommitted) -> None:
        await self._inbox.put(await self.files.verify(checkpoint))

    def _end(self) -> None:
        """End streams and waiting calls: nobody waits for ever on a driver that has ended."""
        self._is_over = True
        self._settled.set()
        for stream in self._streams.values():
            stream.close("the coordinator stops")
        self._turn_away()
        self._writer.shutdown(wait=True)

    def _turn_away(self) -> None:
        """Answer those who asked in vain, and make room for those who wait to."""
        for done in self._unanswered:
            if not done.done():
                done.set_exception(LocalError("the coordinator is stopping"))
        while not self._inbox.empty():
            _ = self._inbox.get_nowait()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Error that came first; the tasks of the group end together, so the others follow from it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
