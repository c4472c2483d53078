"""Leeway of a planner: what a job leaves to it, settled one way or another.

Rules of this file
- A settled job leaves nothing open: it says how many chunks each worker has, and whether backwards are split.
- What a plan has settled stays so as long as its stages are held, for another cut would move all of them.
"""

from collections.abc import Iterator

from skein.config.job import AUTO_CHUNKS, JobSpec
from skein.plan.cut import most_stages
from skein.plan.plan import Plan


def settled(job: JobSpec, plan: Plan) -> JobSpec:
    """The job with what it leaves open as `plan` has it; as it is where the plan does not tell."""
    num_body = len(plan.stages) - plan.layout.num_head_stages - job.parallel.num_shards
    chunks, rest = divmod(num_body, job.parallel.stages)
    if job.parallel.chunks == "auto" and not rest and chunks in AUTO_CHUNKS:
        job = _with_chunks(job, chunks)
    if job.plan.backward == "auto" and plan.paths:
        job = _with_backward(job, is_split=any(path.split for path in plan.paths))
    return job


def settlings(job: JobSpec, previous: Plan | None) -> tuple[JobSpec, ...]:
    """Ways in which all that a job leaves open can be settled, the plainest first: one if it leaves nothing open.

    Args:
        job: what to train.
        previous: the plan so far, if any.
    """
    job = job if previous is None else settled(job, previous)
    return tuple(split for cut in _cuts(job) for split in _backwards(cut))


def is_settled(job: JobSpec) -> bool:
    """Whether a job leaves nothing open."""
    return job.parallel.chunks != "auto" and job.plan.backward != "auto"


def _cuts(job: JobSpec) -> Iterator[JobSpec]:
    if job.parallel.chunks != "auto":
        yield job
        return
    most = most_stages(job) // job.parallel.stages
    may_cut = not job.skip.ratio and not job.aggregation.walkers.are_lines
    for chunks in AUTO_CHUNKS if may_cut else AUTO_CHUNKS[:1]:
        if chunks <= max(1, most):
            yield _with_chunks(job, chunks)


def _backwards(job: JobSpec) -> Iterator[JobSpec]:
    if job.plan.backward != "auto":
        yield job
        return
    yield _with_backward(job, is_split=False)
    if job.model.has_split_backward:
        yield _with_backward(job, is_split=True)


def _with_chunks(job: JobSpec, chunks: int) -> JobSpec:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"chunks": chunks})})


def _with_backward(job: JobSpec, *, is_split: bool) -> JobSpec:
    backward = "split" if is_split else "whole"
    return job.model_copy(update={"plan": job.plan.model_copy(update={"backward": backward})})
