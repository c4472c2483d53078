"""What a job's aggregation is going to cost, said before it runs: on the workers that are there, or on any."""

from collections.abc import Iterable

from skein.config.job import JobSpec
from skein.plan.balanced import make_plan
from skein.plan.estimates import Estimate, estimate_of_job, estimate_of_plan
from skein.plan.plan import Plan
from skein.topology.fleet import Fleet, FleetWorker, Link
from skein.wire.views import WorkerState, WorkerStatus

_MAY_WORK = (WorkerState.IDLE, WorkerState.WORKING)


def expected(job: JobSpec, workers: Iterable[WorkerStatus], links: Iterable[Link]) -> Estimate:
    """Bytes and seconds with the holders that a first plan would choose; bytes alone if there is none."""
    found = sorted((worker for worker in workers if worker.state in _MAY_WORK), key=lambda x: x.worker)
    fleet = Fleet(
        workers=tuple(FleetWorker(worker=x.worker, site=x.site, profile=x.profile) for x in found),
        links=tuple(links),
    )
    plan = make_plan(job, fleet, None, seed=job.seed) if found else None
    if not isinstance(plan, Plan) or len(plan.workers) < job.parallel.stages * job.parallel.replicas:
        return estimate_of_job(job)
    return estimate_of_plan(job, fleet, plan)
