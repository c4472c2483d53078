"""Rows of an array whose samples are chosen along the run: how far each may go by its choice, and whose model is asked.

Rules of this file
- A row rests once the next choice is due at its step, so no local step of a round draws by a choice that was not there
  when the round began.
- Coordinator and worker ask here, of the same numbers; neither tells the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from skein.config.data.coreset import ChoiceShare, CoresetSpec
from skein.config.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlace:
    """Steps that a row has made, and is to make by its choice.

    Args:
        count: steps that it has made.
        is_going: whether it is to make more.
        due: step at which rows are to be chosen by its model; None: never, or not known yet.
        interval: steps from one choice to the next; None: the next one stays.
    """

    count: int
    is_going: bool
    due: int | None
    interval: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether it makes no step before rows are chosen."""
        return self.is_going and self.due is not None and self.count >= self.due


def first_choice(spec: CoresetSpec, *, num_rows: int, samples: int) -> int | None:
    """Step at which a job's first choice is made by its model, `samples` being drawn in a step; None: none is.

    >>> first_choice(CoresetSpec(method="craig", warmup_epochs=2), num_rows=100, samples=8)
    25
    """
    return ceil(spec.warmup_epochs * num_rows / samples) if spec.follows_model else None


def steps_of_passes(passes: int, *, num_picks: int, samples: int) -> int | None:
    """Steps in which a choice is seen so many times; None: it stays.

    >>> steps_of_passes(3, num_picks=20, samples=8), steps_of_passes(0, num_picks=20, samples=8)
    (8, None)
    """
    return ceil(passes * num_picks / samples) if passes else None


def steps_ahead(job: JobSpec, interval: int) -> int:
    """Steps before a choice is due at which rows are looked at for it, the last choice being `interval` steps ago.

    A job of one worker, as an array is, leaves nobody idle: its rows are looked at when the choice is due.
    """
    is_lone = job.parallel.stages == job.parallel.replicas == 1
    return 0 if is_lone else job.data.coreset.steps_ahead(interval)


def asked_rows(share: ChoiceShare, rows: Sequence[RowPlace]) -> tuple[int, ...]:
    """Rows whose models say now what is chosen.

    >>> alone, due = (RowPlace(count=4, is_going=x, due=4) for x in (False, True))
    >>> asked_rows("row", [alone, due, due]), asked_rows("first_alive", [alone, due, due])
    ((1, 2), (1,))
    """
    due = tuple(row for row, place in enumerate(rows) if place.is_due)
    if share == "row":
        return due
    first = next((row for row, place in enumerate(rows) if place.is_going), None)
    return tuple(row for row in due if row == first)


def drawing_rows(share: ChoiceShare, asked: int, rows: Sequence[RowPlace]) -> tuple[int, ...]:
    """Rows that draw by what the model of `asked` has said."""
    return (asked,) if share == "row" else tuple(row for row, x in enumerate(rows) if x.is_going)


def rounds_until_due(rows: Iterable[RowPlace], *, last_step: int, round_steps: int) -> int | None:
    """Rounds until the first of these rows has a choice due; None: none has any more."""
    ahead = [max(0, x.due - x.count) for x in rows if x.is_going and x.due is not None and x.due < last_step]
    return ceil(min(ahead) / round_steps) if ahead else None


def rounds_left(rows: Iterable[RowPlace], *, last_step: int, round_steps: int) -> int:
    """Rounds until all rows are at their end, if no row diverges and choices come as often as now.

    >>> row = RowPlace(count=4, is_going=True, due=6, interval=5)
    >>> rounds_left([row], last_step=16, round_steps=4)  # to 6, 10, 11, 15, 16
    5
    """
    return max((_rounds_left(row, last_step, round_steps) for row in rows if row.is_going), default=0)


def _rounds_left(row: RowPlace, last_step: int, round_steps: int) -> int:
    until = last_step if row.due is None else min(last_step, max(row.due, row.count))
    to_due, left = ceil((until - row.count) / round_steps), last_step - until
    whole, rest = (0, left) if row.interval is None else divmod(left, row.interval)
    return to_due + whole * ceil((row.interval or 0) / round_steps) + ceil(rest / round_steps)
