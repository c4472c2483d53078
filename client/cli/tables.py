"""Tables and JSON on standard output, and the row of a job in a list.

Commands that list jobs import these, so this module imports only light ones.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import click

from skein.types import MOST_STEPS, JobId, JobState

T = TypeVar("T")

_NONE = "-"


class JobLine(Protocol):
    """The figures of a job that a list shows; see `skein.wire.views.JobStatus`."""

    @property
    def job(self) -> JobId: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> JobState: ...
    @property
    def step(self) -> int: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def evaluation_loss(self) -> float | None: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def step_s(self) -> float: ...
    @property
    def num_workers(self) -> int: ...


# --- JSON ---


def print_json(value: object) -> None:
    """Print `value` in one line on standard output."""
    from skein.wire.shown.plain import plain

    click.echo(json.dumps(plain(value)))


def print_listed(
    found: Iterable[T],
    columns: Sequence[str],
    row: Callable[[T], Sequence[str]],
    *,
    nothing: str,
    is_json: bool,
) -> None:
    """Print each value as JSON in a line of its own, or all as a table."""
    if not is_json:
        return print_table(columns, map(row, found), nothing=nothing)
    for value in found:
        print_json(value)


# --- text ---


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, nothing: str) -> None:
    """Aligned columns on standard output, never cut; `nothing` where there are no rows."""
    lines = [tuple(columns), *map(tuple, rows)]
    if len(lines) == 1:
        click.echo(nothing)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())


def job_row(status: JobLine) -> tuple[str, ...]:
    """A job in a list; see `JOB_COLUMNS`."""
    return (
        status.job,
        status.name,
        status.state,
        f"{status.step}/{steps_text(status.total_steps)}",
        number(status.loss),
        number(status.evaluation_loss),
        count(status.tokens_per_s),
        duration(eta_s(status.step, status.total_steps, status.step_s))
        if not status.state.is_final
        else _NONE,
        str(status.num_workers),
    )


JOB_COLUMNS = ("JOB", "NAME", "STATE", "STEP", "LOSS", "VALIDATION", "TOKENS/S", "ETA", "WORKERS")


def eta_s(step: int, total_steps: int, step_s: float) -> float:
    """Seconds that the steps to come take at this pace; infinite while nothing is known."""
    return (total_steps - step) * step_s if step_s > 0 and total_steps < MOST_STEPS else math.inf


def steps_text(total_steps: int) -> str:
    """Number of steps of a job; `?` as long as its data are not counted.

    >>> steps_text(300), steps_text(MOST_STEPS)
    ('300', '?')
    """
    return "?" if total_steps >= MOST_STEPS else str(total_steps)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(7), duration(4000), duration(math.inf)
    ('0:07', '1:06:40', '-')
    """
    if not math.isfinite(seconds):
        return _NONE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None) -> str:
    """A loss or a norm.

    >>> number(2.34567), number(None)
    ('2.346', '-')
    """
    return _NONE if value is None else f"{value:.4g}"


def count(value: float) -> str:
    """A rate or a count, short.

    >>> count(0), count(950), count(12_345), count(3.2e6)
    ('0', '950', '12.3k', '3.2M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
