"""A worker in a step that goes on after a generation: what it tells of it, what it keeps, and what it does again."""

from dataclasses import replace

import pytest

from skein.plan.ops import Direction
from skein.plan.plan import Plan
from skein.protocol.messages.directives import Evaluate, Origin, Resumption
from skein.protocol.messages.progress import ChunkProgress, ResumedChunk
from skein.protocol.messages.reports import Ack, StageDone, Trouble
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import ApplyOp, BackwardOp, ForwardOp, LossOp, OpFailed, hop_key
from skein.protocol.worker.worker_io import Build, BuildFailed, DropTensor, LogShortened, RunOp, SendTensor
from skein.types import Epoch, Generation, MicrobatchId, StageIndex, Step
from tests.support.hands import Hand, record
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, schedule
from tests.support.reports import attempt, ledger

PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
"""`w0a` holds stage 0, `w1a` stage 1; two microbatches."""
MOVED = plan_of(
    [chunk(0, "w0a"), chunk(1, "w1b")], [path(chunk(0, "w0a"), chunk(1, "w1b"))] * 2, num_shards=1
)
"""The same after w1b took w1a's place."""
FAILED = OpFailed(is_fatal=False, reason="out of memory")


def activation(microbatch: int, plan: Plan = PLAN) -> HopTensor:
    """What stage 0 sends to stage 1."""
    return tensor(Direction.FORWARD, microbatch, 1, plan)


def gradient(microbatch: int, plan: Plan = PLAN) -> HopTensor:
    """What stage 1 sends back."""
    return tensor(Direction.BACKWARD, microbatch, 0, plan)


def tensor(direction: Direction, microbatch: int, hop: int, plan: Plan) -> HopTensor:
    return HopTensor(
        direction=direction,
        phase=Phase.TRAIN,
        step=Step(0),
        microbatch=MicrobatchId(microbatch),
        hop=hop,
        path=plan.paths[microbatch],
    )


def started(worker: str = "w0a", plan: Plan = PLAN) -> Hand:
    """A worker in its first step."""
    hand = Hand(worker)
    hand.connect()
    hand.settle(plan)
    hand.start()
    return hand


def one_of_two() -> Hand:
    """The first stage's worker: both forwards done, microbatch 0 accumulated."""
    hand = started()
    hand.run_all()
    hand.arrive(gradient(0))
    hand.run_all()
    return hand


def told_of(ack: Ack) -> ChunkProgress:
    [progress] = ack.progress
    return progress


def progress(
    *,
    stage: int = 0,
    ledger: tuple[int, ...] = (),
    forwards: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    gradients: tuple[int, ...] = (),
) -> ChunkProgress:
    return ChunkProgress(
        stage=StageIndex(stage),
        ledger=microbatches(*ledger),
        forwards=microbatches(*forwards),
        outputs=microbatches(*outputs),
        gradients=microbatches(*gradients),
    )


def left(
    words: str,
    *,
    worker: str = "w0a",
    stage: int = 0,
    ledger: tuple[int, ...] = (),
    forwards: tuple[int, ...] = (),
    repeats: tuple[HopTensor, ...] = (),
    origins: tuple[int, ...] = (),
    plan: Plan = PLAN,
    step: int = 0,
) -> Resumption:
    """These ops are left of the step."""
    kept = ResumedChunk(
        stage=StageIndex(stage), ledger=microbatches(*ledger), forwards=microbatches(*forwards)
    )
    return Resumption(
        step=Step(step),
        schedule=schedule(worker, words),
        chunks=(kept,),
        origins=tuple(Origin(microbatch=m, path=plan.paths[m]) for m in microbatches(*origins)),
        repeats=repeats,
    )


def resume(hand: Hand, resumption: Resumption | None, *, plan: Plan = PLAN, generation: int = 2) -> None:
    """From a generation to the step that goes on."""
    hand.fence(plan, generation=generation)
    hand.acknowledge()
    assign = hand.assignment(plan, generation=generation, resumption=resumption)
    hand.hear(assign)
    assert hand.found(Build)
    hand.built(assign)
    hand.start(generation=generation)


# --- what is told ---


def test_what_was_done_of_a_step_is_told_by_stage() -> None:
    hand = one_of_two()
    hand.fence(PLAN, generation=2)
    assert told_of(hand.acknowledge()) == progress(ledger=(0,), forwards=(1,), outputs=(0, 1))


def test_the_last_stage_tells_its_ledger_and_the_gradients_that_it_has_logged() -> None:
    hand = started("w1a")
    hand.arrive(activation(0), sender="w0a")
    hand.run_all()
    hand.fence(PLAN, generation=2)
    assert told_of(hand.acknowledge()) == progress(stage=1, ledger=(0,), gradients=(0,))


