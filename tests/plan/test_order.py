"""The plain order: each chunk by microbatch, backward first, never more in flight than there are slots."""

import random
from collections import Counter

import pytest

from skein.plan.ops import OpKind
from skein.plan.order import ascending_schedules, ops_of
from skein.plan.plan import Path, PlannedOp, Schedule
from skein.types import ChunkRef, MicrobatchId, StageIndex, WorkerId
from tests.support.extent import part
from tests.support.plans import chunk, path, words_of

TWO = path(chunk(0, "a"), chunk(1, "b"))


def schedules(paths: list[Path], *, slots: int) -> tuple[Schedule, ...]:
    chunks = {hop for way in paths for hop in way.hops}
    return ascending_schedules(paths, dict.fromkeys(chunks, slots), [x.worker for x in chunks])


def test_a_pipeline_fills_its_slots_and_then_goes_backward_first() -> None:
    first, last = schedules([TWO] * 4, slots=2)
    # Both gradients are back before a slot is free for microbatch 2.
    assert words_of(first.ops) == "F0.0 F0.1 B0.0 B0.1 F0.2 F0.3 B0.2 B0.3"
    assert words_of(last.ops) == "L1.0 L1.1 L1.2 L1.3"


def test_one_slot_makes_microbatches_follow_each_other() -> None:
    first, _ = schedules([TWO] * 2, slots=1)
    assert words_of(first.ops) == "F0.0 B0.0 F0.1 B0.1"


def test_of_one_microbatch_the_ops_follow_its_path_and_come_back() -> None:
    [alone] = schedules([path(chunk(0, "a"), chunk(2, "a"), chunk(1, "a"), chunk(3, "a"))], slots=1)
    assert words_of(alone.ops) == "F0.0 F2.0 F1.0 L3.0 B1.0 B2.0 B0.0"


def test_a_worker_that_no_path_visits_has_nothing_to_do() -> None:
    found = ascending_schedules([TWO], dict.fromkeys(TWO.hops, 1), [WorkerId(w) for w in "abc"])
    assert found[2] == Schedule(worker=WorkerId("c"), ops=())


def random_paths(luck: random.Random) -> list[Path]:
    """Any stages in any order on any workers."""
    stages = range(luck.randint(1, 6))
    return [
        path(*(chunk(s, luck.choice("abc")) for s in luck.sample(stages, luck.randint(1, len(stages)))))
        for _ in range(luck.randint(1, 10))
    ]


@pytest.mark.parametrize("seed", part(range(40), every=4))
def test_every_op_is_scheduled_once_on_its_worker_each_chunk_by_microbatch(seed: int) -> None:
    luck = random.Random(seed)
    paths, slots = random_paths(luck), luck.randint(1, 3)
    found = schedules(paths, slots=slots)
    assert [x.worker for x in found] == sorted({hop.worker for way in paths for hop in way.hops})
    listed = Counter((x.worker, op) for x in found for op in x.ops)
    assert listed == Counter(
        (x.chunk.worker, x.op) for m, way in enumerate(paths) for x in ops_of(MicrobatchId(m), way)
    )
    for schedule in found:
        for stage in {op.stage for op in schedule.ops}:
            check_chunk([op for op in schedule.ops if op.stage == stage], slots)


def check_chunk(ops: list[PlannedOp], slots: int) -> None:
    forwards = [op.microbatch for op in ops if op.kind is OpKind.FORWARD]
    accumulated = [op.microbatch for op in ops if op.kind.row.is_accumulating]
    assert forwards == sorted(forwards)
    assert accumulated == sorted(accumulated)
    in_flight = 0
    for op in ops:
        in_flight += {OpKind.FORWARD: 1, OpKind.LOSS: 0, OpKind.BACKWARD: -1}[op.kind]
        assert 0 <= in_flight <= slots


def test_a_path_of_one_hop_is_its_loss() -> None:
    [placed] = ops_of(MicrobatchId(3), path(chunk(0, "a")))
    assert placed.chunk == ChunkRef(stage=StageIndex(0), worker=WorkerId("a"))
    assert placed.op == PlannedOp(kind=OpKind.LOSS, stage=StageIndex(0), microbatch=MicrobatchId(3))
