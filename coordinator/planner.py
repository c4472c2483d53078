"""Planning as Ray tasks, so that a long search uses the cluster and never blocks the coordinator.

Rules of this file
- Every request is answered: by tasks, by others if those are lost or late, or by this process.
- A search runs several seeds side by side. Each hands out whatever is better than what it had, as soon as it has it;
  so a task that dies, or a budget that ends, costs what would have been found later and nothing else.
- Of what is found the least predicted step counts (with what moving costs, spread over the steps to come), of equal
  ones the first seed's. Seeds differ in nothing else, and their effort is counted in moves; so equal requests on an
  equal cluster have equal answers while all tasks live.
- Nobody waits for the compiler: until the search is compiled the plan is the balanced one, and the answer says that a
  better one may be had.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skein.config.job import JobSpec
from skein.plan.balanced import make_plan, reckoned_s
from skein.plan.changing.moving import between_s
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.rng import key

PLAN_S = 20.0
"""What one try may take beyond the job's budget, waiting for a free CPU included."""
NUM_TRIES = 2
NICENESS = 15
"""Of processes that plan."""
MAX_SEEDS = 8
"""More searches of one problem find hardly more."""
_SLICES = (0.2, 0.8)
"""Of the budget: a short search first, for the case that the long one never ends."""
_log = logging.getLogger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """What a search has found so far, and what a step costs with its share of moving."""

    made: PlanMade
    cost_s: float


def plan_here(asked: MakePlan) -> PlanMade:
    """A plan that holds, made by this process without a search."""
    job, fleet, previous = asked.job, asked.fleet, asked.previous
    current_s = None if previous is None else reckoned_s(job, fleet, previous)
    result = _held(make_plan(job, fleet, previous, job.seed), asked)
    move_s = between_s(job, fleet, previous, result) if isinstance(result, Plan) else 0.0
    return _answer(asked, result, current_s=current_s, move_s=move_s)


def _answer(
    asked: MakePlan, result: Plan | Infeasible, *, current_s: float | None = None, move_s: float = 0.0
) -> PlanMade:
    return PlanMade(request=asked.request, result=result, current_s=current_s, move_s=move_s)


def _held(plan: Plan | Infeasible, asked: MakePlan) -> Plan | Infeasible:
    if isinstance(plan, Infeasible):
        return plan
    wrong = violations(plan, asked.job, asked.fleet)
    return Infeasible(reason=f"the planner made a plan that {wrong[0]}") if wrong else plan


def search(asked: MakePlan, seed: int) -> Iterator[FoundPlan]:
    """Plans that hold, each better than the one before; nothing if none exists."""
    # Only here: the coordinator's own process starts without numba.
    from skein.plan.searched import make_plan as make_searched_plan
    from skein.plan.searched import reckoned_s as reckoned_by_search_s

    previous, least_s = asked.previous, math.inf
    current_s = None if previous is None else reckoned_by_search_s(asked.job, asked.fleet, previous)
    for share in _SLICES:
        budget_s = share * asked.job.plan.budget_s
        until_s = time.monotonic() + budget_s
        plan = make_searched_plan(
            _with_budget(asked.job, budget_s),
            asked.fleet,
            previous,
            seed,
            may_go_on=lambda until_s=until_s: time.monotonic() < until_s,  # type: ignore[misc]
            steps_left=asked.steps_left,
        )
        plan = _held(plan, asked)
        if isinstance(plan, Infeasible):
            return
        move_s = between_s(asked.job, asked.fleet, previous, plan)
        cost_s = plan.predicted_step_s + move_s / max(1, asked.steps_left)
        if cost_s < least_s:
            least_s = cost_s
            yield FoundPlan(made=_answer(asked, plan, current_s=current_s, move_s=move_s), cost_s=cost_s)


def _with_budget(job: JobSpec, budget_s: float) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"budget_s": budget_s})})


def warm_up() -> None:
    """Have the search compiled on this machine."""
    from skein.plan.route.warm import warm_up as compile_all

    compile_all()


async def plan_in_thread(asked: MakePlan) -> PlanMade:
    """A plan made off the event loop, without Ray."""
    return await asyncio.to_thread(plan_here, asked)


class _Searching(Protocol):
    """A Ray task whose results come one by one, as Ray's own types do not know it."""

    def remote(self, asked: MakePlan, seed: int) -> AsyncIterator[Awaitable[FoundPlan]]: ...


# --- as tasks: behind training and the coordinator, which Ray's own setting would put back as well ---