def test_an_op_that_runs_while_a_generation_comes_is_booked_but_sends_nothing() -> None:
    hand = started()
    hand.fence(PLAN, generation=2)
    assert hand.said() == []
    hand.end()
    assert hand.found(SendTensor) == []
    assert told_of(hand.acknowledge()) == progress(forwards=(0,), outputs=(0,))


def test_an_accumulation_that_ends_after_the_generation_counts() -> None:
    hand = one_of_two()
    hand.arrive(gradient(1))
    assert isinstance(hand.running, BackwardOp)
    hand.fence(PLAN, generation=2)
    hand.fence(PLAN, generation=3)
    hand.end()
    ack = hand.acknowledge()
    assert (ack.generation, told_of(ack)) == (3, progress(ledger=(0, 1), outputs=(0, 1)))
    assert hand.said() == [ack]


def test_an_evaluation_is_no_part_of_a_step() -> None:
    hand = Hand()
    hand.connect()
    hand.settle(PLAN)
    hand.hear(Evaluate(epoch=Epoch(1), generation=Generation(1), version=Step(0), num_microbatches=2))
    hand.end()
    hand.fence(PLAN, generation=2)
    hand.end()
    assert told_of(hand.acknowledge()) == progress()


def test_of_a_committed_step_nothing_is_told() -> None:
    hand = one_of_two()
    hand.arrive(gradient(1))
    hand.run_all()
    hand.prepare("s0", [ledger(0, "w0a", 0, 1)])
    hand.run_all()
    hand.commit(record(attempts={"s0": attempt(), "s1": attempt()}), goes_on=False)
    hand.fence(PLAN, generation=2)
    ack = hand.acknowledge()
    assert ack.chunks[0].version == 1
    assert all(x == progress() for x in ack.progress)


def test_each_generation_hears_the_same_while_nothing_is_assigned() -> None:
    hand = one_of_two()
    acks = []
    for generation in (2, 3):
        hand.fence(PLAN, generation=generation)
        acks.append(told_of(hand.acknowledge()))
    assert acks[0] == acks[1] == progress(ledger=(0,), forwards=(1,), outputs=(0, 1))


# --- failures ---


def test_a_backward_that_fails_halfway_takes_all_sums_of_its_chunk_along() -> None:
    hand = one_of_two()
    hand.arrive(gradient(1))
    hand.end(FAILED)
    [trouble] = hand.said()
    assert isinstance(trouble, Trouble)
    hand.fence(PLAN, generation=2)
    # Neither the sum that was there before it, nor the activation that it used up.
    assert told_of(hand.acknowledge()) == progress(outputs=(0, 1))


def test_a_backward_that_fails_after_the_generation_does_so_too() -> None:
    hand = one_of_two()
    hand.arrive(gradient(1))
    hand.fence(PLAN, generation=2)
    hand.end(FAILED)
    assert told_of(hand.acknowledge()) == progress(outputs=(0, 1))


def test_a_forward_that_fails_spoils_no_sum() -> None:
    plan = grid_plan(stages=2, replicas=1, num_microbatches=3)
    hand = started(plan=plan)
    hand.run_all()
    hand.arrive(gradient(0, plan))
    hand.end()
    assert isinstance(hand.running, ForwardOp)
    hand.end(FAILED)
    hand.fence(plan, generation=2)
    assert told_of(hand.acknowledge()) == progress(ledger=(0,), forwards=(1,), outputs=(0, 1))


def test_a_failed_op_of_one_chunk_leaves_the_other_chunks_sums_alone() -> None:
    both = plan_of(
        [chunk(0, "w0a"), chunk(1, "w0a")], [path(chunk(0, "w0a"), chunk(1, "w0a"))] * 2, num_shards=1
    )
    hand = started(plan=both)
    while not isinstance(hand.running, BackwardOp):
        hand.end()
    done = hand.running.microbatch
    hand.end(FAILED)
    hand.fence(both, generation=2)
    first, last = hand.acknowledge().progress
    assert first.ledger == ()
    assert done in last.ledger


# --- what stays ---


def test_what_stays_is_not_done_again_and_what_is_left_completes_the_ledger() -> None:
    hand = one_of_two()
    resume(hand, left("B0.1", ledger=(0,), forwards=(1,)))
    assert hand.found(RunOp) == []
    hand.arrive(gradient(1), generation=2)
    assert isinstance(hand.running, BackwardOp)
    hand.end()
    [done] = hand.said()
    assert isinstance(done, StageDone)
    assert (done.generation, done.ledger) == (2, ledger(0, "w0a", 0, 1))


