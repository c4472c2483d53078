"""A failure from the notice until work goes on: one record, one line, and what it cost."""

from dataclasses import replace

import pytest

from skein.plan.plan import Plan
from skein.protocol.coordinator.coordinator_io import Append, Log, Outbox
from skein.protocol.coordinator.runs.incidents import Incidents
from skein.protocol.coordinator.runs.part import Adoption
from skein.protocol.coordinator.runs.placing.resuming import Resumed
from skein.protocol.coordinator.runs.workers.members import Members
from skein.protocol.log.history import History
from skein.protocol.log.records import (
    EpochOpened,
    Incident,
    IncidentKind,
    JobSubmitted,
    Remedy,
    Replayed,
)
from skein.protocol.messages.directives import Assign, ChunkVersion, NewGeneration, Start
from skein.protocol.messages.progress import ChunkProgress
from skein.protocol.messages.reports import Ack, Report, Suspected, Trouble
from skein.types import Epoch, JobId, MicrobatchId, StageIndex, StageSpec, Step, WorkerId
from tests.support.desk import GRACE_S, Desk
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of

JOB = JobId("small-1")
SPEC = small_job(stages=2, replicas=2, steps=3)
"""Two samples in each of four microbatches."""
STAGES = tuple(StageSpec(index=StageIndex(i), first=3 * i, stop=3 * i + 3) for i in (0, 1))
PLAN = replace(grid_plan(stages=2, replicas=2), stages=STAGES)
"""Microbatches 0 and 2 go from `w0a` to `w1b`, 1 and 3 from `w0b` to `w1a`."""


class Book:
    """Incidents of one job."""

    def __init__(self) -> None:
        history = History()
        history.apply(EpochOpened(epoch=Epoch(1), wall_s=0.0))
        history.apply(JobSubmitted(job=JOB, key="k", spec=SPEC.canonical_json(), wall_s=0.0))
        self.outbox = Outbox(history)
        self.incidents = Incidents(Members(history.jobs[JOB], {}, self.outbox))

    def notice(self, kind: IncidentKind, *workers: str, silent_s: float = 0.0, now: float = 10.0) -> None:
        named = [WorkerId(worker) for worker in workers]
        self.incidents.noticed(kind, named, f"{kind} of {workers}", silent_s=silent_s, now=now)

    def over(self, *, now: float = 12.0) -> list[Incident]:
        """Work goes on; what is recorded of it, with a line each."""
        self.incidents.over(now=now)
        commands = self.outbox.drain()
        found = [x.record for x in commands if isinstance(x, Append) and isinstance(x.record, Incident)]
        lines = [x.line for x in commands if isinstance(x, Log)]
        assert len(lines) == len(found)
        assert all(line.startswith(f"incident job={JOB}") for line in lines)
        return found

    def only(self, *, now: float = 12.0) -> Incident:
        [found] = self.over(now=now)
        return found

    def goes_on(self, resumed: Resumed) -> None:
        self.incidents.adopted(Adoption(plan=resumed.plan, resumed=resumed), now=0.0)

    def planned_anew(self, num_begun: int, *, num_steps_lost: int = 0, is_averaged: bool = False) -> None:
        adoption = Adoption(
            plan=PLAN, num_begun=num_begun, num_steps_lost=num_steps_lost, is_averaged=is_averaged
        )
        self.incidents.adopted(adoption, now=0.0)


def resumed(
    *replayed: tuple[int, int],
    dropped: tuple[tuple[int, int], ...] = (),
    num_rerouted: int = 0,
    is_begun: bool = True,
) -> Resumed:
    """By (stage, microbatch)."""

    def listed(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[MicrobatchId, StageIndex], ...]:
        return tuple((MicrobatchId(m), StageIndex(stage)) for stage, m in pairs)

    return Resumed(
        plan=PLAN,
        resumptions={},
        expected={},
        replayed=listed(replayed),
        dropped=listed(dropped),
        num_rerouted=num_rerouted,
        is_begun=is_begun,
    )


# --- by itself ---


def test_a_stage_that_is_averaged_is_the_remedy_and_the_next_failure_has_its_own() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w1a", "w1b")
    book.planned_anew(4, is_averaged=True)
    found = book.only()
    assert (found.remedy, found.num_steps_lost, found.num_retried) == (Remedy.AVERAGED, 0, 4)
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.planned_anew(1)
    assert book.only().remedy is Remedy.RETRIED


