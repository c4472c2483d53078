"""The Worker machine in steps, and what it does when they end halfway."""

from dataclasses import replace

from skein.plan.ops import Direction
from skein.protocol.messages.directives import ChunkVersion, Decision, Dismiss, Evaluate, Save, StepRecord
from skein.protocol.messages.reports import (
    Ack,
    CheckpointUnwritten,
    CheckpointWritten,
    EvaluationDone,
    StageDone,
    Trouble,
    Vote,
)
from skein.protocol.messages.tensors import HopTensor, Phase, ShardKind, ShardTensor
from skein.protocol.worker.ops import (
    ApplyOp,
    BackwardOp,
    ForwardOp,
    JoinOp,
    LossOp,
    OpFailed,
    OpOutcome,
    PackOp,
    SaveOp,
)
from skein.protocol.worker.worker_io import BytesMoved, Complete, DropTensor, Exit, RunOp
from skein.types import Epoch, Generation, StageIndex, Step, parse_group
from tests.support.hands import JOB, Hand, record
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, stage_spec
from tests.support.reports import attempt, ledger
from tests.support.stages import (
    ALONE,
    DECIDED,
    FAILED,
    PLAN,
    accumulated,
    gradient,
    hop,
    only,
    ready,
    stepping,
    voted,
)

# --- a step ---


def test_a_step_runs_forward_sends_on_and_waits_for_gradients() -> None:
    hand = ready()
    hand.start()
    hand.end()
    assert hand.sent() == [("w1a", hop(Direction.FORWARD, 0, 1))]
    hand.run_all()
    assert hand.running is None


def test_a_complete_ledger_is_reported_once() -> None:
    hand = stepping()
    hand.arrive(gradient(0))
    hand.end()
    assert hand.said() == []
    hand.arrive(gradient(1))
    hand.end()
    done = only(hand.said(), StageDone)
    assert (done.ledger, done.loss_sum, done.tokens) == (ledger(0, "w0a", 0, 1), 0.0, ())
    assert hand.arrive(gradient(1)) == []


def test_the_last_stage_reports_its_loss() -> None:
    hand = ready(PLAN, "w1a")
    hand.start()
    for microbatch in (0, 1):
        hand.arrive(hop(Direction.FORWARD, microbatch, 1), sender="w0a")
        hand.run_all()
    done = only(hand.said(), StageDone)
    assert (done.loss_sum, done.tokens) == (4.0, (3, 3))


def test_a_chunk_that_no_path_visits_is_reported_complete_at_the_start_of_each_step() -> None:
    first, idle, last = chunk(0, "w0a"), chunk(1, "w0a"), chunk(2, "w2a")
    plan = plan_of([first, idle, last], [path(first, last)])
    hand = ready(plan)
    hand.start()
    done = only(hand.said(), StageDone)
    assert (done.ledger, done.loss_sum, done.tokens) == (ledger(1, "w0a"), 0.0, ())
    hand.run_all()
    hand.arrive(hop(Direction.BACKWARD, 0, 0, plan=plan), sender="w2a")
    hand.run_all()
    for group in ("s0", "s1"):
        hand.prepare(group, [ledger(0, "w0a", 0) if group == "s0" else ledger(1, "w0a")])
        hand.run_all()
    hand.commit(record(attempts={"s0": attempt(), "s1": attempt()}))
    hand.end()
    assert only(hand.said(), StageDone).step == 1


def test_evaluation_keeps_to_paths_of_its_own() -> None:
    first, between, last = chunk(0, "w0a"), chunk(1, "w1a"), chunk(2, "w2a")
    plan = plan_of([first, between, last], [path(first, last)], full_paths=[path(first, between, last)])
    hand = ready(plan)
    hand.hear(Evaluate(epoch=Epoch(1), generation=Generation(1), version=Step(0), num_microbatches=2))
    for _ in range(2):
        hand.end()
        [(to, header)] = hand.sent()
        assert isinstance(header, HopTensor)
        assert (to, header.path) == ("w1a", plan.evaluation_paths[0])


