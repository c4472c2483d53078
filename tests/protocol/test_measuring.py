"""What is made of measured times: fleets for plans, and what is off what was planned."""

from dataclasses import replace
from math import inf, nan

import pytest

from skein.plan.balanced import make_balanced_plan
from skein.plan.load import stage_loads
from skein.plan.plan import ChunkTime, Plan, TransferTime
from skein.protocol.coordinator.runs.watching.measuring import NUM_STEPS, Measured
from skein.protocol.messages.reports import TimesMeasured
from skein.topology.fleet import Fleet, Link
from skein.types import Generation, WorkerId
from tests.plan.builders import fleet, link
from tests.support.jobs import small_job

SPEC = small_job(stages=2, replicas=1)
Links = dict[tuple[WorkerId, WorkerId], Link]


def links_of(on: Fleet) -> Links:
    return {(x.sender, x.receiver): x for x in on.links}


ON = fleet([1e9, 1e9, 4e9], links=[link("w0", "w1", 0.1, 1e6), link("w1", "w0", 0.3, 1e6)])
LINKS = links_of(ON)
TWO = replace(ON, workers=ON.workers[:2])


def plan() -> Plan:
    made = make_balanced_plan(SPEC, TWO, None, 0)
    assert isinstance(made, Plan)
    return made


PLAN = plan()
FIRST, LAST = PLAN.holders(PLAN.stages[0].index)[0], PLAN.holders(PLAN.stages[1].index)[0]
LOADS = stage_loads(SPEC, PLAN.stages)


def chunk_times(worker: WorkerId, factor: float) -> tuple[ChunkTime, ...]:
    """What the plan has for a worker, times `factor`."""
    return tuple(
        replace(x, forward_s=factor * x.forward_s, backward_s=factor * x.backward_s, loss_s=factor * x.loss_s)
        for x in PLAN.chunk_times
        if x.chunk.worker == worker
    )


def told(measured: Measured, worker: WorkerId, factor: float, *transfers: TransferTime) -> None:
    report = TimesMeasured(generation=Generation(1), chunks=chunk_times(worker, factor), transfers=transfers)
    measured.take(worker, report, PLAN)


def taken(seconds: float, *, num_bytes: int = 10**6) -> TransferTime:
    return TransferTime(sender=FIRST, receiver=LAST, num_bytes=num_bytes, seconds=seconds)


def speeds(on: Fleet) -> list[float]:
    return [worker.profile.flops_per_s for worker in on.workers]


def test_nothing_measured_leaves_the_fleet_as_it_is() -> None:
    assert Measured(SPEC).on(ON, LINKS) == replace(ON, links=tuple(sorted(ON.links, key=lambda x: x.sender)))


def test_a_worker_is_as_fast_as_it_was_and_others_fall_as_short_of_their_profiles() -> None:
    measured = Measured(SPEC)
    told(measured, WorkerId("w0"), 2.0)
    told(measured, WorkerId("w1"), 4.0)
    # Half and a quarter of the profiles; who has not worked gets what is between them.
    assert speeds(measured.on(ON, LINKS)) == pytest.approx([0.5e9, 0.25e9, 0.375 * 4e9])


def test_a_loss_is_cut_into_forward_and_backward_and_its_sum_stays() -> None:
    measured = Measured(SPEC)
    told(measured, LAST, 3.0)
    [time] = measured.on(ON, LINKS).stage_times
    [planned] = [x for x in PLAN.chunk_times if x.chunk.worker == LAST]
    assert time.forward_s + time.backward_s == pytest.approx(3 * planned.loss_s)
    assert time.forward_s / time.backward_s == pytest.approx(LOADS[1].forward_flops / LOADS[1].backward_flops)


def test_a_loss_told_of_a_stage_without_arithmetic_says_nothing() -> None:
    parallel = SPEC.parallel.model_copy(update={"stages": len(SPEC.layers)})
    spec = SPEC.model_copy(update={"parallel": parallel})
    alone = make_balanced_plan(spec, ON, None, 0)
    assert isinstance(alone, Plan)
    embedding = ChunkTime(chunk=alone.chunks[0].chunk, forward_s=0.0, backward_s=0.0, loss_s=1.0)
    measured = Measured(spec)
    report = TimesMeasured(generation=Generation(1), chunks=(embedding,), transfers=())
    measured.take(embedding.chunk.worker, report, alone)
    assert measured.on(ON, LINKS).stage_times == ()


def test_a_plan_made_of_what_was_measured_expects_just_that() -> None:
    measured = Measured(SPEC)
    for worker in (FIRST, LAST):
        told(measured, worker, 2.5)
    again = make_balanced_plan(SPEC, measured.on(TWO, LINKS), PLAN, 0)
    assert isinstance(again, Plan)
    sums = {x.chunk: x.total_s for x in again.chunk_times}
    assert sums == pytest.approx({x.chunk: 2.5 * x.total_s for x in PLAN.chunk_times})


def test_the_way_of_the_acknowledgement_does_not_count() -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, 1.0, taken(2.0))
    back = LINKS[LAST, FIRST].latency_s
    there = measured.transfer_time(FIRST, LAST, LINKS)
    assert there == taken(2.0 - back)
    # A latency that cannot be: at most half of it was the way back.
    told(measured, FIRST, 1.0, taken(back))
    assert measured.transfer_time(FIRST, LAST, LINKS) == taken(back / 2)
    assert measured.transfer_time(LAST, FIRST, LINKS) is None


