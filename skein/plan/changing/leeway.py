"""Leeway of a planner: what a job leaves to it, settled one way or another.

Rules of this file
- A settled job leaves nothing open: it says how many chunks each worker has, which matrices over the vocabulary are in
  shards, and whether backwards are split.
- The model of a job that leaves its vocabulary open is in blocks of rows, whatever is settled: an end that is not cut
  has all of its blocks in one stage. So workers read the plan's stages, and need not know what was open.
- What a plan has settled stays so as long as its stages are held, for another cut would move all of them.
- Ways are begun in the order of what they promise, and what that costs is counted in ops: equal jobs have equal ways
  begun within equal budgets, however busy the machine is.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from skein.config.job import AUTO_CHUNKS, JobSpec
from skein.errors import UserError
from skein.model.rows import VocabularySplit
from skein.plan.cut import cut_job, most_shards, most_stages
from skein.plan.load import stage_loads
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet

_SPLITS = (VocabularySplit.OFF, VocabularySplit.OUTPUT, VocabularySplit.BOTH)
_WORTHWHILE = 0.95
"""Share of a step without shards that one with them may take, to be worth having them."""
_BEGINNING = 20_000
"""Times that a search could evaluate all ops of a step while a way is planned and begun with.

Measured with 4 to 16 workers and 50 to 6,000 ops: 5,000 to 22,000."""


def settled(job: JobSpec, plan: Plan) -> JobSpec:
    """The job with what it leaves open as `plan` has it; as it is where the plan does not tell."""
    if job.parallel.vocabulary.split is VocabularySplit.AUTO:
        job = _with_shards(job, _split_of(job, plan))
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
    return tuple(way for cut in _cuts(job) for rows in _vocabularies(cut) for way in _backwards(rows))


def by_promise(ways: Sequence[JobSpec], fleet: Fleet) -> list[JobSpec]:
    """The ways with the most promising first, of equal ones the plainest: by arithmetic alone, as on equal workers."""
    flops_per_s = median(worker.profile.flops_per_s for worker in fleet.workers) if fleet.workers else 1.0
    hop_s = median(link.latency_s for link in fleet.links) if fleet.links else 0.0
    return sorted(ways, key=lambda way: _promised_s(way, flops_per_s, hop_s))


def _promised_s(way: JobSpec, flops_per_s: float, hop_s: float) -> float:
    """Seconds of a step on the worker with most work, and of what it waits for at both ends; infinite if none fits.

    A worker waits for one visit of each other's chunk, of which weight gradients need not be waited for, and for one
    trip there and back.
    """
    try:
        loads = stage_loads(way, cut_job(way))
    except UserError:
        return math.inf
    num_workers = way.parallel.stages
    # As they are held without a search: in turn.
    held = [loads[first::num_workers] for first in range(num_workers)]
    worked = max(sum(x.flops for x in chunks) for chunks in held) * way.batch.num_microbatches
    awaited = max(x.flops for x in loads) * (num_workers - 1) * (2 / 3 if way.plan.splits else 1)
    trip_s = 2 * hop_s * (len(loads) - 1)
    return ((worked + awaited) / flops_per_s + trip_s) / _least_share(way)


def beginning_ops(way: JobSpec) -> float:
    """Ops that a search could have evaluated in the time that it takes to begin with this way."""
    num_ops = way.batch.num_microbatches * way.num_visited_stages * (3 if way.plan.splits else 2)
    return float(_BEGINNING * num_ops)


def is_settled(job: JobSpec) -> bool:
    """Whether a job leaves nothing open."""
    is_cut = job.parallel.vocabulary.split is not VocabularySplit.AUTO
    return is_cut and job.parallel.chunks != "auto" and job.plan.backward != "auto"


def weighed_s(job: JobSpec, plan: Plan) -> float:
    """Predicted seconds of a step, by which ways to settle a job are compared: shards have to gain a twentieth."""
    return plan.predicted_step_s / _least_share(job)


def _least_share(job: JobSpec) -> float:
    return _WORTHWHILE if job.parallel.num_shards else 1.0


def _cuts(job: JobSpec) -> Iterator[JobSpec]:
    if job.parallel.chunks != "auto":
        yield job
        return
    most = most_stages(job) // job.parallel.stages
    may_cut = not job.skip.ratio and not job.aggregation.walkers.are_lines
    for chunks in AUTO_CHUNKS if may_cut else AUTO_CHUNKS[:1]:
        if chunks <= max(1, most):
            yield _with_chunks(job, chunks)


def _vocabularies(job: JobSpec) -> Iterator[JobSpec]:
    if job.parallel.vocabulary.split is not VocabularySplit.AUTO:
        yield job
        return
    may_cut = job.parallel.stages <= most_shards(job)
    for split in _SPLITS if may_cut else _SPLITS[:1]:
        yield _with_shards(job, split)


def _split_of(job: JobSpec, plan: Plan) -> VocabularySplit:
    """Matrices of which `plan` has a shard for each of a pipeline's workers, as a stage of its own."""
    inner, wanted = job.model.inner_layers, job.parallel.stages
    num_inputs = sum(stage.stop <= inner.start for stage in plan.stages)
    num_outputs = sum(stage.first > inner.stop for stage in plan.stages)
    if job.model.vocabulary_split is VocabularySplit.OFF or num_outputs != wanted:
        return VocabularySplit.OFF
    return VocabularySplit.BOTH if num_inputs == wanted else VocabularySplit.OUTPUT


def _backwards(job: JobSpec) -> Iterator[JobSpec]:
    if job.plan.backward != "auto":
        yield job
        return
    yield _with_backward(job, is_split=False)
    if job.model.has_split_backward:
        yield _with_backward(job, is_split=True)


def _with_chunks(job: JobSpec, chunks: int) -> JobSpec:
    return job.model_copy(update={"parallel": job.parallel.model_copy(update={"chunks": chunks})})


def _with_shards(job: JobSpec, split: VocabularySplit) -> JobSpec:
    # The model keeps the blocks that it has.
    vocabulary = job.parallel.vocabulary.model_copy(update={"split": split})
    parallel = job.parallel.model_copy(update={"vocabulary": vocabulary})
    return job.model_copy(update={"parallel": parallel})


def _with_backward(job: JobSpec, *, is_split: bool) -> JobSpec:
    backward = "split" if is_split else "whole"
    return job.model_copy(update={"plan": job.plan.model_copy(update={"backward": backward})})
