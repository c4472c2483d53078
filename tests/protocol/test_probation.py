"""When exclusions end, which end of a broken link keeps its work, and how often a newcomer's place is tried."""

from dataclasses import replace
from itertools import pairwise

import pytest

from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.coordinator.runs.improving.joining import MAX_EARLY, MAX_FAILURES
from skein.protocol.coordinator.runs.improving.replanning import SHORT_PAUSE_S
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.coordinator.runs.workers.probation import (
    CONTRADICTED_FIRST_S,
    CONTRADICTED_LAST_S,
    FAILED_FIRST_S,
    HEARSAY_FIRST_S,
    HEARSAY_LAST_S,
    ExclusionCause,
    Pauses,
    Probation,
)
from skein.protocol.log.records import GenerationOpened, IncidentKind
from skein.protocol.messages.directives import NewGeneration, Prefetch
from skein.protocol.messages.reports import Beat, Prefetched, Suspected, Trouble
from skein.types import StageSpec, WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import grid_plan, holder

A, B = holder(0, 0), holder(0, 1)


# --- pauses ---


def pauses(kind: Pauses, *, count: int) -> list[float]:
    """Pauses of a worker that is excluded again as soon as it is back."""
    probation, now, found = Probation(), 0.0, []
    for _ in range(count):
        began = now
        excluded = {A: kind}
        assert probation.over(excluded, now=now) == []
        while not probation.over(excluded, now=now):
            now += 1.0
        found.append(now - began)
        probation.let_back(A, is_on_probation=True)
    return found


def test_pauses_grow_to_a_bound_that_is_short_for_hearsay() -> None:
    assert pauses(Pauses.HEARSAY, count=5) == [HEARSAY_FIRST_S, 20.0, HEARSAY_LAST_S, 40.0, 40.0]
    assert pauses(Pauses.CONTRADICTED, count=3) == [CONTRADICTED_FIRST_S, CONTRADICTED_LAST_S, 60.0]
    assert pauses(Pauses.FAILED, count=3) == [FAILED_FIRST_S, 60.0, 120.0]


def test_a_worker_is_on_probation_until_a_step_is_committed_with_it() -> None:
    probation = Probation()
    probation.let_back(A, is_on_probation=True)
    probation.proved(grid_plan(stages=1, replicas=1, num_microbatches=1))
    assert A not in probation
    probation.let_back(B, is_on_probation=True)
    probation.proved(grid_plan(stages=1, replicas=1, num_microbatches=1))
    assert B in probation
    probation.forget(B)
    assert B not in probation


# --- which end of a link goes ---


def test_of_equals_the_accused_goes() -> None:
    plan = grid_plan()
    assert Probation().worker_to_go(holder(0, 0), holder(1, 0), plan) == holder(1, 0)
    assert Probation().worker_to_go(holder(1, 0), holder(0, 0), plan) == holder(0, 0)
    assert Probation().worker_to_go(holder(1, 0), holder(0, 0), None) == holder(0, 0)


def test_the_last_holder_of_a_stage_keeps_its_work_whoever_accuses() -> None:
    plan = grid_plan()
    fewer = replace(plan, chunks=tuple(x for x in plan.chunks if x.chunk.worker != holder(1, 1)))
    for accuser, accused in ((holder(0, 0), holder(1, 0)), (holder(1, 0), holder(0, 0))):
        assert Probation().worker_to_go(accuser, accused, fewer) == holder(0, 0)


def test_a_worker_without_a_stage_goes_first_and_one_on_probation_before_it() -> None:
    plan, probation = grid_plan(), Probation()
    assert probation.worker_to_go(WorkerId("spare"), holder(1, 0), plan) == "spare"
    probation.let_back(holder(1, 0), is_on_probation=True)
    assert probation.worker_to_go(WorkerId("spare"), holder(1, 0), plan) == holder(1, 0)


# --- in a run ---


def settled(plan: Plan, *, steps: int = 1000) -> Desk:
    desk = Desk()
    desk.join(*plan.workers)
    desk.submit(small_job(stages=len(plan.stages), replicas=2, steps=steps))
    desk.settle(plan)
    return desk


def resumed(desk: Desk, plan: Plan) -> None:
    """All members have acknowledged a new generation and have built again."""
    held: dict[str, list[tuple[StageSpec, int]]] = {
        name: [(plan.stages[x.chunk.stage], 0) for x in plan.chunks if x.chunk.worker == name]
        for name in plan.workers
    }
    desk.acknowledge(desk.live, held)
    if desk.found(MakePlan):
        desk.plan(plan)
    desk.ready(plan.workers)