def test_where_nothing_failed_nothing_is_recorded() -> None:
    book = Book()
    book.incidents.closed(now=1.0)
    book.goes_on(resumed((0, 1)))
    assert book.over() == []


def test_times_are_taken_from_the_notice() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a", silent_s=0.5)
    book.incidents.closed(now=10.25)
    book.goes_on(resumed())
    found = book.only(now=12.0)
    assert (found.wall_s, found.silent_s, found.fenced_s, found.seconds) == (10.0, 0.5, 0.25, 2.0)


def test_what_is_replayed_is_told_by_stage_and_each_microbatch_costs_its_samples_once() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.goes_on(resumed((1, 0), (0, 0), (1, 3), num_rerouted=4))
    found = book.only()
    assert found.remedy is Remedy.RESUMED
    assert found.replayed == (
        Replayed(stage=StageIndex(0), microbatches=microbatches(0)),
        Replayed(stage=StageIndex(1), microbatches=microbatches(0, 3)),
    )
    assert (found.num_rerouted, found.num_retried, found.num_samples_repeated) == (4, 0, 4)


def test_a_step_that_begins_anew_costs_what_had_begun_of_it() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.planned_anew(3)
    found = book.only()
    assert (found.remedy, found.num_retried, found.num_samples_repeated) == (Remedy.RETRIED, 3, 6)
    assert (found.replayed, found.num_rerouted) == ((), 0)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_where_no_step_was_begun_none_was_touched(is_resumed: bool) -> None:
    book = Book()
    book.notice(IncidentKind.LINK_FAILED, "w0a")
    if is_resumed:
        book.goes_on(resumed(is_begun=False))
    else:
        book.planned_anew(0)
    found = book.only()
    assert (found.kind, found.remedy, found.num_samples_repeated) == (
        IncidentKind.LINK_FAILED,
        Remedy.UNTOUCHED,
        0,
    )


def test_committed_steps_that_are_lost_are_named_before_all_else() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a", "w0b")
    book.planned_anew(1, num_steps_lost=2)
    found = book.only()
    assert (found.remedy, found.num_steps_lost) == (Remedy.ROLLED_BACK, 2)
    # Two steps of eight samples, and one microbatch of two.
    assert found.num_samples_repeated == 18


def test_failures_before_work_goes_on_are_one_record_with_the_reason_of_the_first() -> None:
    book = Book()
    book.notice(IncidentKind.LINK_FAILED, "w1a", silent_s=0.25)
    book.notice(IncidentKind.WORKER_LOST, "w0a", silent_s=3.0, now=11.0)
    book.notice(IncidentKind.STALLED, silent_s=1.0, now=11.5)
    book.goes_on(resumed())
    found = book.only()
    assert (found.kind, found.workers) == (IncidentKind.LINK_FAILED, ("w0a", "w1a"))
    assert found.reason == "link_failed of ('w1a',)"
    assert (found.silent_s, found.wall_s, found.seconds) == (3.0, 10.0, 2.0)


def test_what_each_of_several_failures_cost_is_added_up() -> None:
    """A second worker dies while the plan without the first is built: that plan already replays and reroutes."""
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.goes_on(resumed((0, 1), (0, 2), num_rerouted=3))
    book.notice(IncidentKind.WORKER_LOST, "w1a", now=10.5)
    book.goes_on(resumed((0, 2), (1, 2), dropped=((0, 3),), num_rerouted=2))
    found = book.only()
    assert found.num_rerouted == 5
    assert found.replayed == (
        Replayed(stage=StageIndex(0), microbatches=microbatches(1, 2)),
        Replayed(stage=StageIndex(1), microbatches=microbatches(2)),
    )
    assert found.num_samples_repeated == 4
    assert found.num_dropped == 1


def test_a_step_that_went_on_and_then_began_anew_replays_nothing() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.goes_on(resumed((0, 1), num_rerouted=3))
    book.notice(IncidentKind.WORKER_LOST, "w0b", now=10.5)
    book.planned_anew(4)
    found = book.only()
    assert (found.remedy, found.replayed, found.num_rerouted, found.num_retried) == (Remedy.RETRIED, (), 0, 4)