def _step_back() -> None:
    """Lower the priority of this process, for good: Ray keeps processes of tasks and of actors apart."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def _plan_behind(asked: MakePlan) -> PlanMade:
    _step_back()
    return plan_here(asked)


def _warm_up_behind() -> None:
    _step_back()
    warm_up()


def _search_behind(asked: MakePlan, seed: int) -> Iterator[FoundPlan]:
    _step_back()
    yield from search(asked, seed)


_plan_task = ray.remote(num_cpus=1, max_retries=2)(_plan_behind)
_warm_task = ray.remote(num_cpus=1, max_retries=2)(_warm_up_behind)
_search_task = cast(_Searching, ray.remote(num_cpus=1, max_retries=0)(_search_behind))


class RayPlanner:
    """Makes plans as tasks of the Ray cluster that this process is in.

    Args:
        limit_s: seconds for one try, beyond what the job lets a search take.
    """

    def __init__(self, *, limit_s: float = PLAN_S) -> None:
        self._limit_s = limit_s
        self._warming: asyncio.Task[bool] | None = None

    def warm_up(self) -> None:
        """Begin to compile the search on every machine of the cluster. Wanted once, on the event loop."""
        self._warming = asyncio.create_task(self._warm())

    async def __call__(self, asked: MakePlan) -> PlanMade:
        """The plan, or why there is none; never an exception of Ray's."""
        if asked.job.plan.method == "balanced" or asked.job.plan.budget_s == 0:
            return await self._balanced(asked)
        if await self._is_warm(asked.job.plan.budget_s):
            found = await self._portfolio(asked)
            if found is not None:
                return found
        return replace(await self._balanced(asked), may_improve=True)

    # --- without a search ---

    async def _balanced(self, asked: MakePlan) -> PlanMade:
        job = asked.job
        for _ in range(NUM_TRIES):
            running = _plan_task.remote(asked)
            try:
                async with asyncio.timeout(self._limit_s):
                    return await running
            except RayTaskError as error:
                # It would fail here too.
                return _answer(asked, Infeasible(reason=f"the planner failed: {_last_line(error)}"))
            except TimeoutError:
                _log.warning("job=%s no plan within %.0f s, trying again", job.name, self._limit_s)
            except RayError as error:
                _log.warning("job=%s planning was lost (%s), trying again", job.name, _last_line(error))
            finally:
                ray.cancel(running)
        return await plan_in_thread(asked)

    # --- with one ---

    async def _portfolio(self, asked: MakePlan) -> PlanMade | None:
        """The best of several seeds within the time there is; None if none of them found anything."""
        best: dict[int, FoundPlan] = {}
        searches = [self._follow(asked, number, best) for number in range(_num_seeds())]
        try:
            async with asyncio.timeout(asked.job.plan.budget_s + self._limit_s):
                await asyncio.gather(*searches)
        except TimeoutError:
            _log.warning("job=%s some searches did not end in time", asked.job.name)
        if not best:
            return None
        number = min(best, key=lambda n: (best[n].cost_s, n))
        return best[number].made

    async def _follow(self, asked: MakePlan, number: int, best: dict[int, FoundPlan]) -> None:
        """Keep what search number `number` finds, for as long as it lives."""
        seed = key(asked.job.seed, "portfolio", number) if number else asked.job.seed
        stream = _search_task.remote(asked, seed)
        try:
            async for coming in stream:
                best[number] = await coming
        except RayError as error:
            _log.warning("job=%s search %d was lost: %s", asked.job.name, number, _last_line(error))
        finally:
            ray.cancel(cast("ray.ObjectRef[FoundPlan]", stream))

    # --- the compiler ---

    async def _is_warm(self, budget_s: float) -> bool:
        """Whether the search is compiled, or will be within the budget."""
        if self._warming is None:
            return True
        await asyncio.wait({self._warming}, timeout=budget_s)
        return self._warming.done() and self._warming.result()

    async def _warm(self) -> bool:
        began_s = time.monotonic()
        machines = [
            str(x["NodeID"])
            for x in ray.nodes()  # type: ignore[no-untyped-call]
            if x["Alive"] and x["Resources"].get("CPU")
        ]
        tasks = [
            _warm_task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=True)
            ).remote()
            for machine in machines
        ]
        try:
            await asyncio.gather(*tasks)
        except RayError as error:
            _log.warning("plans are not searched for: %s", _last_line(error))
            return False
        _log.info("the search for plans is compiled, after %.1f s", time.monotonic() - began_s)
        return True


def _num_seeds() -> int:
    """One search for each CPU of the cluster."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return max(1, min(MAX_SEEDS, int(resources.get("CPU", 1))))


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