def test_a_worker_that_holds_everything_sends_nothing() -> None:
    hand = ready(ALONE)
    hand.start()
    kinds = []
    while hand.running is not None:
        kinds.append(type(hand.running))
        hand.end()
        assert hand.sent() == []
    assert kinds.count(ForwardOp) == kinds.count(LossOp) == kinds.count(BackwardOp) == 2


def test_a_reduction_votes_with_what_was_joined() -> None:
    hand = accumulated()
    hand.prepare("s0", [ledger(0, "w0a", 0, 1)])
    assert isinstance(hand.running, JoinOp)
    hand.end()
    cast = only(hand.said(), Vote)
    assert (str(cast.group), cast.attempt, cast.digest) == ("s0", attempt(), "same")


def test_a_reduction_of_other_parts_than_the_ledger_is_refused() -> None:
    hand = accumulated()
    hand.prepare("s0", [ledger(0, "w0a", 0)])
    assert "the ledger is" in only(hand.said(), Trouble).reason
    assert hand.running is None


def test_a_reduction_of_another_step_or_group_is_ignored() -> None:
    hand = accumulated()
    assert hand.prepare("s0", [ledger(0, "w0a", 0, 1)], step=1) == []
    assert hand.prepare("s1", [ledger(1, "w1a", 0, 1)]) == []


def test_an_attempt_that_is_asked_for_twice_is_made_once() -> None:
    hand = voted()
    assert hand.prepare("s0", [ledger(0, "w0a", 0, 1)]) == []


def test_parts_are_packed_before_anything_else_and_go_to_their_owners() -> None:
    plan = grid_plan(stages=1, replicas=2, num_microbatches=2)
    hand = ready(plan)
    hand.start()
    hand.run_all()
    hand.prepare("s0", [ledger(0, "w0a", 0), ledger(0, "w0b", 1)])
    assert isinstance(hand.running, PackOp)
    hand.end()
    assert [to for to, _ in hand.sent()] == ["w0b"]


def shard(kind: ShardKind, index: int, of: str, *, step: int) -> ShardTensor:
    return ShardTensor(
        kind=kind,
        step=Step(step),
        group=parse_group("s0"),
        attempt=attempt(0),
        shard=index,
        member=chunk(0, of),
    )


def test_a_result_of_the_step_before_that_comes_again_ends_no_later_reduction() -> None:
    plan = grid_plan(stages=1, replicas=2, num_microbatches=2)
    hand = ready(plan)
    hand.start()
    hand.run_all()
    parts = [ledger(0, "w0a", 0), ledger(0, "w0b", 1)]
    for step in range(2):
        hand.prepare("s0", parts, step=step)
        assert isinstance(hand.running, PackOp)
        hand.end()
        stale = shard(ShardKind.RESULT, 1, "w0b", step=0)
        hand.arrive(stale, sender="w0b")
        assert bool(hand.found(DropTensor)) == (step > 0)
        hand.arrive(shard(ShardKind.PART, 0, "w0b", step=step), sender="w0b")
        ran = hand.run_all()
        assert any(isinstance(op, JoinOp) for op in ran) == (step == 0)
        hand.commit(DECIDED)
        hand.run_all()


def test_a_commit_is_applied_and_the_next_step_begins_at_once() -> None:
    hand = voted()
    [run] = hand.commit(DECIDED)
    assert isinstance(run, RunOp)
    assert run.op == ApplyOp(record=DECIDED)
    hand.end()
    assert hand.machine.version == 1
    assert isinstance(hand.running, ForwardOp)
    assert hand.running.step == 1


def test_a_commit_that_does_not_go_on_waits_for_a_directive() -> None:
    hand = voted()
    hand.commit(DECIDED, goes_on=False)
    hand.end()
    assert hand.running is None
    hand.start(step=1)
    assert isinstance(hand.running, ForwardOp)


def test_a_start_that_comes_before_the_update_ends_waits_for_it() -> None:
    hand = voted()
    hand.commit(DECIDED, goes_on=False)
    assert hand.start(step=1) == []
    assert [type(op) for op in hand.run_all()] == [ApplyOp, ForwardOp, ForwardOp]


def test_a_commit_is_applied_once() -> None:
    hand = voted()
    hand.commit(DECIDED)
    assert hand.commit(DECIDED) == []
    hand.end()
    assert hand.commit(DECIDED) == []
    assert hand.machine.version == 1


