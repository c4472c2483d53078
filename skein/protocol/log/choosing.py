"""Versions at which a job's rows are chosen, as its log tells: what was chosen before says when that is over."""

from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import CoresetChosen
from skein.types import Step


def choice_due_at(job: JobHistory) -> Step | None:
    """Version at which the next choice is to be made, by the model as it is then; None: no more is."""
    spec, samples = job.spec.data.coreset, job.spec.batch.samples
    if not spec.follows_model or job.counted is None:
        return None
    if not job.chosen:
        return Step(-(-spec.warmup_epochs * job.counted.num_train_samples // samples))
    last = job.chosen[-1]
    steps = -(-last.passes * last.told.num_picks // samples)
    return Step(last.version + steps) if last.passes else None


def is_choice_due(job: JobHistory) -> bool:
    """Whether no sample may be drawn at the job's version before rows are chosen."""
    due_at = choice_due_at(job)
    return due_at is not None and job.version >= due_at


def overhead(job: JobHistory, seconds: float) -> float | None:
    """Share that a choice which took so long has of the training since the one before; None: nothing was timed."""
    since = job.chosen[-1].version if job.chosen else Step(0)
    step_s, num_steps = job.clock.step_s, job.version - since
    return seconds / (step_s * num_steps) if step_s and num_steps else None


def passes_until_next(job: JobHistory, share: float | None) -> int:
    """Times that the choice which is made now is seen until another is: twice as many once that takes too long."""
    spec = job.spec.data.coreset
    last: CoresetChosen | None = job.chosen[-1] if job.chosen else None
    passes = (spec.refresh_epochs or 0) if last is None else last.passes
    return 2 * passes if share is not None and share > spec.max_overhead else passes
