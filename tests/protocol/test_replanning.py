"""When another plan is asked for, and when it is taken: the policy by itself, and in a run."""

from dataclasses import replace
from itertools import pairwise

import pytest

from skein.plan.balanced import make_balanced_plan
from skein.plan.changing.clauses import parse_clauses
from skein.plan.check import violations
from skein.plan.plan import ChunkTime, Infeasible, Plan
from skein.protocol.coordinator.coordinator_io import MakePlan, PlanMade
from skein.protocol.coordinator.runs.gathering import RETURN_S
from skein.protocol.coordinator.runs.improving.replanning import (
    CHANGE_S,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LEAST_GAIN,
    Backoff,
    Replanning,
    Seen,
)
from skein.protocol.coordinator.runs.watching.measuring import NUM_STEPS
from skein.protocol.log.records import GenerationOpened, PlanAdopted
from skein.protocol.messages.directives import Assign, Commit, Follow, NewGeneration, Prefetch, Start
from skein.protocol.messages.reports import Beat, TimesMeasured
from skein.topology.fleet import Fleet, FleetWorker
from skein.types import MicrobatchId, SiteId, StageSpec, WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.reports import profile

SPEC = small_job(stages=2, replicas=1, steps=1000)


def plan_for(*speeds: float, predicted_step_s: float) -> Plan:
    """A plan of w0a and w1a that could be carried out, were they so fast."""
    workers = tuple(
        FleetWorker(worker=WorkerId(name), site=SiteId("here"), profile=replace(profile(), flops_per_s=speed))
        for name, speed in zip(("w0a", "w1a"), speeds, strict=True)
    )
    plan = make_balanced_plan(SPEC, Fleet(workers=workers, links=()), None, 0)
    assert isinstance(plan, Plan)
    return replace(plan, predicted_step_s=predicted_step_s, lower_bound_s=0.01)


def held_by(plan: Plan, version: int) -> dict[str, list[tuple[StageSpec, int]]]:
    """What workers of a plan hold after so many steps."""
    return {
        name: [(plan.stages[x.chunk.stage], version) for x in plan.chunks if x.chunk.worker == name]
        for name in plan.workers
    }


PLAN = plan_for(1e9, 2e9, predicted_step_s=1.0)
OTHER = plan_for(2e9, 1e9, predicted_step_s=0.5)
"""The same stages on each other's workers."""
assert OTHER.chunks != PLAN.chunks


def seen(
    *, step_s: float | None = None, candidates: tuple[str, ...] = ("w0a", "w1a"), link: bool = False
) -> Seen:
    return Seen(
        step_s=step_s,
        candidates=tuple(WorkerId(name) for name in candidates),
        changed_links=((WorkerId("w0a"), WorkerId("w1a")),) if link else (),
        blamed="w1a's speed",
    )


def policy(*, may_improve: bool = False) -> Replanning:
    made = Replanning(off_by=0.15)
    made.adopted(PLAN, PLAN.workers, may_improve=may_improve)
    return made


# --- reasons ---


@pytest.mark.parametrize("step_s", [None, 1.0, 1.14, 0.86])
def test_a_step_that_is_near_the_plan_or_not_known_is_no_reason(step_s: float | None) -> None:
    assert policy().reason(seen(step_s=step_s), now=0.0) is None


@pytest.mark.parametrize("step_s", [1.16, 0.84])
def test_a_step_that_is_off_in_either_direction_is_a_reason_and_says_whose_fault_it_is(step_s: float) -> None:
    why = policy().reason(seen(step_s=step_s), now=0.0)
    assert why == f"measured {step_s:.2g} s, planned 1 s: replanned for w1a's speed"


def test_what_was_looked_at_once_is_looked_at_again_only_when_it_has_changed_again() -> None:
    made = policy()
    made.asked(seen(step_s=2.0, link=True, candidates=("w0a", "w1a", "w9")), now=0.0)
    late = 10 * LAST_PAUSE_S
    again = seen(step_s=2.1, link=True, candidates=("w0a", "w1a", "w9"))
    assert made.reason(again, now=late) is None
    assert made.reason(replace(again, step_s=2.4), now=late) is not None
    assert made.reason(replace(again, candidates=(*again.candidates, WorkerId("w8"))), now=late) is not None


def test_a_newcomer_and_a_link_are_reasons() -> None:
    made = policy()
    assert made.reason(seen(candidates=("w0a", "w1a", "w9")), now=0.0) == "w9 could work too"
    assert made.reason(seen(link=True, step_s=1.0), now=0.0) == "the link w0a -> w1a has changed"


