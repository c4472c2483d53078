"""Expectations of a job, said before it runs: what its aggregation costs, and which holders it will lack."""

from collections.abc import Iterable
from dataclasses import dataclass

from client.planning.estimates import Estimate, estimate_of_job, estimate_of_plan
from skein.config.job import JobSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.redundancy import shortfalls
from skein.plan.plan import Infeasible
from skein.topology.fleet import Fleet, FleetWorker, Link
from skein.wire.views import WorkerState, WorkerStatus

_MAY_WORK = (WorkerState.IDLE, WorkerState.WORKING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Cost of a job's aggregation, and a sentence for each thing that the job asks for and will not have."""

    estimate: Estimate
    warnings: tuple[str, ...] = ()


def expected(job: JobSpec, workers: Iterable[WorkerStatus], links: Iterable[Link]) -> Expected:
    """Bytes and seconds with the holders that a first plan would choose; bytes alone if some are missing."""
    found = sorted((worker for worker in workers if worker.state in _MAY_WORK), key=lambda x: x.worker)
    fleet = Fleet(
        workers=tuple(FleetWorker(worker=x.worker, site=x.site, profile=x.profile) for x in found),
        links=tuple(links),
    )
    plan = make_balanced_plan(job, fleet, None, seed=job.seed)
    if isinstance(plan, Infeasible):
        return Expected(estimate=estimate_of_job(job), warnings=(f"the job waits: {plan.reason}",))
    warnings = tuple(short.words for short in shortfalls(plan, job, fleet))
    if len(plan.workers) < job.parallel.stages * job.parallel.replicas:
        return Expected(estimate=estimate_of_job(job), warnings=warnings)
    return Expected(estimate=estimate_of_plan(job, fleet, plan), warnings=warnings)
