"""Versions at which a job's rows are chosen, as its log tells: what was chosen before says when that is over.

The rows of an array are trials, each of which counts its own steps; any other job is as an array of one row, number 0.
"""

from dataclasses import dataclass

from skein.config.job import ArrayJob
from skein.plan.sweeping.choosing import (
    asked_rows,
    drawing_rows,
    first_choice,
    rounds_until_due,
    steps_ahead,
    steps_of_passes,
)
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CoresetChosen
from skein.protocol.log.row_choices import choice_by_row
from skein.protocol.messages.coresets import DrawingRow
from skein.types import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLook:
    """Look at all rows for a choice: by parameters at `version`, for samples that are drawn from version `due` on."""

    version: Step
    due: Step


def next_look(job: JobHistory) -> RowLook | None:
    """The look for the next choice; None: no choice is made any more."""
    due = choice_due_at(job)
    if due is None:
        return None
    since = job.chosen[-1].version if job.chosen else Step(0)
    return RowLook(version=Step(due - steps_ahead(job.spec, due - since)), due=due)


def choice_due_at(job: JobHistory) -> Step | None:
    """Version at which the next choice is to be made, by the model as it is then; None: no more is."""
    spec, samples = job.spec.data.coreset, job.spec.batch.samples
    if not spec.follows_model or job.counted is None:
        return None
    if isinstance(job.spec, ArrayJob):
        last_step, round_steps = job.spec.array.last_step, job.spec.round_steps
        places = job.places
        heard = places if spec.share == "row" else [x for x in places if x.is_going][:1]
        rounds = rounds_until_due(heard, last_step=last_step, round_steps=round_steps)
        return None if rounds is None else Step(job.version + rounds)
    if not job.chosen:
        first = first_choice(spec, num_rows=job.counted.num_train_samples, samples=samples)
        return None if first is None else Step(first)
    last = job.chosen[-1]
    steps = steps_of_passes(last.passes, num_picks=last.told.num_picks, samples=samples)
    return None if steps is None else Step(last.version + steps)


def asked_now(job: JobHistory) -> tuple[int, ...]:
    """Rows of an array whose models say at the job's version what is chosen; of any other job 0, if it is due."""
    if not job.spec.data.coreset.follows_model:
        return ()
    if isinstance(job.spec, ArrayJob):
        return asked_rows(job.spec.data.coreset.share, job.places)
    due_at = choice_due_at(job)
    return (0,) if due_at is not None and job.version >= due_at else ()


def is_choice_due(job: JobHistory) -> bool:
    """Whether no sample may be drawn at the job's version before rows are chosen."""
    return bool(asked_now(job))


def step_of_row(job: JobHistory, row: int) -> Step:
    """Steps that a row has made; of a job that is no array its version."""
    return Step(job.places[row].count) if isinstance(job.spec, ArrayJob) else job.version


def drawn_by(job: JobHistory, asked: int, *, passes: int, num_picks: int) -> tuple[DrawingRow, ...]:
    """Rows of an array that draw by what the model of `asked` says now; any other job has none.

    Args:
        passes: over the choice, until the next is made; 0: it stays.
        num_picks: rows of it.
    """
    steps = steps_of_passes(passes, num_picks=num_picks, samples=job.spec.step_batch.samples)
    places = job.places
    return tuple(
        DrawingRow(
            row=row,
            since=Step(places[row].count),
            until=None if steps is None else Step(places[row].count + steps),
        )
        for row in (drawing_rows(job.spec.data.coreset.share, asked, places) if places else ())
    )


def choice_before(job: JobHistory, row: int = 0) -> CoresetChosen | None:
    """The choice that a row draws by so far; None: there is none."""
    if not isinstance(job.spec, ArrayJob):
        return job.chosen[-1] if job.chosen else None
    before = choice_by_row(job.chosen).get(row)
    return None if before is None else before[0]


def overhead(job: JobHistory, seconds: float, row: int = 0) -> float | None:
    """Share that a choice which took so long has of the training since the one before; None: nothing was timed."""
    before = choice_before(job, row)
    since = Step(0) if before is None else before.version
    step_s, num_steps = job.clock.step_s, job.version - since
    return seconds / (step_s * num_steps) if step_s and num_steps else None


def passes_until_next(job: JobHistory, share: float | None, row: int = 0) -> int:
    """Times that the choice which is made now is seen until another is: twice as many once that takes too long."""
    spec = job.spec.data.coreset
    last = choice_before(job, row)
    passes = (spec.refresh_epochs or 0) if last is None else last.passes
    return 2 * passes if share is not None and share > spec.max_overhead else passes