def test_a_straggler_is_a_reason_once_until_it_is_well_and_slow_again() -> None:
    made = policy()
    slow = replace(seen(step_s=1.0), stragglers=((WorkerId("w0a"), 1.6), (WorkerId("w1a"), 2.04)))
    assert made.reason(slow, now=0.0) == "w1a takes 2.0 times as long as expected"
    made.asked(slow, now=0.0)
    assert made.reason(slow, now=LAST_PAUSE_S) is None
    made.asked(seen(step_s=1.0), now=LAST_PAUSE_S)
    assert made.reason(slow, now=3 * LAST_PAUSE_S) is not None


def test_a_plan_that_was_not_searched_for_is_a_reason_until_one_was() -> None:
    made = policy(may_improve=True)
    assert made.reason(seen(), now=0.0) == "the search can be run by now"
    made.verdict(answer(OTHER, may_improve=True), PLAN, steps_left=10)
    assert made.reason(seen(), now=0.0) is not None
    made.verdict(answer(OTHER), PLAN, steps_left=10)
    assert made.reason(seen(), now=0.0) is None


# --- pauses ---


def test_a_plan_that_was_at_hand_leaves_newcomers_and_the_search_to_be_tried() -> None:
    made = policy(may_improve=True)
    made.kept(OTHER)
    assert made.reason(seen(candidates=("w0a", "w1a", "w9")), now=0.0) == "w9 could work too"
    assert made.reason(seen(), now=0.0) == "the search can be run by now"


def test_an_answer_that_never_comes_leaves_newcomers_as_new_as_they_were() -> None:
    made = policy()
    newcomer = seen(candidates=("w0a", "w1a", "w9"))
    made.asked(newcomer, now=0.0)
    made.overtaken()
    made.kept(PLAN)
    assert made.reason(newcomer, now=LAST_PAUSE_S) == "w9 could work too"
    made.asked(newcomer, now=LAST_PAUSE_S)
    made.verdict(answer(OTHER), PLAN, steps_left=1)
    made.overtaken()
    assert made.reason(newcomer, now=3 * LAST_PAUSE_S) is None


def test_pauses_double_up_to_a_bound_and_quiet_makes_them_short_again() -> None:
    backoff, now = Backoff(), 0.0
    times: list[float] = []
    while len(times) < 14:
        if backoff.may(now=now):
            backoff.happened(now=now)
            times.append(now)
        now += 1.0
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:4] == [FIRST_PAUSE_S * 2**i for i in range(4)]
    assert max(pauses) == LAST_PAUSE_S
    now += 10 * LAST_PAUSE_S
    backoff.happened(now=now)
    assert not backoff.may(now=now + FIRST_PAUSE_S - 1)
    assert backoff.may(now=now + FIRST_PAUSE_S)


def test_while_a_pause_lasts_nothing_is_a_reason() -> None:
    made = policy()
    made.backoff.happened(now=0.0)
    assert made.reason(seen(step_s=9.0), now=FIRST_PAUSE_S - 0.1) is None
    assert made.reason(seen(step_s=9.0), now=FIRST_PAUSE_S) is not None


# --- verdicts ---


def answer(
    plan: Plan | Infeasible, *, current_s: float | None = 1.0, move_s: float = 0.0, may_improve: bool = False
) -> PlanMade:
    return PlanMade(request=1, result=plan, current_s=current_s, move_s=move_s, may_improve=may_improve)


def test_a_plan_is_taken_if_it_gains_more_over_the_steps_to_come_than_it_costs() -> None:
    made = policy()
    # Half a second a step, and 2 s for the change.
    assert CHANGE_S == 2.0
    assert made.verdict(answer(OTHER), PLAN, steps_left=5) is None
    kept = made.verdict(answer(OTHER), PLAN, steps_left=4)
    assert kept == "another would gain 0.5 s in each of 4 steps, and cost 2 s"
    assert made.verdict(answer(OTHER, move_s=10.0), PLAN, steps_left=24) is not None
    assert made.verdict(answer(OTHER, move_s=10.0), PLAN, steps_left=25) is None


def test_a_change_costs_what_the_last_one_took() -> None:
    made = policy()
    made.changed(seconds=30.0)
    assert made.verdict(answer(OTHER), PLAN, steps_left=60) is not None
    assert made.verdict(answer(OTHER), PLAN, steps_left=61) is None


def test_nobody_gains_more_than_what_a_step_takes() -> None:
    made = policy()
    # Reckoned by links that look broken; measured it is a second.
    assert made.verdict(answer(OTHER, current_s=100.0), PLAN, steps_left=4) is not None
    assert made.verdict(answer(OTHER, current_s=100.0), PLAN, steps_left=5) is None