def test_a_commit_of_an_attempt_that_is_not_here_is_trouble() -> None:
    hand = voted()
    hand.commit(record(attempts={"s0": attempt(1)}))
    assert "not here" in only(hand.said(), Trouble).reason
    assert hand.machine.version == 0


def test_who_is_outvoted_does_not_apply_its_own_result() -> None:
    hand = voted()
    others = tuple(replace(result, digest="of most") for result in DECIDED.results)
    hand.commit(replace(DECIDED, results=others))
    assert "or another" in only(hand.said(), Trouble).reason
    assert hand.machine.version == 0


def test_a_skipped_step_needs_no_result() -> None:
    hand = accumulated()
    hand.commit(record(decision=Decision.SKIP))
    hand.end()
    assert hand.machine.version == 1


# --- a generation around a commit ---


def fenced_with(hand: Hand, decided: StepRecord | None, *, generation: int = 2) -> tuple[Hand, int]:
    """After a new generation: the hand, and the version that it acknowledges."""
    hand.fence(PLAN, generation=generation, last_commit=decided)
    ack = hand.acknowledge()
    return hand, ack.chunks[0].version


def test_a_generation_applies_the_recorded_commit_whose_result_is_here() -> None:
    hand = voted()
    hand.fence(PLAN, generation=2, last_commit=DECIDED)
    assert hand.running == ApplyOp(record=DECIDED)
    ack = hand.acknowledge()
    assert ack.chunks == (ChunkVersion(stage=stage_spec(0), version=Step(1)),)


def test_a_generation_while_the_update_runs_does_not_apply_it_again() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand, version = fenced_with(hand, DECIDED)
    assert version == 1
    hand.settle(PLAN, generation=3, version=1)
    assert hand.machine.version == 1


def test_a_recorded_commit_that_was_applied_before_is_not_applied_again() -> None:
    hand = voted()
    hand.commit(DECIDED, goes_on=False)
    hand.end()
    hand, version = fenced_with(hand, DECIDED)
    assert version == 1


def test_a_recorded_commit_of_another_attempt_is_not_applied() -> None:
    _, version = fenced_with(voted(), record(attempts={"s0": attempt(1)}))
    assert version == 0


def test_a_recorded_commit_without_a_result_here_is_not_applied() -> None:
    _, version = fenced_with(accumulated(), DECIDED)
    assert version == 0


def test_results_do_not_outlive_the_acknowledgement() -> None:
    hand, _ = fenced_with(voted(), None)
    _, version = fenced_with(hand, DECIDED, generation=3)
    assert version == 0


def test_a_commit_that_a_generation_overtook_is_not_applied_from_the_queue() -> None:
    hand = voted()
    hand.arrive(gradient(0, step=1))
    hand.hear(
        Save(
            epoch=Epoch(1),
            generation=Generation(1),
            version=Step(0),
            stages=(StageIndex(0),),
            url=None,
            walkers=(0,),
        )
    )
    assert isinstance(hand.running, SaveOp)
    hand.commit(DECIDED)
    hand, version = fenced_with(hand, None)
    assert version == 0


# --- evaluation ---


def test_an_evaluation_reports_what_this_head_has_seen() -> None:
    hand = ready(ALONE)
    hand.hear(Evaluate(epoch=Epoch(1), generation=Generation(1), version=Step(0), num_microbatches=3))
    reports = []
    while hand.running is not None:
        hand.end()
        reports += hand.said()
    done = only(reports, EvaluationDone)
    assert (done.microbatches, done.loss_sum, done.num_tokens) == (microbatches(0, 1, 2), 6.0, 9)


def test_after_an_evaluation_a_step_may_follow_at_the_same_version() -> None:
    hand = ready(ALONE)
    hand.hear(Evaluate(epoch=Epoch(1), generation=Generation(1), version=Step(0), num_microbatches=2))
    hand.run_all()
    hand.start()
    ran = hand.run_all()
    assert sum(isinstance(op, BackwardOp) for op in ran) == 2


