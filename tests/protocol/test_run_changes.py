"""The Run machine while workers die, return, come and leave, and who is to blame."""

from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import (
    CheckpointVerified,
    DrainAsked,
    MakePlan,
    Send,
    VerifyCheckpoint,
)
from skein.protocol.coordinator.runs.gathering import GATHER_S, PARDON_S
from skein.protocol.coordinator.runs.phase import StepPhase
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.log.records import (
    Drained,
    GenerationOpened,
    RolledBack,
    StepCommitted,
)
from skein.protocol.messages.directives import (
    Assign,
    Commit,
    Dismiss,
    NewGeneration,
    Refused,
    Save,
    SourceKind,
    Start,
)
from skein.protocol.messages.reports import Beat, CheckpointUnwritten, Leaving, Suspected, Trouble
from skein.types import Condition, JobId, JobState, WorkerId
from tests.support.desk import Desk
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, plan_of, stage_spec
from tests.support.reports import hello, ledger, stage_done
from tests.support.runs import (
    BOTH_STAGES,
    HELD,
    LEFT,
    PAIRS,
    PAIRS_SPEC,
    PLAN,
    SPEC,
    beats,
    began,
    ended,
    held_at,
    let_in,
    phase,
    stepping,
)

# --- deaths and returns ---


def test_a_lost_worker_opens_a_generation_of_the_survivors() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.break_stream("w1b")
    assert set(desk.told(NewGeneration)) == {"w0a", "w0b", "w1a"}
    assert "lost w1b" in desk.recorded(GenerationOpened)[0].reason


def test_the_last_commit_travels_with_a_generation() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    [committed] = desk.recorded(StepCommitted)
    desk.break_stream("w1b")
    assert {fence.last_commit for fence in desk.told(NewGeneration).values()} == {committed.record}


def test_losing_a_worker_without_a_place_is_no_event() -> None:
    desk = Desk()
    desk.join("spare", *PLAN.workers)
    desk.submit(SPEC)
    desk.settle(PLAN)
    assert not [c for c in desk.break_stream("spare") if isinstance(c, Send)]
    assert phase(desk) is StepPhase


def test_a_broken_stream_that_comes_back_costs_a_generation_for_what_was_said_may_be_lost() -> None:
    desk = stepping()
    desk.report("w0a", hello("w0a", "w0a-1"))
    assert "came back on a new stream" in desk.recorded(GenerationOpened)[0].reason


def test_survivors_give_their_state_to_who_lacks_it() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.join("w1b", incarnation=2)
    desk.acknowledge(desk.live, {worker: HELD[worker] for worker in ("w0a", "w0b", "w1a")})
    desk.adopt(PAIRS)
    sources = {worker: assign.chunks[0].source for worker, assign in desk.told(Assign).items()}
    assert {worker: source.kind for worker, source in sources.items()} == {
        "w0a": SourceKind.KEEP,
        "w0b": SourceKind.KEEP,
        "w1a": SourceKind.KEEP,
        "w1b": SourceKind.PEER,
    }
    assert sources["w1b"].peer == "w1a"


def test_as_long_as_every_stage_has_a_holder_nothing_is_rolled_back() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.break_stream("w0a")
    desk.break_stream("w1b")
    desk.acknowledge(desk.live, {worker: HELD[worker] for worker in desk.live})
    desk.adopt(LEFT)
    assert not desk.recorded(RolledBack)
    desk.ready(LEFT.workers)
    assert {start.step for start in desk.told(Start).values()} == {1}


def test_a_stage_that_nobody_holds_takes_everybody_back_to_the_checkpoint() -> None:
    desk = stepping(small_job(stages=2, replicas=2, steps=9, save_every=1), PAIRS)
    desk.step(PAIRS)
    desk.save()
    desk.step(PAIRS)
    desk.break_stream("w1a")
    desk.break_stream("w1b")
    desk.acknowledge(desk.live, {worker: [(stage_spec(0), 2)] for worker in desk.live})
    desk.adopt(BOTH_STAGES)
    [asked] = desk.found(VerifyCheckpoint)
    desk.give(CheckpointVerified(checkpoint=asked.checkpoint, condition=Condition.WHOLE, reason=""))
    [record] = desk.recorded(RolledBack)
    assert (record.from_version, record.to_version) == (2, 1)
    assert record.reason == "no worker holds stage 1 at version 2"
    kinds = {chunk.source.kind for assign in desk.told(Assign).values() for chunk in assign.chunks}
    assert kinds == {SourceKind.CHECKPOINT}
    desk.ready(BOTH_STAGES.workers)
    assert {start.step for start in desk.told(Start).values()} == {1}


def test_who_returns_from_before_a_roll_back_is_emptied() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.break_stream("w1a")
    desk.break_stream("w1b")
    desk.acknowledge(desk.live, {worker: HELD[worker] for worker in desk.live})
    desk.adopt(BOTH_STAGES)
    assert desk.recorded(RolledBack)
    again = Desk(desk.log)
    again.join("w1b")
    assert again.told(Dismiss)["w1b"].job == "small-1"


