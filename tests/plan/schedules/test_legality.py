"""A valid schedule with one thing broken: each is found, and named by worker and op."""

from dataclasses import replace

import pytest

from skein.plan.route.schedules.shape import Shape
from tests.plan.schedules.builders import backward, cut_for, forward, links
from tests.support.scheduling.legality import deadlock, peaks, violations
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule
from tests.support.scheduling.pricing import StageCost
from tests.support.scheduling.simulate import simulate
from tests.support.scheduling.table import make_schedule

PLAIN = make_schedule("one_f_one_b", Shape(num_workers=2, num_microbatches=3))
SPLIT = make_schedule("zb_h1", Shape(num_workers=2, num_microbatches=3))


def with_ops(schedule: PipelineSchedule, worker: int, *ops: Op) -> PipelineSchedule:
    listed = list(schedule.ops_by_worker)
    listed[worker] = ops
    return replace(schedule, ops_by_worker=tuple(listed))


def without(schedule: PipelineSchedule, worker: int, op: Op) -> PipelineSchedule:
    return with_ops(schedule, worker, *(x for x in schedule.ops_by_worker[worker] if x != op))


def swapped(schedule: PipelineSchedule, worker: int, a: Op, b: Op) -> PipelineSchedule:
    other = {a: b, b: a}
    return with_ops(schedule, worker, *(other.get(x, x) for x in schedule.ops_by_worker[worker]))


def weight(stage: int, microbatch: int) -> Op:
    return Op(PipelineOpKind.BACKWARD_WEIGHT, stage, microbatch)


def gradient(stage: int, microbatch: int) -> Op:
    return Op(PipelineOpKind.BACKWARD_INPUT, stage, microbatch)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (without(PLAIN, 1, forward(1, 2)), "w1 lacks F2 of stage 1"),
        (without(PLAIN, 0, backward(0, 1)), "w0 lacks B1 of stage 0"),
        (without(SPLIT, 0, weight(0, 1)), "w0 lacks W1 of stage 0"),
        (without(SPLIT, 0, gradient(0, 1)), "w0 lacks I1 of stage 0"),
        (with_ops(PLAIN, 0, *PLAIN.ops_by_worker[0], backward(0, 2)), "w0 has B2 of stage 0 2 times"),
        (
            with_ops(PLAIN, 1, *PLAIN.ops_by_worker[1], gradient(1, 0)),
            "w1 has B0 of stage 1 beside I0 of stage 1",
        ),
        (with_ops(PLAIN, 1, *PLAIN.ops_by_worker[1], forward(0, 0)), "w1 has F0 of stage 0, which w0 holds"),
        (with_ops(PLAIN, 1, forward(2, 0)), "w1 has F0 of stage 2, which does not exist"),
        (with_ops(PLAIN, 1, forward(1, 3)), "w1 has F3 of stage 1, and there are 3 microbatches"),
        (
            swapped(PLAIN, 1, forward(1, 1), backward(1, 1)),
            "w1 has B1 of stage 1 before F1 of stage 1, which it needs",
        ),
        (
            swapped(SPLIT, 0, gradient(0, 0), weight(0, 0)),
            "w0 has W0 of stage 0 before I0 of stage 0, which it needs",
        ),
    ],
)
def test_what_is_broken_is_named(broken: PipelineSchedule, sentence: str) -> None:
    assert violations(PLAIN) == violations(SPLIT) == ()
    assert sentence in violations(broken)


def test_a_stage_before_its_own_predecessor_on_one_worker_is_named() -> None:
    alone = make_schedule("looped_bfs", Shape(num_workers=1, num_microbatches=1, num_chunks=2))
    broken = swapped(alone, 0, forward(0, 0), forward(1, 0))
    assert "w0 has F0 of stage 1 before F0 of stage 0, which it needs" in violations(broken)


def test_a_deadlock_is_told_as_who_waits_for_whom() -> None:
    waiting = with_ops(
        PLAIN, 0, forward(0, 0), backward(0, 0), *(f(0, i) for i in (1, 2) for f in (forward, backward))
    )
    early = with_ops(waiting, 1, *(forward(1, i) for i in range(3)), *(backward(1, i) for i in range(3)))
    told = (
        "deadlock: w0 waits with B0 of stage 0 for B0 of stage 1 on w1, "
        "w1 waits with F1 of stage 1 for F1 of stage 0 on w0"
    )
    assert violations(early) == (told,)
    assert deadlock(waiting) is None
    with pytest.raises(ValueError, match="deadlock: w0 waits with B0"):
        simulate(early, cut_for("one_f_one_b", 2, 1).stages, links(2))


def test_many_sentences_of_a_kind_are_abridged() -> None:
    empty = replace(PLAIN, ops_by_worker=((), ()))
    assert len(violations(empty)) == 6
    assert violations(empty)[-1] == "and 7 more of the kind"


def test_lack_of_memory_is_told_in_slots_and_bytes() -> None:
    schedule = make_schedule("zb_h2", Shape(num_workers=4, num_microbatches=8))
    stages = [StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=2**20, kept_bytes=2**20)] * 4
    enough = [7 * 2**20] * 4
    assert violations(schedule, stages=stages, memory_bytes=enough) == ()
    short = [7 * 2**20, 7 * 2**20 - 1, 4 * 2**20, 7 * 2**20]
    found = violations(schedule, stages=stages, memory_bytes=short)
    assert [sentence.split(" (")[0] for sentence in found] == ["needs 7 slots on w1", "needs 7 slots on w2"]
    assert "has 6 " in found[0]
    assert "has 4 " in found[1]


def test_a_pending_weight_gradient_holds_its_own_bytes() -> None:
    schedule = make_schedule("zb_h1", Shape(num_workers=2, num_microbatches=3))
    order = " ".join(f"{op.kind}{op.microbatch}" for op in schedule.ops_by_worker[1])
    assert order == "F0 I0 F1 I1 W0 F2 I2 W1 W2"
    stages = [StageCost(forward_s=1, input_s=1, weight_s=1, activation_bytes=10, kept_bytes=3)] * 2
    # w1 at its fullest: one whole activation and what is left of another.
    assert [peak.num_bytes for peak in peaks(schedule, stages)] == [20, 13]
    assert [peak.num_activations for peak in peaks(schedule, stages)] == [2, 2]
