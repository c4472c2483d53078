"""A sweep's trials as progress: a bar over the steps of all of them, and a line where one is over before its time."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, Self

from rich.console import Console
from rich.text import Text

from client.cli.job.follow import LINE_S, StepsBar
from client.cli.tables import count, duration, eta_s, number
from skein.types import JobState
from skein.wire.views import JobStatus

LOOK_S = 2.0
"""Seconds between two looks at a sweep: what its trials come to are its arrays' events, and not its own."""


class SweepView(Protocol):
    """Shows a sweep while it is entered."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, status: JobStatus) -> None:
        """The sweep is like this now."""


def figures(status: JobStatus) -> str:
    """Figures of a sweep beside its steps: losses of the best trial, tokens a second, time to the end."""
    validation = "" if status.evaluation_loss is None else f", validation {number(status.evaluation_loss)}"
    eta = duration(eta_s(status.step, status.total_steps, status.step_s))
    return f"best {number(status.loss)}{validation}  {count(status.tokens_per_s)}/s  eta {eta}"


class TrialNews:
    """Lines about trials that are over before their budget is spent, and about the state of a sweep; each once."""

    def __init__(self) -> None:
        self._told: set[int] = set()
        self._state: JobState | None = None

    def lines(self, status: JobStatus) -> list[str]:
        """Lines to tell."""
        new = [x for x in status.trials if x.state is JobState.FAILED and x.trial not in self._told]
        self._told.update(trial.trial for trial in new)
        by_reason: dict[str, list[int]] = {}
        for trial in new:
            by_reason.setdefault(trial.reason, []).append(trial.trial)
        lines = [f"{_are(trials)} retired: {reason}" for reason, trials in by_reason.items()]
        # A failure is told as an error instead.
        if status.state not in (self._state, JobState.FAILED):
            lines.append(f"{status.state}: {status.reason}" if status.reason else str(status.state))
        self._state = status.state
        return lines


def _are(trials: list[int]) -> str:
    """Trials and a verb.

    >>> _are([3]), _are([0, 2])
    ('trial 3 is', 'trials 0, 2 are')
    """
    named = ", ".join(map(str, trials))
    return f"trial {named} is" if len(trials) == 1 else f"trials {named} are"


class SweepLines:
    """Lines: what changes at once, steps every `LINE_S`."""

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._told_at = -math.inf
        self._news = TrialNews()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: JobStatus) -> None:
        now = self._now()
        lines = self._news.lines(status)
        if status.step and (status.state.is_final or now - self._told_at >= LINE_S):
            self._told_at = now
            lines.insert(0, f"step {status.step}/{status.total_steps}  {figures(status)}")
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)


class SweepBar(StepsBar):
    """A bar with figures, and news above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._news = TrialNews()

    def show(self, status: JobStatus) -> None:
        self._be_at(status.step, status.total_steps, state=status.state, figures=figures(status))
        for line in self._news.lines(status):
            self._line(line)


def sweep_view_for(console: Console) -> SweepView:
    """View that suits the console."""
    is_bar = console.is_terminal and not console.is_dumb_terminal
    return SweepBar(console) if is_bar else SweepLines(console)


def follow_sweep(
    look: Callable[[], JobStatus], view: SweepView, *, wait: Callable[[float], None] = time.sleep
) -> JobStatus:
    """Shows a sweep until it ends; gives its status then.

    Args:
        look: gives its status now.
        view: shows it.
        wait: lets so many seconds pass.
    """
    with ExitStack() as stack:
        stack.enter_context(view)
        while True:
            status = look()
            view.show(status)
            if status.state.is_final:
                return status
            wait(LOOK_S)
