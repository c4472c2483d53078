"""Judge of recovery: once faults are over, each stage has the holders that its job asks for, if workers for them exist.

Rules of this file
- A worker exists for a stage if a plan of the workers that the job has, or may have, gives its stages more holders. So
  memory, quotas and devices that cannot share a stage count as the planner has them.
- Workers get their places between two steps. Where steps are very long, `NUM_STEPS` of them are waited for too.
- Workers that lied may be excluded for good, so they do not count. Where any worker may lie, measurements may be lies
  too, and nothing is judged.
"""

from skein.plan.changing.redundancy import num_missing
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.coordinator.view import RunView
from skein.sim.judging.idling import within_quota
from skein.sim.judging.invariants import Violated
from skein.sim.world import World
from skein.topology.fleet import Fleet
from skein.types import JobId, WorkerId

WHOLE_S = 120.0
"""Simulated seconds from the last fault until each stage has its holders."""
NUM_STEPS = 4
LOOK_S = 1.0


class Recovery:
    """Follows which runs have too few holders though workers for them exist, and since when.

    Args:
        quiet_s: simulated time at which the last fault is over.
    """

    def __init__(self, *, quiet_s: float) -> None:
        self._since: dict[JobId, tuple[float, int]] = {}
        """By run with too few holders: since when, and at which version it was then."""
        self._looks_at = quiet_s

    def is_whole(self, world: World) -> bool:
        """Whether the faults are over, and every run has the holders that it can have; asked after every event.

        Raises:
            Violated: a run has had too few holders for too long.
        """
        coordinator, now = world.coordinator, world.clock.now
        if now < self._looks_at or coordinator is None or world.has_liars:
            return False
        self._looks_at = now + LOOK_S
        runs = coordinator.view.runs
        short = [job for job, run in runs.items() if _is_short(world, coordinator, run)]
        self._since = {job: self._since.get(job, (now, runs[job].job.version)) for job in short}
        for job, (since, version) in self._since.items():
            run = runs[job]
            has_stepped = run.plan is None or run.job.version >= version + NUM_STEPS
            if now - since > WHOLE_S and has_stepped:
                raise Violated(
                    f"{now - since:.0f} s after the last fault {job} has {_told(run)}, and workers for more "
                    f"exist; excluded: {[*run.exclusions]}"
                )
        return not short


def _told(run: RunView) -> str:
    if run.plan is None:
        return "no plan"
    return ", ".join(f"stage {x.index} on {'/'.join(run.plan.holders(x.index))}" for x in run.plan.stages)


def _is_short(world: World, coordinator: Coordinator, run: RunView) -> bool:
    """Whether a run that is not about to end has fewer holders than it could have."""
    job = run.job
    if job.halt is not None or job.version >= job.total_steps:
        return False
    replicas = job.spec.parallel.replicas
    if run.plan is not None and not num_missing(run.plan, replicas):
        return False
    usable = [
        coordinator.membership.live[worker].fleet_worker
        for worker in sorted(_usable(coordinator, world, run))
        if not _has_lied(world, worker)
    ]
    made = world.planner(job.spec, Fleet(workers=tuple(usable), links=()), None, 0)
    if not isinstance(made, Plan):
        return False
    return run.plan is None or num_missing(made, replicas) < num_missing(run.plan, replicas)


def _has_lied(world: World, worker: WorkerId) -> bool:
    return worker in world.workers and world.workers[worker].has_lied


def _usable(coordinator: Coordinator, world: World, run: RunView) -> frozenset[WorkerId]:
    """Workers that stay: those that the run has, and free ones that it may have."""
    view, job = coordinator.view, run.job.job
    staying = {worker for worker, entry in coordinator.membership.live.items() if not entry.is_going}
    owned = {worker for other in view.runs.values() for worker in other.crew}
    free = frozenset(worker for worker in staying - owned if view.kept_for.get(worker, job) == job)
    return (frozenset(run.crew) & staying) | within_quota(coordinator, world.quotas, job, free)
