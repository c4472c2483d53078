"""The Worker machine: generations, builds, steps, and what it does when things end halfway."""

from dataclasses import replace
from typing import TypeVar

import pytest

from skein import PROTOCOL_VERSION
from skein.plan.plan import Plan
from skein.protocol.messages import (
    Ack,
    Beat,
    CheckpointWritten,
    ChunksReady,
    ChunkVersion,
    Decision,
    Direction,
    Dismiss,
    Evaluate,
    EvaluationDone,
    Hello,
    HopTensor,
    Leaving,
    LinksMeasured,
    Phase,
    Probe,
    Refused,
    Report,
    Save,
    ShardKind,
    ShardTensor,
    StageDone,
    StepRecord,
    Suspected,
    TimesMeasured,
    Trouble,
    Vote,
    Welcome,
)
from skein.protocol.ops import (
    ApplyOp,
    BackwardOp,
    ForwardOp,
    JoinOp,
    LossOp,
    OpFailed,
    PackOp,
    SaveOp,
)
from skein.protocol.work.timing import LEAST_KEPT
from skein.protocol.worker_io import (
    Build,
    BuildFailed,
    CancelBuild,
    CheckpointSaved,
    DropTensor,
    Exit,
    ForgetJob,
    LinksProbed,
    MeasureLinks,
    RunOp,
    SaveFailed,
    SendFailed,
    StopRequested,
    StreamLost,
    StreamOpened,
    TimePassed,
)
from skein.types import Epoch, Generation, GroupId, JobId, MicrobatchId, StageIndex, Step, WorkerId
from tests.support.hands import JOB, Hand, envelope, record
from tests.support.plans import chunk, grid_plan, microbatches, path, plan_of, stage_spec
from tests.support.reports import attempt, ledger

PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
"""`w0a` holds stage 0, `w1a` stage 1; two microbatches."""
ALONE = plan_of(
    [chunk(0, "w0a"), chunk(1, "w0a")], [path(chunk(0, "w0a"), chunk(1, "w0a"))] * 2, num_shards=1
)
"""`w0a` holds everything."""
FAILED = OpFailed(is_fatal=False, reason="out of memory")
R = TypeVar("R")


def hop(
    direction: Direction,
    microbatch: int,
    at: int,
    *,
    plan: Plan = PLAN,
    phase: Phase = Phase.TRAIN,
    step: int = 0,
) -> HopTensor:
    return HopTensor(
        direction=direction,
        phase=phase,
        step=Step(step),
        microbatch=MicrobatchId(microbatch),
        hop=at,
        path=plan.paths[microbatch % len(plan.paths)],
    )


def gradient(microbatch: int, *, step: int = 0) -> HopTensor:
    """What stage 1 sends back to stage 0."""
    return hop(Direction.BACKWARD, microbatch, 0, step=step)


def ready(plan: Plan = PLAN, worker: str = "w0a") -> Hand:
    """A worker that waits for its first step."""
    hand = Hand(worker)
    hand.connect()
    hand.settle(plan)
    return hand


def stepping() -> Hand:
    """The first stage's worker in step 0, both forwards done."""
    hand = ready()
    hand.start()
    hand.run_all()
    return hand


def accumulated() -> Hand:
    """The same with both backwards done."""
    hand = stepping()
    for microbatch in (0, 1):
        hand.arrive(gradient(microbatch))
        hand.run_all()
    return hand


def voted() -> Hand:
    """The same with the result of its group joined."""
    hand = accumulated()
    hand.prepare("s0", [ledger(0, "w0a", 0, 1)])
    hand.run_all()
    return hand


DECIDED = record(attempts={"s0": attempt(), "s1": attempt()})


def only(reports: list[Report], kind: type[R]) -> R:
    [report] = reports
    assert isinstance(report, kind)
    return report


# --- the control stream ---


def test_a_stream_begins_with_a_hello_that_names_the_epoch_followed() -> None:
    hand = Hand()
    hand.connect(epoch=4)
    hand.give(StreamLost(reason="reset"))
    hand.give(StreamOpened())
    hello = only(hand.said(), Hello)
    assert (hello.worker, hello.incarnation, hello.epoch) == ("w0a", "w0a-1", 4)
    assert hello.protocol_version == PROTOCOL_VERSION