def test_the_next_failure_begins_with_nothing_of_the_last() -> None:
    book = Book()
    book.notice(IncidentKind.WORKER_LOST, "w0a", silent_s=3.0)
    book.planned_anew(1, num_steps_lost=2)
    book.over()
    book.notice(IncidentKind.WORKER_FAILED, "w1a", now=20.0)
    book.goes_on(resumed((0, 1)))
    found = book.only(now=21.0)
    assert (found.kind, found.workers, found.remedy) == (IncidentKind.WORKER_FAILED, ("w1a",), Remedy.RESUMED)
    assert (found.silent_s, found.num_steps_lost, found.num_retried, found.num_samples_repeated) == (
        0.0,
        0,
        0,
        2,
    )


def test_what_happened_without_a_failure_is_no_part_of_the_next_one() -> None:
    book = Book()
    book.goes_on(resumed((0, 1), num_rerouted=3))
    book.planned_anew(1, num_steps_lost=2)
    book.over()
    book.notice(IncidentKind.WORKER_LOST, "w0a")
    book.goes_on(resumed((1, 1), num_rerouted=1))
    found = book.only()
    assert (found.num_rerouted, found.num_steps_lost, found.num_samples_repeated) == (1, 0, 2)


# --- in a run ---


def stepping() -> Desk:
    desk = Desk()
    desk.join(*PLAN.workers)
    desk.submit(SPEC)
    desk.settle(PLAN)
    assert desk.told(Start)
    return desk


