"""The Run machine from a fence to the last checkpoint, if nothing fails."""

import pytest

from skein.plan.plan import Infeasible
from skein.protocol.coordinator.coordinator_io import (
    Append,
    CancelAsked,
    MakePlan,
    ManifestWritten,
    PlanMade,
    PruneCheckpoints,
    Send,
    StreamBroken,
    WriteManifest,
)
from skein.protocol.coordinator.runs.checkpoints.savings import AGAIN_S
from skein.protocol.coordinator.runs.gathering import GATHER_S
from skein.protocol.coordinator.runs.phase import EvaluatePhase, FencePhase, GatherPhase, SavePhase, StepPhase
from skein.protocol.coordinator.runs.watching.vigil import STALL_S, STUCK_STALLS
from skein.protocol.coordinator.runs.workers.disputes import MAX_STRIKES
from skein.protocol.coordinator.runs.workers.plausible import implausible
from skein.protocol.log.records import (
    CheckpointCommitted,
    DataCounted,
    Evaluated,
    GenerationOpened,
    JobEnded,
    PlanAdopted,
    RolledBack,
    StepCommitted,
)
from skein.protocol.messages.directives import (
    Assign,
    Commit,
    Dismiss,
    Evaluate,
    NewGeneration,
    Prepare,
    Refused,
    Save,
    Start,
)
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointWritten,
    ChunksReady,
    EvaluationDone,
    Leaving,
    Report,
    Suspected,
    Vote,
)
from skein.protocol.messages.tensors import Phase
from skein.types import Generation, JobId, JobState, MicrobatchId, StageIndex, Step, WorkerId, parse_group
from tests.support.desk import GRACE_S, Desk, checkpoint
from tests.support.jobs import small_job
from tests.support.plans import chunk, grid_plan, path, plan_of, stage_spec
from tests.support.reports import attempt, hello, ledger, stage_done
from tests.support.runs import PLAN, SPEC, began, ended, later, let_in, phase, stepping

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
    assert phase(desk) is GatherPhase
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
    assert (desk.machine.view.state_of(job), desk.machine.view.reason_of(job)) == (
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


def reading(desk: Desk, worker: str, *, fingerprint: str = "this", num_train_samples: int = 100) -> None:
    """A worker is ready, with data as it says."""
    report = ChunksReady(
        generation=desk.generation,
        num_train_samples=num_train_samples,
        num_validation_samples=10,
        data_fingerprint=fingerprint,
    )
    desk.commands = desk.report(worker, report)


@pytest.mark.parametrize(
    "claim", [{"fingerprint": "that"}, {"num_train_samples": 3}, {"num_train_samples": 0}]
)
@pytest.mark.parametrize("liar", ["w0a", "w0b", "w0c"])
def test_one_of_three_that_reads_other_data_is_left_out_and_the_job_goes_on(
    liar: str, claim: dict[str, object]
) -> None:
    plan = grid_plan(stages=1, replicas=3)
    desk = began(small_job(stages=1, replicas=3), plan)
    desk.acknowledge(desk.live)
    desk.plan(plan)
    for worker in plan.workers:
        reading(desk, worker, **(claim if worker == liar else {}))  # type: ignore[arg-type]  # by name
    assert not desk.recorded(JobEnded)
    assert not desk.recorded(DataCounted)
    [opened] = desk.recorded(GenerationOpened)
    assert f"{liar}: reads other data" in opened.reason
    desk.acknowledge(desk.live)
    [asked] = [command for command in desk.commands if isinstance(command, MakePlan)]
    assert [found.worker for found in asked.fleet.workers] == sorted(set(plan.workers) - {liar})


def test_a_fingerprint_longer_than_any_is_implausible() -> None:
    report = ChunksReady(
        generation=Generation(1), num_train_samples=1, num_validation_samples=1, data_fingerprint="x" * 129
    )
    assert "give at most 128" in (implausible(WorkerId("w0a"), report, SPEC) or "")


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


def test_a_score_of_another_kind_ends_no_evaluation() -> None:
    desk = stepping()
    for _ in range(3):
        desk.step(PLAN)
    for way in range(len(PLAN.evaluation_paths)):
        probe = EvaluationDone(
            generation=desk.generation,
            version=Step(3),
            microbatches=(MicrobatchId(way),),
            loss_sum=1.0,
            num_tokens=1,
            phase=Phase.PROBE,
        )
        assert desk.report("w1a", probe) == []
    desk.evaluate(PLAN, 2)
    assert desk.recorded(Evaluated)


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
            group=parse_group("s0"),
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
    assert phase(desk) is FencePhase


def test_an_evaluation_that_reports_nothing_is_ignored() -> None:
    desk = stepping(SPEC.model_copy(update={"budget": SPEC.budget.model_copy(update={"steps": 1})}))
    desk.step(PLAN)
    assert phase(desk) is EvaluatePhase
    empty = EvaluationDone(
        generation=desk.generation, version=Step(1), microbatches=(), loss_sum=1.0, num_tokens=9
    )
    assert desk.report("w1a", empty) == []


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


def test_a_checkpoint_that_is_completed_after_its_version_was_rolled_back_is_not_recorded() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    desk.step(PLAN)
    for stage, worker in ((0, "w0a"), (1, "w1a")):
        desk.report(worker, written(2, stage))
    [late] = desk.found(WriteManifest)
    for worker in PLAN.workers:
        desk.break_stream(worker)
    desk.join(*PLAN.workers, incarnation=2)
    desk.acknowledge(desk.live)
    desk.adopt(PLAN)
    assert [back.to_version for back in desk.recorded(RolledBack)] == [0]
    desk.ready(PLAN.workers)
    desk.step(PLAN)
    desk.step(PLAN)
    desk.give(ManifestWritten(checkpoint=late.checkpoint, error=None))
    assert desk.machine.history.jobs[JobId("small-1")].checkpoints == []


def test_a_checkpoint_of_a_version_that_is_not_reached_is_not_recorded() -> None:
    desk = stepping(SAVING)
    assert desk.give(ManifestWritten(checkpoint=checkpoint(JobId("small-1"), 7), error=None)) == []


def test_a_checkpoint_that_fails_on_the_way_is_told_and_training_goes_on() -> None:
    desk = stepping(SAVING)
    desk.step(PLAN)
    desk.step(PLAN)
    for stage, worker in ((0, "w0a"), (1, "w1a")):
        desk.report(worker, written(2, stage))
    [manifest] = desk.found(WriteManifest)
    desk.give(ManifestWritten(checkpoint=manifest.checkpoint, error="disk full"))
    assert desk.lines() == ["job=small-1 checkpoint=2 was not completed: disk full"]
    assert phase(desk) is StepPhase


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


def test_a_job_waits_with_its_last_checkpoint_until_there_is_room() -> None:
    desk = stepping(small_job(stages=2, replicas=1, microbatches=2, steps=1))
    desk.step(PLAN)
    desk.evaluate(PLAN, 2)
    assert phase(desk) is SavePhase
    for stage, worker in ((0, "w0a"), (1, "w1a")):
        desk.report(worker, written(1, stage))
    [manifest] = desk.found(WriteManifest)
    desk.give(ManifestWritten(checkpoint=manifest.checkpoint, error="no room"))
    assert phase(desk) is SavePhase
    assert (
        desk.machine.view.reason_of(JobId("small-1"))
        == "waits to save checkpoint 1: was not completed: no room"
    )
    later(desk, AGAIN_S)
    assert sorted(desk.told(Save)) == list(PLAN.workers)
    desk.save()
    assert ended(desk)[0] is JobState.FINISHED


def test_a_manifest_of_another_job_is_ignored() -> None:
    desk = stepping(SAVING)
    assert desk.give(ManifestWritten(checkpoint=checkpoint(JobId("other-9"), 1), error=None)) == []


def test_each_generation_has_a_key_of_its_own_which_is_in_no_record_and_no_line() -> None:
    desk = began()
    first = desk.told(NewGeneration)
    assert len({fence.key for fence in first.values()}) == 1
    desk.break_stream(PLAN.workers[0])
    second = desk.told(NewGeneration)[PLAN.workers[1]]
    keys = {second.key, first[PLAN.workers[0]].key}
    assert len(keys) == 2
    assert not any(key.hex() in repr(desk.log) or repr(key) in repr((desk.log, first)) for key in keys)
