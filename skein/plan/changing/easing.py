"""Easing of a job that fits nowhere: the one setting that frees most of the memory that is missing.

Only settings that leave the sums of a step alone are tried: how many samples go through the model together, whether
backwards are split, and how many stages there are where workers are left for more.
"""

from collections.abc import Iterator
from dataclasses import replace

from skein.config.job import JobSpec
from skein.plan.cut import cut_under_memory, most_stages
from skein.plan.place import Pool
from skein.plan.plan import Infeasible
from skein.units import format_bytes


def with_cure(lacking: Infeasible, job: JobSpec, pool: Pool) -> Infeasible:
    """`lacking`, which no cut of `job` on `pool` escapes, with the setting that frees most of what is missing."""
    if not lacking.missing_bytes:
        return lacking
    tried = [(_missing_bytes(way, pool), setting) for setting, way in _ways(job, pool)]
    left, setting = min(tried, default=(lacking.missing_bytes, ""))
    if left >= lacking.missing_bytes:
        cure = "no other setting frees any of it: add workers, or memory"
    else:
        part = "all" if not left else format_bytes(lacking.missing_bytes - left)
        cure = f"{setting} frees most, {part} of it"
    return replace(lacking, reason=", and ".join((lacking.reason, cure)))


def _missing_bytes(job: JobSpec, pool: Pool) -> int:
    """Bytes that are missing in the cut that comes nearest; 0 where one fits."""
    found = cut_under_memory(job, pool)
    return found.missing_bytes if isinstance(found, Infeasible) else 0


def _ways(job: JobSpec, pool: Pool) -> Iterator[tuple[str, JobSpec]]:
    """Settings, and the job with each."""
    if job.batch.microbatch_samples > 1:
        batch = job.batch.model_copy(update={"microbatch_samples": 1})
        yield "batch.microbatch_samples: 1", job.model_copy(update={"batch": batch})
    if job.plan.splits:
        plan = job.plan.model_copy(update={"backward": "whole"})
        yield "plan.backward: whole", job.model_copy(update={"plan": plan})
    chunks = job.parallel.num_stages // job.parallel.stages
    stages = min(len(pool.workers), most_stages(job) // chunks)
    if stages > job.parallel.stages and not job.skip.ratio:
        parallel = job.parallel.model_copy(update={"stages": stages})
        yield f"parallel.stages: {stages}", job.model_copy(update={"parallel": parallel})
