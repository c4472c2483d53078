"""Data of a job, recorded when workers open them first: fingerprint, size of an epoch; room for choices of it."""

from collections import Counter
from dataclasses import replace
from math import ceil

from skein.config.job import with_steps
from skein.data.agreement import SHOWN
from skein.errors import UserError
from skein.numeric.coreset.portions import num_parts_of
from skein.numeric.coreset.room import MOST_FEATURE_BYTES, feature_bytes, no_room
from skein.plan.admission import check_admissible
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Outbox
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import DataCounted
from skein.protocol.log.row_choices import choices_in_force
from skein.protocol.messages.coresets import MOST_PICKS, MOST_ROWS
from skein.units import format_bytes


def count_data(
    job: JobHistory,
    num_train_samples: int,
    outbox: Outbox,
    *,
    now: float,
    num_validation_samples: int | None = None,
    fingerprint: str = "",
) -> str | None:
    """Record what workers have found, unless it is recorded; says before the first step whether the job can be.

    Args:
        job: whose data they are.
        num_train_samples: what every origin has to train on.
        outbox: where the record goes.
        now: seconds.
        num_validation_samples: what every origin has to validate on.
        fingerprint: of the data of every origin; "": they are not compared.

    Returns:
        Why the job cannot be: it does not agree with the steps that its epochs are. None if it can.
    """
    spec, samples = job.spec, job.spec.step_batch.samples
    if spec.data.coreset.follows_model and not samples <= num_train_samples <= MOST_ROWS:
        return f"data: {num_train_samples} rows: choices along the run are made of {samples} to {MOST_ROWS}"
    # Rows that come from several arrays have a choice of each, until there is one of all of them.
    is_shared = spec.data.coreset.is_shared
    num_choices = len(choices_in_force(job.chosen)) if is_shared else len(spec.rows)
    num_told = num_choices * spec.data.coreset.num_picks(num_train_samples)
    if spec.data.coreset.follows_model and num_told > MOST_PICKS:
        hint = (
            f"of {len(spec.rows)} trials side by side are more than {MOST_PICKS}, which can be told at once"
        )
        otherwise = "" if is_shared else ", or share: first_alive"
        return f"data: {num_told} chosen rows {hint}: give a smaller sweep.per_array{otherwise}"
    counted = job.counted
    if counted is None or (fingerprint and fingerprint != counted.fingerprint):
        counted = replace(
            _counted(job, num_train_samples, now=now),
            num_validation_samples=num_validation_samples,
            fingerprint=fingerprint,
        )
        outbox.record(counted)
        outbox.log(_words(job, counted), job=job.job)
    if counted.num_steps is None or job.version:
        return None
    try:
        check_admissible(with_steps(job.spec, job.total_steps))
    except UserError as error:
        return f"budget.epochs: {job.spec.budget.epochs:g}: {error}"
    return None


def room_doubt(job: JobHistory, plan: Plan, num_train_samples: int) -> str | None:
    """Reason why rows cannot be compared where the plan's evaluation paths end; None: they can.

    Args:
        job: before its first step.
    """
    spec, ends = job.spec.data.coreset, [path.end.worker for path in plan.evaluation_paths]
    if not spec.follows_model or not ends:
        return None
    num_models = 1 if spec.is_shared else max(1, len(job.spec.rows))
    num_parts = num_parts_of(ceil(num_train_samples / job.spec.batch.microbatch_samples), num_train_samples)
    most_parts = min(num_parts, ceil(num_parts / len(ends)) * max(Counter(ends).values()))
    num_rows = ceil(num_train_samples * most_parts / num_parts)
    num_bytes = num_models * feature_bytes(job.spec.model, spec, num_rows)
    if num_bytes <= MOST_FEATURE_BYTES:
        return None
    return f"{no_room(spec)}: here are {num_rows} rows, {format_bytes(num_bytes)}"


def _counted(job: JobHistory, num_train_samples: int, *, now: float) -> DataCounted:
    """Record of so many samples. Steps that epochs came to stay what they were once a step is made."""
    spec, before = job.spec, job.counted
    if before is not None and job.version:
        num_steps = before.num_steps
    else:
        num_steps = spec.budget.steps_of_epochs(num_train_samples, spec.batch.samples)
    return DataCounted(job=job.job, num_train_samples=num_train_samples, num_steps=num_steps, wall_s=now)


def _words(job: JobHistory, counted: DataCounted) -> str:
    spec, num_samples = job.spec, counted.num_train_samples
    tokens = "" if spec.model.vocab_size is None else f", {num_samples * spec.data.sequence_tokens} tokens"
    is_budget = counted.num_steps is not None and spec.budget.epochs is not None
    budget = f"; {spec.budget.epochs:g} of them are {counted.num_steps} steps" if is_budget else ""
    named = f" (fingerprint {counted.fingerprint[:SHOWN]})" if counted.fingerprint else ""
    num_steps = -(-num_samples // spec.batch.samples)
    return f"data: an epoch is {num_samples} samples{tokens}, {num_steps} steps{budget}{named}"
