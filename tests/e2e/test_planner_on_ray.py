"""Searches and choices as tasks of a real Ray cluster: some are killed, and what they had found is not lost."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE

import numpy as np
import psutil
import pytest
import ray

from coordinator import planner
from coordinator.planner import RayPlanner, choose_by_ray
from skein.config.data.coreset import CoresetSpec
from skein.config.job import JobSpec, PlanSpec
from skein.numeric.coreset.features import vectors
from skein.numeric.coreset.portions import Picking, Portion, pick_candidates
from skein.plan.check import violations
from skein.plan.plan import Plan
from skein.plan.route.portfolio import Portfolio
from skein.protocol.coordinator.coordinator_io import ChooseRows, MakePlan
from skein.protocol.coordinator.runs.placing.portfolio import FoundPlan
from skein.topology.fleet import Fleet
from skein.types import JobId, WorkerId
from tests.plan.builders import fleet, job

LIMIT_S = 300.0
POLL_S = 0.05


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two CPUs, to which this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        command = [sys.executable, "-m", "tests.e2e.lone_ray"]
        with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as lone:
            assert lone.stdout is not None
            ray.init(address=lone.stdout.readline().removesuffix("\n") or "nowhere", log_to_driver=False)
            try:
                yield
            finally:
                ray.shutdown()
                # The end of its input.
                lone.communicate()


def asked(*, budget_s: float) -> MakePlan:
    spec: JobSpec = job(stages=4, replicas=2, num_layers=8, num_microbatches=16)
    spec = spec.model_copy(update={"plan": PlanSpec(budget_s=budget_s)})
    on: Fleet = fleet([1e9, 2e9, 1e9, 3e9, 1e9, 2e9, 1e9, 1e9])
    return MakePlan(request=1, run=JobId("j"), job=spec, fleet=on, previous=None, steps_left=100)


def searching() -> list[psutil.Process]:
    """Processes that run a search now."""
    return [x for x in psutil.Process().children(recursive=True) if _words(x)[:1] == ["ray::_search_behind"]]


def _words(process: psutil.Process) -> list[str]:
    """What a process was started with; nothing if it has ended meanwhile."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


class Watched(RayPlanner):
    """Lets a test see what searches have found so far."""

    portfolio: Portfolio[FoundPlan]

    async def _follow(self, asked: MakePlan, number: int, seed: int, portfolio: Portfolio[FoundPlan]) -> None:
        self.portfolio = portfolio
        await super()._follow(asked, number, seed, portfolio)


async def until_compiled(planner: RayPlanner) -> None:
    until_s = time.monotonic() + LIMIT_S
    while (await planner(asked(budget_s=0.2))).may_improve:
        assert time.monotonic() < until_s


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("num_killed", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_killed_searches_cost_only_what_they_had_yet_to_find(num_killed: int) -> None:
    planner = Watched()
    planner.warm_up()
    await until_compiled(planner)
    planner.portfolio = Portfolio(seeds=())
    question = asked(budget_s=4.0)
    asking = asyncio.create_task(planner(question))
    until_s = time.monotonic() + LIMIT_S
    while planner.portfolio.best is None or len(searching()) < 2:
        assert time.monotonic() < until_s
        await asyncio.sleep(POLL_S)
    had = planner.portfolio.best.cost_s
    victims = searching()[:num_killed]
    assert len(victims) == num_killed
    for victim in victims:
        victim.kill()
    made = await asking
    assert isinstance(made.result, Plan)
    assert violations(made.result, question.job, question.fleet) == ()
    assert not made.may_improve
    assert made.result.predicted_step_s <= had


async def test_rows_are_chosen_by_a_task_as_they_are_here(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "FEW_CANDIDATES", 0)
    spec = CoresetSpec(method="craig", fraction=0.1)
    picking = Picking.at(spec, 3, num_rows=400, block_rows=8)
    x, y = np.random.default_rng(1).normal(size=(400, 6)), np.arange(400) % 3
    portions = {
        WorkerId(f"w{i}"): Portion(num_rows=400, block_rows=8, num_ways=2, ways=(i,)) for i in range(2)
    }
    proposed = {
        worker: pick_candidates(vectors(x[own.ids]), y[own.ids], own.ids, picking)
        for worker, own in portions.items()
    }
    wanted = ChooseRows(request=1, run=JobId("j"), portions=portions, proposed=proposed, picking=picking)
    made = await choose_by_ray(wanted, limit_s=LIMIT_S)
    assert made.chosen.choice.digest == wanted.answer().chosen.choice.digest
    assert (made.request, len(made.chosen.choice.ids), made.chosen.faults) == (1, 40, {})