def test_a_gain_within_the_error_of_predictions_is_none_however_many_steps_are_left() -> None:
    made, million = policy(), 10**6
    small = replace(OTHER, predicted_step_s=1.0 - 0.9 * LEAST_GAIN)
    assert made.verdict(answer(small), PLAN, steps_left=million) is not None
    enough = replace(OTHER, predicted_step_s=1.0 - 1.1 * LEAST_GAIN)
    assert made.verdict(answer(enough), PLAN, steps_left=million) is None


def test_a_gain_is_measured_by_the_step_as_it_is() -> None:
    made = policy()
    made.asked(seen(step_s=20.0), now=0.0)
    # Half of what is reckoned, but little of what a step really takes.
    assert made.verdict(answer(OTHER), PLAN, steps_left=10**6) is not None


def test_a_worse_plan_the_same_plan_and_no_plan_are_not_taken() -> None:
    made = policy()
    assert made.verdict(answer(OTHER, current_s=0.4), PLAN, steps_left=10**6) is not None
    same = replace(PLAN, reason=parse_clauses("found again"), predicted_step_s=0.1)
    assert made.verdict(answer(same), PLAN, steps_left=10**6) == "it is the best known"
    assert made.verdict(answer(Infeasible(reason="too small")), PLAN, steps_left=10) == "too small"


# --- in a run ---


def running(*, steps: int = 1000) -> Desk:
    """A job of two workers that begins its first step."""
    desk = Desk()
    desk.join("w0a", "w1a")
    desk.submit(small_job(stages=2, replicas=1, steps=steps))
    desk.settle(PLAN)
    assert desk.told(Start)
    return desk


def make_steps(desk: Desk, plan: Plan, *, seconds: float, count: int = NUM_STEPS) -> list[MakePlan]:
    """So many steps, each taking so long; gives what was asked of the planner meanwhile."""
    asked: list[MakePlan] = []
    for _ in range(count):
        for worker in desk.live:
            desk.report(worker, Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(seconds)
        desk.step(plan)
        asked += desk.found(MakePlan)
    return asked


def test_a_run_that_keeps_to_its_plan_asks_for_no_other() -> None:
    assert make_steps(running(), PLAN, seconds=1.0, count=3 * NUM_STEPS) == []


def test_a_run_that_is_off_its_plan_asks_for_another_and_goes_on_meanwhile() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    assert asked.previous == PLAN
    assert asked.steps_left == 1000 - NUM_STEPS
    assert desk.told(Commit)["w0a"].goes_on
    assert make_steps(desk, PLAN, seconds=2.0) == []


def test_a_better_plan_is_put_in_place_between_two_steps_and_says_why() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    assert set(desk.told(Prefetch)) == {"w0a", "w1a"}
    desk.prefetch()
    desk.step(PLAN)
    why = "measured 2 s, planned 1 s: replanned for what was measured"
    assert not desk.told(Commit)["w0a"].goes_on
    assert [record.reason for record in desk.recorded(GenerationOpened)] == [why]
    desk.acknowledge(desk.live, held_by(PLAN, NUM_STEPS + 1))
    assert desk.found(MakePlan) == []
    [adopted] = desk.recorded(PlanAdopted)
    assert str(adopted.plan.reason) == f"{OTHER.reason}; {why}; moves nothing"
    desk.ready(OTHER.workers)
    assert desk.told(Start)["w0a"].step == NUM_STEPS + 1


def test_a_better_plan_waits_for_the_copies_that_it_needs() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    commands = desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    desk.step(PLAN)
    assert desk.told(Commit)["w0a"].goes_on
    assert set(desk.told(Follow)) == {"w0a", "w1a"}
    desk.commands = commands
    desk.prefetch()
    desk.step(PLAN)
    assert not desk.told(Commit)["w0a"].goes_on
    assert desk.recorded(GenerationOpened)


def test_a_plan_that_is_not_worth_it_changes_nothing_and_is_told() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=0.5))
    assert any("keeps its plan (measured 2 s, planned 1 s" in line for line in desk.lines())
    desk.step(PLAN)
    assert desk.told(Commit)["w0a"].goes_on
    assert desk.generation == 1


def test_an_answer_that_a_new_generation_overtook_is_ignored() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.break_stream("w1a")
    assert desk.told(NewGeneration)
    assert desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0)) == []


def test_a_chosen_plan_that_no_longer_fits_is_asked_for_anew() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    desk.break_stream("w1a")
    desk.acknowledge(desk.live)
    [again] = desk.found(MakePlan)
    assert [worker.worker for worker in again.fleet.workers] == ["w0a"]
    assert desk.told(Assign) == {}


