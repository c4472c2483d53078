"""What a worker tells of its times: medians of training, bounded, once for each piece of news."""

from dataclasses import replace

from skein.plan.ops import Direction, OpKind
from skein.plan.plan import ChunkTime, TransferTime
from skein.protocol.messages.reports import TimesMeasured
from skein.protocol.messages.tensors import HopTensor, Phase, ShardKind, ShardTensor
from skein.protocol.worker.ops import COMPUTE_OPS, BackwardOp, ForwardOp, LossOp, Op, SaveOp
from skein.protocol.worker.timing import LEAST_KEPT, MAX_PEERS, NUM_KEPT, Timing
from skein.types import Generation, MicrobatchId, StageIndex, Step, WorkerId, parse_group
from tests.support.plans import chunk, path
from tests.support.reports import attempt

WAY = path(chunk(0, "w0a"), chunk(1, "w1a"))
FIRST = Generation(1)


def forward(*, phase: Phase = Phase.TRAIN) -> Op:
    return ForwardOp(phase=phase, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=WAY)


def backward() -> Op:
    return BackwardOp(step=Step(0), microbatch=MicrobatchId(0), hop=0, path=WAY)


def boundary(*, phase: Phase = Phase.TRAIN) -> HopTensor:
    return HopTensor(
        direction=Direction.FORWARD, phase=phase, step=Step(0), microbatch=MicrobatchId(0), hop=1, path=WAY
    )


def told(timing: Timing) -> TimesMeasured:
    report = timing.report(FIRST)
    assert report is not None
    return report


def test_each_kind_of_op_has_its_own_median() -> None:
    timing = Timing(WorkerId("w0a"))
    for seconds in (1.0, 9.0, 2.0):
        timing.op_ended(forward(), seconds)
        timing.op_ended(backward(), 4.0)
    assert told(timing).chunks == (
        ChunkTime(chunk=chunk(0, "w0a"), forward_s=2.0, backward_s=4.0, loss_s=0.0),
    )


def test_a_loss_is_an_op_of_the_last_hop() -> None:
    timing = Timing(WorkerId("w1a"))
    loss = LossOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=1, path=WAY)
    for _ in range(LEAST_KEPT):
        timing.op_ended(loss, 5.0)
    assert told(timing).chunks == (
        ChunkTime(chunk=chunk(1, "w1a"), forward_s=0.0, backward_s=0.0, loss_s=5.0),
    )


def test_of_a_split_backward_and_a_split_loss_weight_ops_are_a_part() -> None:
    way = replace(WAY, split=(0, 1))
    for worker, hop, times, expected in (
        ("w0a", 0, {OpKind.FORWARD: 2.0, OpKind.INPUT: 3.0, OpKind.WEIGHT: 1.5}, (2.0, 4.5, 0.0)),
        ("w1a", 1, {OpKind.LOSS_INPUT: 5.0, OpKind.WEIGHT: 2.5}, (0.0, 0.0, 7.5)),
    ):
        timing = Timing(WorkerId(worker))
        for _ in range(LEAST_KEPT):
            for kind, seconds in times.items():
                op = COMPUTE_OPS[kind](
                    phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=hop, path=way
                )
                timing.op_ended(op, seconds)
        [found] = told(timing).chunks
        assert (found.forward_s, found.backward_s, found.loss_s) == expected
        assert found.weight_s == times[OpKind.WEIGHT]
        assert found.total_s == sum(times.values())


def test_evaluation_and_everything_that_is_not_a_path_does_not_count() -> None:
    timing = Timing(WorkerId("w0a"))
    saving = SaveOp(generation=FIRST, version=Step(0), stage=StageIndex(0), url=None)
    for _ in range(LEAST_KEPT):
        timing.op_ended(forward(phase=Phase.EVALUATE), 1.0)
        timing.op_ended(saving, 1.0)
        timing.tensor_taken(WorkerId("w1a"), boundary(phase=Phase.EVALUATE), 10, 1.0)
    shard = ShardTensor(
        kind=ShardKind.PART,
        step=Step(0),
        group=parse_group("s0"),
        attempt=attempt(),
        shard=0,
        member=chunk(0, "w0a"),
    )
    for _ in range(LEAST_KEPT):
        timing.tensor_taken(WorkerId("w1a"), shard, 10, 1.0)
    assert timing.report(FIRST) is None


def visit(timing: Timing, count: int = LEAST_KEPT, seconds: float = 1.0) -> None:
    for _ in range(count):
        timing.op_ended(forward(), seconds)
        timing.op_ended(backward(), seconds)


def test_the_first_ops_of_a_kind_and_half_a_visit_are_not_told() -> None:
    timing = Timing(WorkerId("w0a"))
    visit(timing, LEAST_KEPT - 1)
    assert timing.report(FIRST) is None
    timing.op_ended(forward(), 1.0)
    assert timing.report(FIRST) is None
    timing.op_ended(backward(), 1.0)
    assert timing.report(FIRST) is not None


def test_what_was_told_is_no_news() -> None:
    timing = Timing(WorkerId("w0a"))
    visit(timing)
    assert timing.report(FIRST) is not None
    assert timing.report(FIRST) is None
    timing.op_ended(forward(), 1.0)
    assert timing.report(FIRST) is not None


def test_only_the_last_ops_count() -> None:
    timing = Timing(WorkerId("w0a"))
    visit(timing, NUM_KEPT, 100.0)
    visit(timing, NUM_KEPT, 1.0)
    assert told(timing).chunks[0].forward_s == 1.0


def test_transfers_that_waited_for_others_do_not_make_a_link_slow() -> None:
    timing = Timing(WorkerId("w0a"))
    for seconds in (1.0, 1.0, 5.0, 5.0, 5.0):
        timing.tensor_taken(WorkerId("w1a"), boundary(), 100, seconds)
    timing.tensor_taken(WorkerId("w1a"), boundary(), 1, 0.001)
    assert told(timing).transfers == (
        TransferTime(sender=WorkerId("w0a"), receiver=WorkerId("w1a"), num_bytes=100, seconds=1.0),
    )


def test_the_report_of_a_worker_with_very_many_peers_is_bounded() -> None:
    timing = Timing(WorkerId("w0a"))
    for number in range(2 * MAX_PEERS):
        for _ in range(LEAST_KEPT):
            timing.tensor_taken(WorkerId(f"p{number:04d}"), boundary(), 1, 1.0)
    assert len(told(timing).transfers) == MAX_PEERS


def test_a_new_generation_begins_with_nothing() -> None:
    timing = Timing(WorkerId("w0a"))
    visit(timing)
    timing.clear()
    visit(timing, LEAST_KEPT - 1)
    assert timing.report(FIRST) is None
