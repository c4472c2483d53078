"""Planning, and choosing rows, as Ray tasks: what takes long uses the cluster and never blocks the coordinator.

Rules of this file
- Every request is answered: by tasks, by others if those are lost or late, or by this process. What is searched for and
  which find counts is told by `portfolio`; this file ships.
- Nobody waits for the compiler: until the search is compiled the plan is the balanced one, and the answer says that a
  better one may be had.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from typing import Protocol, cast

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.driver import choose_beside
from skein.plan.plan import Infeasible
from skein.plan.route.portfolio import Portfolio
from skein.protocol.coordinator.coordinator_io import ChooseRows, MakePlan, PlanMade, RowsChosen
from skein.protocol.coordinator.runs.placing.portfolio import (
    FoundPlan,
    answered,
    plan_here,
    portfolio_of,
    search,
    wants_search,
)

PLAN_S = 20.0
"""Seconds that one try may take beyond the job's budget, waiting for a free CPU included."""
NUM_TRIES = 2
CHOOSE_S = 120.0
"""Seconds for a choice of rows, waiting for a free CPU included."""
FEW_CANDIDATES = 2_000
"""So many are chosen among in a tenth of a second, and a task's process may take seconds to start."""
NICENESS = 15
"""Nice value of processes that plan."""
_log = logging.getLogger("coordinator")


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
    from skein.plan.route.warm import warm_up as compile_all

    compile_all()


def _search_behind(asked: MakePlan, seed: int) -> Iterator[FoundPlan]:
    _step_back()
    yield from search(asked, seed, now=time.monotonic)


def _choose_behind(asked: ChooseRows) -> RowsChosen:
    _step_back()
    return asked.answer()


_choose_task = ray.remote(num_cpus=1, max_retries=2)(_choose_behind)
_plan_task = ray.remote(num_cpus=1, max_retries=2)(_plan_behind)
_warm_task = ray.remote(num_cpus=1, max_retries=2)(_warm_up_behind)
_search_task = cast(_Searching, ray.remote(num_cpus=1, max_retries=0)(_search_behind))


async def choose_by_ray(asked: ChooseRows, limit_s: float = CHOOSE_S) -> RowsChosen:
    """The choice by a task of the Ray cluster that this process is in; by a thread here if small, lost or late."""
    if asked.num_candidates <= FEW_CANDIDATES:
        return await choose_beside(asked)
    running = _choose_task.remote(asked)
    try:
        async with asyncio.timeout(limit_s):
            return await running
    except TimeoutError:
        _log.warning("job=%s no choice of rows within %.0f s: made here", asked.run, limit_s)
    except RayError as error:
        _log.warning("job=%s a choice of rows was lost (%s): made here", asked.run, _last_line(error))
    finally:
        ray.cancel(running)
    return await choose_beside(asked)


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
        if not wants_search(asked.job):
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
                return answered(asked, Infeasible(reason=f"the planner failed: {_last_line(error)}"))
            except TimeoutError:
                _log.warning("job=%s no plan within %.0f s, trying again", job.name, self._limit_s)
            except RayError as error:
                _log.warning("job=%s planning was lost (%s), trying again", job.name, _last_line(error))
            finally:
                ray.cancel(running)
        return await asyncio.to_thread(plan_here, asked)

    # --- with one ---

    async def _portfolio(self, asked: MakePlan) -> PlanMade | None:
        """The best of several seeds within the time there is; None if none of them found anything."""
        portfolio = portfolio_of(asked.job, _num_cpus())
        turns = enumerate(portfolio.turns())
        searches = [self._follow(asked, number, turn.seed, portfolio) for number, turn in turns]
        try:
            async with asyncio.timeout(asked.job.plan.budget_s + self._limit_s):
                await asyncio.gather(*searches)
        except TimeoutError:
            _log.warning("job=%s some searches did not end in time", asked.job.name)
        return None if portfolio.best is None else portfolio.best.made

    async def _follow(self, asked: MakePlan, number: int, seed: int, portfolio: Portfolio[FoundPlan]) -> None:
        """Take what search number `number` finds, for as long as it lives."""
        stream = _search_task.remote(asked, seed)
        try:
            async for coming in stream:
                found = await coming
                portfolio.take(number, (found.cost_s,), found)
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


def _num_cpus() -> float:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("CPU", 1.0)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
