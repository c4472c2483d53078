"""The Coordinator machine: jobs, generations, steps, checkpoints, and who is to blame."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan

import pytest

from skein.config.job import JobSpec
from skein.plan.plan import Infeasible, Plan
from skein.protocol import coordinator
from skein.protocol.coordinator_io import (
    Append,
    CancelAsked,
    DrainAsked,
    MakePlan,
    ManifestWritten,
    PlanMade,
    PruneCheckpoints,
    Send,
    StreamBroken,
    WriteManifest,
)
from skein.protocol.messages import (
    Ack,
    Assign,
    Beat,
    CheckpointWritten,
    ChunksReady,
    Commit,
    Dismiss,
    Evaluate,
    EvaluationDone,
    Leaving,
    LinksMeasured,
    NewGeneration,
    Prepare,
    Probe,
    Refused,
    Report,
    Save,
    SourceKind,
    Start,
    Suspected,
    Trouble,
    Vote,
    Welcome,
)
from skein.protocol.records import (
    CheckpointCommitted,
    Drained,
    Evaluated,
    GenerationOpened,
    JobEnded,
    JobSubmitted,
    PlanAdopted,
    RolledBack,
    StepCommitted,
)
from skein.protocol.runs.detection import WARMING_S
from skein.protocol.runs.gathering import GATHER_S, PARDON_S, RETURN_S
from skein.protocol.runs.run import RunPhase
from skein.protocol.runs.strikes import MAX_STRIKES
from skein.protocol.runs.watchdog import STALL_S, STUCK_STALLS
from skein.topology.fleet import Link
from skein.types import Generation, GroupId, JobId, JobState, StageIndex, StageSpec, Step, WorkerId
from tests.support.desk import GRACE_S, Desk, checkpoint
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, stage_spec
from tests.support.reports import attempt, hello, ledger, stage_done

SPEC = small_job(stages=2, replicas=1, microbatches=2, steps=3)
PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
PAIRS_SPEC = small_job(stages=2, replicas=2, steps=3)
PAIRS = grid_plan(stages=2, replicas=2)
LEFT = plan_of([chunk(0, "w0b"), chunk(1, "w1a")], [path(chunk(0, "w0b"), chunk(1, "w1a"))] * 4, num_shards=1)
BOTH_STAGES = plan_of(
    [chunk(stage, worker) for stage in (0, 1) for worker in ("w0a", "w0b")],
    [path(chunk(0, worker), chunk(1, worker)) for worker in ("w0a", "w0b")] * 2,
)


def held_at(version: int) -> dict[str, Sequence[tuple[StageSpec, int]]]:
    """What the workers of `PAIRS` hold."""
    return {worker: [(stage_spec(int(worker[1])), version)] for worker in PAIRS.workers}


HELD = held_at(1)


def began(spec: JobSpec = SPEC, plan: Plan = PLAN) -> Desk:
    """Workers of the plan are here, and a generation of them is open."""
    desk = Desk()
    desk.join(*plan.workers)
    desk.submit(spec)
    assert desk.told(NewGeneration)
    return desk


def stepping(spec: JobSpec = SPEC, plan: Plan = PLAN) -> Desk:
    """The same in its first step."""
    desk = began(spec, plan)
    desk.settle(plan)
    assert desk.told(Start)
    return desk


def let_in(desk: Desk, plan: Plan, larger: Plan) -> None:
    """A step under `plan` asks for one with a place for who came, and another begins it: its copies are here."""
    desk.step(plan)
    assert desk.told(Commit)[plan.workers[0]].goes_on
    desk.plan(larger)
    desk.prefetch()
    desk.step(plan)


def phase(desk: Desk) -> RunPhase:
    assert desk.machine.run is not None
    return desk.machine.run.phase


def ended(desk: Desk) -> tuple[JobState, str]:
    [record] = desk.recorded(JobEnded)
    return record.state, record.reason


# --- jobs ---


def test_a_key_submits_one_job_however_often_it_is_used() -> None:
    desk = Desk()
    first = desk.submit(SPEC, key="a")
    assert desk.recorded(JobSubmitted)
    assert desk.submit(SPEC, key="a") == first
    assert desk.commands == []
    assert desk.submit(SPEC, key="b") != first


def test_jobs_wait_for_each_other_in_the_order_of_submission() -> None:
    desk = Desk()
    first, second, third = (desk.submit(SPEC, key=key) for key in "abc")
    assert (first, second, third) == ("small-1", "small-2", "small-3")
    assert desk.machine.state_of(first) is JobState.PAUSED
    assert desk.machine.state_of(third) is JobState.PENDING
    assert desk.machine.reason_of(first) == "waiting for workers"
    assert desk.machine.reason_of(third) == "waiting for small-1"
    desk.give(CancelAsked(job=first))
    assert desk.machine.state_of(first) is JobState.CANCELLED
    assert desk.machine.state_of(second) is JobState.PAUSED


def test_a_job_that_has_not_begun_can_be_cancelled_once() -> None:
    desk = stepping()
    waiting = desk.submit(SPEC, key="later")
    desk.give(CancelAsked(job=waiting))
    assert ended(desk) == (JobState.CANCELLED, "cancelled before it began")
    assert desk.machine.reason_of(waiting) == "cancelled before it began"
    assert desk.give(CancelAsked(job=waiting)) == []
    assert desk.give(CancelAsked(job=JobId("unknown"))) == []


def test_cancelling_the_active_job_frees_its_workers_and_begins_the_next() -> None:
    desk = stepping()
    desk.submit(SPEC, key="next")
    desk.give(CancelAsked(job=JobId("small-1")))
    assert set(desk.told(Dismiss)) == set(PLAN.workers)
    assert {fence.job for fence in desk.told(NewGeneration).values()} == {"small-2"}


def test_the_state_of_a_job_follows_its_run() -> None:
    desk = Desk()
    job = desk.submit(SPEC)
    desk.join(*PLAN.workers)
    assert desk.machine.state_of(job) is JobState.PLANNING
    desk.settle(PLAN)
    assert desk.machine.state_of(job) is JobState.RUNNING
    assert desk.machine.reason_of(job) == "workers gathered"


# --- gathering ---


def test_a_run_begins_at_once_when_all_wanted_workers_are_here() -> None:
    desk = Desk()
    desk.submit(SPEC)
    desk.join("w0a")
    assert not desk.told(NewGeneration)
    desk.join("w1a")
    assert set(desk.told(NewGeneration)) == {"w0a", "w1a"}


def test_a_run_begins_with_fewer_after_a_while() -> None:
    desk = Desk()
    desk.submit(PAIRS_SPEC)
    desk.join("w0a")
    desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.machine.deadline() == desk.now + GATHER_S
    desk.wait(GATHER_S - 0.1)
    assert not desk.told(NewGeneration)
    desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    desk.wait(0.1)
    assert desk.told(NewGeneration)


def test_a_restarted_coordinator_waits_for_the_members_it_had() -> None:
    desk = Desk(stepping().log)
    desk.join("w0a")
    for _ in range(int(RETURN_S) - 1):
        desk.wait(1.0)
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.machine.history.generation == 1
    desk.wait(1.0)
    assert set(desk.told(NewGeneration)) == {"w0a"}


def test_a_restarted_coordinator_goes_on_as_soon_as_all_are_back() -> None:
    desk = Desk(stepping().log)
    desk.join("w0a")
    desk.join("w1a")
    [opened] = desk.recorded(GenerationOpened)
    assert (opened.generation, desk.machine.history.epoch) == (2, 2)


def test_nobody_is_waited_for_twice() -> None:
    """After the first generation of a restarted coordinator, who stayed away is no reason to hurry or to wait."""
    desk = Desk(stepping().log)
    desk.join("w0a")
    for _ in range(int(RETURN_S)):
        desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(1.0)
    assert desk.generation == 2
    desk.break_stream("w0a")
    desk.wait(100.0)
    desk.join("w5a")
    assert not desk.told(NewGeneration)
    assert desk.machine.deadline() == desk.now + GATHER_S


# --- workers ---


def test_a_newcomer_is_welcomed_and_measures_its_links() -> None:
    desk = Desk()
    desk.join("a")
    assert desk.told(Welcome)["a"].epoch == 1
    assert not desk.told(Probe)
    desk.join("b")
    assert [member.worker for member in desk.told(Probe)["b"].peers] == ["a"]


def test_a_worker_of_another_release_is_refused() -> None:
    desk = Desk()
    desk.report("a", hello("a", version=99))
    assert "install the same release" in desk.told(Refused)["a"].reason
    assert desk.live == []


def test_a_worker_that_followed_a_newer_coordinator_is_refused() -> None:
    desk = Desk()
    desk.report("a", hello("a", epoch=7))
    assert "start the worker again" in desk.told(Refused)["a"].reason
    assert desk.live == []


def test_who_loses_its_name_to_another_process_is_told_so() -> None:
    desk = Desk()
    desk.join("a")
    desk.join("a", incarnation=2)
    [refused] = [command for command in desk.found(Send) if isinstance(command.directive, Refused)]
    assert refused.incarnation == "a-1"
    assert desk.live == ["a"]


def test_measured_links_reach_the_planner() -> None:
    desk = began()
    link = Link(sender=WorkerId("w0a"), receiver=WorkerId("w1a"), latency_s=0.5, bytes_per_s=1e6)
    desk.report("w0a", LinksMeasured(links=(link,)))
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    assert [(x.sender, x.receiver) for x in asked.fleet.links] == [("w0a", "w1a")]


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s"), [(0.1, 0.0), (0.1, nan), (-1.0, 1e6), (inf, 1e6), (nan, 1e6)]
)
def test_a_link_that_cannot_be_is_none(latency_s: float, bytes_per_s: float) -> None:
    desk = Desk()
    desk.join("a", "b")
    link = Link(sender=WorkerId("a"), receiver=WorkerId("b"), latency_s=latency_s, bytes_per_s=bytes_per_s)
    desk.report("a", LinksMeasured(links=(link,)))
    assert not desk.machine.links


def test_links_of_workers_that_are_gone_are_forgotten_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "MAX_LINKS", 2)
    desk = Desk()
    desk.join("a", "b")
    ends = [("a", "b"), ("a", "gone"), ("gone", "b")]
    links = tuple(
        Link(sender=WorkerId(s), receiver=WorkerId(r), latency_s=0.1, bytes_per_s=1e6) for s, r in ends
    )
    desk.report("a", LinksMeasured(links=links))
    assert list(desk.machine.links) == [("a", "b")]


def test_what_an_unknown_worker_says_is_nothing() -> None:
    desk = stepping()
    desk.incarnations[WorkerId("stranger")] = desk.incarnations[WorkerId("w0a")]
    assert desk.report("stranger", Leaving(reason="bye")) == []


# --- the fence ---


def test_a_generation_is_recorded_before_anybody_hears_of_it() -> None:
    desk = began()
    kinds = [
        type(command.record) if isinstance(command, Append) else type(command.directive)
        for command in desk.commands
        if isinstance(command, Append | Send)
    ]
    assert kinds.index(GenerationOpened) < kinds.index(NewGeneration)


def test_nothing_is_planned_or_assigned_before_everybody_has_acknowledged() -> None:
    desk = began()
    desk.acknowledge(["w0a"])
    assert desk.commands == []
    desk.acknowledge(["w0a"])
    assert desk.commands == []
    desk.acknowledge(["w1a"])
    assert desk.found(MakePlan)
    desk.plan(PLAN)
    assert set(desk.told(Assign)) == {"w0a", "w1a"}
    assert desk.recorded(PlanAdopted)[0].plan == PLAN


def test_acknowledgements_of_an_older_generation_do_not_count() -> None:
    desk = began()
    desk.report("w0a", Leaving(reason="bye"))
    before = desk.generation
    desk.join("w1a", incarnation=2)
    assert desk.generation == before + 1
    desk.report("w1a", Ack(generation=before, chunks=(), progress=(), backups=()))
    desk.acknowledge(["w0a"])
    assert not desk.found(MakePlan)


def test_a_death_during_the_fence_opens_another_generation() -> None:
    desk = began()
    desk.acknowledge(["w0a"])
    desk.break_stream("w1a")
    assert set(desk.told(NewGeneration)) == {"w0a"}
    assert desk.generation == 2
    desk.acknowledge(["w0a"])
    assert [worker.worker for worker in desk.found(MakePlan)[0].fleet.workers] == ["w0a"]


def test_a_plan_that_a_newer_generation_overtook_is_ignored() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    desk.break_stream("w1a")
    assert desk.give(PlanMade(request=asked.request, result=PLAN)) == []


def test_a_plan_for_workers_who_all_died_meanwhile_is_ignored() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    for worker, incarnation in desk.incarnations.items():
        desk.give(StreamBroken(worker=worker, incarnation=incarnation, reason="reset"))
    desk.wait(GRACE_S)
    assert phase(desk) is RunPhase.GATHERING
    assert desk.give(PlanMade(request=asked.request, result=PLAN)) == []


def test_a_plan_for_a_job_that_was_cancelled_is_ignored_by_the_next() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    desk.submit(SPEC, key="next")
    desk.give(CancelAsked(job=JobId("small-1")))
    assert desk.told(NewGeneration)
    desk.acknowledge(desk.live)
    [again] = desk.found(MakePlan)
    assert again.request != asked.request
    assert desk.give(PlanMade(request=asked.request, result=PLAN)) == []


def test_who_beats_but_never_acknowledges_is_turned_away() -> None:
    desk = began()
    desk.acknowledge(["w0a"])
    for _ in range(int(STUCK_STALLS * STALL_S)):
        desk.report("w0a", Beat(progress=1, running_s=0.0, statistics=()))
        desk.report("w1a", Beat(progress=0, running_s=0.0, statistics=()))
        desk.wait(1.0)
        if desk.told(Refused):
            break
    assert set(desk.told(Refused)) == {"w1a"}
    assert set(desk.told(NewGeneration)) == {"w0a"}


def test_a_worker_that_comes_while_no_plan_is_found_is_tried_at_once() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    [asked] = desk.found(MakePlan)
    desk.join("w9a")
    desk.give(PlanMade(request=asked.request, result=Infeasible(reason="too small")))
    assert set(desk.told(NewGeneration)) == {"w0a", "w1a", "w9a"}


def test_without_a_plan_the_job_waits_and_says_why() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    desk.plan(Infeasible(reason="stage 0 needs 9 GiB"))
    job = JobId("small-1")
    assert (desk.machine.state_of(job), desk.machine.reason_of(job)) == (
        JobState.PAUSED,
        "stage 0 needs 9 GiB",
    )
    for _ in range(30):
        desk.wait(1.0)
        for worker in desk.live:
            desk.report(worker, Beat(progress=0, running_s=0.0, statistics=()))
    assert desk.generation == 1
    desk.join("w2a")
    assert desk.generation == 2


# --- building ---


def test_the_first_step_starts_when_all_chunks_are_ready() -> None:
    desk = began()
    desk.acknowledge(desk.live)
    desk.plan(PLAN)
    desk.ready(["w0a"])
    assert desk.commands == []
    desk.ready(["w1a"])
    assert {start.step for start in desk.told(Start).values()} == {0}


def test_who_has_no_place_in_the_plan_is_free_for_other_work() -> None:
    desk = Desk()
    desk.join("spare", *PLAN.workers)
    desk.submit(SPEC)
    desk.settle(PLAN)
    assert set(desk.told(Dismiss)) == {"spare"}
    assert not desk.told(Dismiss)["spare"].may_exit


def test_workers_that_read_different_data_fail_the_job() -> None:
    plan = grid_plan(stages=1, replicas=2)
    desk = began(small_job(stages=1, replicas=2), plan)
    desk.acknowledge(desk.live)
    desk.plan(plan)
    desk.ready(["w0a"], fingerprint="this")
    desk.ready(["w0b"], fingerprint="that")
    state, reason = ended(desk)
    assert state is JobState.FAILED
    assert "w0a and w0b" in reason
    assert "same files" in reason


def test_who_only_evaluates_must_read_the_same_data_too() -> None:
    first, second = chunk(0, "w0a"), chunk(0, "w0b")
    plan = plan_of([first, second], [path(first)] * 4, full_paths=[path(second)])
    desk = began(small_job(stages=1, replicas=2), plan)
    desk.acknowledge(desk.live)
    desk.plan(plan)
    desk.ready(["w0a"], fingerprint="this")
    desk.ready(["w0b"], fingerprint="that")
    assert ended(desk)[0] is JobState.FAILED


def test_a_newcomer_that_reads_other_data_is_excluded_and_the_job_goes_on() -> None:
    one, two = grid_plan(stages=1, replicas=1), grid_plan(stages=1, replicas=2)
    desk = Desk()
    desk.join("w0a")
    desk.submit(small_job(stages=1, replicas=2))
    desk.wait(GATHER_S - 0.1)
    desk.report("w0a", Beat(progress=0, running_s=0.0, statistics=()))
    desk.wait(0.2)
    desk.settle(one)
    desk.join("w0b")
    let_in(desk, one, two)
    held = {"w0a": [(stage_spec(0), 2)]}
    for _ in range(MAX_STRIKES):
        desk.acknowledge(desk.live, held)
        desk.adopt(two)
        desk.ready(["w0a"])
        desk.ready(["w0b"], fingerprint="other")
    desk.acknowledge(desk.live, held)
    assert [w.worker for w in desk.found(MakePlan)[0].fleet.workers] == ["w0a"]
    assert not desk.recorded(JobEnded)


def test_readiness_that_nobody_asked_for_is_ignored() -> None:
    desk = began()
    assert desk.ready(["w0a"]) == []


# --- steps ---


def test_a_reduction_is_asked_of_the_group_alone() -> None:
    desk = stepping()
    desk.report("w1a", stage_done(ledger(1, "w1a", 0, 1), loss_sum=2.0, tokens=(1, 3)))
    assert set(desk.told(Prepare)) == {"w1a"}


def test_a_step_is_committed_before_it_is_announced() -> None:
    desk = stepping()
    desk.step(PLAN)
    [committed] = desk.recorded(StepCommitted)
    assert (committed.record.step, committed.record.num_tokens) == (0, 4)
    order = [
        type(command).__name__
        for command in desk.commands
        if (isinstance(command, Append) and isinstance(command.record, StepCommitted))
        or (isinstance(command, Send) and isinstance(command.directive, Commit))
    ]
    assert order == ["Append", "Send", "Send"]
    assert all(commit.goes_on for commit in desk.told(Commit).values())


def test_the_last_step_is_followed_by_evaluation_checkpoint_and_end() -> None:
    desk = stepping()
    for _ in range(3):
        desk.step(PLAN)
    assert not desk.told(Commit)["w0a"].goes_on
    assert desk.told(Evaluate)["w0a"].num_microbatches == 2
    desk.evaluate(PLAN, 2)
    [evaluated] = desk.recorded(Evaluated)
    assert (evaluated.version, evaluated.loss, evaluated.num_tokens) == (3, 2.0, 2)
    desk.save()
    assert desk.recorded(CheckpointCommitted)[0].version == 3
    assert ended(desk) == (JobState.FINISHED, "3 steps done")
    assert set(desk.told(Dismiss)) == {"w0a", "w1a"}


def test_reports_of_another_generation_are_dropped() -> None:
    desk = stepping()
    old = stage_done(ledger(1, "w1a", 0, 1), generation=0)
    assert desk.report("w1a", old) == []


@pytest.mark.parametrize(
    "report",
    [
        stage_done(ledger(0, "w0a", 0, 1)),
        Vote(
            generation=Generation(1),
            step=Step(0),
            group=GroupId("s0"),
            attempt=attempt(),
            digest="",
            squared_norm=1.0,
            is_finite=True,
        ),
        EvaluationDone(
            generation=Generation(1), version=Step(0), microbatches=(), loss_sum=0.0, num_tokens=0
        ),
        ChunksReady(
            generation=Generation(1), num_train_samples=1, num_validation_samples=1, data_fingerprint="x"
        ),
        Suspected(generation=Generation(1), peer=WorkerId("stranger"), reason="?"),
        CheckpointWritten(generation=Generation(1), version=Step(9), stage=StageIndex(0), files=()),
    ],
    ids=lambda report: type(report).__name__,
)
def test_a_report_at_the_wrong_time_changes_nothing(report: Report) -> None:
    desk = began()
    assert desk.report("w0a", report) == []
    assert phase(desk) is RunPhase.FENCING


def test_an_evaluation_that_reports_nothing_is_ignored() -> None:
    desk = stepping(SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"steps": 1})}))
    desk.step(PLAN)
    assert phase(desk) is RunPhase.EVALUATING
    empty = EvaluationDone(
        generation=desk.generation, version=Step(1), microbatches=(), loss_sum=1.0, num_tokens=9
    )
    assert desk.report("w1a", empty) == []


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
    assert phase(desk) is RunPhase.STEPPING


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
    assert again.told(Dismiss)["w1b"].job is None


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
    assert desk.machine.state_of(JobId("small-1")) is JobState.PAUSED


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
    assert desk.machine.reason_of(JobId("small-1")) == "too small"


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
    assert desk.machine.story("w1b")[-1].endswith("out of memory")


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


def test_a_fatal_failure_fails_the_job_at_once() -> None:
    desk = stepping()
    desk.report("w0a", Trouble(generation=desk.generation, is_fatal=True, reason="no such file"))
    assert ended(desk) == (JobState.FAILED, "w0a: no such file")


def test_what_is_fatal_to_one_worker_is_not_to_a_job_that_has_made_steps() -> None:
    desk = stepping(PAIRS_SPEC, PAIRS)
    desk.step(PAIRS)
    desk.report("w0b", Trouble(generation=desk.generation, is_fatal=True, reason="no such file"))
    assert not desk.recorded(JobEnded)
    assert desk.told(NewGeneration)


# --- time ---


def beats(desk: Desk, seconds: int, *, progress: int = 0) -> None:
    """All workers beat every second; nothing moves unless `progress` changes."""
    for _ in range(seconds):
        for worker in desk.live:
            desk.report(worker, Beat(progress=progress, running_s=0.0, statistics=()))
        desk.wait(1.0)
        if desk.recorded(GenerationOpened):
            return


def test_a_step_in_which_nothing_ends_for_long_is_tried_again() -> None:
    desk = stepping()
    beats(desk, int(STALL_S) - 1)
    assert desk.generation == 1
    beats(desk, 2)
    assert desk.generation == 2
    assert f"no op ended for {STALL_S:.0f} s" in desk.recorded(GenerationOpened)[0].reason


def test_the_watchdog_waits_twice_as_long_after_it_was_in_vain() -> None:
    desk = stepping()
    beats(desk, int(STALL_S) + 1)
    desk.settle(PLAN)
    beats(desk, int(2 * STALL_S) - 2)
    assert desk.generation == 2
    beats(desk, 3)
    assert desk.generation == 3


def test_a_worker_whose_op_never_ends_is_turned_away_by_its_beat() -> None:
    desk = stepping()
    desk.report("w1a", Beat(progress=1, running_s=WARMING_S - 1.0, statistics=()))
    assert desk.generation == 1
    desk.report("w1a", Beat(progress=1, running_s=WARMING_S + 1.0, statistics=()))
    assert "an op has run for 31.0 s" in desk.told(Refused)["w1a"].reason
    assert set(desk.told(NewGeneration)) == {"w0a"}


def test_a_suspicion_that_the_coordinators_own_stream_bears_out_is_a_death_at_once() -> None:
    desk = stepping()
    dead = WorkerId("w1a")
    desk.give(StreamBroken(worker=dead, incarnation=desk.incarnations[dead], reason="reset"))
    suspected = Suspected(generation=desk.generation, peer=dead, reason="refused")
    desk.report("w0a", suspected)
    assert "w0a cannot reach it: refused" in desk.recorded(GenerationOpened)[0].reason
    assert desk.generation == 2
    assert [member.worker for member in desk.recorded(GenerationOpened)[0].members] == ["w0a"]


def test_progress_anywhere_puts_off_the_watchdog() -> None:
    desk = stepping()
    for progress in range(1, 4):
        beats(desk, int(STALL_S) - 20, progress=progress)
    assert desk.generation == 1


def test_a_step_that_was_predicted_to_be_slow_may_be_slow() -> None:
    slow = replace(PLAN, predicted_step_s=100.0)
    desk = stepping(SPEC, slow)
    beats(desk, 399)
    assert desk.generation == 1
    beats(desk, 3)
    assert desk.generation == 2


# --- checkpoints ---

SAVING = small_job(stages=2, replicas=1, microbatches=2, steps=9, save_every=2, keep=1)


def written(version: int, stage: int) -> CheckpointWritten:
    return CheckpointWritten(
        generation=Generation(1), version=Step(version), stage=StageIndex(stage), files=()
    )


def test_a_checkpoint_is_saved_while_the_next_step_runs() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    assert not desk.told(Save)
    desk.step(PLAN)
    assert {worker: asked.stages for worker, asked in desk.told(Save).items()} == {"w0a": (0,), "w1a": (1,)}
    assert all(commit.goes_on for commit in desk.told(Commit).values())


def test_a_checkpoint_is_committed_after_its_manifest_and_older_ones_go() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    desk.step(PLAN)
    desk.report("w0a", written(2, 0))
    assert desk.commands == []
    desk.report("w1a", written(2, 1))
    [manifest] = desk.found(WriteManifest)
    assert not desk.recorded(CheckpointCommitted)
    desk.give(ManifestWritten(checkpoint=manifest.checkpoint, error=None))
    assert desk.recorded(CheckpointCommitted)[0].version == 2
    assert desk.found(PruneCheckpoints)[0].keep == (2,)


def test_a_slow_older_checkpoint_does_not_replace_a_newer_one() -> None:
    desk = stepping(SAVING)
    for _ in range(4):
        desk.step(PLAN)
    for version in (4, 2):
        for stage, worker in ((0, "w0a"), (1, "w1a")):
            desk.report(worker, written(version, stage))
        for manifest in desk.found(WriteManifest):
            desk.give(ManifestWritten(checkpoint=manifest.checkpoint, error=None))
    desk.give(ManifestWritten(checkpoint=checkpoint(JobId("small-1"), 3), error=None))
    assert [c.version for c in desk.machine.history.jobs[JobId("small-1")].checkpoints] == [4]


def test_a_checkpoint_of_a_version_that_is_not_reached_is_not_recorded() -> None:
    desk = stepping(SAVING)
    assert desk.give(ManifestWritten(checkpoint=checkpoint(JobId("small-1"), 7), error=None)) == []


def test_a_checkpoint_that_fails_on_the_way_is_told_and_training_goes_on() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    desk.step(PLAN)
    desk.give(ManifestWritten(checkpoint=checkpoint(JobId("small-1"), 2), error="disk full"))
    assert desk.lines() == ["job=small-1 checkpoint=2 failed: disk full"]
    assert phase(desk) is RunPhase.STEPPING


def test_a_checkpoint_that_a_fence_cut_short_is_asked_for_again() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    desk.step(PLAN)
    desk.report("w0a", hello("w0a", "w0a-1"))
    held = {"w0a": [(stage_spec(0), 2)], "w1a": [(stage_spec(1), 2)]}
    desk.acknowledge(desk.live, held)
    desk.adopt(PLAN)
    desk.ready(PLAN.workers)
    assert {asked.version for asked in desk.told(Save).values()} == {2}


def test_without_the_last_checkpoint_the_job_fails() -> None:
    desk = stepping(small_job(stages=2, replicas=1, microbatches=2, steps=1))
    desk.step(PLAN)
    desk.evaluate(PLAN, 2)
    assert phase(desk) is RunPhase.SAVING
    desk.give(ManifestWritten(checkpoint=checkpoint(JobId("small-1"), 1), error="disk full"))
    assert ended(desk) == (JobState.FAILED, "the last checkpoint could not be written: disk full")


def test_a_manifest_of_another_job_is_ignored() -> None:
    desk = stepping(SAVING)
    assert desk.give(ManifestWritten(checkpoint=checkpoint(JobId("other-9"), 1), error=None)) == []
