"""The coordinator's process in a simulated world: the real machine, a log on a disk, a wall clock, and their faults.

Rules of this file
- The coordinator handles what waits in turns, as its driver does: while records of a turn are not durable, nothing that
  follows the first of them is carried out, and no further turn begins.
- `clock.now` is true time. The coordinator's is its wall clock, which each incarnation reads once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from skein.config.quota import UNBOUNDED
from skein.plan.balanced import make_balanced_plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.coordinator_io import (
    Append,
    CheckpointVerified,
    ChooseRows,
    CoordinatorCommand,
    CoordinatorEvent,
    Halt,
    Log,
    MakePlan,
    ManifestWritten,
    PruneCheckpoints,
    ReportArrived,
    ReportRefused,
    Send,
    StreamBroken,
    VerifyCheckpoint,
    WriteManifest,
)
from skein.protocol.coordinator.runs.placing.portfolio import Planner, plan_here
from skein.protocol.deadline import TimePassed
from skein.protocol.log.records import CheckpointCommitted, EpochOpened, Record
from skein.sim.clock import Clock
from skein.sim.judging.invariants import Invariants
from skein.sim.processes.store import Store
from skein.types import Epoch, Step

APPEND_S = 0.002
"""Seconds of one durable append."""
READ_S = 0.05
"""Reading a checkpoint, to see whether it is whole."""
PLAN_S = 0.2
CHOOSE_S = 0.3
"""Seconds of the second stage of a choice of rows."""
RESTART_S = 1.0
"""Seconds from a coordinator's death to its successor."""

_LATE_S = 1e-6
"""Seconds that timers are late by, so that rounding between clocks never makes one early."""