def test_who_returns_without_a_roll_back_keeps_what_it_holds() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.break_stream("w1b")
    desk.join("w1b")
    assert not desk.told(Dismiss)


# --- newcomers and leavers ---


def test_a_newcomer_gets_a_place_at_the_next_boundary_if_there_are_too_few() -> None:
    desk = Desk()
    desk.join(*PLAN.workers)
    desk.submit(PAIRS_SPEC)
    beats(desk, int(GATHER_S) + 1)
    desk.settle(PLAN)
    desk.join("w9a")
    assert not desk.told(NewGeneration)
    pair = plan_of([*(x.chunk for x in PLAN.chunks), chunk(0, "w9a")], PLAN.paths)
    let_in(desk, PLAN, pair)
    assert not desk.told(Commit)["w0a"].goes_on
    assert set(desk.told(NewGeneration)) == {"w0a", "w1a", "w9a"}
    assert desk.recorded(GenerationOpened)[0].reason == "w9a could work too"


def test_a_newcomer_waits_when_there_are_enough() -> None:
    desk = stepping()
    desk.join("w9a")
    desk.step(PLAN)
    assert desk.told(Commit)["w0a"].goes_on


def test_a_worker_that_leaves_is_replaced_at_the_next_boundary_and_then_let_go() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.report("w1b", Leaving(reason="SIGTERM"))
    assert not desk.told(Dismiss)
    desk.step(PAIRS)
    assert desk.recorded(GenerationOpened)[0].reason == "w1b leaving"
    desk.acknowledge(desk.live, HELD)
    [asked] = desk.found(MakePlan)
    assert "w1b" not in [worker.worker for worker in asked.fleet.workers]
    smaller = grid_plan(stages=2, replicas=1)
    desk.plan(smaller)
    desk.ready(smaller.workers)
    assert desk.told(Dismiss)["w1b"].may_exit


def test_an_idle_worker_is_let_go_at_once() -> None:
    desk = Desk()
    desk.join("a")
    desk.report("a", Leaving(reason="SIGTERM"))
    assert desk.told(Dismiss)["a"].may_exit


def test_a_drained_worker_that_did_not_hear_it_is_told_again_when_it_returns() -> None:
    desk = Desk()
    desk.join("a")
    desk.give(DrainAsked(worker=WorkerId("a")))
    desk.join("a")
    assert desk.told(Dismiss)["a"].may_exit


def test_a_restarted_coordinator_remembers_whom_an_operator_wants_to_go() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.give(DrainAsked(worker=WorkerId("w1b")))
    [drained] = desk.recorded(Drained)
    assert (drained.worker, drained.incarnation) == ("w1b", "w1b-1")
    again = Desk(desk.log)
    again.join(*PAIRS.workers)
    assert [w for w, entry in again.machine.membership.live.items() if entry.is_leaving] == ["w1b"]


def test_a_drain_is_recorded_once_and_is_of_one_process() -> None:
    desk = Desk()
    desk.join("a")
    desk.give(DrainAsked(worker=WorkerId("stranger")))
    assert desk.commands == []
    desk.give(DrainAsked(worker=WorkerId("a")))
    desk.give(DrainAsked(worker=WorkerId("a")))
    assert not desk.recorded(Drained)
    again = Desk(desk.log)
    again.join("a", incarnation=2)
    assert not again.machine.membership.live[WorkerId("a")].is_leaving


def test_a_process_that_was_silent_while_another_took_its_name_is_told_so() -> None:
    desk = Desk()
    desk.join("a")
    desk.wait(3.0)
    desk.report("a", hello("a", "a-2"))
    [refused] = [c for c in desk.found(Send) if isinstance(c.directive, Refused)]
    assert refused.incarnation == "a-1"


def test_an_operator_drains_as_a_worker_leaves() -> None:
    desk = Desk()
    desk.join("spare", *PLAN.workers)
    desk.submit(SPEC)
    desk.settle(PLAN)
    desk.give(DrainAsked(worker=WorkerId("spare")))
    assert desk.told(Dismiss)["spare"].may_exit


def test_when_all_leave_a_checkpoint_comes_first() -> None:
    desk = stepping()
    for worker in PLAN.workers:
        desk.report(worker, Leaving(reason="SIGTERM"))
    assert not desk.told(Dismiss)
    desk.step(PLAN)
    assert not desk.told(Dismiss)
    assert set(desk.told(Save)) == set(PLAN.workers)
    desk.save()
    assert {dismiss.may_exit for dismiss in desk.told(Dismiss).values()} == {True}
    assert desk.machine.view.state_of(JobId("small-1")) is JobState.PAUSED