def excluded(desk: Desk) -> dict[WorkerId, str]:
    [run] = desk.machine.runs
    return dict(run.excluded)


def test_a_worker_that_is_unreached_three_times_is_excluded_and_its_accuser_works_on() -> None:
    plan = grid_plan()
    desk = settled(plan)
    for _ in range(MAX_STRIKES):
        assert excluded(desk) == {}
        desk.report("w0a", Suspected(generation=desk.generation, peer=holder(1, 0), reason="silent"))
        if not excluded(desk):
            resumed(desk, plan)
    assert list(excluded(desk)) == ["w1a"]


@pytest.mark.parametrize("is_building", [False, True])
def test_a_worker_that_comes_back_thrice_without_an_answer_is_left_out_of_the_next_generation(
    is_building: bool,
) -> None:
    plan = grid_plan()
    desk = settled(plan)
    desk.report("w0a", Trouble(generation=desk.generation, is_fatal=False, reason="an op failed"))
    for attempt in range(MAX_STRIKES):
        others = [name for name in desk.live if name != "w1a" or is_building]
        if is_building:
            held: dict[str, list[tuple[StageSpec, int]]] = {
                name: [(plan.stages[x.chunk.stage], 0) for x in plan.chunks if x.chunk.worker == name]
                for name in plan.workers
            }
            desk.acknowledge(others, held)
            if desk.found(MakePlan):
                desk.plan(plan)
        else:
            desk.acknowledge(others)
        assert excluded(desk) == {}, attempt
        desk.join("w1a")
    assert "without an answer" in excluded(desk)[holder(1, 0)]
    assert sorted(desk.told(NewGeneration)) == ["w0a", "w0b", "w1b"]
    [opened] = desk.recorded(GenerationOpened)
    assert [member.worker for member in opened.members] == ["w0a", "w0b", "w1b"]
    desk.join("w1a")
    assert not desk.recorded(GenerationOpened)


def test_a_newcomer_is_tried_again_with_bounded_pauses_while_a_stage_lacks_a_holder() -> None:
    spec = small_job(stages=1, replicas=2, steps=10000)
    desk = Desk()
    desk.join("w0a")
    desk.submit(spec)
    desk.beat("w0a", seconds=4.0)
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    alone = make_balanced_plan(spec, asked.fleet, None, 0)
    assert isinstance(alone, Plan)
    desk.plan(alone)
    desk.ready(alone.workers)
    desk.join("w0b")
    tries: list[float] = []
    for _ in range(400):
        desk.wait(1.0)
        for name in desk.live:
            desk.report(name, Beat(progress=0, running_s=0.0, statistics=()))
        desk.step(alone)
        for question in desk.found(MakePlan):
            made = make_balanced_plan(spec, question.fleet, alone, 0)
            desk.give(PlanMade(request=question.request, result=made))
        if "w0b" in (told := desk.told(Prefetch)):
            if not tries or desk.now - tries[-1] > 5.0:
                tries.append(desk.now)
            stage, version = told["w0b"].stage, told["w0b"].version
            error = Prefetched(job=desk.job, stage=stage, version=version, error="no donor has it")
            for _ in range(MAX_EARLY + MAX_FAILURES):
                desk.report("w0b", error)
    assert len(tries) >= 10
    assert max(b - a for a, b in pairwise(tries)) <= SHORT_PAUSE_S + 2.0


def test_a_failure_that_lasts_is_shown_and_so_is_who_is_excluded_and_why() -> None:
    plan = grid_plan()
    desk = settled(plan)
    assert desk.machine.view.runs[desk.job].open_incident is None
    for _ in range(MAX_STRIKES):
        desk.report("w0a", Suspected(generation=desk.generation, peer=holder(1, 0), reason="silent"))
        shown = desk.machine.view.runs[desk.job].open_incident
        assert shown is not None
        assert (shown.kind, shown.workers) == (IncidentKind.LINK_FAILED, (holder(1, 0),))
        assert shown.reason == "w1a: w0a cannot reach it: silent"
        if not excluded(desk):
            resumed(desk, plan)
            assert desk.machine.view.runs[desk.job].open_incident is None
    [exclusion] = desk.machine.view.runs[desk.job].exclusions
    assert (exclusion.worker, exclusion.cause) == ("w1a", ExclusionCause.LINK)
