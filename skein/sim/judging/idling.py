"""Judge of idle workers: none is without work for long while a job waits that may begin on it."""

from skein.config.quota import QuotasSpec
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.scheduling.scheduler import num_least
from skein.sim.judging.invariants import Violated
from skein.sim.world import World
from skein.topology.fleet import Fleet
from skein.types import JobId, JobState, WorkerId

MOST_IDLE_S = 10.0
"""Seconds that workers may be idle, all of them here, while a job that fits on them waits."""
LOOK_S = 0.5


class Idling:
    """Follows who has no work, and since when; what is asked of a coordinator begins anew with the next one."""

    def __init__(self) -> None:
        self._since: dict[JobId, tuple[int, frozenset[WorkerId], float]] = {}
        self._looks_at = 0.0

    def look(self, world: World) -> None:
        """Look now and then.

        Raises:
            Violated: a job waits, and for too long has had idle workers enough.
        """
        coordinator, now = world.coordinator, world.clock.now
        if now < self._looks_at or len(world.submitted) < 2 or coordinator is None or world.has_liars:
            return
        self._looks_at = now + LOOK_S
        idle = _idle(coordinator)
        waiting: dict[JobId, tuple[int, frozenset[WorkerId], float]] = {}
        for job in coordinator.view.waits.keys() - coordinator.view.runs.keys():
            # Who is kept for a job that has waited for longer is idle on purpose.
            here = frozenset(w for w in idle if coordinator.view.kept_for.get(w, job) == job)
            here = within_quota(coordinator, world.quotas, job, here)
            if not _would_run(coordinator, job, here):
                continue
            before = self._since.get(job, (world.term, here, now))
            # As long as a gang is left of those that were idle then, it has been so all the time.
            is_same = before[0] == world.term and _would_run(coordinator, job, here & before[1])
            waiting[job] = (world.term, here & before[1], before[2]) if is_same else (world.term, here, now)
            idle_s = now - waiting[job][2]
            if idle_s > MOST_IDLE_S:
                raise Violated(f"{sorted(waiting[job][1])} idle for {idle_s:.1f} s, and {job} waits")
        self._since = waiting


def _idle(coordinator: Coordinator) -> frozenset[WorkerId]:
    """Workers that are in no plan, nor with a run that has none yet, or is about to have another, or to end.

    Such a run may hold its plan back for who was lost, or wait until a store takes what it has come to: what it has
    meanwhile is its gang.
    """
    live = {worker for worker, entry in coordinator.membership.live.items() if not entry.is_leaving}
    for run in coordinator.view.runs.values():
        is_ending = run.job.halt is not None or run.job.version >= run.job.total_steps
        used = None if run.state is JobState.PLANNING or is_ending else run.plan
        live -= set(run.crew if used is None else used.workers)
    return frozenset(live)


def within_quota(
    coordinator: Coordinator, quotas: QuotasSpec, job: JobId, idle: frozenset[WorkerId]
) -> frozenset[WorkerId]:
    """Workers among the idle ones that a job's namespace may have still, those that come first."""
    jobs = coordinator.history.jobs
    quota, crews = quotas.of(jobs[job].namespace), []
    for other, run in coordinator.view.runs.items():
        if jobs[other].namespace == jobs[job].namespace:
            crews.append(len(run.crew))
    if quota.running_jobs is not None and sum(map(bool, crews)) >= quota.running_jobs:
        return frozenset()
    room = len(idle) if quota.workers is None else max(0, quota.workers - sum(crews))
    return frozenset(sorted(idle)[:room])


def _would_run(coordinator: Coordinator, job: JobId, idle: frozenset[WorkerId]) -> bool:
    spec = coordinator.history.jobs[job].spec
    if not idle or len(idle) < num_least(spec, len(coordinator.membership.live)):
        return False
    workers = tuple(coordinator.membership.live[worker].fleet_worker for worker in sorted(idle))
    return isinstance(make_balanced_plan(spec, Fleet(workers=workers, links=()), None, 0), Plan)
