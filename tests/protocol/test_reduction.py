"""One reduction as each worker sees it, and all of them together."""

import random
from dataclasses import replace

import pytest

from skein.plan.plan import Group
from skein.protocol.ops import JoinOp, PackOp, SumOp
from skein.protocol.tensors import ShardKind, ShardTensor
from skein.protocol.work.reduction import Exchange, Parcel, ReductionOp
from skein.types import ChunkRef, GroupId, Step, WorkerId
from tests.support.plans import chunk
from tests.support.reports import attempt


def group_of(*members: ChunkRef, num_shards: int) -> Group:
    return Group(group=GroupId("s0"), members=members, num_shards=num_shards)


def exchange(worker: str) -> Exchange:
    return Exchange(WorkerId(worker), Step(3), attempt())


def part(group: Group, shard: int, member: ChunkRef) -> ShardTensor:
    return ShardTensor(
        kind=ShardKind.PART, step=Step(3), group=group.group, attempt=attempt(), shard=shard, member=member
    )


PAIR = group_of(chunk(0, "a"), chunk(0, "b"), num_shards=2)


def test_the_only_member_joins_what_it_has() -> None:
    group = group_of(chunk(0, "a"), num_shards=1)
    machine = exchange("a")
    assert machine.prepare(group) == [JoinOp(step=Step(3), group=group, attempt=attempt())]
    assert machine.prepare(group) == []


def test_results_of_shards_that_do_not_exist_complete_nothing() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    for shard in (0, 7):
        tensor = replace(part(PAIR, shard, chunk(0, "b")), kind=ShardKind.RESULT)
        assert machine.arrive(tensor) == []


def test_parts_go_to_the_owners_of_their_shards() -> None:
    machine = exchange("b")
    assert machine.prepare(PAIR) == [
        PackOp(step=Step(3), group=PAIR, attempt=attempt(), stages=(chunk(0, "b").stage,))
    ]
    assert machine.packed() == [
        ("a", part(PAIR, 0, chunk(0, "b"))),
        ("b", part(PAIR, 1, chunk(0, "b"))),
    ]


def test_a_shard_is_summed_when_the_parts_of_all_members_are_here() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    assert machine.arrive(part(PAIR, 0, chunk(0, "a"))) == []
    assert machine.arrive(part(PAIR, 0, chunk(0, "a"))) == []
    assert machine.arrive(part(PAIR, 0, chunk(0, "b"))) == [
        SumOp(step=Step(3), group=PAIR, attempt=attempt(), shard=0)
    ]


def test_parts_that_come_before_the_directive_wait_for_it() -> None:
    machine = exchange("a")
    for member in PAIR.members:
        assert machine.arrive(part(PAIR, 0, member)) == []
    assert [type(op) for op in machine.prepare(PAIR)] == [PackOp, SumOp]


def test_a_part_that_is_sent_again_sums_nothing_twice() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    ops = [op for _ in range(2) for member in PAIR.members for op in machine.arrive(part(PAIR, 0, member))]
    assert [type(op) for op in ops] == [SumOp]


def test_the_result_goes_to_every_worker_once() -> None:
    group = group_of(chunk(0, "a"), chunk(1, "a"), chunk(0, "b"), num_shards=2)
    machine = exchange("a")
    machine.prepare(group)
    assert [to for to, _ in machine.summed(0)] == ["a", "b"]
    assert all(header.member == group.owner(0) for _, header in machine.summed(0))


def run_all(group: Group, seed: int) -> dict[WorkerId, list[ReductionOp]]:
    """Deliver everything in a random order, directives and parcels alike, some of them twice."""
    order = random.Random(seed)
    machines = {worker: exchange(worker) for worker in group.workers}
    ran: dict[WorkerId, list[ReductionOp]] = {worker: [] for worker in machines}
    waiting: list[tuple[WorkerId, ShardTensor | None]] = [(worker, None) for worker in machines]
    while waiting:
        to, tensor = waiting.pop(order.randrange(len(waiting)))
        ops = machines[to].prepare(group) if tensor is None else machines[to].arrive(tensor)
        for op in ops:
            ran[to].append(op)
            parcels: list[Parcel] = []
            if isinstance(op, PackOp):
                parcels = machines[to].packed()
            elif isinstance(op, SumOp):
                parcels = machines[to].summed(op.shard)
            waiting += parcels
            if order.random() < 0.3:
                waiting += parcels
    return ran


@pytest.mark.parametrize(
    "group",
    [
        PAIR,
        group_of(chunk(0, "a"), chunk(0, "b"), chunk(0, "c"), num_shards=3),
        group_of(chunk(0, "a"), chunk(0, "b"), chunk(0, "c"), num_shards=1),
        group_of(chunk(0, "a"), chunk(2, "a"), num_shards=1),
        group_of(chunk(0, "a"), chunk(0, "b"), chunk(2, "a"), chunk(2, "c"), num_shards=3),
    ],
    ids=["pair", "three", "one shard", "tied on one worker", "tied across workers"],
)
@pytest.mark.parametrize("seed", range(20))
def test_every_shard_is_summed_once_and_every_worker_joins_once_in_any_order(group: Group, seed: int) -> None:
    ran = run_all(group, seed)
    summed = sorted(op.shard for ops in ran.values() for op in ops if isinstance(op, SumOp))
    assert summed == list(range(group.num_shards)), seed
    for worker, ops in ran.items():
        assert [type(op) for op in ops].count(JoinOp) == 1, (worker, seed)
        assert isinstance(ops[-1], JoinOp), (worker, seed)
        packed = [stage for op in ops if isinstance(op, PackOp) for stage in op.stages]
        assert packed == [member.stage for member in group.members if member.worker == worker]