def test_a_newcomer_that_a_chosen_plan_has_no_place_for_is_looked_at_later() -> None:
    desk = running()
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.join("w9a")
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    desk.prefetch()
    desk.step(PLAN)
    desk.acknowledge(desk.live, held_by(PLAN, NUM_STEPS + 1))
    assert [record.plan.chunks for record in desk.recorded(PlanAdopted)] == [OTHER.chunks]
    desk.ready(OTHER.workers)
    asks = make_steps(desk, OTHER, seconds=0.5, count=200)
    assert [worker.worker for worker in asks[0].fleet.workers] == ["w0a", "w1a", "w9a"]


def test_waiting_for_workers_is_no_price_of_a_change() -> None:
    desk = running()
    make_steps(desk, PLAN, seconds=1.0)
    desk.break_stream("w1a")
    desk.acknowledge(desk.live)
    desk.plan(Infeasible(reason="too few"))
    for _ in range(2000):
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(1.0)
    desk.join("w1a", incarnation=2)
    desk.acknowledge(desk.live, {})
    desk.adopt(PLAN)
    desk.ready(PLAN.workers)
    assert desk.told(Start)
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    desk.give(PlanMade(request=asked.request, result=OTHER, current_s=2.0))
    desk.prefetch()
    desk.step(PLAN)
    # 1.5 s in each of 990 steps is less than what was waited.
    assert desk.recorded(GenerationOpened)


def test_a_restarted_coordinator_whose_workers_hold_too_little_plans_with_the_recorded_cut() -> None:
    before = running()
    make_steps(before, PLAN, seconds=1.0)
    desk = Desk(before.log)
    desk.join("w0a")
    for _ in range(int(RETURN_S)):
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(1.0)
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    assert asked.previous is not None
    assert asked.previous.stages == PLAN.stages


def test_what_workers_measure_reaches_the_planner() -> None:
    desk = running()
    times = ChunkTime(chunk=PLAN.chunks[0].chunk, forward_s=0.25, backward_s=0.5, loss_s=0.0)
    desk.report("w0a", TimesMeasured(generation=desk.generation, chunks=(times,), transfers=()))
    [asked] = make_steps(desk, PLAN, seconds=2.0)
    [time] = asked.fleet.stage_times
    assert (time.worker, time.stage) == ("w0a", PLAN.stages[0])
    # Rounded to half a percent.
    assert (time.forward_s, time.backward_s) == pytest.approx((0.25, 0.5), rel=0.005)


def test_a_worker_that_comes_and_goes_causes_few_plans_however_long_it_does() -> None:
    desk = running(steps=100_000)
    generations = desk.generation
    for number in range(100):
        desk.join("w9", incarnation=number)
        for asked in make_steps(desk, PLAN, seconds=1.0, count=3):
            desk.give(PlanMade(request=asked.request, result=PLAN, current_s=1.0))
        desk.break_stream("w9")
    assert desk.generation == generations


def test_a_plan_that_has_microbatches_visit_other_stages_says_so() -> None:
    desk = Desk()
    spec = small_job(stages=4, replicas=1, steps=1000, skip_ratio=0.25)
    names = [f"w{i}a" for i in range(4)]
    workers = (FleetWorker(worker=WorkerId(x), site=SiteId("here"), profile=profile()) for x in names)
    plan = make_balanced_plan(spec, Fleet(workers=tuple(workers), links=()), None, 0)
    assert isinstance(plan, Plan)
    plan = replace(plan, predicted_step_s=1.0, lower_bound_s=0.01)
    desk.join(*names)
    desk.submit(spec)
    desk.settle(plan)
    told = [str(record.plan.reason) for record in desk.log if isinstance(record, PlanAdopted)]
    assert "other stages" not in told[-1]
    [asked] = make_steps(desk, plan, seconds=2.0)
    # The second microbatch goes the first one's way, and the other way round.
    turned = make_balanced_plan(spec.model_copy(update={"seed": 1}), asked.fleet, plan, 0)
    assert isinstance(turned, Plan)
    first, second, *rest = turned.paths
    swap = {MicrobatchId(0): MicrobatchId(1), MicrobatchId(1): MicrobatchId(0)}
    schedules = tuple(
        replace(x, ops=tuple(replace(op, microbatch=swap.get(op.microbatch, op.microbatch)) for op in x.ops))
        for x in turned.schedules
    )
    turned = replace(turned, paths=(second, first, *rest), schedules=schedules, lower_bound_s=0.01)
    assert violations(turned, spec, asked.fleet) == ()
    desk.give(PlanMade(request=asked.request, result=turned, current_s=2.0))
    desk.step(plan)
    desk.acknowledge(desk.live, held_by(plan, NUM_STEPS + 1))
    [adopted] = desk.recorded(PlanAdopted)
    assert "microbatches visit other stages than before" in str(adopted.plan.reason)