def test_losses_and_tokens_of_what_stays_count_again() -> None:
    hand = started("w1a")
    hand.arrive(activation(0), sender="w0a")
    hand.run_all()
    resume(hand, left("L1.1", worker="w1a", stage=1, ledger=(0,)))
    hand.arrive(activation(1), sender="w0a", generation=2)
    hand.end()
    [done] = hand.said()
    assert isinstance(done, StageDone)
    assert (done.ledger, done.loss_sum, done.tokens) == (ledger(1, "w1a", 0, 1), 4.0, (3, 3))


def test_a_ledger_that_is_dropped_begins_anew() -> None:
    hand = started("w1a")
    hand.arrive(activation(0), sender="w0a")
    hand.run_all()
    resume(hand, left("L1.1", worker="w1a", stage=1))
    hand.arrive(activation(1), sender="w0a", generation=2)
    hand.end()
    [done] = hand.said()
    assert isinstance(done, StageDone)
    assert (done.ledger, done.loss_sum, done.tokens) == (ledger(1, "w1a", 1), 2.0, (3,))


def test_a_chunk_of_whose_step_nothing_is_left_is_complete_at_once() -> None:
    hand = one_of_two()
    hand.arrive(gradient(1))
    hand.run_all()
    resume(hand, left("", ledger=(0, 1)))
    [done] = hand.said()
    assert isinstance(done, StageDone)
    assert done.ledger == ledger(0, "w0a", 0, 1)


def test_activations_that_stay_hold_their_slots() -> None:
    plan = grid_plan(stages=2, replicas=1, num_microbatches=3)
    hand = started(plan=plan)
    hand.run_all()
    assert hand.machine.pipeline is not None
    assert hand.machine.pipeline.num_in_flight == 2
    resume(hand, left("B0.0 F0.2 B0.1 B0.2", forwards=(0, 1), origins=(2,), plan=plan), plan=plan)
    assert hand.machine.pipeline.num_in_flight == 2
    assert hand.running is None
    hand.arrive(gradient(0), generation=2)
    assert [type(op) for op in hand.run_all()] == [BackwardOp, ForwardOp]


def test_without_a_resumption_the_step_begins_anew() -> None:
    hand = one_of_two()
    resume(hand, None)
    assert [(type(op), op.microbatch) for op in hand.run_all() if isinstance(op, ForwardOp)] == [
        (ForwardOp, 0),
        (ForwardOp, 1),
    ]
    hand.fence(PLAN, generation=3)
    assert told_of(hand.acknowledge()) == progress(forwards=(0, 1), outputs=(0, 1))


def test_a_chunk_with_a_ledger_that_is_not_the_workers_own_is_a_fault() -> None:
    hand = one_of_two()
    with pytest.raises(AssertionError, match="told to keep"):
        resume(hand, left("B0.1", ledger=(1,), forwards=(1,)))


def test_the_step_after_the_one_that_went_on_is_a_whole_one() -> None:
    hand = one_of_two()
    resume(hand, left("B0.1", ledger=(0,), forwards=(1,)))
    hand.arrive(gradient(1), generation=2)
    hand.run_all()
    hand.prepare("s0", [ledger(0, "w0a", 0, 1)], generation=2)
    hand.run_all()
    hand.commit(record(attempts={"s0": attempt(), "s1": attempt()}), generation=2)
    assert isinstance(hand.running, ApplyOp)
    hand.end()
    assert [op.step for op in hand.run_all() if isinstance(op, ForwardOp)] == [1, 1]


# --- what is sent again, and what must wait ---


def test_what_was_made_is_sent_again_the_way_that_holds_now() -> None:
    hand = one_of_two()
    resume(
        hand,
        left(
            "B0.1",
            ledger=(0,),
            forwards=(1,),
            repeats=(activation(0, MOVED), activation(1, MOVED)),
            plan=MOVED,
        ),
        plan=MOVED,
    )
    assert hand.sent() == [("w1b", activation(0, MOVED)), ("w1b", activation(1, MOVED))]
    assert {command.envelope.generation for command in hand.found(SendTensor)} == {2}


