"""Rows of an array as the run log has them, round after round, and from one array to the next."""

from collections.abc import Sequence

from skein.config.job import ArrayJob, read_spec
from skein.plan.sweeping.choosing import RowPlace
from skein.protocol.log.history import History
from skein.protocol.log.records import JobSubmitted
from skein.protocol.log.row_history import rows_begun
from skein.protocol.messages.array_rounds import RowNumbers


def begin_faults(history: History, record: JobSubmitted) -> list[str]:
    """Faults of an array of a sweep that begins: where a trial does not go on from all that it has made, once.

    No other array of the sweep has a trial that is in it; none was retired; and each goes on from the newest version of
    the row that it was last, whatever array that was in, or begins if it was in none.
    """
    assert record.sweep is not None, "asked of arrays only"
    arrays = [history.jobs[job] for job in history.jobs[record.sweep].arrays]
    spec = read_spec(record.spec)
    faults = [
        f"trial {trial} is in {array.job} still"
        for array in arrays
        for trial in array.trials
        if array.end is None and trial in record.trials
    ]
    if not isinstance(spec, ArrayJob):
        begun = {trial for array in arrays for trial in array.trials if array.version}
        return faults + [f"trial {trial} begins again" for trial in record.trials if trial in begun]
    for trial, row in zip(record.trials, spec.rows, strict=True):
        newest = next((x for x in reversed(arrays) if trial in x.trials and x.version), None)
        place = None if newest is None else (newest.job, newest.version, newest.trials.index(trial))
        told = None if row.origin is None else (row.origin.job, row.origin.version, row.origin.row)
        if told != place or row.trial != trial:
            faults.append(f"trial {trial} goes on from {told}, and was {place} last")
    rows = rows_at_begin(spec, history)
    faults += [f"row {at} is retired: {row}" for at, row in enumerate(rows) if row.retired]
    if (fewest := min(row.num_updates for row in rows)) != spec.array.first_step:
        faults.append(f"rows begin after {spec.array.first_step} steps, and one has made {fewest}")
    return faults


def rows_at_begin(job: ArrayJob, history: History) -> tuple[RowNumbers, ...]:
    """Numbers of the rows that an array begins with."""
    return rows_begun(job, lambda other: history.jobs[other].rounds)


def row_faults(
    job: ArrayJob,
    before: Sequence[RowNumbers],
    after: Sequence[RowNumbers],
    places: Sequence[RowPlace] = (),
) -> list[str]:
    """Faults of a round that is committed after another, or first; before a first round there may be nothing.

    A row makes all steps of a round, but beyond its last, or where rows are to be chosen for it; one that was put back
    has made fewer. A retired one makes none, and stays retired.

    Args:
        job: the array.
        before: numbers of its rows when the round began; none: it is the first.
        after: those that are committed.
        places: rows when the round began, where they are chosen for along the run.
    """
    first = [job.array.first_step] * len(job.rows)
    counts = [row.num_updates for row in before] or first
    faults = []
    for at, (count, row) in enumerate(zip(counts, after, strict=True)):
        was = before[at] if before else None
        grown = row.num_updates - count
        due = places[at].due if places else None
        last_step = job.array.last_step if due is None else min(due, job.array.last_step)
        wanted = min(job.round_steps, last_step - count)
        if was is not None and was.retired and (not row.retired or grown):
            faults.append(f"row {at} was retired, and has made {grown} steps")
        elif row.retired and grown:
            faults.append(f"row {at} is retired, and not where its round began")
        elif (
            not row.retired and grown != wanted and row.num_rewinds == (0 if was is None else was.num_rewinds)
        ):
            faults.append(f"row {at} has made {grown} steps in a round of {wanted}")
        elif not 0 <= grown <= wanted:
            faults.append(f"row {at} has made {grown} steps in a round of at most {wanted}")
    return faults
