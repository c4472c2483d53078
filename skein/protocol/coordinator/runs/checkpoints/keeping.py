"""Checkpoints that are kept: the newest ones, and beside them those that a job could go back to."""

from collections.abc import Iterable
from math import inf

from skein.protocol.log.history import JobHistory
from skein.types import JobId, Step


def is_sound(job: JobHistory, version: Step) -> bool:
    """Whether a version's parameters are good, as far as losses tell."""
    is_learning = version <= (job.losses.good if job.diverged is None else job.diverged.last_good)
    return is_learning and job.scores.get(version, 0.0) < inf


def newest_sound(job: JobHistory) -> Step:
    """The newest checkpoint whose parameters are good; 0 for none, which is what the seed draws."""
    return max((x.version for x in job.whole_checkpoints if is_sound(job, x.version)), default=Step(0))


def newest_good(job: JobHistory) -> Step:
    """The newest checkpoint to begin another job with: sound, or the end of a row of good steps; 0 for none."""
    versions = [x.version for x in job.whole_checkpoints]
    return max((x for x in versions if is_sound(job, x) or _is_last_of_good(job, x)), default=Step(0))


def _is_last_of_good(job: JobHistory, version: Step) -> bool:
    """Whether nothing speaks against a version that no step has begun with: of a job that is done, the last one."""
    score = job.scores.get(version, 0.0)
    was_good = version == job.version == job.losses.good + 1 and job.diverged is None
    return was_good and score < inf and score <= job.losses.far


def begun_from(job: JobId, others: Iterable[JobHistory]) -> frozenset[Step]:
    """Versions of a job with whose parameters others begin, or begin again while they have nothing of their own."""
    waiting = [other for other in others if other.end is None and not newest_sound(other)]
    begins = (other.begins for other in waiting)
    origins = (row.origin for other in waiting for row in other.spec.rows)
    return frozenset(
        Step(begun.version) for begun in (*begins, *origins) if begun is not None and begun.job == job
    )


def kept_with(job: JobHistory, version: Step, others: Iterable[JobHistory] = ()) -> tuple[Step, ...]:
    """Versions of the checkpoints to keep once there is one of `version`, which is the newest.

    These are the newest as many as the job asks for, the newest that was evaluated as finite, the newest whose training
    loss was good, the one with the lowest validation loss, and what `others` begin with, which somebody may put back if
    it is damaged.
    """
    versions = sorted({*(x.version for x in job.whole_checkpoints), version})
    kept = {*versions[-job.spec.checkpoint.keep :]}
    kept.update([x for x in versions if is_sound(job, x)][-1:])
    scored = [x for x in versions if job.scores.get(x, inf) < inf]
    kept.update(scored[-1:])
    if scored:
        kept.add(min(scored, key=lambda x: (job.scores[x], -x)))
    kept.update(begun_from(job.job, others).intersection(x.version for x in job.checkpoints))
    return tuple(sorted(kept))