def test_beats_come_as_often_as_the_coordinator_says() -> None:
    hand = Hand()
    hand.give(StreamOpened())
    hand.hear(Welcome(epoch=Epoch(1), lease_s=3.0, beat_s=0.5))
    assert hand.machine.deadline() == 0.5
    hand.now = 0.4
    assert hand.give(TimePassed()) == []
    hand.now = 0.5
    hand.give(TimePassed())
    assert only(hand.said(), Beat).progress == 0
    assert hand.machine.deadline() == 1.0


def test_progress_counts_ended_ops() -> None:
    hand = stepping()
    hand.now = 9.0
    hand.give(TimePassed())
    [beat] = [report for report in hand.said() if isinstance(report, Beat)]
    assert beat.progress == 2  # two forwards


def test_times_are_told_with_the_beat_and_begin_anew_with_a_generation() -> None:
    plan = grid_plan(stages=2, replicas=1, num_microbatches=LEAST_KEPT, slots=LEAST_KEPT)
    hand = Hand()
    hand.connect()
    hand.settle(plan)
    hand.start()
    hand.run_all()
    for microbatch in range(LEAST_KEPT):
        hand.arrive(replace(gradient(0), microbatch=MicrobatchId(microbatch)))
        hand.run_all()
    hand.now = 9.0
    hand.give(TimePassed())
    [times] = [report for report in hand.said() if isinstance(report, TimesMeasured)]
    assert (times.generation, [time.forward_s for time in times.chunks]) == (1, [0.5])
    hand.fence(plan, generation=2)
    hand.now = 19.0
    hand.give(TimePassed())
    assert [report for report in hand.said() if isinstance(report, TimesMeasured)] == []


def test_without_a_stream_nothing_is_said_and_no_time_matters() -> None:
    hand = accumulated()
    hand.give(StreamLost(reason="reset"))
    assert hand.machine.deadline() is None
    hand.give(CheckpointSaved(generation=Generation(1), version=Step(0), stage=StageIndex(0), files=()))
    assert hand.said() == []


def test_a_lost_coordinator_does_not_stop_the_work_in_hand() -> None:
    hand = ready()
    hand.start()
    hand.give(StreamLost(reason="reset"))
    assert [type(op) for op in hand.run_all()] == [ForwardOp, ForwardOp]
    hand.arrive(gradient(0))
    assert isinstance(hand.running, BackwardOp)


def test_a_coordinator_of_a_lower_epoch_is_not_followed() -> None:
    hand = Hand()
    hand.connect(epoch=3)
    hand.hear(Welcome(epoch=Epoch(2), lease_s=9.0, beat_s=9.0))
    assert hand.machine.epoch == 3
    assert hand.fence(PLAN, epoch=2) == []


def test_who_is_refused_exits_with_the_reason() -> None:
    hand = Hand()
    hand.give(StreamOpened())
    assert hand.hear(Refused(reason="protocol version")) == [Exit(is_clean=False, reason="protocol version")]


def test_links_are_measured_when_asked() -> None:
    hand = Hand()
    hand.connect()
    assert hand.hear(Probe(peers=())) == [MeasureLinks(peers=())]
    hand.give(LinksProbed(links=()))
    assert only(hand.said(), LinksMeasured).links == ()


# --- leaving ---


def test_asked_to_stop_it_says_so_once_and_again_on_every_new_stream() -> None:
    hand = ready()
    hand.give(StopRequested(reason="SIGTERM"))
    assert only(hand.said(), Leaving).reason == "SIGTERM"
    assert hand.give(StopRequested(reason="SIGTERM")) == []
    hand.machine.handle(StreamOpened(), now=0.0)
    hand.give(StreamOpened())
    assert [type(report) for report in hand.said()] == [Hello, Leaving]


