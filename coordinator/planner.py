"""Planning as a Ray task, so that a long search uses the cluster and never blocks the coordinator.

Every request is answered: by the task, by another task if that one is lost or late, or by this process.
"""

import asyncio
import logging

import ray
from ray.exceptions import RayError, RayTaskError

from skein.config.job import JobSpec
from skein.plan.balanced import make_plan
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet

PLAN_S = 20.0
"""What one try may take, waiting for a free CPU included."""
NUM_TRIES = 2
_log = logging.getLogger("coordinator")


def plan_here(job: JobSpec, fleet: Fleet, previous: Plan | None) -> Plan | Infeasible:
    """A plan that holds, made by this process."""
    plan = make_plan(job, fleet, previous, job.seed)
    if isinstance(plan, Infeasible):
        return plan
    wrong = violations(plan, job, fleet)
    return Infeasible(reason=f"the planner made a plan that {wrong[0]}") if wrong else plan


async def plan_in_thread(job: JobSpec, fleet: Fleet, previous: Plan | None) -> Plan | Infeasible:
    """A plan made off the event loop, without Ray."""
    return await asyncio.to_thread(plan_here, job, fleet, previous)


_plan_task = ray.remote(num_cpus=1, max_retries=2)(plan_here)


class RayPlanner:
    """Makes plans as tasks of the Ray cluster that this process is in.

    Args:
        limit_s: seconds for one try.
    """

    def __init__(self, *, limit_s: float = PLAN_S) -> None:
        self._limit_s = limit_s

    async def __call__(self, job: JobSpec, fleet: Fleet, previous: Plan | None) -> Plan | Infeasible:
        """The plan, or why there is none; never an exception of Ray's."""
        for _ in range(NUM_TRIES):
            asked = _plan_task.remote(job, fleet, previous)
            try:
                async with asyncio.timeout(self._limit_s):
                    return await asked
            except RayTaskError as error:
                # It would fail here too.
                return Infeasible(reason=f"the planner failed: {_last_line(error)}")
            except TimeoutError:
                _log.warning("job=%s no plan within %.0f s, trying again", job.name, self._limit_s)
            except RayError as error:
                _log.warning("job=%s planning was lost (%s), trying again", job.name, _last_line(error))
            finally:
                ray.cancel(asked)
        return await plan_in_thread(job, fleet, previous)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
