"""Every question to the planner is answered, whatever becomes of the tasks that look for the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from coordinator import planner
from coordinator.planner import NUM_TRIES, RayPlanner, plan_here
from skein.plan.plan import Infeasible, Plan
from skein.topology.fleet import Fleet, FleetWorker
from skein.types import SiteId, WorkerId
from tests.coordinator.builders import hello, job_spec, one_worker_plan

WORKER = FleetWorker(worker=WorkerId("w1"), site=SiteId("here"), profile=hello().profile)
FLEET = Fleet(workers=(WORKER,), links=())
Answer = Callable[[], Awaitable[Plan | Infeasible]]


class Tasks:
    """In place of Ray: tasks that answer as a test says, one after the other."""

    def __init__(self, *answers: Answer) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self.num_asked = 0
        self.num_cancelled = 0

    def remote(self, *args: object) -> Awaitable[Plan | Infeasible]:
        self.num_asked += 1
        return next(self._answers)()

    def cancel(self, asked: object) -> None:
        self.num_cancelled += 1


def with_tasks(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> Tasks:
    tasks = Tasks(*answers)
    monkeypatch.setattr(planner, "_plan_task", tasks)
    monkeypatch.setattr(ray, "cancel", tasks.cancel)
    return tasks


async def found() -> Plan | Infeasible:
    return one_worker_plan()


async def crashed() -> Plan | Infeasible:
    raise WorkerCrashedError


async def never() -> Plan | Infeasible:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody answers that")


async def wrong() -> Plan | Infeasible:
    raise RayTaskError("plan", "Traceback ...\nZeroDivisionError: division by zero", ZeroDivisionError())  # type: ignore[no-untyped-call]


async def test_a_task_gives_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, found)
    assert await RayPlanner()(job_spec(), FLEET, None) == one_worker_plan()
    assert tasks.num_asked == 1


async def test_a_lost_task_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, crashed, found)
    assert await RayPlanner()(job_spec(), FLEET, None) == one_worker_plan()
    assert tasks.num_asked == 2


async def test_where_no_task_answers_this_process_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, never, crashed)
    assert await RayPlanner(limit_s=0.01)(job_spec(), FLEET, None) == one_worker_plan()
    assert tasks.num_asked == NUM_TRIES
    assert tasks.num_cancelled == NUM_TRIES


async def test_a_planner_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tasks(monkeypatch, wrong)
    answer = await RayPlanner()(job_spec(), FLEET, None)
    assert answer == Infeasible(reason="the planner failed: ZeroDivisionError: division by zero")


async def test_a_question_that_is_withdrawn_ends_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, never)
    asking = asyncio.create_task(RayPlanner()(job_spec(), FLEET, None))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert tasks.num_cancelled == 1


def test_a_plan_that_does_not_hold_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "make_plan", lambda *_: one_worker_plan())
    answer = plan_here(job_spec(), Fleet(workers=(), links=()), None)
    assert isinstance(answer, Infeasible)
    assert "w1" in answer.reason
