"""Workers without work hold what lacks holders, as far as their memory goes, and change nothing else."""

from dataclasses import replace

from hypothesis import given

from skein.config.aggregation import AllReduce
from skein.config.job import JobSpec
from skein.plan.changing.redundancy import num_missing, shortfalls
from skein.plan.changing.silent import silent_chunks, working
from skein.plan.check import violations
from skein.plan.load import stage_loads, together_bytes
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan, searched_step_s
from skein.topology.fleet import Fleet
from skein.types import Layout, StageIndex
from tests.plan.builders import AMPLE_BYTES, fleet, fleets, job, jobs, planned, without

SLOW = 1e8
FAST_AND_SLOW = fleet([1e10, 1e10, SLOW, SLOW])


def silent_by_worker(plan: Plan) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for chunk in sorted(silent_chunks(plan)):
        found.setdefault(chunk.worker, []).append(chunk.stage)
    return found


@given(jobs(), fleets())
def test_with_memory_to_spare_nobody_without_work_leaves_a_stage_short(spec: JobSpec, on: Fleet) -> None:
    plan = planned(spec, on)
    assert violations(plan, spec, on) == ()
    busy = {hop.worker for path in plan.paths for hop in path.hops}
    for short in shortfalls(plan, spec, on):
        idle = {worker.worker for worker in on.workers} - busy
        assert idle <= set(plan.holders(short.stage))


def test_slow_workers_hold_one_stage_each_where_there_are_enough_of_them() -> None:
    plan = planned(job(), FAST_AND_SLOW)
    assert silent_by_worker(plan) == {"w2": [0], "w3": [1]}
    assert num_missing(plan, 2) == 0
    assert "silent holders: w2 of stage 0 and 1 more" in str(plan.reason)


def test_one_slow_worker_holds_all_stages_the_head_of_a_loop_included() -> None:
    plan = planned(job(layout=Layout.LOOP), fleet([1e10, 1e10, SLOW]))
    assert silent_by_worker(plan) == {"w2": [0, 1, 2]}
    assert [len(group.workers) for group in plan.groups] == [2, 2, 2, 2]


def test_silent_holders_change_neither_paths_nor_orders() -> None:
    alone, helped = planned(job(), fleet([1e10, 1e10])), planned(job(), FAST_AND_SLOW)
    assert working(helped, set(helped.workers)).paths == alone.paths
    assert [x for x in helped.schedules if x.ops] == list(alone.schedules)


def test_memory_bounds_what_is_held_and_who_lacks_how_much_is_told() -> None:
    spec = job()
    plan = planned(spec, fleet([1e10, 1e10]))
    needed = together_bytes(stage_loads(spec, plan.stages), [1, 1])
    on = fleet([1e10, 1e10, SLOW], memory_bytes=[AMPLE_BYTES, AMPLE_BYTES, needed - 10])
    plan = planned(spec, on)
    assert silent_by_worker(plan) == {"w2": [0]}
    [short] = shortfalls(plan, spec, on)
    assert (short.stage, short.num_holders) == (1, 1)
    assert [(x.worker, x.missing_bytes) for x in short.left_out] == [("w2", 10)]
    assert short.words.startswith("stage 1 has 1 holder of 2 asked (w2 lacks 10 B of memory)")


def test_who_holds_a_stage_silently_goes_on_holding_it() -> None:
    before = planned(job(), FAST_AND_SLOW)
    lost = without(FAST_AND_SLOW, before.workers[2])
    after = planned(job(), lost, before)
    assert silent_by_worker(after) == {"w3": [0, 1]}
    assert planned(job(), lost, after) == replace(after, reason=planned(job(), lost, after).reason)


def test_a_worker_that_turns_out_slow_goes_on_as_a_silent_holder() -> None:
    before = planned(job(), fleet([1e10] * 4))
    after = planned(job(), fleet([1e10, 1e10, 1e10, SLOW]), before)
    assert {x.chunk for x in after.chunks} == {x.chunk for x in before.chunks}
    assert list(silent_by_worker(after)) == ["w3"]


def test_where_members_are_compared_or_parts_are_rounded_nobody_is_silent() -> None:
    rounded = job().model_copy(update={"aggregation": AllReduce(wire="int8")})
    assert not silent_chunks(planned(rounded, FAST_AND_SLOW))


def test_a_search_leaves_silent_holders_out_and_its_plan_has_them() -> None:
    spec = job(num_microbatches=6)
    spec = spec.model_copy(update={"plan": spec.plan.model_copy(update={"budget_s": 0.02})})
    plan = make_searched_plan(spec, FAST_AND_SLOW, None, 0)
    assert isinstance(plan, Plan)
    assert violations(plan, spec, FAST_AND_SLOW) == ()
    assert num_missing(plan, 2) == 0
    again = make_searched_plan(spec, FAST_AND_SLOW, plan, 0, steps_left=10)
    assert isinstance(again, Plan)
    assert silent_by_worker(again) == silent_by_worker(plan)
    assert searched_step_s(spec, FAST_AND_SLOW, plan) == plan.predicted_step_s


def test_how_far_a_death_goes_back_is_the_nearest_of_copies_and_checkpoints() -> None:
    spec = job(replicas=2)
    spec = spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 1000})})
    two, one = fleet([1e10, 1e10]), fleet([1e10])
    assert [x.num_steps for x in shortfalls(planned(spec, two), spec, two)] == [20, 20]
    # With nobody else there is no copy elsewhere.
    assert [x.num_steps for x in shortfalls(planned(spec, one), spec, one)] == [100, 100]
    assert planned(spec, one).holders(StageIndex(0)) == ("w0",)