def test_what_is_held_is_saved_before_a_run_waits_for_lack_of_a_plan() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.give(DrainAsked(worker=WorkerId("w1b")))
    desk.step(PAIRS)
    desk.acknowledge(desk.live, held_at(2))
    desk.plan(Infeasible(reason="too small"))
    assert not desk.told(Dismiss)
    assert sorted(stage for asked in desk.told(Save).values() for stage in asked.stages) == [0, 1]
    assert "w1b" not in desk.told(Save)
    desk.save()
    assert desk.told(Dismiss)["w1b"].may_exit
    assert desk.machine.view.reason_of(JobId("small-1")) == "too small"


def test_a_run_that_cannot_save_before_it_waits_tries_with_who_comes() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.give(DrainAsked(worker=WorkerId("w1b")))
    desk.step(PAIRS)
    desk.acknowledge(desk.live, held_at(2))
    desk.plan(Infeasible(reason="too small"))
    [(saver, asked), *_] = sorted(desk.told(Save).items())
    desk.join("x")
    # As long as it may be saved, that comes first.
    assert not desk.told(NewGeneration)
    failed = CheckpointUnwritten(
        generation=asked.generation, version=asked.version, stage=asked.stages[0], reason="disk full"
    )
    desk.report(saver, failed)
    assert "x" in desk.told(NewGeneration)


def test_what_cannot_be_saved_keeps_nobody() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.give(DrainAsked(worker=WorkerId("w1b")))
    desk.step(PAIRS)
    desk.acknowledge(desk.live, {"w0a": [(stage_spec(0), 2)]})
    desk.plan(Infeasible(reason="too small"))
    assert desk.told(Dismiss)["w1b"].may_exit


# --- blame ---


def test_who_fails_three_times_gets_no_more_work() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    for _ in range(MAX_STRIKES):
        desk.settle(PAIRS)
        desk.report("w1b", Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"))
    assert any("excluded=w1b: out of memory" in line for line in desk.lines())
    desk.acknowledge(desk.live)
    assert "w1b" not in [worker.worker for worker in desk.found(MakePlan)[0].fleet.workers]


def test_a_committed_step_makes_up_for_older_failures() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    for _ in range(MAX_STRIKES - 1):
        desk.settle(PAIRS)
        desk.report("w1b", Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"))
    desk.settle(PAIRS)
    desk.step(PAIRS)
    desk.report("w1b", Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"))
    assert not any("excluded" in line for line in desk.lines())


def test_a_new_process_of_an_excluded_worker_has_another_chance() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    for _ in range(MAX_STRIKES):
        desk.settle(PAIRS)
        desk.report("w1b", Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"))
    desk.join("w1b", incarnation=2)
    desk.acknowledge(desk.live)
    assert "w1b" in [worker.worker for worker in desk.found(MakePlan)[0].fleet.workers]


def test_a_suspicion_blames_the_peer() -> None:
    desk = stepping()
    desk.report("w0a", Suspected(generation=desk.generation, peer=WorkerId("w1a"), reason="refused"))
    assert desk.recorded(GenerationOpened)[0].reason == "w1a: w0a cannot reach it: refused"


def test_who_reports_a_wrong_ledger_is_struck() -> None:
    desk = began(PAIRS_SPEC, PAIRS)
    for _ in range(MAX_STRIKES):
        desk.settle(PAIRS)
        desk.report("w0a", stage_done(ledger(0, "w0a", 0), generation=desk.generation))
    assert any("excluded=w0a" in line for line in desk.lines())


def test_when_every_worker_fails_the_job_fails_with_the_reason() -> None:
    desk = Desk()
    desk.join("w0a")
    plan = grid_plan(stages=1, replicas=1)
    desk.submit(small_job(stages=1, replicas=1))
    for _ in range(MAX_STRIKES):
        desk.settle(plan)
        desk.report("w0a", Trouble(generation=desk.generation, is_fatal=False, reason="out of memory"))
    state, reason = ended(desk)
    assert state is JobState.FAILED
    assert reason == "no worker can run it; the last reason: w0a: out of memory"


def test_who_only_peers_complained_of_is_pardoned_when_nobody_else_is_left() -> None:
    desk = began()
    for _ in range(MAX_STRIKES):
        desk.settle(PLAN)
        desk.report("w0a", Suspected(generation=desk.generation, peer=WorkerId("w1a"), reason="refused"))
    assert any("excluded=w1a" in line for line in desk.lines())
    desk.break_stream("w0a")
    assert set(desk.told(NewGeneration)) == {"w1a"}


def test_who_only_peers_complained_of_is_pardoned_when_no_plan_exists_without_it() -> None:
    desk = began()
    for _ in range(MAX_STRIKES):
        desk.settle(PLAN)
        desk.report("w0a", Suspected(generation=desk.generation, peer=WorkerId("w1a"), reason="refused"))
    desk.acknowledge(desk.live)
    desk.plan(Infeasible(reason="too small"))
    before = desk.generation
    for _ in range(int(PARDON_S)):
        assert desk.generation == before
        desk.wait(1.0)
        for worker in desk.live:
            desk.report(worker, Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.generation == before + 1
