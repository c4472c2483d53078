"""The Worker machine: its stream, generations, builds, and the end of a job."""

from dataclasses import replace

import pytest

from skein import PROTOCOL_VERSION
from skein.protocol.deadline import TimePassed
from skein.protocol.messages.directives import (
    ChunkVersion,
    Dismiss,
    Look,
    Member,
    Probe,
    Refused,
    Welcome,
)
from skein.protocol.messages.reports import (
    Ack,
    Beat,
    CheckpointWritten,
    ChunksReady,
    Hello,
    Leaving,
    LinksMeasured,
    PeersSeen,
    Suspected,
    TimesMeasured,
)
from skein.protocol.messages.tensors import Envelope, Refusal, ShardKind, ShardTensor
from skein.protocol.worker.ops import (
    BackwardOp,
    ForwardOp,
)
from skein.protocol.worker.timing import LEAST_KEPT
from skein.protocol.worker.worker_io import (
    Build,
    BuildFailed,
    CancelBuild,
    Exit,
    ForgetJob,
    LookAtPeers,
    MeasureLinks,
    StopRequested,
    StreamLost,
    StreamOpened,
)
from skein.types import (
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
    parse_group,
)
from tests.support.hands import JOB, Hand, key_of, peer
from tests.support.plans import chunk, grid_plan, stage_spec
from tests.support.reports import attempt
from tests.support.stages import (
    ALONE,
    PLAN,
    accumulated,
    gradient,
    only,
    ready,
    stepping,
)

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
    hand.give(CheckpointWritten(generation=Generation(1), version=Step(0), stage=StageIndex(0), files=()))
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
    hand.give(LinksMeasured(links=()))
    assert only(hand.said(), LinksMeasured).links == ()


def test_peers_are_looked_at_when_asked() -> None:
    hand = Hand()
    hand.connect()
    assert hand.hear(Look(peers=())) == [LookAtPeers(peers=())]
    hand.give(PeersSeen(reached=(Incarnation("a"),), gone=(Incarnation("b"),)))
    assert only(hand.said(), PeersSeen) == PeersSeen(reached=(Incarnation("a"),), gone=(Incarnation("b"),))


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
    assert [donor.worker for donor in build.donors] == ["w1a"]
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
    hand.give(BuildFailed(report=None))
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


@pytest.mark.parametrize(("generation", "is_said"), [(1, True), (0, False)])
def test_why_a_build_failed_is_said_while_somebody_waits_for_it(generation: int, *, is_said: bool) -> None:
    hand = Hand()
    hand.connect()
    hand.fence(PLAN)
    hand.acknowledge()
    hand.hear(hand.assignment(PLAN))
    report = Suspected(generation=Generation(generation), peer=WorkerId("w1a"), reason="no")
    hand.give(BuildFailed(report=report))
    assert hand.said() == [report] * is_said


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


# --- whose a tensor is ---


def with_one_peer() -> Hand:
    """A worker with one peer."""
    hand = Hand("w0a")
    hand.connect()
    hand.settle(PLAN)
    hand.machine._standing.peers = {WorkerId("w0b"): peer(WorkerId("w0b"))}
    return hand


def secret_of(worker: str, incarnation: str) -> str:
    return key_of(1).tensor_secret(WorkerId(worker), Incarnation(incarnation))


PART = ShardTensor(
    kind=ShardKind.PART,
    step=Step(0),
    group=parse_group("s0"),
    attempt=attempt(),
    shard=0,
    member=chunk(0, "w0b"),
)
TRUE = Envelope(
    job=JOB,
    epoch=Epoch(1),
    generation=Generation(1),
    sender=WorkerId("w0b"),
    incarnation=Incarnation("w0b-1"),
    header=PART,
    secret=secret_of("w0b", "w0b-1"),
)


OWN = replace(PART, member=chunk(0, "w0a"))


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (TRUE, None),
        (replace(TRUE, secret=""), Refusal.FORGED),
        (replace(TRUE, secret=secret_of("w0a", "w0a-1")), Refusal.FORGED),
        (replace(TRUE, secret="ü"), Refusal.FORGED),
        (replace(TRUE, incarnation=Incarnation("w0b-2")), Refusal.FORGED),
        (replace(TRUE, incarnation=Incarnation("w0b-2"), secret=secret_of("w0b", "w0b-2")), Refusal.FORGED),
        (replace(TRUE, sender=WorkerId("w9"), secret=secret_of("w9", "w0b-1")), Refusal.FORGED),
        (replace(TRUE, sender=WorkerId("w0a")), Refusal.FORGED),
        (replace(TRUE, header=OWN), Refusal.UNEXPECTED),
        (replace(TRUE, header=replace(OWN, kind=ShardKind.RESULT)), None),
        (replace(TRUE, job=JobId("j9")), Refusal.UNKNOWN_JOB),
        (replace(TRUE, header=replace(PART, step=Step(-1))), Refusal.STALE),
        (replace(TRUE, generation=Generation(0)), Refusal.STALE),
        (replace(TRUE, generation=Generation(2)), Refusal.NOT_YET),
        (replace(TRUE, epoch=Epoch(2), secret=""), Refusal.NOT_YET),
    ],
)
def test_a_tensor_is_taken_from_whom_it_names_and_when_its_time_has_come(
    said: Envelope, refusal: Refusal | None
) -> None:
    assert with_one_peer().machine.gate.refusal_of(said) is refusal


def test_what_is_early_waits_outside_where_there_is_no_room_for_it() -> None:
    gate = with_one_peer().machine.gate
    early = replace(TRUE, header=replace(PART, step=Step(1)))
    assert [gate.refusal_of(early, is_full=is_full) for is_full in (False, True)] == [None, Refusal.NOT_YET]
    assert gate.refusal_of(TRUE, is_full=True) is None


def test_state_is_for_those_who_show_what_this_generation_or_the_one_before_was_told() -> None:
    hand = Hand("w0a")
    hand.connect()
    me = WorkerId("w0a"), Incarnation("w0a-1")
    shown = ["", *(key_of(number).state_secret(*me) for number in (1, 2, 3))]
    assert not any(map(hand.machine.gate.may_fetch, shown))
    allowed = []
    for number in (1, 2, 3):
        hand.fence(PLAN, generation=number)
        allowed.append([place for place, door in enumerate(shown) if hand.machine.gate.may_fetch(door)])
    assert allowed == [[1], [1, 2], [2, 3]]


def test_links_are_for_those_to_measure_who_show_what_the_welcome_said() -> None:
    hand = Hand("w0a")
    assert not hand.machine.gate.may_probe("")
    hand.give(StreamOpened())
    hand.hear(Welcome(epoch=Epoch(1), lease_s=3.0, beat_s=1.0, door="told"))
    assert [hand.machine.gate.may_probe(door) for door in ("", "ü", "told")] == [False, False, True]


def test_secrets_are_in_no_line_and_no_comparison_of_members() -> None:
    member = Member(worker=WorkerId("a"), incarnation=Incarnation("a-1"), address="a:1", door="told to few")
    assert "told to few" not in f"{member!r} {TRUE!r}"
    assert member == replace(member, door="another")
