"""Pace and memory of the rows of a sweep, by what workers have measured of them.

Rules of this file
- Rows that may be beside each other have one pace, whoever makes their steps: the one that was told last.
- An array is begun anew for its pace once at most: when its rows have come from no other.
"""

from collections.abc import Iterator
from math import ceil

from skein.config.job import ArrayJob
from skein.config.sweep.trials import trials_of
from skein.plan.sweeping.packing import Parting, parting, round_steps
from skein.plan.sweeping.repacking import LEAST_ROUNDS
from skein.protocol.coordinator.sweeping.standing import TrialStand
from skein.protocol.log.history import History, JobHistory

MOST_OFF = 4.0
"""Times as long or as short as it should be that a round may take."""
_MANY_ROUNDS = 100
"""Rounds left, from which on an array with short ones is worth beginning anew: each costs some milliseconds."""


def measured_row_s(sweep: JobHistory, key: Parting, history: History) -> float | None:
    """Seconds of a row's step, of those that share `key`, as they were told last; None: they were not."""
    own = _arrays(sweep, key, history)
    return next((row_s for array in own if (row_s := _told(array)) is not None), None)


def measured_bytes(sweep: JobHistory, key: Parting, history: History) -> tuple[int, int] | None:
    """Memory of rows that share `key`, whatever their number, and of each, as was told last; None: it was not."""
    for array in _arrays(sweep, key, history):
        made = None if array.last_commit is None else array.last_commit.array
        if made is not None and made.row_bytes:
            return made.fixed_bytes, made.row_bytes
    return None


def _arrays(sweep: JobHistory, key: Parting, history: History) -> Iterator[JobHistory]:
    """Arrays whose rows share `key` and that have made a round, newest first."""
    trials = trials_of(sweep.spec)
    for array in (history.jobs[job] for job in reversed(sweep.arrays)):
        if array.last_commit is not None and parting(trials[array.trials[0]]) == key:
            yield array


def is_off(array: JobHistory, stand: TrialStand) -> bool:
    """Whether the rounds of an array whose rows were drawn take so much longer or shorter than they should.

    Args:
        array: of several trials, or one of a search that compares them.
        stand: of its first trial.
    """
    spec, row_s = array.spec, _told(array)
    if not isinstance(spec, ArrayJob) or row_s is None or any(row.origin is not None for row in spec.rows):
        return False
    left = spec.array.last_step - stand.num_steps
    if left <= 0:
        return False
    wanted = round_steps(
        stand.trial.job,
        num_rows=_num_going(array),
        num_saved=len(spec.rows),
        num_steps=left,
        row_s=row_s,
    )
    if wanted > MOST_OFF * spec.round_steps:
        return ceil(left / spec.round_steps) >= _MANY_ROUNDS
    return MOST_OFF * wanted < spec.round_steps and ceil(left / wanted) >= LEAST_ROUNDS


def _told(array: JobHistory) -> float | None:
    """Seconds of a row's step in the newest round of an array; None: it was not measured."""
    made = None if array.last_commit is None else array.last_commit.array
    if made is None or not made.step_s:
        return None
    return made.step_s / _num_going(array)


def _num_going(array: JobHistory) -> int:
    """Rows that make steps, at least 1."""
    return max(1, sum(place.is_going for place in array.places))