def test_a_stopping_worker_goes_on_until_it_is_dismissed() -> None:
    hand = ready()
    hand.start()
    hand.give(StopRequested(reason="SIGTERM"))
    assert [type(op) for op in hand.run_all()] == [ForwardOp, ForwardOp]
    hand.hear(Dismiss(epoch=Epoch(1), job=JOB, may_exit=True))
    assert hand.commands == [ForgetJob(), Exit(is_clean=True, reason="drained")]


def test_a_stopping_worker_without_a_coordinator_exits() -> None:
    hand = Hand()
    assert hand.give(StopRequested(reason="SIGTERM")) == [Exit(is_clean=True, reason="SIGTERM")]
    hand = ready()
    hand.give(StopRequested(reason="SIGTERM"))
    hand.give(StreamLost(reason="reset"))
    assert [type(command) for command in hand.commands] == [Exit]


# --- generations ---


def test_a_generation_is_acknowledged_at_once_where_nothing_runs() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    ack = only(hand.said(), Ack)
    assert (ack.generation, ack.chunks, ack.progress) == (1, (), ())


def test_a_running_op_is_never_interrupted_by_a_generation() -> None:
    hand = ready()
    hand.start()
    assert isinstance(hand.running, ForwardOp)
    assert hand.fence(PLAN, generation=2) == []
    hand.end()
    assert hand.sent() == []
    assert only(hand.said(), Ack).generation == 2
    assert hand.running is None


def test_only_the_newest_of_several_generations_is_acknowledged() -> None:
    hand = ready()
    hand.start()
    hand.fence(PLAN, generation=2)
    hand.fence(PLAN, generation=3)
    assert hand.acknowledge().generation == 3


def test_each_generation_is_acknowledged_where_nothing_runs() -> None:
    hand = ready()
    for generation in (2, 3):
        hand.fence(PLAN, generation=generation)
        assert only(hand.said(), Ack).generation == generation


def test_directives_of_another_generation_or_epoch_are_dropped() -> None:
    hand = ready()
    assert hand.start(generation=0) == []
    assert hand.start(generation=2) == []
    assert hand.start(epoch=0) == []
    assert hand.fence(PLAN, generation=1) == []
    assert hand.running is None


def test_what_is_held_is_reported_with_its_version() -> None:
    hand = ready()
    hand.fence(PLAN, generation=2)
    assert hand.acknowledge().chunks == (ChunkVersion(stage=stage_spec(0), version=Step(0)),)


def test_nothing_computes_between_a_generation_and_what_it_assigns() -> None:
    hand = stepping()
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    assert hand.arrive(gradient(0), generation=2) == []
    assert hand.running is None


# --- building ---


def test_ready_chunks_are_reported_with_what_is_known_of_the_data() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    assign = hand.assignment(PLAN)
    [build] = hand.hear(assign)
    assert isinstance(build, Build)
    assert build.assign == assign
    assert [member.worker for member in build.members] == ["w0a", "w1a"]
    hand.built(assign)
    assert only(hand.said(), ChunksReady).data_fingerprint == "data"


def test_a_newer_generation_cancels_a_build_once_and_waits_for_its_end() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    hand.hear(hand.assignment(PLAN))
    assert hand.fence(PLAN, generation=2) == [CancelBuild()]
    assert hand.fence(PLAN, generation=3) == []
    hand.give(BuildFailed(generation=Generation(1), peer=None, is_fatal=False, reason="overtaken"))
    ack = only(hand.said(), Ack)
    assert (ack.generation, ack.chunks) == (3, ())


def test_a_build_that_a_newer_generation_came_too_late_for_counts_as_held() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    assign = hand.assignment(PLAN)
    hand.hear(assign)
    hand.fence(PLAN, generation=2)
    hand.built(assign)
    assert only(hand.said(), Ack).chunks == (ChunkVersion(stage=stage_spec(0), version=Step(0)),)


def test_a_build_that_was_forgotten_counts_for_nothing() -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    assign = hand.assignment(PLAN)
    hand.hear(assign)
    assert hand.hear(Dismiss(epoch=Epoch(1), job=None, may_exit=False)) == [CancelBuild(), ForgetJob()]
    hand.fence(PLAN, generation=2)
    hand.built(assign)
    assert hand.acknowledge().chunks == ()