def acknowledge(desk: Desk, done: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Everybody alive acknowledges; by worker, its ledger and what waits for a gradient."""
    for worker in desk.live:
        ledger, forwards = done.get(worker, ((), ()))
        stage = int(worker[1])
        desk.report(
            worker,
            Ack(
                generation=desk.generation,
                chunks=(ChunkVersion(stage=STAGES[stage], version=Step(0)),),
                progress=(
                    ChunkProgress(
                        stage=StageIndex(stage),
                        ledger=microbatches(*ledger),
                        forwards=microbatches(*forwards),
                        outputs=microbatches(*ledger, *forwards) if stage == 0 else (),
                        gradients=microbatches(*ledger) if stage == 1 else (),
                    ),
                ),
                backups=(),
            ),
        )


def go_on(desk: Desk) -> Incident:
    desk.ready(plan_of_run(desk).workers)
    [found] = desk.recorded(Incident)
    assert desk.told(Start)
    return found


def plan_of_run(desk: Desk) -> Plan:
    assert desk.machine.run is not None
    assert desk.machine.run.plan is not None
    return desk.machine.run.plan


def test_a_death_in_a_step_is_recorded_when_the_step_goes_on() -> None:
    desk = stepping()
    desk.break_stream("w1b")
    assert set(desk.told(NewGeneration)) == {"w0a", "w0b", "w1a"}
    # w1b had had the loss of 0: w0a has its gradient. Microbatch 2 was on its way there.
    acknowledge(desk, {"w0a": ((0,), (2,))})
    found = go_on(desk)
    assert (found.kind, found.workers, found.remedy) == (IncidentKind.WORKER_LOST, ("w1b",), Remedy.RESUMED)
    assert found.replayed == (Replayed(stage=StageIndex(1), microbatches=microbatches(0)),)
    assert (found.num_rerouted, found.num_samples_repeated) == (2, 2)
    assert found.seconds >= 0.0
    assert found.fenced_s <= found.seconds
    assert found.silent_s <= GRACE_S


def test_a_death_while_a_plan_is_built_belongs_to_the_same_incident() -> None:
    desk = stepping()
    desk.break_stream("w1b")
    acknowledge(desk, {"w0a": ((0,), (2,))})
    desk.break_stream("w0b")
    acknowledge(desk, {"w0a": ((0,), (2,))})
    found = go_on(desk)
    assert found.workers == ("w0b", "w1b")
    assert plan_of_run(desk).workers == ("w0a", "w1a")
    # Two hops of w1b, then two of w0b.
    assert found.num_rerouted == 4
    assert found.replayed == (Replayed(stage=StageIndex(1), microbatches=microbatches(0)),)


@pytest.mark.parametrize(
    ("kind", "worker"), [(IncidentKind.LINK_FAILED, "w1b"), (IncidentKind.WORKER_FAILED, "w0a")]
)
def test_a_broken_link_and_a_failed_op_are_told_apart(kind: IncidentKind, worker: str) -> None:
    desk = stepping()
    said: dict[IncidentKind, tuple[str, Report]] = {
        IncidentKind.LINK_FAILED: (
            "w0a",
            Suspected(generation=desk.generation, peer=WorkerId(worker), reason="refused"),
        ),
        IncidentKind.WORKER_FAILED: (
            worker,
            Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"),
        ),
    }
    desk.report(*said[kind])
    assert desk.generation == 2
    acknowledge(desk, {"w0a": ((), (0,))})
    found = go_on(desk)
    assert (found.kind, found.workers, found.remedy) == (kind, (worker,), Remedy.RESUMED)
    assert (found.num_rerouted, found.replayed, found.num_samples_repeated) == (0, (), 0)


def test_losing_both_holders_of_a_stage_begins_the_step_anew() -> None:
    desk = stepping()
    desk.break_stream("w1a")
    desk.break_stream("w1b")
    acknowledge(desk, {"w0a": ((0,), (2,)), "w0b": ((), (1,))})
    both = plan_of(
        [chunk(stage, worker) for stage in (0, 1) for worker in ("w0a", "w0b")],
        [path(chunk(0, worker), chunk(1, worker)) for worker in ("w0a", "w0b")] * 2,
    )
    desk.plan(replace(both, stages=STAGES))
    found = go_on(desk)
    assert (found.workers, found.remedy) == (("w1a", "w1b"), Remedy.RETRIED)
    # Of four microbatches, 0, 1 and 2 had been begun.
    assert (found.num_retried, found.num_samples_repeated) == (3, 6)
    assert (found.replayed, found.num_rerouted, found.num_steps_lost) == ((), 0, 0)


def skipping(ways: tuple[tuple[int, ...], tuple[int, ...]], *workers: str) -> Plan:
    """Four stages on `w0a` to `w3b`, of which each microbatch visits three, on the first who holds each."""
    chunks = [chunk(int(worker[1]), worker) for worker in workers]
    holder = {at.stage: at for at in reversed(chunks)}
    paths = [path(*(holder[StageIndex(stage)] for stage in way)) for way in ways]
    full = [path(*(holder[StageIndex(stage)] for stage in range(4)))]
    return plan_of(chunks, paths, full_paths=full, num_shards=1)


def retried_another_way() -> tuple[Desk, Plan]:
    """A log lacked what was needed after a death, so the step begins anew by other stages; nobody has built that."""
    spec = small_job(stages=4, replicas=1, microbatches=2, skip_ratio=0.25)
    workers = ("w0a", "w1a", "w2a", "w3a", "w3b")
    desk = Desk()
    desk.join(*workers)
    desk.submit(spec)
    desk.settle(_cut(skipping(((0, 1, 3), (0, 2, 3)), *workers)))
    desk.break_stream("w3b")
    told_of_stages(desk, {"w0a": ((), (1,)), "w3a": ((0,), ())})
    other = _cut(skipping(((0, 2, 3), (0, 1, 3)), *workers[:-1]))
    desk.plan(other)
    assert desk.told(Assign)
    return desk, other


def _cut(plan: Plan) -> Plan:
    bounds = (0, 3, 5, 7, 10)
    stages = (StageSpec(index=StageIndex(i), first=bounds[i], stop=bounds[i + 1]) for i in range(4))
    return replace(plan, stages=tuple(stages))


def told_of_stages(desk: Desk, done: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Everybody alive acknowledges: its ledger, with gradients in the log, and what waits for a gradient, with none."""
    stages = _cut(skipping(((0, 1, 3), (0, 2, 3)), "w0a", "w1a", "w2a", "w3a")).stages
    for worker in desk.live:
        ledger, forwards = done.get(worker, ((), ()))
        stage = stages[int(worker[1])]
        progress = ChunkProgress(
            stage=stage.index,
            ledger=microbatches(*ledger),
            forwards=microbatches(*forwards),
            outputs=(),
            gradients=microbatches(*ledger),
        )
        chunks = (ChunkVersion(stage=stage, version=Step(0)),)
        desk.report(worker, Ack(generation=desk.generation, chunks=chunks, progress=(progress,), backups=()))


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_done_by_other_ways_is_no_part_of_a_step_that_began_anew(is_restarted: bool) -> None:
    desk, other = retried_another_way()
    if is_restarted:
        desk = Desk(desk.log)
        desk.join(*other.workers)
    else:
        desk.report("w0a", Suspected(generation=desk.generation, peer=WorkerId("w1a"), reason="refused"))
    # w3a has still what it summed when microbatch 0 came to it from stage 1; now it comes from stage 2.
    told_of_stages(desk, {"w3a": ((0,), ())})
    assigned = desk.told(Assign)
    assert set(assigned) == set(other.workers)
    assert all(x.resumption is None or not x.resumption.chunks for x in assigned.values())
