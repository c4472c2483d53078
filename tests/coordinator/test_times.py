"""Planned beside measured, for clients and for Prometheus: of a job that a simulated fleet works on."""

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache

import pytest

from coordinator.page.bars import bars_of
from coordinator.records.journal import Journal
from coordinator.telling.metrics import CoordinatorMetrics
from coordinator.telling.status import brief_status, expert_loads, job_status
from skein.config.job import PlanSpec
from skein.plan.changing.reroute import rerouted
from skein.plan.clock.holding import CollectiveUse
from skein.protocol.coordinator.coordinator import Coordinator
from skein.protocol.log.records import Record
from skein.sim.scenario import make_world
from skein.sim.world import World
from skein.types import JobId, WorkerId
from skein.wire.views import JobStatus
from tests.coordinator.test_metrics import sampled, samples
from tests.support.jobs import small_job
from tests.support.worlds import fleet_of, plan_of, run_until, version_of, worker

JOB = JobId("small-1")
STEPS = 40


@cache
def world(*, version: int) -> World:
    """A job of which so many steps are made, one worker being three times as slow as it says."""
    # However far off, it keeps its plan.
    job = small_job(steps=STEPS, microbatches=8).model_copy(update={"plan": PlanSpec(replan_if_off_by=10.0)})
    made = make_world(job, fleet_of(4), seed=0)
    made.slow_worker(worker(1), 3.0)
    run_until(made, lambda made: version_of(made) == version)
    return made


def machine(*, version: int) -> Coordinator:
    found = world(version=version).coordinator
    assert found is not None
    return found


async def nothing_kept(_: JobId) -> AsyncIterator[Sequence[Record]]:
    """A run log that nobody watches."""
    for piece in list[list[Record]]():
        yield piece


def status(*, version: int) -> JobStatus:
    return job_status(machine(version=version).view, Journal(nothing_kept), JOB)


def brief(*, version: int) -> JobStatus:
    return brief_status(machine(version=version).view, Journal(nothing_kept), JOB)


def test_before_enough_steps_there_is_only_the_plan() -> None:
    found = status(version=1)
    assert found.measured_step_s is None
    assert len(found.chunk_times) == 4
    assert len(found.transfer_times) >= 4


def test_each_chunk_is_shown_as_planned_and_as_it_is() -> None:
    found = status(version=12)
    assert found.measured_step_s is not None
    factors = {
        times.planned.chunk.worker: times.measured.total_s / times.planned.total_s
        for times in found.chunk_times
        if times.measured is not None
    }
    # A cost model's ops take half a millisecond each beside their arithmetic, 5 % of these.
    assert factors == pytest.approx({worker(i): 3.0 if i == 1 else 1.0 for i in range(4)}, rel=0.06)


def test_each_way_is_shown_as_planned_and_as_it_is() -> None:
    network = world(version=12).network
    for times in status(version=12).transfer_times:
        assert times.measured is not None
        link = network.link(times.planned.sender, times.planned.receiver)
        alone_s = link.latency_s + times.measured.num_bytes / link.bytes_per_s
        # Tensors may wait for each other, and what the links' latencies are is known by a probe only later.
        assert times.measured.seconds >= 0.9 * alone_s / 2


def test_a_step_is_drawn_op_by_op_as_planned_and_as_it_is() -> None:
    plan, found = plan_of(world(version=12)), status(version=12)
    latency_s = {pair: link.latency_s for pair, link in machine(version=12).view.links.items()}
    planned = bars_of(plan, plan.chunk_times, plan.transfer_times, latency_s)
    ops = [times.measured or times.planned for times in found.chunk_times]
    ways = [times.measured or times.planned for times in found.transfer_times]
    measured = bars_of(plan, ops, ways, latency_s)
    assert planned is not None
    assert measured is not None
    drawn = sorted((schedule.worker, op.kind, op.stage) for schedule in plan.schedules for op in schedule.ops)
    assert sorted(bar[:3] for bar in planned) == sorted(bar[:3] for bar in measured) == drawn
    for bars in (planned, measured):
        for one, following in itertools.pairwise(sorted(bars, key=lambda bar: (bar.worker, bar.begin_s))):
            assert one.worker != following.worker or one.end_s <= following.begin_s
    # Aggregation follows the last op; worker 1 is three times as slow as planned.
    assert 0 < max(bar.end_s for bar in planned) <= found.predicted_step_s
    slow_s = sum(bar.end_s - bar.begin_s for bar in measured if bar.worker == worker(1))
    assert slow_s == pytest.approx(
        3 * sum(bar.end_s - bar.begin_s for bar in planned if bar.worker == worker(1)), rel=0.06
    )


def test_a_step_that_goes_on_without_a_worker_is_drawn() -> None:
    plan = plan_of(world(version=12))
    left = [x.chunk for x in plan.chunks if x.chunk.worker != worker(1)]
    smaller = rerouted(plan, left, {})
    assert smaller is not None
    assert worker(1) in {way.sender for way in smaller.transfer_times}
    bars = bars_of(smaller, smaller.chunk_times, smaller.transfer_times, {})
    assert bars is not None
    assert {bar.worker for bar in bars} == {chunk.worker for chunk in left}


def test_loads_of_experts_are_those_of_all_replicas_over_an_even_share() -> None:
    told = {
        worker(0): {"0/0": 3.0, "0/1": 1.0, "1/0": 2.0, "1/1": 2.0},
        worker(1): {"0/0": 5.0, "0/1": 3.0},
        worker(2): {"2/most": 3.0, "2/least": 0.5, "2/mean": 1.5},
    }

    def reported(_: str) -> Mapping[WorkerId, Mapping[str, float]]:
        return told

    assert expert_loads([worker(0), worker(1)], reported) == (8 / 6, 4 / 6)
    assert expert_loads([worker(2)], reported) == (2.0, 0.5 / 1.5)
    assert expert_loads([worker(3)], reported) == (None, None)


