"""Numbers of an array's rows, version by version, as its log has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from skein.config.job import ArrayJob
from skein.config.sweep.rows import RowOrigin
from skein.protocol.log.records import CheckpointCommitted
from skein.protocol.messages.array_rounds import RowNumbers
from skein.types import JobId, Step

RowsByVersion = Mapping[Step, tuple[RowNumbers, ...]]


def saved_numbers(origin: RowOrigin, rounds: RowsByVersion) -> RowNumbers | None:
    """Numbers of a row as it is saved, `rounds` being those of its array; None if nobody knows them."""
    rows = rounds.get(Step(origin.version), ())
    return rows[origin.row] if rows else None


def rows_begun(array: ArrayJob, rounds_of: Callable[[JobId], RowsByVersion]) -> tuple[RowNumbers, ...]:
    """Numbers of the rows that an array begins with; `rounds_of` gives those of others."""
    origins = [row.origin for row in array.rows]
    found = (x and saved_numbers(x, rounds_of(JobId(x.job))) for x in origins)
    unknown = RowNumbers.begun(array.array.first_step)
    return tuple(numbers or unknown for numbers in found)


def rounds_with(
    rounds: RowsByVersion,
    version: Step,
    rows: tuple[RowNumbers, ...],
    checkpoints: Sequence[CheckpointCommitted],
) -> dict[Step, tuple[RowNumbers, ...]]:
    """Rounds of all checkpoints and since the newest, with the one that has led to `version`.

    The best checkpoint may be kept for long: what came between that and the newest is of no use.

    The loss of a row is that of the newest round in which it made a step: what is told of it afterwards depends on who
    has it.
    """
    saved = {x.version for x in checkpoints}
    newest = max((x for x in saved if x < version), default=0)
    before = rounds.get(Step(version - 1), ())
    carried = tuple(
        now if now.num_tokens or not before else replace(now, loss=before[row].loss)
        for row, now in enumerate(rows)
    )
    return {**{at: x for at, x in rounds.items() if at in saved or newest <= at < version}, version: carried}


def is_turn(rounds: RowsByVersion, version: Step) -> bool:
    """Whether a sweep looks at an array at this version: a first round tells its pace, or more rows are retired."""
    now, before = (rounds.get(Step(at), ()) for at in (version, version - 1))
    return version == 1 or sum(bool(row.retired) for row in now) > sum(bool(row.retired) for row in before)