class SimService(ABC):
    """Carries out what the Coordinator machine commands; who hears it is the subclass's business.

    Plans are `planner`'s. `before_append` and `after_append` are told how many records the log holds: faults may strike
    in between. `skew_s` is what the machine has its wall clock ahead by; the next incarnation reads it.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = Store(self.clock)
        self.log: list[Record] = []
        self.log_key = b"key"
        """Key that positions of the log are signed with; a coordinator that loses it has another one."""
        self.lines: list[str] = []
        self.coordinator: Coordinator | None = None
        self.planner: Planner = make_balanced_plan
        self.before_append: Callable[[int], None] | None = None
        self.after_append: Callable[[int], None] | None = None
        self.skew_s = 0.0
        self.halted: str | None = None
        """Reason for which the coordinator has ended itself, if it has."""
        self.quotas = UNBOUNDED
        """Quotas that coordinators are started with."""
        self.accepts_loss = False
        """Whether the next coordinator is told to go on with a log that has lost its end."""
        self.invariants = Invariants()
        self.term = 0
        """Counts coordinators."""
        self._wakes_at: float | None = None
        self._inbox: deque[CoordinatorEvent] = deque()
        self._appending: list[CoordinatorCommand] = []
        """A turn's commands from the first append on, until that is durable."""
        self._tear: Callable[[], None] | None = None
        self._room_at = 0.0
        self._wall_ahead_s = 0.0
        self._other_log: list[Record] | None = None
        """Log of a coordinator that runs on another state directory for a while; None while there is none."""

    @abstractmethod
    def _send_directive(self, command: Send) -> None:
        """Put a directive on its way."""

    @abstractmethod
    def _coordinator_is_up(self) -> None:
        """Workers may dial."""

    @abstractmethod
    def _coordinator_is_down(self) -> None:
        """All streams break."""

    # --- the process ---

    def start_coordinator(self) -> None:
        """Open the log under a new epoch and replay it, as a restarted service does; on a full disk, wait for room."""
        if self.clock.now < self._room_at:
            self.clock.at(self._room_at, self.start_coordinator)
            return
        if self.coordinator is not None:
            return
        self.term += 1
        self._wall_ahead_s = self.skew_s
        log = self.log if self._other_log is None else self._other_log
        num_before = sum(isinstance(record, EpochOpened) for record in log)
        opened = EpochOpened(epoch=Epoch(num_before + 1), wall_s=self._wall_s, accepts_loss=self.accepts_loss)
        self.halted, self.accepts_loss = None, False
        self._hold(opened)
        self.coordinator = Coordinator(key=f"of term {self.term}".encode(), quotas=self.quotas)
        self.coordinator.sign_with(self.log_key if self._other_log is None else b"another key")
        self.coordinator.replay(log)
        self._wakes_at = None
        self._coordinator_is_up()
        # As the driver does: so a job that is pending is under way before the first worker says anything.
        self.tell(TimePassed())

    @property
    def _wall_s(self) -> float:
        return self.clock.now + self._wall_ahead_s

    def crash_coordinator(self, *, restarts_after_s: float = RESTART_S, num_durable: int = 0) -> None:
        """Kill the coordinator; commands it has not carried out yet are lost.

        Of the records that it was just appending, the first `num_durable` are in the log; the next one is torn, which
        is as if it were absent.
        """
        if self.coordinator is None:
            return
        appending = [command.record for command in self._appending if isinstance(command, Append)]
        for record in appending[:num_durable]:
            self._hold(record)
        self.coordinator = None
        self._inbox.clear()
        self._appending = []
        self._coordinator_is_down()
        self.clock.after(restarts_after_s, self.start_coordinator)

    def misplace_log(self, seconds: float) -> None:
        """Start the coordinator on an empty state directory, and after so long on the right one again.

        Clients reach neither in between, so the other coordinator has no job.
        """
        if self.coordinator is None or self._other_log is not None:
            return
        self.crash_coordinator(restarts_after_s=0.0)
        self._other_log = []
        self.clock.after(seconds, self._find_log)

    def _find_log(self) -> None:
        self.crash_coordinator()
        self._other_log = None

    def lose_tail(
        self, num_records: int, *, restarts_after_s: float = RESTART_S, loses_key: bool = False
    ) -> None:
        """Kill the coordinator; when it starts again its disk has forgotten the newest records, and perhaps the key."""
        self.crash_coordinator(restarts_after_s=restarts_after_s)
        if loses_key:
            self.log_key += b"'"
        del self.log[len(self.log) - num_records :]
        self.invariants.forget_all_but(self.log)

    @property
    def is_up(self) -> bool:
        """Whether there is a coordinator."""
        return self.coordinator is not None

    @property
    def is_appending(self) -> bool:
        """Whether records are on their way to the disk."""
        return bool(self._appending)

    def tear_append(self, *, restarts_after_s: float, num_durable: int) -> None:
        """Crash in the middle of the next append."""
        self._tear = partial(
            self.crash_coordinator, restarts_after_s=restarts_after_s, num_durable=num_durable
        )

    def fill_disk(self, seconds: float) -> None:
        """Let no append end for a while: the coordinator holds back what depends on it, and tries again."""
        self._room_at = max(self._room_at, self.clock.now + seconds)

    # --- events ---

    def tell(self, event: CoordinatorEvent) -> None:
        """Give the coordinator an event, if there is one."""
        is_client = not isinstance(event, ReportArrived | ReportRefused | StreamBroken | TimePassed)
        if self.coordinator is not None and not (is_client and self._other_log is not None):
            self._inbox.append(event)
            self._turn()

    def tell_term(self, term: int, event: CoordinatorEvent) -> None:
        """Give the coordinator an event that was under way, unless that was to another one."""
        if term == self.term:
            self.tell(event)

    def _turn(self) -> None:
        """Have all that waits handled."""
        if self.coordinator is None or self._appending:
            return
        commands: list[CoordinatorCommand] = []
        while self._inbox:
            commands += self._decide(self._inbox.popleft())
        self._carry_out(commands)
        self._wake()

    def _decide(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Commands of the coordinator's machine for an event."""
        assert self.coordinator is not None
        return self.coordinator.handle(event, now=self._wall_s)

    def _wake(self) -> None:
        deadline = self._deadline()
        if deadline is not None and (self._wakes_at is None or deadline < self._wakes_at):
            self._wakes_at = deadline
            self.clock.at(deadline, partial(self._due, self.term, deadline))

    def _deadline(self) -> float | None:
        wall_s = None if self.coordinator is None else self.coordinator.deadline()
        return None if wall_s is None else wall_s - self._wall_ahead_s + _LATE_S

    def _due(self, term: int, deadline: float) -> None:
        if term != self.term or self.coordinator is None:
            return
        if self._wakes_at == deadline:
            self._wakes_at = None
        at = self.coordinator.deadline()
        if at is not None and at <= self._wall_s:
            self.tell(TimePassed())
        else:
            self._wake()

    # --- commands ---

    def _carry_out(self, commands: Sequence[CoordinatorCommand]) -> None:
        """Everything after an append waits for it; a crash in between loses the rest."""
        for index, command in enumerate(commands):
            if isinstance(command, Append):
                self._appending = list(commands[index:])
                tear, self._tear = self._tear, None
                if tear is not None:
                    self.clock.after(APPEND_S / 2, tear)
                self.clock.after(APPEND_S, partial(self._durable, self.term))
                return
            self._act(command)

    def _durable(self, term: int) -> None:
        """A turn's records are on the disk, if there was room: carry out what follows."""
        if term != self.term or self.coordinator is None:
            return
        if self.clock.now < self._room_at:
            self.clock.at(self._room_at, partial(self._durable, term))
            return
        commands, self._appending = self._appending, []
        for command in commands:
            if isinstance(command, Append):
                self._append(command.record)
                if term != self.term or not self.is_up:
                    return
        if self._other_log is None:
            self.invariants.replays(self.coordinator.history)
        for command in commands:
            self._act(command)
        self._turn()

    def _append(self, record: Record) -> None:
        if self.before_append is not None:
            self.before_append(len(self.log))
        if not self.is_up:
            return
        self._hold(record)
        if self.after_append is not None:
            self.after_append(len(self.log))

    def _hold(self, record: Record) -> None:
        if self._other_log is not None:
            self._other_log.append(record)
            if isinstance(record, EpochOpened):
                self.invariants.opened_elsewhere(record.epoch)
            return
        self.log.append(record)
        self.invariants.has_storage_failed = self.store.has_failed
        self.invariants.recorded(record)

    def _act(self, command: CoordinatorCommand) -> None:
        match command:
            case Send():
                self._send_directive(command)
            case MakePlan():
                self.clock.after(PLAN_S, partial(self.tell_term, self.term, plan_here(command, self.planner)))
            case ChooseRows():
                self.clock.after(CHOOSE_S, partial(self.tell_term, self.term, command.answer()))
            case WriteManifest():
                self.clock.after(READ_S, partial(self._complete, self.term, command.checkpoint))
            case VerifyCheckpoint():
                self.clock.after(READ_S, partial(self._verify, self.term, command.checkpoint))
            case Halt():
                self.halted = command.reason
                self.coordinator = None
                self._coordinator_is_down()
            case Log():
                self.lines.append(f"{self.clock.now:.3f} {command.line}")
            case PruneCheckpoints():
                self._prune(command)
            case Append():
                pass

    def _prune(self, command: PruneCheckpoints) -> None:
        """Delete what is older than the newest of what is kept and not in it, and what is wanted no more."""
        newest = max(command.keep, default=Step(0))
        saved = [x for x in self.log if isinstance(x, CheckpointCommitted) and x.job == command.job]
        gone = [x for x in saved if x.version < newest and x.version not in command.keep]
        gone += [x for x in saved if x.version in command.drop]
        self.store.delete(gone, but=[x for x in saved if x not in gone])

    def _complete(self, term: int, checkpoint: CheckpointCommitted) -> None:
        error = self.store.look(checkpoint)[1] or self.store.refusal()
        self.tell_term(term, ManifestWritten(checkpoint=checkpoint, error=error or None))

    def _verify(self, term: int, checkpoint: CheckpointCommitted) -> None:
        condition, reason = self.store.look(checkpoint)
        self.tell_term(term, CheckpointVerified(checkpoint=checkpoint, condition=condition, reason=reason))
