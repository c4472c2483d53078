"""Every question to the planner is answered, whatever becomes of the tasks that look for the answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayTaskError, WorkerCrashedError

from coordinator import planner
from coordinator.planner import NUM_TRIES, RayPlanner, choose_by_ray
from skein.config.job import PlanSpec
from skein.numeric.coreset.greedy import Greedy
from skein.numeric.coreset.portions import Picking, Portion
from skein.plan import searched
from skein.plan.balanced import make_balanced_plan
from skein.plan.check import violations
from skein.plan.plan import Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import ChooseRows, MakePlan, PlanMade, RowsChosen
from skein.protocol.coordinator.runs.placing.portfolio import FoundPlan, plan_here, search
from skein.topology.fleet import Fleet, FleetWorker
from skein.types import JobId, SiteId, WorkerId
from tests.coordinator.builders import hello, job_spec, one_worker_plan

WORKER = FleetWorker(worker=WorkerId("w1"), site=SiteId("here"), profile=hello().profile)
FLEET = Fleet(workers=(WORKER,), links=())
Answer = Callable[[], Awaitable[PlanMade]]


def asked(method: str = "balanced", *, budget_s: float = 0.0, fleet: Fleet = FLEET) -> MakePlan:
    plan = PlanSpec.model_validate({"method": method, "budget_s": budget_s})
    spec = job_spec().model_copy(update={"plan": plan})
    return MakePlan(request=7, run=JobId("j"), job=spec, fleet=fleet, previous=None, steps_left=10)


def answer(result: Plan | Infeasible, *, may_improve: bool = False) -> PlanMade:
    return PlanMade(request=7, result=result, may_improve=may_improve)


class Tasks:
    """In place of Ray: tasks that answer as a test says, one after the other."""

    def __init__(self, *answers: Answer) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self.num_asked = 0
        self.num_cancelled = 0

    def remote(self, *args: object) -> Awaitable[PlanMade]:
        self.num_asked += 1
        return next(self._answers)()

    def cancel(self, asked: object) -> None:
        self.num_cancelled += 1


def with_tasks(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> Tasks:
    tasks = Tasks(*answers)
    monkeypatch.setattr(planner, "_plan_task", tasks)
    monkeypatch.setattr(ray, "cancel", tasks.cancel)
    return tasks


async def found() -> PlanMade:
    return answer(one_worker_plan())


async def crashed() -> PlanMade:
    raise WorkerCrashedError


async def never() -> PlanMade:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody answers that")


async def wrong() -> PlanMade:
    raise RayTaskError("plan", "Traceback ...\nZeroDivisionError: division by zero", ZeroDivisionError())  # type: ignore[no-untyped-call]


# --- one task ---


async def test_a_task_gives_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, found)
    assert await RayPlanner()(asked()) == answer(one_worker_plan())
    assert tasks.num_asked == 1


async def test_a_lost_task_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, crashed, found)
    assert await RayPlanner()(asked()) == answer(one_worker_plan())
    assert tasks.num_asked == 2


async def test_where_no_task_answers_this_process_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, never, crashed)
    assert await RayPlanner(limit_s=0.01)(asked()) == answer(one_worker_plan())
    assert tasks.num_asked == NUM_TRIES
    assert tasks.num_cancelled == NUM_TRIES


async def test_a_planner_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tasks(monkeypatch, wrong)
    made = await RayPlanner()(asked())
    assert made == answer(Infeasible(reason="the planner failed: ZeroDivisionError: division by zero"))


async def test_a_question_that_is_withdrawn_ends_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = with_tasks(monkeypatch, never)
    asking = asyncio.create_task(RayPlanner()(asked()))
    _, pending = await asyncio.wait({asking}, timeout=0)
    assert pending
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert tasks.num_cancelled == 1


def test_a_plan_that_does_not_hold_is_none() -> None:
    made = plan_here(asked(fleet=Fleet(workers=(), links=())), lambda *_: one_worker_plan())
    assert isinstance(made.result, Infeasible)
    assert "w1" in made.result.reason


# --- several searches ---

Course = Sequence[float | Exception | None]
"""What one search does in turn: find a step of so many seconds, die, or say nothing more (None)."""


class Searches:
    """In place of Ray: as many searches as there are courses, in the order of their numbers."""

    def __init__(self, *courses: Course) -> None:
        self._courses = courses
        self.seeds: list[int] = []
        self.num_cancelled = 0

    def remote(self, asked: MakePlan, seed: int) -> AsyncIterator[Awaitable[FoundPlan]]:
        self.seeds.append(seed)
        return self._run(self._courses[len(self.seeds) - 1])

    def cancel(self, asked: object) -> None:
        self.num_cancelled += 1

    async def _run(self, course: Course) -> AsyncIterator[Awaitable[FoundPlan]]:
        for event in course:
            yield self._next(event)

    async def _next(self, event: float | Exception | None) -> FoundPlan:
        if isinstance(event, Exception):
            raise event
        if event is None:
            await asyncio.get_running_loop().create_future()
        assert isinstance(event, float)
        return FoundPlan(made=PlanMade(request=7, result=plan_of(event), current_s=2.0), cost_s=event)


def plan_of(step_s: float) -> Plan:
    return replace(one_worker_plan(), predicted_step_s=step_s)


def with_searches(monkeypatch: pytest.MonkeyPatch, *courses: Course) -> Searches:
    searches = Searches(*courses)
    monkeypatch.setattr(planner, "_search_task", searches)
    monkeypatch.setattr(planner, "_plan_task", Tasks(found))
    monkeypatch.setattr(ray, "cancel", searches.cancel)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(len(courses))})
    return searches


SEARCH = asked("search", budget_s=0.01)


async def test_the_shortest_step_of_all_seeds_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = with_searches(monkeypatch, [3.0], [2.5, 1.5], [2.0])
    made = await RayPlanner()(SEARCH)
    assert made == PlanMade(request=7, result=plan_of(1.5), current_s=2.0)
    assert len(set(searches.seeds)) == 3
    assert searches.num_cancelled == 3


async def test_seeds_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = with_searches(monkeypatch, [1.0], [1.0]), Searches([1.0], [1.0])
    await RayPlanner()(SEARCH)
    monkeypatch.setattr(planner, "_search_task", again)
    await RayPlanner()(SEARCH)
    assert first.seeds == again.seeds


async def test_what_a_task_had_found_when_it_died_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_searches(monkeypatch, [3.0], [2.5, 1.5, WorkerCrashedError()])
    made = await RayPlanner()(SEARCH)
    assert made.result == plan_of(1.5)


async def test_a_search_that_never_ends_counts_with_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = with_searches(monkeypatch, [3.0], [2.5, None])
    made = await RayPlanner(limit_s=0.05)(SEARCH)
    assert made.result == plan_of(2.5)
    assert searches.num_cancelled == 2


async def test_where_all_searches_die_the_balanced_plan_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with_searches(monkeypatch, [WorkerCrashedError()], [WorkerCrashedError()])
    assert await RayPlanner()(SEARCH) == answer(one_worker_plan(), may_improve=True)


async def test_a_search_that_is_being_compiled_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = with_searches(monkeypatch, [1.0])
    compiled = asyncio.Event()

    class Compiling(RayPlanner):
        async def _warm(self) -> bool:
            return await compiled.wait()

    made_by = Compiling()
    made_by.warm_up()
    assert await made_by(SEARCH) == answer(one_worker_plan(), may_improve=True)
    assert searches.seeds == []
    compiled.set()
    assert (await made_by(SEARCH)).result == plan_of(1.0)


async def test_where_the_search_cannot_be_compiled_plans_are_balanced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_searches(monkeypatch, [1.0])

    class Broken(RayPlanner):
        async def _warm(self) -> bool:
            return False

    made_by = Broken()
    made_by.warm_up()
    assert await made_by(SEARCH) == answer(one_worker_plan(), may_improve=True)


def test_a_search_hands_out_plans_that_hold_each_better_than_the_last() -> None:
    question = asked("search", budget_s=0.02)
    plans = [
        found.made.result
        for found in search(question, 1, now=lambda: 0.0)
        if isinstance(found.made.result, Plan)
    ]
    assert plans
    assert all(violations(plan, question.job, question.fleet) == () for plan in plans)
    steps_s = [plan.predicted_step_s for plan in plans]
    assert steps_s == sorted(set(steps_s), reverse=True)


def test_the_plan_so_far_is_reckoned_beside_the_new_one() -> None:
    # A search goes by the mean under 3 % jitter.
    for method, by in (("search", 0.03), ("balanced", 1e-9)):
        question = replace(asked(method, budget_s=0.02), previous=one_worker_plan())
        made = (
            plan_here(question) if method == "balanced" else [*search(question, 1, now=lambda: 0.0)][-1].made
        )
        assert made.current_s == pytest.approx(one_worker_plan().predicted_step_s, rel=by)


def test_a_search_keeps_a_plan_that_does_not_hold_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(one_worker_plan(), paths=())
    monkeypatch.setattr(searched, "make_searched_plan", lambda *_, **__: wrong)
    assert list(search(asked("search", budget_s=0.02), 1, now=lambda: 0.0)) == []


def test_a_search_finds_nothing_where_no_plan_exists() -> None:
    question = asked("search", budget_s=0.02, fleet=Fleet(workers=(), links=()))
    assert isinstance(make_balanced_plan(question.job, question.fleet, None, 0), Infeasible)
    assert list(search(question, 1, now=lambda: 0.0)) == []


# --- choices of rows ---


def with_choices(
    monkeypatch: pytest.MonkeyPatch, choose: Callable[[], Awaitable[RowsChosen]]
) -> list[object]:
    """Tasks that answer so, in place of Ray; gives what is cancelled."""
    monkeypatch.setattr(planner, "FEW_CANDIDATES", -1)
    cancelled: list[object] = []
    monkeypatch.setattr(planner, "_choose_task", SimpleNamespace(remote=lambda _asked: choose()))
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    return cancelled


def rows_asked() -> ChooseRows:
    portion = Portion(num_rows=20, block_rows=2, num_ways=1, ways=(0,))
    picking = Picking(num_picks=5, num_rows=20, block_rows=2, is_local=False, form=Greedy.AUTO, seed=3)
    worker = WorkerId("w1")
    return ChooseRows(
        request=4,
        run=JobId("j"),
        portions={worker: portion},
        proposed={worker: "it was lost"},
        picking=picking,
    )


async def test_a_task_chooses_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for, other = rows_asked(), replace(rows_asked(), request=5).answer()

    async def choose() -> RowsChosen:
        return other

    cancelled = with_choices(monkeypatch, choose)
    assert await choose_by_ray(asked_for) is other
    assert len(cancelled) == 1


@pytest.mark.parametrize("lost", [crashed, never, wrong])
async def test_rows_are_chosen_here_where_no_task_does(monkeypatch: pytest.MonkeyPatch, lost: Answer) -> None:
    async def choose() -> RowsChosen:
        await lost()
        raise AssertionError("nobody answers that")

    with_choices(monkeypatch, choose)
    asked_for = rows_asked()
    made = await choose_by_ray(asked_for, limit_s=0.05)
    assert made.request == asked_for.request
    assert made.chosen.choice.digest == asked_for.answer().chosen.choice.digest
    assert made.chosen.faults == {WorkerId("w1"): "it was lost"}


async def test_a_small_choice_waits_for_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with_choices(monkeypatch, never_asked)
    monkeypatch.setattr(planner, "FEW_CANDIDATES", 0)
    asked_for = rows_asked()
    assert asked_for.num_candidates == 0
    assert (await choose_by_ray(asked_for)).request == asked_for.request


async def never_asked() -> RowsChosen:
    raise AssertionError("a task was asked")