def test_what_is_sent_again_to_another_stage_here_is_taken_at_once() -> None:
    both = plan_of([chunk(0, "w0a"), chunk(1, "w0a")], [path(chunk(0, "w0a"), chunk(1, "w0a"))], num_shards=1)
    hand = started(plan=both)
    hand.end()
    assert isinstance(hand.running, LossOp)
    hand.fence(both, generation=2)
    hand.end(FAILED)
    told = hand.acknowledge().progress
    assert [x.ledger for x in told] == [(), ()]
    assign = hand.assignment(
        both,
        generation=2,
        resumption=replace(
            left("L1.0 B0.0", forwards=(0,), repeats=(activation(0, both),), plan=both),
        ),
    )
    hand.hear(assign)
    hand.built(assign)
    hand.start(generation=2)
    assert hand.sent() == []
    assert [type(op).__name__ for op in hand.run_all()] == ["LossOp", "BackwardOp"]


def test_a_gradient_that_comes_before_its_activation_is_made_again_waits_for_it() -> None:
    hand = one_of_two()
    resume(hand, left("F0.0 B0.0 B0.1", forwards=(1,), origins=(0,)))
    assert isinstance(hand.running, ForwardOp)
    hand.arrive(gradient(0), generation=2)
    hand.arrive(gradient(1), generation=2)
    ran = hand.run_all()
    assert [(type(op), op.microbatch) for op in ran if isinstance(op, ForwardOp | BackwardOp)] == [
        (ForwardOp, 0),
        (BackwardOp, 0),
        (BackwardOp, 1),
    ]


def test_what_is_begun_again_is_sent_where_its_path_goes_by_now() -> None:
    hand = started()
    resume(hand, left("F0.0 F0.1 B0.0 B0.1", origins=(0, 1), plan=MOVED), plan=MOVED)
    hand.end()
    assert hand.sent() == [("w1b", activation(0, MOVED))]


def test_a_tensor_for_an_op_that_is_done_is_dropped() -> None:
    hand = one_of_two()
    resume(hand, left("B0.1", ledger=(0,), forwards=(1,)))
    hand.arrive(gradient(0), generation=2)
    assert hand.running is None
    assert len(hand.found(DropTensor)) == 1


# --- the boundary log ---


def test_what_the_log_has_forgotten_is_not_told() -> None:
    hand = one_of_two()
    hand.give(LogShortened(keys=(hop_key(activation(0)),), is_wanted=False))
    assert hand.said() == []
    hand.fence(PLAN, generation=2)
    assert told_of(hand.acknowledge()).outputs == (1,)


def test_what_the_log_has_forgotten_and_somebody_waits_for_is_trouble() -> None:
    hand = one_of_two()
    resume(hand, left("B0.1", ledger=(0,), forwards=(1,), repeats=(activation(0),)))
    hand.give(LogShortened(keys=(hop_key(activation(0)),), is_wanted=True))
    [trouble] = hand.said()
    assert isinstance(trouble, Trouble)
    assert (trouble.generation, trouble.is_fatal) == (2, False)
    hand.fence(PLAN, generation=3)
    assert told_of(hand.acknowledge()).outputs == (1,)


def test_what_is_made_again_is_logged_again() -> None:
    hand = one_of_two()
    hand.give(LogShortened(keys=(hop_key(activation(0)),), is_wanted=False))
    resume(hand, left("F0.0 B0.0 B0.1", forwards=(1,), origins=(0,)))
    hand.run_all()
    hand.fence(PLAN, generation=3)
    assert told_of(hand.acknowledge()).outputs == (0, 1)


# --- several generations ---


def test_a_step_is_stopped_again_after_it_has_gone_on() -> None:
    hand = one_of_two()
    resume(hand, left("B0.1", ledger=(0,), forwards=(1,)))
    hand.fence(PLAN, generation=3)
    assert told_of(hand.acknowledge()) == progress(ledger=(0,), forwards=(1,), outputs=(0, 1))


def test_a_generation_while_chunks_are_built_loses_nothing_of_what_stays() -> None:
    hand = one_of_two()
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    assign = hand.assignment(PLAN, generation=2, resumption=left("F0.0 B0.0 B0.1", forwards=(1,)))
    hand.hear(assign)
    hand.fence(PLAN, generation=3)
    assert hand.said() == []
    hand.built(assign)
    # What that generation had it drop is gone, for the sums are; the rest is here.
    assert told_of(hand.acknowledge()) == progress(forwards=(1,), outputs=(0, 1))


def test_a_build_that_came_to_nothing_has_dropped_nothing() -> None:
    hand = one_of_two()
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    hand.hear(hand.assignment(PLAN, generation=2, resumption=None))
    hand.fence(PLAN, generation=3)
    hand.give(BuildFailed(report=None))
    assert told_of(hand.acknowledge()) == progress(ledger=(0,), forwards=(1,), outputs=(0, 1))
