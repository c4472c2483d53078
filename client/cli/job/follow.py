"""A job's events as progress: a bar on a terminal, a line now and then elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from client.cli.show import event_text
from client.cli.tables import count, duration, eta_s, number, steps_text
from skein.types import Generation, JobState
from skein.wire.views import (
    CheckpointFinished,
    Ended,
    EpochsCounted,
    EvaluationFinished,
    GenerationBegun,
    JobEvent,
    LineLogged,
    StateChanged,
    StepFinished,
    WentBack,
)

LINE_S = 10.0
"""Between two lines about steps where there is no terminal."""
LONG_CHARACTERS = 40
"""With which a line ends as an earlier one did, and which are not told again."""
NUM_REMEMBERED = 64
"""Lines. A job that waits tries again and again, with each of its workers."""


@dataclass(slots=True)
class JobProgress:
    """Progress of a job, as its events tell."""

    total_steps: int
    step: int = 0
    loss: float | None = None
    evaluation_loss: float | None = None
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    state: str = "pending"
    end: Ended | None = None
    _tokens_by_step: list[int] = field(default_factory=list)

    def take(self, event: JobEvent) -> None:
        """Be as far as `event` says."""
        match event.body:
            case StepFinished(record=record):
                self._tokens_by_step.append(record.num_tokens)
                self.num_tokens += record.num_tokens
                self.step, self.loss = record.step + 1, record.loss
                self.tokens_per_s, self.step_s = event.body.tokens_per_s, event.body.step_s
            case EpochsCounted(num_steps=num_steps):
                self.total_steps = min(self.total_steps, num_steps)
            case EvaluationFinished(loss=loss):
                self.evaluation_loss = loss
            case WentBack(to_version=version):
                del self._tokens_by_step[version:]
                self.num_tokens, self.step = sum(self._tokens_by_step), version
            case StateChanged(state=state):
                # Somebody may have a job go on that had ended.
                self.state, self.end = state, None
            case Ended(state=state):
                self.state, self.end = state, event.body
            case _:
                pass

    @property
    def eta_s(self) -> float:
        """Seconds to the end, at the present pace."""
        return 0.0 if self.end is not None else eta_s(self.step, self.total_steps, self.step_s)

    def brief(self) -> str:
        """Beside a bar: loss, on validation data too if known, tokens, their rate, time to the end; few columns."""
        validation = "" if self.evaluation_loss is None else f"/{number(self.evaluation_loss)}"
        return (
            f"loss {number(self.loss)}{validation}  {count(self.num_tokens)} tokens  "
            f"{count(self.tokens_per_s)}/s  eta {duration(self.eta_s)}"
        )

    def figures(self) -> str:
        """Everything in words."""
        return (
            f"loss {number(self.loss)}  validation {number(self.evaluation_loss)}  "
            f"tokens {count(self.num_tokens)}  tokens/s {count(self.tokens_per_s)}  eta {duration(self.eta_s)}"
        )


class View(Protocol):
    """Shows progress while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, progress: JobProgress, event: JobEvent) -> None:
        """`event` has just been taken into `progress`."""


class News:
    """Lines about events, each told once while the job gets no further, and a long reason in full only once."""

    def __init__(self) -> None:
        self._told: deque[str] = deque(maxlen=NUM_REMEMBERED)

    def text(self, event: JobEvent) -> str:
        """Line to tell of an event; "" for nothing."""
        if isinstance(event.body, StepFinished | EvaluationFinished | CheckpointFinished):
            self._told.clear()
        if not _is_news(event):
            return ""
        text, bare = event_text(event), _bare(event)
        known = max((_same_end(bare, told) for told in self._told), default=0)
        is_old = bare in self._told
        self._told.append(bare)
        if is_old:
            return ""
        if known < LONG_CHARACTERS:
            return text
        end = ")" if text.endswith(")") else ""
        return f"{text[: len(text) - known - len(end)]}... (as before){end}"


class LineView:
    """Lines: what changes at once, steps every `LINE_S`."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._told_at = -math.inf
        self._news = News()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, progress: JobProgress, event: JobEvent) -> None:
        if isinstance(event.body, StepFinished):
            now, is_last = self._now(), progress.step >= progress.total_steps
            if is_last or now - self._told_at >= LINE_S:
                self._told_at = now
                self._line(f"step {progress.step}/{steps_text(progress.total_steps)}  {progress.figures()}")
        if text := self._news.text(event):
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class StepsBar:
    """A bar over steps with figures at its end, and lines above it, while it is entered."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _be_at(self, step: int, total_steps: int, *, state: str, figures: str) -> None:
        if self._bar is None:
            self._bar = self._progress.add_task(state, total=total_steps, figures="")
        self._progress.update(
            self._bar, total=total_steps, completed=step, description=state, figures=figures
        )

    def _line(self, text: str) -> None:
        self._progress.console.print(Text(text), soft_wrap=True)


class BarView(StepsBar):
    """A bar with figures, and news above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._news = News()

    def show(self, progress: JobProgress, event: JobEvent) -> None:
        self._be_at(progress.step, progress.total_steps, state=progress.state, figures=progress.brief())
        text = self._news.text(event)
        if text and not isinstance(event.body, EvaluationFinished | CheckpointFinished):
            self._line(text)


def view_for(console: Console) -> View:
    """View that suits the console: a bar needs a terminal that can go back in a line."""
    is_bar = console.is_terminal and not console.is_dumb_terminal
    return BarView(console) if is_bar else LineView(console)


def follow_events(
    events: Iterable[JobEvent],
    shown: View | None,
    *,
    total_steps: int,
    told: Iterable[JobEvent] = (),
    on_event: Callable[[JobEvent], None] | None = None,
) -> JobProgress:
    """Takes events until they end, shows how far they are, and gives that.

    Args:
        events: of one job, from its beginning, or after those that were `told`.
        shown: None shows nothing.
        total_steps: of the job.
        told: what happened before `events`, and is not shown.
        on_event: told each event too.
    """
    progress = JobProgress(total_steps=total_steps)
    for event in told:
        progress.take(event)
    # What epochs were told to be may be another budget since.
    progress.total_steps = total_steps
    with ExitStack() as stack:
        if shown is not None:
            stack.enter_context(shown)
        for event in events:
            progress.take(event)
            if on_event is not None:
                on_event(event)
            if shown is not None:
                shown.show(progress, event)
    return progress


def _bare(event: JobEvent) -> str:
    """Its line without what makes a known reason look new: the number of the try, and the bracket after it."""
    if isinstance(event.body, GenerationBegun):
        event = replace(event, body=replace(event.body, generation=Generation(0)))
    return event_text(event).removesuffix(")")


def _same_end(text: str, other: str) -> int:
    """Characters with which both end, of whole words."""
    pairs = zip(reversed(text), reversed(other), strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    words = text[len(text) - num_same :]
    return num_same if num_same == len(text) else len(words.partition(" ")[2])


def _is_news(event: JobEvent) -> bool:
    """Worth a line by itself: whatever changes, and warnings of workers. A failure is told as an error instead."""
    match event.body:
        case StepFinished() | Ended(state=JobState.FAILED):
            return False
        case LineLogged(line=line):
            return line.level in ("warning", "error")
        case _:
            return True