def test_what_the_plan_uses_of_workers_stands_beside_what_they_told() -> None:
    told = {
        "skein_worker_stage_peak_microbatches": {worker(0): {"0": 3.0}},
        "skein_worker_bubble_ratio": {},
        "skein_worker_expert_tokens": {},
        "skein_worker_stage_devices": {worker(0): {"0/1d": 2.0, "1/2d": 4.0, "7/1d": 2.0}},
        "skein_worker_collectives_total": {worker(0): {"tp": 4.0, "a2a": 0.0}},
        "skein_worker_collective_seconds_total": {worker(0): {"tp": 0.5, "a2a": 0.0}},
        "skein_worker_collective_predicted_seconds_total": {worker(0): {"tp": 0.25, "a2a": 0.0}},
        "skein_worker_collective_fits_total": {worker(0): {"tp": 2.0, "a2a": 0.0}},
        "skein_worker_collective_fit_r_squared": {worker(0): {"tp": 0.5}},
    }
    view = machine(version=12).view
    uses = job_status(view, Journal(nothing_kept), JOB, lambda name: told[name]).uses
    assert [use.worker for use in uses] == [worker(i) for i in range(4)]
    first, *others = uses
    assert first.held_peaks in ((3,), (0,))
    assert first.collectives == (
        CollectiveUse(
            kind="tp", num_collectives=4, predicted_s=0.25, measured_s=0.5, num_fits=2, r_squared=0.5
        ),
    )
    shared = {0: ("1d", 2), 1: ("2d", 4)}
    assert {x.stage: (x.form, x.num_devices) for x in first.forms} == {s: shared[s] for s in first.stages}
    assert all(use.collectives == () for use in others)
    assert all(use.forms == () for use in others)
    assert all(use.held_peaks == () for use in others)
    assert all(0 <= use.planned_bubble < 1 for use in uses)
    assert any(use.planned_bytes > 0 for use in uses)
    assert brief(version=12).uses == ()
    # What was counted in an earlier job is not of this one, where one device computes each stage.
    told["skein_worker_stage_devices"] = {worker(0): {"0/whole": 1.0, "1/whole": 1.0, "7/1d": 2.0}}
    assert job_status(view, Journal(nothing_kept), JOB, lambda name: told[name]).uses[0].collectives == ()
    metrics = CoordinatorMetrics()
    sampled(metrics, machine(version=12))
    shown = samples(metrics)
    for use in uses:
        assert shown["skein_activation_bytes", (use.worker, "planned", JOB)] == use.planned_bytes
        assert shown["skein_planned_bubble_ratio", (use.worker, JOB)] == use.planned_bubble


def test_an_epoch_of_the_data_is_known_while_the_job_is_at_work() -> None:
    assert status(version=12).num_train_samples == 10**6


def test_a_list_of_jobs_has_no_line_for_each_chunk() -> None:
    found = brief(version=12)
    assert (found.chunk_times, found.transfer_times) == ((), ())
    assert found.measured_step_s == status(version=12).measured_step_s


def test_after_the_end_the_times_can_still_be_seen() -> None:
    done = make_world(small_job(steps=8, microbatches=8), fleet_of(4), seed=0)
    run_until(done, lambda done: version_of(done) == 8)
    assert done.coordinator is not None
    run_until(done, lambda done: done.coordinator is not None and done.coordinator.run is None)
    found = job_status(done.coordinator.view, Journal(nothing_kept), JOB)
    assert found.measured_step_s is not None
    assert all(times.measured is not None for times in found.chunk_times)
    assert found.num_train_samples == 10**6


def test_stages_with_fewer_holders_than_asked_are_told_in_the_status_the_log_and_the_metrics() -> None:
    made = make_world(small_job(steps=STEPS, microbatches=8), fleet_of(3), seed=0)
    run_until(made, lambda made: version_of(made) == 1)
    now, metrics = made.coordinator, CoordinatorMetrics()
    assert now is not None
    [short] = job_status(now.view, Journal(nothing_kept), JOB).shortfalls
    assert short.words == "stage 1 has 1 holder of 2 asked: a death costs up to 20 steps"
    assert any(f"short: {short.words}" in line for line in made.lines)
    assert brief_status(now.view, Journal(nothing_kept), JOB).shortfalls == ()
    metrics.recorded(made.log)
    sampled(metrics, now, now=0.0)
    found = samples(metrics)
    told = {labels: value for (name, labels), value in found.items() if name == "skein_stage_holders"}
    # Labels from the last by name: stage, kind, job.
    assert told == {
        (stage, kind, JOB): value
        for stage, values in (("0", (2.0, 2.0)), ("1", (1.0, 2.0)))
        for kind, value in zip(("held", "asked"), values, strict=True)
    }


def test_metrics_have_the_step_and_the_ops_of_each_stage_in_both_kinds() -> None:
    now, metrics = machine(version=12), CoordinatorMetrics()
    metrics.recorded(world(version=12).log)
    sampled(metrics, now, now=0.0)
    found = samples(metrics)
    assert found["skein_plan_step_seconds", ("planned", JOB)] == plan_of(world(version=12)).predicted_step_s
    assert found["skein_plan_step_seconds", ("measured", JOB)] == now.measured[JOB].step_s
    labels = {labels for name, labels in found if name == "skein_stage_op_seconds"}
    # Labels from the last by name: stage, op, kind, job.
    assert labels == {
        (stage, op, kind, JOB)
        for stage, ops in (("0", ("forward", "backward")), ("1", ("loss",)))
        for op in ops
        for kind in ("planned", "measured")
    }
