"""Clauses of a searched plan beside what it moves: how it began and rather than what, and who holds most."""

from collections.abc import Iterator, Sequence

from skein.config.job import JobSpec
from skein.plan.changing.clauses import Clause, and_more
from skein.plan.clock.holding import planned_uses
from skein.plan.place import Pool
from skein.plan.plan import Plan
from skein.topology.doubts import questioned_links
from skein.topology.fleet import Fleet
from skein.topology.links import F64
from skein.units import counted, format_bytes

NUM_LOST = 2
"""Starts, or ways to settle a job, that a plan tells of beside the best one."""


def manner(job: JobSpec) -> str:
    """Manner in which a job's model is cut and its gradients are made, in words."""
    parallel = job.parallel
    chunks = (parallel.num_stages - parallel.num_shards) // parallel.stages
    shards = f", vocabulary {parallel.vocabulary.split} in shards" if parallel.num_shards else ""
    return f"{counted(chunks, 'chunk')}{shards} and {job.plan.backward} backwards"


def settled_so(job: JobSpec, others: Sequence[tuple[JobSpec, float]]) -> Clause:
    """Clause about what the job left open, and the next ways with the seconds that they began with."""
    lost = " or ".join(f"{manner(other)} ({seconds:.3g} s)" for other, seconds in others)
    return Clause(f"{manner(job)} rather than {lost} before the search")


def searched_from(found_s: float, started: Sequence[tuple[float, str]]) -> Clause:
    """Clause about the step found, and about the order that was best before, with the next ones."""
    (before_s, name), *others = started
    lost = ", then ".join(f"{other} {seconds:.3g} s" for seconds, other in others[:NUM_LOST])
    told = f"{name}, then {lost}" if lost else name
    return Clause(f"{found_s:.3g} s a step, {before_s:.3g} s before the search ({told})")


def fullest(plan: Plan, job: JobSpec) -> Clause:
    """Clause about the worker that the plan has hold most bytes, and how many microbatches it has in flight."""
    use = max(planned_uses(plan, job), key=lambda x: x.fixed_bytes + x.planned_bytes)
    held = ", ".join(map(str, use.planned_peaks))
    num_bytes = format_bytes(use.fixed_bytes + use.planned_bytes)
    return Clause(f"{use.worker} holds most: {num_bytes} with up to {held} microbatches at its stages")


def doubted(transfer_s: F64, fleet: Fleet, pool: Pool) -> Iterator[Clause]:
    """Clause about links that should be measured again; none if none looks broken."""
    doubts = questioned_links(transfer_s, [worker.site for worker in fleet.workers])
    if doubts:
        worst = doubts[0]
        link = f"{pool.workers[worst.sender]} -> {pool.workers[worst.receiver]}"
        why = f"{worst.factor:.0f} times what {worst.like} take{and_more(doubts[1:])}"
        yield Clause(f"measure {link} again: {why}")