def test_an_evaluation_of_a_version_to_come_waits_for_the_update() -> None:
    hand = voted()
    hand.commit(DECIDED, goes_on=False)
    hand.hear(Evaluate(epoch=Epoch(1), generation=Generation(1), version=Step(1), num_microbatches=2))
    applied, *evaluated = hand.run_all()
    assert isinstance(applied, ApplyOp)
    assert [op.phase for op in evaluated if isinstance(op, ForwardOp)] == [Phase.EVALUATE] * 2


# --- checkpoints ---


def save(version: int, *, walker: int = 0) -> Save:
    return Save(
        epoch=Epoch(1),
        generation=Generation(1),
        version=Step(version),
        stages=(StageIndex(0),),
        url="s3://b",
        walkers=(walker,),
    )


def test_a_save_behind_an_update_copies_the_new_version() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand.hear(save(1))
    ran = [hand.running]
    hand.end()
    ran.append(hand.running)
    assert [type(op) for op in ran] == [ApplyOp, SaveOp]


def test_what_was_copied_is_written_unless_it_failed_or_the_job_is_over() -> None:
    def follows(outcome: OpOutcome, *, is_over: bool) -> list[Complete]:
        hand = ready()
        hand.hear(save(0))
        if is_over:
            hand.hear(Dismiss(epoch=Epoch(1), job=JOB, may_exit=False))
        return [command for command in hand.end(outcome) if isinstance(command, Complete)]

    [written] = follows(None, is_over=False)
    assert isinstance(written.op, SaveOp)
    assert follows(OpFailed(is_fatal=False, reason="no"), is_over=False) == []
    assert follows(None, is_over=True) == []


def test_a_save_and_what_was_written_carry_the_number_of_the_walker() -> None:
    hand = ready()
    hand.hear(save(0, walker=3))
    assert isinstance(hand.running, SaveOp)
    assert hand.running.walker == 3
    hand.give(
        CheckpointWritten(generation=Generation(1), version=Step(0), stage=StageIndex(0), files=(), walker=3)
    )
    assert only(hand.said(), CheckpointWritten).walker == 3


def test_a_save_of_another_version_is_ignored() -> None:
    assert ready().hear(save(3)) == []


def test_what_was_written_is_reported_and_so_is_what_was_not() -> None:
    hand = ready()
    hand.give(CheckpointWritten(generation=Generation(1), version=Step(0), stage=StageIndex(0), files=()))
    assert only(hand.said(), CheckpointWritten).stage == 0
    hand.give(
        CheckpointUnwritten(
            generation=Generation(1), version=Step(0), stage=StageIndex(0), reason="disk full"
        )
    )
    assert only(hand.said(), CheckpointUnwritten).reason == "disk full"


def test_what_an_older_generation_could_not_save_is_told_as_of_that_one() -> None:
    hand = ready()
    hand.fence(PLAN, generation=2)
    failed = CheckpointUnwritten(
        generation=Generation(1), version=Step(0), stage=StageIndex(0), reason="the job has ended"
    )
    hand.give(failed)
    assert only(hand.said(), CheckpointUnwritten).generation == 1


def test_bytes_that_move_are_progress() -> None:
    hand = ready()
    before = hand.machine.progress
    hand.give(BytesMoved())
    assert hand.machine.progress == before + 1


# --- failures ---


def test_after_a_failed_op_nothing_computes_until_a_new_generation() -> None:
    hand = ready()
    hand.start()
    hand.end(FAILED)
    assert only(hand.said(), Trouble) == Trouble(
        generation=Generation(1), is_fatal=False, reason="out of memory"
    )
    hand.arrive(gradient(0))
    assert hand.running is None


def test_what_fails_under_an_older_generation_is_nobodys_fault() -> None:
    hand = ready()
    hand.start()
    hand.fence(PLAN, generation=2)
    hand.end(FAILED)
    assert only(hand.said(), Ack).generation == 2


def test_unreadable_data_is_told_to_be_fatal() -> None:
    hand = ready()
    hand.start()
    hand.end(OpFailed(is_fatal=True, reason="no such file"))
    assert only(hand.said(), Trouble).is_fatal


def test_an_update_that_fails_halfway_ends_the_process() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand.end(FAILED)
    [end] = hand.found(Exit)
    assert not end.is_clean
