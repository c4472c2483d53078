"""Choices of an array's rows as its log has them: which row draws by which, and how far each is."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from skein.config.job import ArrayJob
from skein.plan.sweeping.choosing import RowPlace, first_choice, steps_of_passes
from skein.protocol.log.records import CoresetChosen, DataCounted
from skein.protocol.messages.array_rounds import RowNumbers
from skein.protocol.messages.coresets import DrawingRow, ToldChoice
from skein.types import JobId, Step

RowChoice = tuple[CoresetChosen, DrawingRow]
"""Choice that a row draws by, and from where on."""


def choice_by_row(chosen: Sequence[CoresetChosen]) -> Mapping[int, RowChoice]:
    """Choices in force by the row of an array, given all, oldest first."""
    return {row.row: (record, row) for record in chosen for row in record.rows}


def choices_in_force(
    chosen: Sequence[CoresetChosen], places: Sequence[RowPlace] = ()
) -> tuple[ToldChoice, ...]:
    """Choices by which samples are drawn now, as they are told: one, or in an array all that are of some row.

    `places`: of the rows of an array, of which those that make no more steps draw nothing; none: of all.
    """
    newest = choice_by_row(chosen)
    if not newest:
        return tuple(record.told for record in chosen[-1:])
    drawn = [(by, row) for by, row in newest.values() if not places or places[row.row].is_going]
    told = (replace(record.told, rows=tuple(row for by, row in drawn if by is record)) for record in chosen)
    return tuple(x for x in told if x.rows)


def newest_choices(chosen: Sequence[CoresetChosen], most: int) -> list[CoresetChosen]:
    """The newest choices, oldest first: so many of each row."""
    counts, kept = Counter[int](), list[CoresetChosen]()
    for record in reversed(chosen):
        rows = [x.row for x in record.rows] or [0]
        if min(counts[row] for row in rows) < most:
            kept.append(record)
        counts.update(rows)
    return kept[::-1]


def carried_choices(
    array: ArrayJob, job: JobId, chosen_of: Callable[[JobId], Sequence[CoresetChosen]]
) -> list[CoresetChosen]:
    """Choices that the rows of an array go on with: those in force where they come from.

    Args:
        array: whose rows may have been rows of others.
        job: its name.
        chosen_of: gives the choices of another array.
    """
    found: dict[int, tuple[CoresetChosen, list[DrawingRow]]] = {}
    for row, arrayed in enumerate(array.rows):
        if (origin := arrayed.origin) is None:
            continue
        before = [x for x in chosen_of(JobId(origin.job)) if x.version <= origin.version]
        choice = choice_by_row(before).get(origin.row)
        if choice is not None:
            record, drawing = choice
            found.setdefault(id(record), (record, []))[1].append(replace(drawing, row=row))
    return [replace(x, job=job, version=Step(0), rows=tuple(rows)) for x, rows in found.values()]


def row_places(
    array: ArrayJob,
    counted: DataCounted | None,
    chosen: Sequence[CoresetChosen],
    numbers: Sequence[RowNumbers],
) -> tuple[RowPlace, ...]:
    """Places of the rows of an array, `numbers` being theirs at its version; none: it begins."""
    newest, spec, samples = choice_by_row(chosen), array.data.coreset, array.step_batch.samples
    num_rows = 0 if counted is None else counted.num_train_samples
    first = None if counted is None else first_choice(spec, num_rows=num_rows, samples=samples)
    usual = steps_of_passes(spec.refresh_epochs or 0, num_picks=spec.num_picks(num_rows), samples=samples)
    places = []
    for row in range(len(array.rows)):
        count = numbers[row].num_updates if numbers else array.array.first_step
        is_retired = bool(numbers) and bool(numbers[row].retired)
        due, interval = first, usual
        if row in newest:
            _, drawing = newest[row]
            due = drawing.until
            interval = None if due is None else due - drawing.since
        is_going = not is_retired and count < array.array.last_step
        places.append(RowPlace(count=count, is_going=is_going, due=due, interval=interval))
    return tuple(places)