@pytest.mark.parametrize(
    ("peer", "is_fatal", "expected"),
    [
        ("w1a", False, Suspected(generation=Generation(1), peer=WorkerId("w1a"), reason="no")),
        (None, False, Trouble(generation=Generation(1), is_fatal=False, reason="no")),
        (None, True, Trouble(generation=Generation(1), is_fatal=True, reason="no")),
    ],
)
def test_a_failed_build_blames_the_donor_the_worker_or_the_job(
    peer: str | None, is_fatal: bool, expected: Report
) -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    hand.hear(hand.assignment(PLAN))
    donor = None if peer is None else WorkerId(peer)
    hand.give(BuildFailed(generation=Generation(1), peer=donor, is_fatal=is_fatal, reason="no"))
    assert hand.said() == [expected]


def test_a_chunk_that_the_plan_takes_away_is_held_until_a_step_begins() -> None:
    hand = ready(ALONE)
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    assign = hand.assignment(PLAN, generation=2)
    hand.hear(assign)
    hand.built(assign)
    hand.fence(PLAN, generation=3)
    both = [ChunkVersion(stage=stage_spec(s), version=Step(0)) for s in (0, 1)]
    assert list(hand.acknowledge().chunks) == both
    assign = hand.assignment(PLAN, generation=3)
    hand.hear(assign)
    hand.built(assign)
    hand.start(generation=3)
    hand.fence(PLAN, generation=4)
    assert list(hand.acknowledge().chunks) == both[:1]


# --- tensors of other times ---


def test_a_tensor_of_an_older_generation_is_dropped() -> None:
    hand = ready()
    hand.settle(PLAN, generation=2)
    hand.start(generation=2)
    hand.run_all()
    hand.arrive(gradient(0), generation=1)
    assert hand.commands == [DropTensor(envelope=envelope(gradient(0), sender="w1a", generation=1))]


def test_a_tensor_of_a_newer_generation_waits_for_it() -> None:
    hand = ready(PLAN, "w1a")
    activation = hop(Direction.FORWARD, 0, 1)
    assert hand.arrive(activation, sender="w0a", generation=2) == []
    hand.fence(PLAN, generation=2)
    hand.acknowledge()
    assign = hand.assignment(PLAN, generation=2)
    hand.hear(assign)
    hand.built(assign)
    assert isinstance(hand.running, LossOp)


def test_a_tensor_that_waited_in_vain_is_dropped() -> None:
    hand = ready(PLAN, "w1a")
    hand.arrive(hop(Direction.FORWARD, 0, 1), sender="w0a", generation=2)
    hand.settle(PLAN, generation=3)
    assert len(hand.found(DropTensor)) == 1


def test_a_tensor_of_the_next_step_waits_for_the_update() -> None:
    hand = ready(PLAN, "w1a")
    hand.start()
    for microbatch in (0, 1):
        hand.arrive(hop(Direction.FORWARD, microbatch, 1), sender="w0a")
        hand.run_all()
    hand.prepare("s1", [ledger(1, "w1a", 0, 1)])
    hand.run_all()
    assert hand.arrive(hop(Direction.FORWARD, 0, 1, step=1), sender="w0a") == []
    hand.commit(DECIDED)
    assert [type(op) for op in hand.run_all()] == [ApplyOp, LossOp]


def test_a_tensor_of_a_step_that_is_over_is_dropped() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand.end()
    hand.arrive(gradient(0, step=0))
    assert len(hand.found(DropTensor)) == 1


@pytest.mark.parametrize(
    "header",
    [
        hop(Direction.FORWARD, 0, 1),
        HopTensor(
            direction=Direction.BACKWARD,
            phase=Phase.TRAIN,
            step=Step(0),
            microbatch=MicrobatchId(7),
            hop=0,
            path=PLAN.paths[0],
        ),
        ShardTensor(
            kind=ShardKind.PART,
            step=Step(0),
            group=GroupId("s1"),
            attempt=attempt(),
            shard=0,
            member=chunk(1, "w1a"),
        ),
    ],
    ids=["another worker's hop", "unassigned microbatch", "another group"],
)
def test_a_tensor_that_is_not_for_this_worker_is_dropped(header: HopTensor | ShardTensor) -> None:
    hand = stepping()
    hand.arrive(header)
    assert len(hand.found(DropTensor)) == 1


