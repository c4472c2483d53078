"""Which checkpoints are kept: the newest ones, and beside them those that a job could go back to."""

from math import inf

from skein.protocol.history import JobHistory
from skein.types import Step


def is_sound(job: JobHistory, version: Step) -> bool:
    """Whether a version's parameters are good, as far as losses tell."""
    is_learning = version <= (job.losses.good if job.diverged is None else job.diverged.last_good)
    return is_learning and job.scores.get(version, 0.0) < inf


def newest_sound(job: JobHistory) -> Step:
    """The newest checkpoint whose parameters are good; 0 for none, which is what the seed draws."""
    return max((x.version for x in job.whole_checkpoints if is_sound(job, x.version)), default=Step(0))


def kept_with(job: JobHistory, version: Step) -> tuple[Step, ...]:
    """Versions of the checkpoints to keep once there is one of `version`, which is the newest.

    These are the newest as many as the job asks for, the newest that was evaluated as finite, the newest whose training
    loss was good, and the one with the lowest validation loss.
    """
    versions = sorted({*(x.version for x in job.whole_checkpoints), version})
    kept = {*versions[-job.spec.checkpoint.keep :]}
    kept.update([x for x in versions if is_sound(job, x)][-1:])
    scored = [x for x in versions if job.scores.get(x, inf) < inf]
    kept.update(scored[-1:])
    if scored:
        kept.add(min(scored, key=lambda x: (job.scores[x], -x)))
    return tuple(sorted(kept))
