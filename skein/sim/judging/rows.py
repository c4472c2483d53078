"""Rows of an array as the run log has them, round after round."""

from collections.abc import Sequence

from skein.config.job import ArrayJob
from skein.protocol.messages.array_rounds import RowNumbers


def row_faults(job: ArrayJob, before: Sequence[RowNumbers], after: Sequence[RowNumbers]) -> list[str]:
    """Faults of a round that is committed after another, or first.

    A row makes all steps of a round, but beyond its last; one that was put back has made fewer. A retired one makes
    none, and stays retired.
    """
    first = [job.array.first_step] * len(job.rows)
    counts = [row.num_updates for row in before] or first
    faults = []
    for at, (count, row) in enumerate(zip(counts, after, strict=True)):
        was = before[at] if before else None
        grown = row.num_updates - count
        wanted = min(job.round_steps, job.array.last_step - count)
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