def test_a_tensor_of_another_job_is_dropped() -> None:
    hand = stepping()
    hand.arrive(gradient(0), job=JobId("other-9"))
    assert len(hand.found(DropTensor)) == 1


def test_a_peer_that_takes_nothing_is_suspected_unless_that_is_old_news() -> None:
    hand = stepping()
    hand.give(SendFailed(to=WorkerId("w1a"), generation=Generation(1), reason="refused"))
    assert only(hand.said(), Suspected).peer == "w1a"
    assert hand.give(SendFailed(to=WorkerId("w1a"), generation=Generation(0), reason="refused")) == []


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
    assert (cast.group, cast.attempt, cast.digest) == ("s0", attempt(), "same")


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
        Save(epoch=Epoch(1), generation=Generation(1), version=Step(0), stages=(StageIndex(0),), url=None)
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


def save(version: int) -> Save:
    return Save(
        epoch=Epoch(1), generation=Generation(1), version=Step(version), stages=(StageIndex(0),), url="s3://b"
    )


def test_a_save_behind_an_update_copies_the_new_version() -> None:
    hand = voted()
    hand.commit(DECIDED)
    hand.hear(save(1))
    ran = [hand.running]
    hand.end()
    ran.append(hand.running)
    assert [type(op) for op in ran] == [ApplyOp, SaveOp]


def test_a_save_of_another_version_is_ignored() -> None:
    assert ready().hear(save(3)) == []


def test_what_was_written_is_reported_and_what_was_not_is_trouble() -> None:
    hand = ready()
    hand.give(CheckpointSaved(generation=Generation(1), version=Step(0), stage=StageIndex(0), files=()))
    assert only(hand.said(), CheckpointWritten).stage == 0
    hand.give(SaveFailed(generation=Generation(1), version=Step(0), stage=StageIndex(0), reason="disk full"))
    assert "disk full" in only(hand.said(), Trouble).reason


def test_what_an_older_generation_could_not_save_is_no_trouble() -> None:
    hand = ready()
    hand.fence(PLAN, generation=2)
    failed = SaveFailed(
        generation=Generation(1), version=Step(0), stage=StageIndex(0), reason="the job has ended"
    )
    hand.give(failed)
    assert hand.said() == []


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
    assert hand.machine.story("op") == ("0.000 ForwardOp failed: out of memory",)


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


# --- the end of a job ---


def test_a_dismissed_worker_forgets_and_a_running_op_counts_for_nothing() -> None:
    hand = ready()
    hand.start()
    assert hand.hear(Dismiss(epoch=Epoch(1), job=JOB, may_exit=False)) == [ForgetJob()]
    assert hand.end() == []
    assert hand.running is None
    hand.fence(PLAN, generation=2)
    assert hand.acknowledge().chunks == ()


def test_the_end_of_another_job_changes_nothing() -> None:
    hand = stepping()
    assert hand.hear(Dismiss(epoch=Epoch(1), job=JobId("other-9"), may_exit=False)) == []
    hand.arrive(gradient(0))
    assert isinstance(hand.running, BackwardOp)


def test_an_old_coordinator_dismisses_nobody() -> None:
    hand = Hand()
    hand.connect(epoch=2)
    assert hand.hear(Dismiss(epoch=Epoch(1), job=None, may_exit=True)) == []


def test_a_generation_of_the_next_job_forgets_the_last_one() -> None:
    hand = ready()
    hand.fence(PLAN, generation=2, job=JobId("next-2"))
    assert hand.found(ForgetJob)
    assert hand.acknowledge().chunks == ()
    assert hand.machine.job == "next-2"


def test_a_generation_is_told_as_a_story() -> None:
    hand = ready()
    assert hand.machine.story("generation") == ("0.000 adopted 1",)
