"""Several processes at one case: the best plan so far is here, whatever becomes of them.

This process only listens, so it can be interrupted at any moment and ends on time; whoever is still at work is ended
then. Processes end with this one, however it goes.
"""

import contextlib
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from client.planning.messages import (
    Bounded,
    Compiling,
    Errand,
    Message,
    MethodRefused,
    PlanFound,
    Progressed,
    Started,
    line_of,
    message_of,
)
from skein.plan.route.portfolio import Portfolio
from skein.wire.process.tether import tethered_arguments

COMPILE_S = 300.0
"""Far above what compiling takes on a slow and busy core."""
_LISTEN_S = 0.25
"""Between two looks at the clock."""
_END_S = 2.0
_INPUT = "instance"


@dataclass(slots=True)
class PortfolioStanding:
    """All that members have told so far."""

    portfolio: Portfolio[PlanFound]
    started_s: float = 0.0
    """Seconds that the command took until it had read the case, as its members do at the same time."""
    first_plan_s: float | None = None
    started: tuple[tuple[str, float], ...] = ()
    """Orders that the search began with, by name, and their seconds; all members begin with the same."""
    bound: Bounded | None = None
    is_compiling: bool = False
    refused: list[str] = field(default_factory=list)
    num_moves_by_member: dict[int, int] = field(default_factory=dict)
    has_done: bool = False
    """Some member has done what it was asked."""
    losses: list[str] = field(default_factory=list)

    @property
    def best(self) -> PlanFound | None:
        return self.portfolio.best

    @property
    def has_only_begun(self) -> bool:
        """Whether no member has told of a plan, nor of why there is none."""
        return self.best is None and not (self.refused or self.losses)

    @property
    def is_held_up(self) -> bool:
        """Whether the search is being compiled, and no member has got further yet."""
        return self.is_compiling and not (self.num_moves_by_member or self.has_done or self.refused)

    @property
    def num_moves(self) -> int:
        return sum(self.num_moves_by_member.values())

    def take(self, member: int, message: Message) -> bool:
        """Be as far as `message` says; whether the best plan or the bound is another now."""
        match message:
            case PlanFound():
                return self.portfolio.take(member, message.cost, message)
            case Started(orders=orders):
                self.started = self.started or orders
            case Compiling():
                self.is_compiling = True
            case MethodRefused(reason=reason):
                self.refused.append(reason)
            case Progressed(num_moves=num_moves):
                self.num_moves_by_member[member] = num_moves
            case Bounded():
                if self.bound is None or message.seconds > self.bound.seconds:
                    self.bound = message
                    return True
        return False


@dataclass(slots=True)
class _Member:
    """A member's process and the end of its pipe."""

    number: int
    errand: Errand
    process: "subprocess.Popen[str]"
    log: Path
    has_ended: bool = False


class MemberProcesses:
    """Processes at work on the case in `text`, from entering to leaving, as `portfolio` wants them."""

    def __init__(self, text: str, portfolio: Portfolio[PlanFound]) -> None:
        self._text = text
        self._members: list[_Member] = []
        self._told: queue.SimpleQueue[tuple[_Member, str | None]] = queue.SimpleQueue()
        self._files = contextlib.ExitStack()
        self._folder: Path | None = None
        self.standing = PortfolioStanding(portfolio=portfolio)

    def __enter__(self) -> "MemberProcesses":
        self._folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="skein-plan-")))
        (self._folder / _INPUT).write_text(self._text, encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.wait(_END_S)
        self._files.close()

    def send(self, errand: Errand) -> None:
        """Start a member."""
        assert self._folder is not None, "entered"
        log = self._folder / f"{len(self._members)}.log"
        with (self._folder / _INPUT).open("rb") as given, log.open("wb") as errors:
            process = subprocess.Popen(
                tethered_arguments("client.planning.member", [line_of(errand)]),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        self._files.enter_context(process.stdout or contextlib.nullcontext())
        member = _Member(len(self._members), errand, process, log)
        self._members.append(member)
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()

    def _listen(self, member: _Member) -> None:
        assert member.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed, since nobody listens any more
            for line in member.process.stdout:
                self._told.put((member, line))
        self._told.put((member, None))

    def news(self, until_s: float, *, now: Callable[[], float] = time.monotonic) -> Iterator[bool]:
        """Now and then, whether best plan or bound have changed; ends at `until_s`, or when nobody works any more.

        The first search on a machine compiles its loops, which outlasts a short budget and would never be done if
        it were cut off each time: until that is done, members get up to `COMPILE_S` more.
        """
        latest_s = until_s + COMPILE_S
        while not all(x.has_ended for x in self._members):
            end_s = latest_s if self.standing.is_held_up else until_s
            if now() >= end_s:
                return
            try:
                member, line = self._told.get(timeout=max(0.0, min(_LISTEN_S, end_s - now())))
            except queue.Empty:
                yield False
                continue
            if line is None:
                self._end(member)
                yield False
            elif line.endswith("\n"):  # a killed member's last line may be cut
                yield self.standing.take(member.number, message_of(line))

    def _end(self, member: _Member) -> None:
        """Note that a member has ended, and with which words if it broke."""
        member.has_ended = True
        code = member.process.wait(_END_S)
        if code == 0:
            self.standing.has_done = True
        else:
            said = member.log.read_text(encoding="utf-8", errors="replace")
            lines = said.strip().splitlines() or [f"exit code {code}"]
            self.standing.losses.append(
                f"{member.errand.role.value} (seed {member.errand.seed}) broke: {lines[-1]}"
            )
