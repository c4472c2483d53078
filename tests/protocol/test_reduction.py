"""One reduction as each worker sees it, and all of them together."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from skein.plan.agreeing.exchange import Broadcast, Direct, Neighbours, Pattern, Ring, Row, Tree
from skein.plan.plan import Group
from skein.protocol.messages.tensors import ShardKind, ShardTensor
from skein.protocol.worker.ops import JoinOp, PackOp, Parcel, ReductionOp, SumOp
from skein.protocol.worker.reduction import Exchange, Moves, handed_out
from skein.types import ChunkRef, Step, WorkerId, parse_group
from tests.support import extent
from tests.support.plans import chunk
from tests.support.reports import attempt


def group_of(
    *members: ChunkRef, num_shards: int, pattern: Pattern | None = None, weights: tuple[Row, ...] = ()
) -> Group:
    return Group(
        group=parse_group("s0"),
        members=members,
        num_shards=num_shards,
        pattern=pattern or Direct(),
        weights=weights,
    )


def exchange(worker: str) -> Exchange:
    return Exchange(WorkerId(worker), Step(3), attempt())


def tensor(kind: ShardKind, shard: int, member: ChunkRef) -> ShardTensor:
    return ShardTensor(
        kind=kind, step=Step(3), group=parse_group("s0"), attempt=attempt(), shard=shard, member=member
    )


def part(shard: int, member: ChunkRef) -> ShardTensor:
    return tensor(ShardKind.PART, shard, member)


def packing(moves: Moves) -> PackOp:
    (op,) = (op for op in moves.ops if isinstance(op, PackOp))
    return op


A, B, C, D = (chunk(0, worker) for worker in "abcd")
PAIR = group_of(A, B, num_shards=2)


@pytest.mark.parametrize("members", [(A,), (A, chunk(2, "a"))])
def test_who_is_alone_in_a_group_joins_what_it_has(members: tuple[ChunkRef, ...]) -> None:
    group = group_of(*members, num_shards=1)
    machine = exchange("a")
    assert machine.prepare(group).ops == (JoinOp(step=Step(3), group=group, attempt=attempt()),)
    assert machine.prepare(group) == Moves()


def test_results_of_shards_that_do_not_exist_complete_nothing() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    for shard in (0, 7):
        assert machine.arrive(tensor(ShardKind.RESULT, shard, B)) == Moves()


def test_parts_go_to_the_owners_of_their_shards() -> None:
    op = packing(exchange("b").prepare(PAIR))
    assert op.stages == (B.stage,)
    assert handed_out(op) == (("a", part(0, B)), ("b", part(1, B)))


def test_a_shard_is_summed_in_member_order_when_the_parts_of_all_members_are_here() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    assert machine.arrive(part(0, B)) == Moves()
    assert machine.arrive(part(0, B)) == Moves()
    (op,) = machine.arrive(part(0, A)).ops
    assert isinstance(op, SumOp)
    assert op.parts == (part(0, A), part(0, B))
    assert op.total == tensor(ShardKind.RESULT, 0, A)
    assert op.to == ("a", "b")


def test_parts_that_come_before_the_directive_wait_for_it() -> None:
    machine = exchange("a")
    for member in PAIR.members:
        assert machine.arrive(part(0, member)) == Moves()
    assert [type(op) for op in machine.prepare(PAIR).ops] == [PackOp, SumOp]


def test_a_part_that_is_sent_again_sums_nothing_twice() -> None:
    machine = exchange("a")
    machine.prepare(PAIR)
    ops = [op for _ in range(2) for member in PAIR.members for op in machine.arrive(part(0, member)).ops]
    assert [type(op) for op in ops] == [SumOp]


def test_on_a_ring_the_owner_adds_last_and_who_is_behind_it_first() -> None:
    group = group_of(A, B, C, num_shards=3, pattern=Ring())
    machine = exchange("c")
    # Shard 0: b sends its part as it is, c adds, a owns it.
    assert (WorkerId("c"), part(0, C)) in handed_out(packing(machine.prepare(group)))
    machine.arrive(part(0, C))
    (op,) = machine.arrive(part(0, B)).ops
    assert isinstance(op, SumOp)
    assert op.parts == (part(0, B), part(0, C))
    assert handed_out(op) == (("a", tensor(ShardKind.SUM, 0, C)),)


def test_on_a_ring_results_are_passed_on_once_even_if_they_came_before_the_directive() -> None:
    group = group_of(A, B, C, num_shards=3, pattern=Ring())
    result = tensor(ShardKind.RESULT, 0, A)
    early, late = exchange("b"), exchange("b")
    assert early.arrive(result) == early.arrive(result) == Moves()
    late.prepare(group)
    passed = (("c", result),)
    assert early.prepare(group).parcels == late.arrive(result).parcels == passed
    assert early.arrive(result) == late.arrive(result) == Moves()


def test_a_leader_hands_out_alone_and_each_result_goes_on_before_the_next_is_here() -> None:
    group = group_of(A, B, C, num_shards=4, pattern=Broadcast(leader=1, parents=(1, 1, 0)))
    leader, middle, last = (exchange(worker) for worker in "bac")
    assert [to for to, _ in handed_out(packing(leader.prepare(group)))] == ["b"] * 4
    assert handed_out(packing(middle.prepare(group))) == handed_out(packing(last.prepare(group))) == ()
    (op,) = leader.arrive(part(2, B)).ops
    assert isinstance(op, SumOp)
    assert op.to == ("b", "a")
    assert middle.arrive(op.total) == Moves(parcels=((WorkerId("c"), op.total),))


def test_a_neighbour_takes_what_its_row_names_and_keeps_the_result() -> None:
    rows = (
        Row(members=(0, 1), weights=(0.5, 0.5)),
        Row(members=(0, 1, 2), weights=(0.25, 0.5, 0.25)),
        Row(members=(2,), weights=(1.0,)),
    )
    group = group_of(A, B, C, num_shards=3, pattern=Neighbours(), weights=rows)
    machine = exchange("a")
    assert handed_out(packing(machine.prepare(group))) == (("a", part(0, A)), ("b", part(1, A)))
    machine.arrive(part(0, B))
    (op,) = machine.arrive(part(0, A)).ops
    assert isinstance(op, SumOp)
    assert op.to == ("a",)
    assert machine.arrive(op.total).ops == (
        JoinOp(step=Step(3), group=group, attempt=attempt(), results=(op.total,)),
    )


def test_who_has_no_weight_is_not_waited_for_and_gets_the_result_all_the_same() -> None:
    rows = (Row(members=(2, 0), weights=(0.5, 0.5)),)
    group = group_of(A, B, C, num_shards=1, weights=rows)
    assert handed_out(packing(exchange("b").prepare(group))) == ()
    machine = exchange("a")
    machine.prepare(group)
    machine.arrive(part(0, A))
    (op,) = machine.arrive(part(0, C)).ops
    assert isinstance(op, SumOp)
    assert op.parts == (part(0, C), part(0, A))
    assert op.to == ("a", "b", "c")


# --- all workers together ---


@dataclass(slots=True)
class Site:
    """One worker: its machine, what it has run, and what its tensors are made of."""

    machine: Exchange
    worker: WorkerId
    ran: list[ReductionOp] = field(default_factory=list)
    made_of: dict[ShardTensor, Counter[ChunkRef]] = field(default_factory=dict)
    joined: dict[int, Counter[ChunkRef]] = field(default_factory=dict)

    def run(self, op: ReductionOp) -> tuple[Parcel, ...]:
        """Do it, and give what is to be handed over."""
        self.ran.append(op)
        match op:
            case PackOp():
                mine = [member for member in op.group.members if member.worker == self.worker]
                self.made_of |= {x: Counter(mine) for _, x in op.parcels}
            case SumOp():
                self.made_of[op.total] = sum((self.made_of.pop(x) for x in op.parts), Counter())
            case JoinOp():
                self.joined = {x.shard: self.made_of[x] for x in op.results}
                if not op.results:
                    self.joined = {0: Counter(op.group.members)}
                return ()
        return handed_out(op)


def run_all(group: Group, seed: int) -> dict[WorkerId, Site]:
    """Deliver everything in a random order, directives and parcels alike, some of them twice."""
    order = random.Random(seed)
    sites = {worker: Site(exchange(worker), worker) for worker in group.workers}
    waiting: list[tuple[WorkerId, ShardTensor | None, Counter[ChunkRef]]]
    waiting = [(worker, None, Counter()) for worker in sites]
    while waiting:
        to, header, content = waiting.pop(order.randrange(len(waiting)))
        site = sites[to]
        if header is None:
            moves = site.machine.prepare(group)
        else:
            site.made_of.setdefault(header, content)
            moves = site.machine.arrive(header)
        parcels = [*moves.parcels, *(parcel for op in moves.ops for parcel in site.run(op))]
        for target, sent in parcels:
            waiting += [(target, sent, site.made_of[sent])] * (2 if order.random() < 0.3 else 1)
    return sites


ROWS = tuple(Row(members=tuple(sorted({i, (i + 1) % 4})), weights=(0.5, 0.5)) for i in range(4))
GROUPS = {
    "pair": PAIR,
    "three": group_of(A, B, C, num_shards=3),
    "one shard": group_of(A, B, C, num_shards=1),
    "tied on one worker": group_of(A, chunk(2, "a"), num_shards=1),
    "tied across workers": group_of(A, B, chunk(2, "a"), chunk(2, "c"), num_shards=3),
    "ring": group_of(A, B, C, D, num_shards=4, pattern=Ring()),
    "ring of two": group_of(A, B, num_shards=2, pattern=Ring()),
    "ring, one shard": group_of(A, B, C, num_shards=1, pattern=Ring()),
    "ring, tied": group_of(A, B, chunk(2, "a"), chunk(2, "c"), num_shards=3, pattern=Ring()),
    "tree": group_of(A, B, C, D, num_shards=4, pattern=Tree()),
    "tree, one shard": group_of(A, B, C, num_shards=1, pattern=Tree()),
    "tree, tied": group_of(A, B, chunk(2, "a"), chunk(2, "c"), num_shards=2, pattern=Tree()),
    "given tree": group_of(A, B, C, D, num_shards=4, pattern=Tree(parents=(1, 1, 1, 2))),
    "neighbours": group_of(A, B, C, D, num_shards=4, pattern=Neighbours(), weights=ROWS),
    "broadcast": group_of(A, B, C, D, num_shards=7, pattern=Broadcast(leader=2, parents=(2, 0, 2, 0))),
    "quorum": group_of(A, B, C, num_shards=3, weights=(Row(members=(0, 2), weights=(1.0, 2.0)),) * 3),
}


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("seed", extent.part(range(20), every=4))
def test_in_any_order_each_contribution_is_in_every_result_once(group: Group, seed: int) -> None:
    for place, (worker, site) in enumerate(run_all(group, seed).items()):
        assert [type(op) for op in site.ran].count(JoinOp) == 1, (worker, seed)
        wanted = [place] if isinstance(group.pattern, Neighbours) else range(group.num_shards)
        assert site.joined == {shard: Counter(group.contributors(shard)) for shard in wanted}, (worker, seed)
        packs = [op for op in site.ran if isinstance(op, PackOp)]
        assert len(packs) == (len(group.workers) > 1)
        # Whatever it holds of the group, a worker sends a shard once.
        assert all(len({x.shard for _, x in op.parcels}) == len(op.parcels) for op in packs)


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_the_order_of_summation_does_not_depend_on_the_order_of_arrival(group: Group) -> None:
    def summed(seed: int) -> list[tuple[WorkerId, tuple[ShardTensor, ...]]]:
        sites = run_all(group, seed)
        return sorted(
            (
                (worker, op.parts)
                for worker, site in sites.items()
                for op in site.ran
                if isinstance(op, SumOp)
            ),
            key=repr,
        )

    assert len({tuple(summed(seed)) for seed in range(8)}) == 1


def test_another_attempt_knows_nothing_of_the_one_that_fell() -> None:
    group = group_of(A, B, C, num_shards=3, pattern=Ring())
    before = exchange("c")
    before.prepare(group)
    before.arrive(part(0, B))
    again = Exchange(WorkerId("c"), Step(3), replace(attempt(), number=1))
    own = packing(again.prepare(group)).parcels
    assert all(moves == Moves() for moves in (again.arrive(x) for to, x in own if to == "c"))