def test_a_link_takes_for_a_tensor_what_that_was_measured_to_take() -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, 1.0, taken(5.0))
    way = measured.transfer_time(FIRST, LAST, LINKS)
    assert way is not None
    [found] = [x for x in measured.on(ON, LINKS).links if (x.sender, x.receiver) == (FIRST, LAST)]
    assert found.latency_s + 10**6 / found.bytes_per_s == pytest.approx(way.seconds)
    other = [x for x in measured.on(ON, LINKS).links if (x.sender, x.receiver) == (LAST, FIRST)]
    assert other == [LINKS[LAST, FIRST]]


@pytest.mark.parametrize(("num_bytes", "is_latency"), [(10, True), (10**7, False)])
def test_what_a_short_tensor_takes_too_long_is_latency(num_bytes: int, *, is_latency: bool) -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, 1.0, taken(50.0, num_bytes=num_bytes))
    way = measured.transfer_time(FIRST, LAST, LINKS)
    assert way is not None
    [found] = [x for x in measured.on(ON, LINKS).links if (x.sender, x.receiver) == (FIRST, LAST)]
    assert found.latency_s + num_bytes / found.bytes_per_s == pytest.approx(way.seconds)
    assert (found.bytes_per_s == LINKS[FIRST, LAST].bytes_per_s) is is_latency


def test_a_link_that_nobody_probed_is_known_once_tensors_went_over_it() -> None:
    bare = replace(TWO, links=())
    measured = Measured(SPEC)
    told(measured, FIRST, 1.0, taken(5.0))
    [found] = measured.on(bare, {}).links
    assert found.latency_s + 10**6 / found.bytes_per_s == pytest.approx(5.0)


def test_a_step_is_believed_after_enough_of_them_and_another_plan_begins_anew() -> None:
    measured = Measured(SPEC)
    for seconds in (9.0, 1.0, 2.0, 3.0):
        measured.step_took(seconds)
    few = measured.step_s
    measured.step_took(4.0)
    enough = measured.step_s
    measured.adopted()
    assert NUM_STEPS == 5
    assert (few, enough, measured.step_s) == (None, 3.0, None)


def test_a_lost_worker_takes_its_times_along() -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, 2.0, taken(5.0))
    measured.lost(LAST)
    assert measured.transfer_time(FIRST, LAST, LINKS) is None
    measured.lost(FIRST)
    assert measured.on(ON, LINKS).stage_times == ()


def test_what_a_worker_says_of_others_is_ignored() -> None:
    measured = Measured(SPEC)
    told_of_last = TimesMeasured(
        generation=Generation(1),
        chunks=chunk_times(LAST, 9.0),
        transfers=(
            TransferTime(sender=LAST, receiver=FIRST, num_bytes=1, seconds=1.0),
            TransferTime(sender=FIRST, receiver=WorkerId("stranger"), num_bytes=1, seconds=1.0),
        ),
    )
    measured.take(FIRST, told_of_last, PLAN)
    assert measured.on(ON, LINKS).stage_times == ()
    assert measured.transfer_time(LAST, FIRST, LINKS) is None


@pytest.mark.parametrize(
    "impossible", [taken(0.0), taken(-1.0), taken(nan), taken(inf), taken(1.0, num_bytes=0)], ids=str
)
def test_a_transfer_that_cannot_have_been_is_ignored(impossible: TransferTime) -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, 1.0, impossible)
    assert measured.on(TWO, LINKS).links == Measured(SPEC).on(TWO, LINKS).links


@pytest.mark.parametrize("factor", [-1.0, inf, nan])
def test_a_time_that_cannot_have_been_is_ignored(factor: float) -> None:
    measured = Measured(SPEC)
    told(measured, FIRST, factor)
    assert measured.on(TWO, {}) == TWO


def test_who_is_farthest_off_is_named() -> None:
    measured = Measured(SPEC)
    assert measured.blamed(PLAN, LINKS) == "what was measured"
    told(measured, FIRST, 1.1)
    told(measured, LAST, 3.0)
    assert measured.blamed(PLAN, LINKS) == f"{LAST}'s speed"
    told(measured, FIRST, 1.1, taken(100.0))
    assert measured.blamed(PLAN, LINKS) == f"the link {FIRST} -> {LAST}"


@pytest.mark.parametrize(("factor", "is_changed"), [(1.0, False), (1.1, False), (2.0, True), (0.2, True)])
def test_a_link_has_changed_when_its_tensors_are_off_by_a_share_that_matters(
    factor: float, *, is_changed: bool
) -> None:
    measured = Measured(SPEC)
    [way] = [x for x in PLAN.transfer_times if (x.sender, x.receiver) == (FIRST, LAST)]
    back_s = LINKS[LAST, FIRST].latency_s
    told(measured, FIRST, 1.0, replace(way, seconds=factor * way.seconds + back_s))
    num_tensors = SPEC.batch.num_microbatches
    step_s = num_tensors * way.seconds
    found = measured.changed_links(PLAN, LINKS, off_by=0.15, step_s=step_s)
    assert found == (((FIRST, LAST),) if is_changed else ())
    # In a step that takes a hundred times as long the same change is no matter.
    assert measured.changed_links(PLAN, LINKS, off_by=0.15, step_s=100 * step_s) == ()


def test_looking_up_embeddings_tells_nothing_about_speed() -> None:
    lookup, rest = PLAN.stages[0], PLAN.stages[1]
    cut = (replace(lookup, stop=1), replace(rest, first=1))
    assert stage_loads(SPEC, cut)[0].flops == 0
    measured = Measured(SPEC)
    time = next(x for x in PLAN.chunk_times if x.chunk.worker == FIRST)
    report = TimesMeasured(
        generation=Generation(1), chunks=(replace(time, forward_s=0.1, backward_s=0.1),), transfers=()
    )
    measured.take(FIRST, report, replace(PLAN, stages=cut))
    assert speeds(measured.on(ON, LINKS)) == speeds(ON)
